"""What a flip could test about a run, most pressing first: one for each alert that names a flip, then
one for each choice that was made automatically and could have been made otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.runlog.view import RunView
from engine.spec import KEYS

_SET = "--set "


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One setting to change, and what would be learnt."""

    assignment: str
    """`knob=value`, as after --set."""
    hypothesis: str
    source: str
    """What raised it: the alert or the decision, in words."""


def suspicions(view: RunView) -> tuple[Suspicion, ...]:
    """Each assignment once, by whoever named it first."""
    found: dict[str, Suspicion] = {}
    for suspicion in (*_of_alerts(view), *_of_decisions(view)):
        found.setdefault(suspicion.assignment, suspicion)
    return tuple(found.values())


def _of_alerts(view: RunView) -> Iterator[Suspicion]:
    # Errors before warnings; newest first among equals.
    alerts = sorted(view.alerts.values(), key=lambda a: (a.severity != "error", -a.to_unix_s))
    for alert in alerts:
        if alert.flip.startswith(_SET):
            assignment = alert.flip.removeprefix(_SET)
            words = f"{assignment} ends this: {alert.title}"
            yield Suspicion(assignment, words, f"alert {alert.id}: {alert.title}")


def _of_decisions(view: RunView) -> Iterator[Suspicion]:
    for decision in view.decisions:
        if decision.knob not in KEYS:
            continue
        for value, why in decision.rejected:
            yield Suspicion(
                f"{decision.knob}={value}",
                f"{decision.knob}: {value} is better here than {decision.choice}",
                f"decision {decision.knob} = {decision.choice}; not {value}: {why}",
            )
