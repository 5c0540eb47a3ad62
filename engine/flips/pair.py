"""A pair of runs, one of each arm, and what must hold before their times may be compared, proved from the logs and not
from the request (`proofs`):

    flipped    each arm's decisions follow its settings, and they are not the same in both
    equal      device, precision, rows, tokens and models are the same in both, except what the changed
               setting is meant to change: nothing fell back silently
    parity     first losses and the teacher's held-out loss agree; applies only to settings that must not
               change what is computed

Each is a Verdict. FAIL ends the flip. UNKNOWN means that the logs do not show it; the flip's verdict is then
a screen, not a measurement. A faster arm that computes something else has not won.

A flip tests whether a setting changes the time, the memory or the energy of a run, and nothing else. Settings
whose row in `engine.spec.sections` says that they change results (the objective, the data, the models) change
the losses on purpose; all others must leave them unchanged, within the plan's tolerance. A setting that has no
row, in the plan of an older engine, falls under the stricter rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.decision import as_choice, is_choice_of_the_engine
from engine.flips.arms import Outcome, code_folder
from engine.flips.plan import Change, Plan
from engine.flips.script_folder import kept_sources
from engine.flips.script_settings import SCRIPT_SETTINGS
from engine.flips.surroundings import CPU
from engine.log.folder import RunFolder
from engine.log.work import DATA, work_left_out
from engine.spec import CHANGE_RESULTS
from engine.verdict import Level, Verdict, lowest

PROOFS = {"flipped": "manipulation", "equal": "equal", "parity": "parity"}
"""Proofs about a pair, each with its name among the controls of a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One run of each arm, and the proofs about the two."""

    number: int
    b_first: bool
    begun_unix_s: float
    seconds: float
    a: Outcome
    b: Outcome
    proofs: Mapping[str, Verdict | None]
    """Verdicts by the names in PROOFS; None for a proof that does not apply."""

    @property
    def arms(self) -> tuple[Outcome, Outcome]:
        return self.a, self.b

    @property
    def complete(self) -> bool:
        return self.a.completed and self.b.completed

    @property
    def difference(self) -> float | None:
        """ln(y_B / y_A) of the plan's metric; None unless both arms completed with an amount of it."""
        a, b = self.a.value, self.b.value
        if not self.complete or not a or not b or min(a, b) <= 0:
            return None
        return math.log(b / a)


def count_of(pairs: int) -> str:
    """Format a number of pairs: `1 pair`, `4 pairs`."""
    return f"{pairs} pair{'' if pairs == 1 else 's'}"


FACTS: dict[str, tuple[str, ...]] = {
    "device": ("compute.device",),
    "student precision": ("student.precision", "compute.device"),
    "teacher precision": (
        *("teacher.precision", "teacher.backend", "teacher.path"),
        *("compute.device", "memory."),
    ),
    "rows per step": ("train.rows", "train.accumulation", "compute.gpus"),
    "tokens per step": ("train.rows", "train.accumulation", "compute.gpus", "data."),
    "seq_len": ("data.seq_len",),
    "training tokens": ("data.", "teacher.path", "student.path"),
    "held-out tokens": ("data.", "teacher.path", "student.path"),
    "trainable parameters": ("student.path", "student.config", "vocab."),
    "teacher": ("teacher.path", "teacher.backend", "teacher.precision", "compute.device"),
    "engine": (),
    "torch": (),
}
"""Logged facts that must be equal in both arms, and the settings that may change each of them."""

OF_ROWS = (*FACTS["training tokens"], *FACTS["tokens per step"], "train.seed")
"""Settings that may change the rows of a step."""
OF_LOADERS = ("loader.",)
"""Settings of a script that may change the rows of a step: each worker augments by a seed of its own."""


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted key is one of `patterns`, or lies in a section (`data.`) that is one."""
    return any(key == p or (p.endswith(".") and key.startswith(p)) for p in patterns)


def asks_parity(keys: Iterable[str]) -> bool:
    """Whether runs that differ in `keys` must give the same losses."""
    return CHANGE_RESULTS.isdisjoint(keys)


SLOWED_SHARE = 0.1
"""Largest allowed difference between the arms in the fraction of time that heat held the clocks down. A pair
beyond it measures heat, not the setting. The value is a choice, not a measurement."""


def proofs(plan: Plan, a: Outcome, b: Outcome, flip: Path) -> dict[str, Verdict | None]:
    """Return every proof about a pair, by the names in `PROOFS`; None for one that does not apply."""
    is_asked, of_script = plan.observed is not None, plan.command is not None
    return {
        "flipped": flipped(plan, a, b),
        "equal": same_work(plan, a, b, flip) if is_asked else equal(plan, a, b),
        # The words of a script may change what it computes on purpose.
        "parity": None if is_asked or of_script else parity(plan, a, b),
    }


def same_work(plan: Plan, a: Outcome, b: Outcome, flip: Path) -> Verdict | None:
    """Fail a pair whose B does not show the observation because it left out work in which A showed it."""
    if not a.shown or b.shown is not False:
        return None
    (change,) = plan.changes
    runs = RunFolder(flip / a.run), RunFolder(flip / b.run)
    texts = change.text(b=False), change.text(b=True)
    same_rows = not matches(change.key, OF_ROWS)
    left_out = work_left_out(
        *runs,
        *texts,
        key=change.key,
        same_rows=same_rows,
        scales_updates=same_rows and plan.command is None and change.key.startswith("train."),
        kind=plan.changes_on_purpose or (DATA if matches(change.key, OF_LOADERS) else ""),
        observed=plan.observed,
        sources=kept_sources(code_folder(runs[0].path)),
    )
    return Verdict(Level.FAIL, f"B did not do the work of A: {left_out}") if left_out else None


def _prove_changed(change: Change, b: Outcome) -> Verdict:
    """Prove from its log that the probe changed a setting in arm B's script."""
    text = f"{change.key}={change.b}"
    if b.choices.get(change.key) == change.b:
        return Verdict(Level.PASS, f"{text} replaced the script's own value")
    if not b.completed:
        return Verdict(Level.UNKNOWN, f"arm B ended before {text} was applied")
    why = "the script already has this value, or nothing that the setting applies to"
    return Verdict(Level.FAIL, f"NotFlipped: {text} changed nothing in arm B: {why}")


def flipped(plan: Plan, a: Outcome, b: Outcome) -> Verdict:
    """Prove that the planned settings had an effect. The effect of words and variables cannot be proved."""
    what = " and ".join(map(str, plan.changes)) or "nothing"
    verdicts = [Verdict(Level.PASS, f"the arms differ in {what} alone")]
    if plan.observed is None:
        for change in plan.changes:
            if plan.command is None:
                verdicts.append(_prove_decided(change, a, b))
            elif change.key in SCRIPT_SETTINGS:
                verdicts.append(_prove_changed(change, b))
    return lowest(verdicts)


def _prove_decided(change: Change, a: Outcome, b: Outcome) -> Verdict:
    """Prove that each arm's decision follows its setting, if the setting is a decision at all."""
    key = change.key
    for outcome, asked in ((a, change.a), (b, change.b)):
        choice = outcome.choices.get(key)
        if choice is None or is_choice_of_the_engine(asked) or choice == as_choice(asked):
            continue
        text = (
            f"NotFlipped: {key} is {choice} in arm {outcome.arm}, where {as_choice(asked)} was set"
        )
        return Verdict(Level.FAIL, text)
    choices = a.choices.get(key), b.choices.get(key)
    if None in choices:
        if any(choices) or not (a.completed and b.completed):
            missing = "A" if choices[0] is None else "B"
            return Verdict(Level.UNKNOWN, f"arm {missing} ended before it chose {key}")
        return Verdict(Level.PASS, f"{key} is used as set: no decision is made about it")
    if choices[0] == choices[1]:
        return Verdict(Level.FAIL, f"NotFlipped: {key} is {choices[0]} in both arms")
    return Verdict(Level.PASS, f"{key} was {choices[0]} in A and {choices[1]} in B")


def equal(plan: Plan, a: Outcome, b: Outcome) -> Verdict:
    """Prove that nothing else differs: no device, precision, batch or model fell back. A script may differ on
    purpose, so its differences give UNKNOWN."""
    if (disturbed := _find_disturbance(a, b)) is not None:
        return disturbed
    common = [name for name in a.facts if name in b.facts]
    for name in common:
        may_change = any(matches(key, FACTS.get(name, ())) for key in plan.keys)
        if not may_change and _differ(a.facts[name], b.facts[name]):
            text = f"{name} is {a.facts[name]!s:.40} in A and {b.facts[name]!s:.40} in B"
            if plan.command is not None:
                return Verdict(Level.UNKNOWN, f"{text}, which may be intended")
            return Verdict(Level.FAIL, f"SilentFallback: {text}")
    logged = {*a.facts, *b.facts}
    # A run without a teacher lacks the teacher's facts in both arms.
    expected = ["device"] if plan.command is not None else FACTS
    missing = [
        name
        for name in expected
        if name not in common and (name in logged or "teacher" not in name)
    ]
    if missing:
        return Verdict(Level.UNKNOWN, f"not in both logs: {', '.join(missing)}")
    is_sampled = "watch.sample_seconds" not in plan.keys
    if is_sampled and a.facts["device"] != CPU and None in (a.slowed, b.slowed):
        text = "an arm has no reading of the GPU's clocks in its measured steps"
        return Verdict(Level.UNKNOWN, text)
    return Verdict(Level.PASS, f"the same in both arms: {', '.join(common)}")


def _find_disturbance(a: Outcome, b: Outcome) -> Verdict | None:
    """Return a failed verdict if the machine itself treated the arms differently."""
    if a.suspended or b.suspended:
        asleep = " and ".join(o.arm for o in (a, b) if o.suspended)
        return Verdict(Level.FAIL, f"Suspended: the machine slept during {asleep}")
    slowed = (a.slowed or 0.0, b.slowed or 0.0)
    if abs(slowed[0] - slowed[1]) > SLOWED_SHARE:
        text = f"clocks were held down {slowed[0]:.0%} of the time in A and {slowed[1]:.0%} in B"
        return Verdict(Level.FAIL, f"Throttled: {text}")
    return None


def _differ(a: object, b: object) -> bool:
    """Compare two facts. A list has an entry per step, and an arm that was ended early has fewer of them."""
    if isinstance(a, list) and isinstance(b, list):
        steps = min(len(a), len(b))
        return a[:steps] != b[:steps]
    return a != b


def parity(plan: Plan, a: Outcome, b: Outcome) -> Verdict | None:
    """Prove that both arms computed the same; None when the setting may change what is computed."""
    if not asks_parity(plan.keys):
        return None
    worst, where = 0.0, ""
    steps = enumerate(zip(a.losses, b.losses, strict=False), start=1)
    losses = [(f"the loss of step {step}", *pair) for step, pair in steps]
    if a.teacher_loss is not None and b.teacher_loss is not None:
        losses.append(("the teacher's held-out loss", a.teacher_loss, b.teacher_loss))
    for name, left, right in losses:
        if left is None or right is None:
            if left != right:
                return Verdict(Level.FAIL, f"{name} is finite in one arm only")
            continue
        gap = abs(left - right) / max(abs(left), abs(right), 1e-30)
        if gap > plan.parity:
            text = f"{name} is {left:.6g} in A and {right:.6g} in B, {gap:.2%} apart"
            return Verdict(Level.FAIL, f"{text} where {plan.parity:.2%} is allowed")
        if gap >= worst:
            worst, where = gap, name
    if not losses:
        return Verdict(Level.UNKNOWN, "the arms have no losses to compare")
    return Verdict(Level.PASS, f"losses differ by at most {worst:.2g} of their value ({where})")
