"""Compare the curves of two logs at their common steps, and their settings.

Values of neighbouring steps are not independent. So the differences at the common steps of the second half are
summarised by the medians of BLOCKS blocks, to which Student's t test is applied. The test sees only the noise within
the two runs: runs with different seeds may differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median, stdev
from typing import NamedTuple

from engine.flips.statistics import t_tail
from engine.log.view import RunView

CURVES = ("loss", "ce", "kd", "grad_norm", "lr", "step_s", "tokens")
BETTER_LOW = frozenset({"loss", "ce", "kd", "step_s", "held_out"})
EXACT = frozenset({"lr", "tokens"})
"""Names of curves without noise, which are compared step by step."""
BLOCKS, LEAST = 8, 16
"""Number of blocks, and minimum number of common steps in the second half for a comparison."""
ALPHA = 0.001
"""Significance level: maximum p value of a difference that is reported, 0 to 1."""
MARGIN = 0.01
"""Smallest relative difference that is reported."""


class Change(NamedTuple):
    """A curve or a setting in two logs."""

    name: str
    new: float | str | None
    old: float | str | None
    why: str
    """Difference and p value of a curve, or its steps that differ, or `setting`; empty if it does not differ."""
    is_worse: bool = False


def compare(new: RunView, old: RunView) -> list[Change]:
    """Compare each curve that has at least LEAST common steps in its second half."""
    changes = []
    for name in CURVES:
        changes += _compare_curve(name, _curve(new, name), _curve(old, name))
    return changes + _compare_curve("held_out", _held_out(new), _held_out(old))


def compare_settings(new: Mapping[str, object], old: Mapping[str, object]) -> list[Change]:
    """Return the settings that differ, including settings that only one of the two has."""
    names = [name for name in {**new, **old} if new.get(name) != old.get(name)]
    return [
        Change(name, _text_or_none(new.get(name)), _text_or_none(old.get(name)), "setting")
        for name in names
    ]


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _curve(view: RunView, name: str) -> dict[float, float]:
    steps, values = view.steps.values("step"), view.steps.values(name)
    pairs = zip(steps, values, strict=True)
    return {s: v for s, v in pairs if s is not None and v is not None and math.isfinite(v)}


def _held_out(view: RunView) -> dict[float, float]:
    evals = [
        evaluation
        for evaluation in view.evals
        if evaluation.subject == "student" and evaluation.loss is not None
    ]
    return {e.step: e.loss for e in evals if e.loss is not None and math.isfinite(e.loss)}


def _compare_curve(name: str, new: dict[float, float], old: dict[float, float]) -> list[Change]:
    common = sorted(new.keys() & old.keys())
    if name in EXACT:
        apart = [s for s in common if abs(new[s] - old[s]) > 1e-6 * max(abs(new[s]), abs(old[s]))]
        if not common:
            return []
        step = apart[0] if apart else common[-1]
        why = f"in {len(apart)} of {len(common)} steps, first {step:.0f}" if apart else ""
        return [Change(name, new[step], old[step], why)]
    tail = common[len(common) // 2 :]
    if len(tail) < LEAST:
        return []
    size = len(tail) / BLOCKS
    blocks = [tail[round(index * size) : round((index + 1) * size)] for index in range(BLOCKS)]
    shifts = [median([new[s] - old[s] for s in block]) for block in blocks]
    new_median, old_median = (median([curve[s] for s in tail]) for curve in (new, old))
    shift = fmean(shifts)
    error = stdev(shifts) / math.sqrt(BLOCKS)
    p = t_tail(abs(shift) / error, BLOCKS - 1) if error else float(shift == 0)
    differs = p < ALPHA and abs(shift) > MARGIN * abs(old_median)
    why = f"{shift:+.3g}, p {p:.1g}" if differs else ""
    return [Change(name, new_median, old_median, why, differs and shift > 0 and name in BETTER_LOW)]
