"""Controls: which differences flips on this machine were recently able to detect.

    same   A against A, in at least four pairs, must be EQUIVALENT; its deviation is the noise floor
    slow   A made slower by twice the margin must be detected as slower

A verdict counts as measured only with both controls. They must be at most a day old, from the same machine,
device and engine, of the same spec apart from the flipped settings, and with the same or a narrower margin. They are
stored in `controls.jsonl` of the user's state folder, one line each. A metric that waiting does not lengthen
has no positive control; verdicts on such a metric stay screens.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput, write_error
from engine.files import parse_json, read_bytes, user_state
from engine.flips.pair import count_of
from engine.flips.plan import EXTERNAL, Plan
from engine.flips.statistics import EQUIVALENT, FASTER, INCONCLUSIVE
from engine.flips.surroundings import Surroundings
from engine.units import format_seconds
from engine.verdict import Level, Verdict

SAME, SLOW = "same", "slow"
EXPECTED = {SAME: EQUIVALENT, SLOW: FASTER}
"""Expected verdict of each control. The slowed arm is A, so B is the faster one."""
UNDECIDED = "too few pairs to tell"
"""Words for a control whose pairs ran out."""
AGE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The result of one control."""

    kind: str
    at_unix_s: float
    surroundings: dict[str, str]
    metric: str
    margin: float
    verdict: str
    ratio: float | None
    deviation: float | None
    """Standard deviation of ln(y_B / y_A) between pairs."""
    pairs: int
    folder: str
    spec: Mapping[str, Mapping[str, Any]]

    def answer(self) -> Verdict:
        level = Level.PASS if self.verdict == EXPECTED[self.kind] else Level.FAIL
        text = f"{self.verdict} in"
        if self.verdict == INCONCLUSIVE:
            level, text = Level.UNKNOWN, f"{UNDECIDED} after"
        ratio = "" if self.ratio is None else f", B/A {self.ratio:.3f}"
        noise = "" if self.deviation is None else f", deviation {self.deviation:.1%}"
        age = format_seconds(max(0.0, time.time() - self.at_unix_s))
        return Verdict(
            level,
            f"{text} {count_of(self.pairs)}{ratio}{noise}, {age} ago ({self.folder})",
        )


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """Return the kinds of control that exist for a plan's metric: waiting lengthens only a time by a known fraction."""
    return (SAME, SLOW) if plan.metric == "step_s" else (SAME,)


def remember(control: Control) -> None:
    """Append a control to the file. Raises DiskFull or RunLogError."""
    file = _file()
    line = json.dumps(dataclasses.asdict(control), allow_nan=False).encode() + b"\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # One write, so that lines of other flips are not torn.
        with file.open("ab", buffering=0) as lines:
            lines.write(line)
    except OSError as error:
        raise write_error("controls", file, "to add a line", error) from error


def find(plan: Plan, surroundings: Surroundings) -> dict[str, Control]:
    """Return the newest control of each kind that applies to this plan, if there is one."""
    return {c.kind: c for c in _read() if _applies_to(c, plan, surroundings)}


def answers(plan: Plan, found: Mapping[str, Control], why_none: str) -> dict[str, Verdict]:
    """Return the controls AA and positive as verdicts; `why_none` is the reason given for a missing control."""
    verdicts = {}
    for name, kind in (("AA", SAME), ("positive", SLOW)):
        control = found.get(kind)
        if kind not in kinds_of(plan):
            text = f"waiting does not lengthen {plan.metric}: there is no positive control for it"
            verdicts[name] = Verdict(Level.UNKNOWN, text)
        else:
            verdicts[name] = control.answer() if control else Verdict(Level.UNKNOWN, why_none)
    return verdicts


def _applies_to(control: Control, plan: Plan, surroundings: Surroundings) -> bool:
    return (
        control.kind in EXPECTED
        and bool(surroundings.machine)
        and control.surroundings == dataclasses.asdict(surroundings)
        and control.metric == plan.metric
        and control.margin <= plan.margin
        and 0 <= time.time() - control.at_unix_s <= AGE_S
        and _without(control.spec, plan.keys) == _without(plan.subject, plan.keys)
    )


def _without(spec: Mapping[str, Mapping[str, Any]], keys: frozenset[str]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, settings in spec.items()
        if section not in EXTERNAL
        for key, value in settings.items()
        if f"{section}.{key}" not in keys
    }


def _file() -> Path:
    return user_state("controls.jsonl")


def _read() -> list[Control]:
    """Return every stored control, oldest first. Lines that cannot be read are skipped: another version wrote them,
    or a killed writer tore them."""
    try:
        lines = read_bytes(_file(), "controls", limits.FLIP_FILE).splitlines()
    except BadInput:
        return []
    controls = []
    for line in lines:
        try:
            controls.append(Control(**parse_json(line, _file(), "control")))
        except (BadInput, TypeError):
            continue
    return controls
