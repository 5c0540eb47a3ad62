"""The rule about the identities of a watched script: properties of every healthy training."""

from __future__ import annotations

from engine.catalogue import BY_ID
from engine.log.events import FAIL, IDENTITY
from engine.watch.rules.rule import CannotJudge, Case, Span, Symptom, rule

NAMED = 3
"""Maximum number of contradictions that the title names."""


@rule(
    reads=("identity",),
    threshold="one contradiction",
)
def identity_fails(case: Case) -> Symptom | None:
    if not case.view.is_foreign:
        raise CannotJudge("a run of the engine is judged by its audit (engine checks)")
    if not case.view.identities:
        raise CannotJudge("no identity has been checked yet")
    wrong = [identity for identity in case.view.identities if identity.level == FAIL]
    if not wrong:
        return None
    first = wrong[0]
    about = BY_ID[IDENTITY].get(first.id)
    names = list(dict.fromkeys(identity.id for identity in wrong))
    more = f" (and {', '.join(names[1:NAMED])})" if len(names) > 1 else ""
    begun_s = case.view.session_unix_s or 0.0
    return Symptom(
        f"{first.id}{more}: {first.text}",
        [
            ("step", float(first.step), "the first at which it failed"),
            *((name, n, "as measured") for name, n in first.numbers.items() if n is not None),
        ],
        Span(
            first_step=first.step,
            last_step=wrong[-1].step,
            from_unix_s=begun_s + first.t_s,
            to_unix_s=begun_s + wrong[-1].t_s,
        ),
        meaning=about.means
        if about
        else "a property that must hold in every training run does not hold in this one",
        no_flip=about.remedy_with(first.framework) if about else "read `engine checks RUN`",
        part=first.id,
    )
