"""Check whether anything but an optimizer writes its weights between a sampled step and the next one.

Some elements of each weight are copied after the step and compared before the next, on their device. A write that is
reverted in between, such as averaged weights for an evaluation, is not detected.
"""

from __future__ import annotations

from typing import Any

from .parameters import PASS, SUSPICION, Line, Modules, named
from .updates import Seen, sample_of

_ELEMENTS = 1 << 14
_TOLERANCE_ULP = 8.0
"""Tolerated change of a weight, in units of the last place."""


class Between:
    """Weights of one optimizer between two of its steps."""

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        """Copy weights after a step; `parameters` are those that no other optimizer writes."""
        self._torch = torch
        self._sample = sample_of(torch, parameters, _ELEMENTS)
        self._last: Any = self._sample and self._sample.read()

    def end(self, seen: Seen) -> None:
        """Find before the next step which elements changed, if that can be known."""
        last, self._last = self._last, None
        now: Any = self._sample and self._sample.read()
        if last is None or now is None:
            return
        # A perturbation that is added and removed again (sharpness-aware minimisation) leaves rounding errors.
        size = last.abs().clamp_min(last.abs().mean())
        rounding = _TOLERANCE_ULP * self._torch.finfo(last.dtype).eps
        changed = ~((now - last).abs() <= rounding * size) & ~(now.isnan() & last.isnan())
        seen.later(lambda one: self._lines(seen.name, seen.number, one[0]), {0: changed})

    def _lines(self, optimizer: str, step: int, changed: Any) -> list[Line]:
        numbers, written = changed.numel(), int(changed.sum())
        if not written:
            text = f"{numbers} weights of {optimizer} did not change between steps {step - 1} and {step}"
            return [("outside_writes", PASS, text, {"numbers": numbers})]
        assert self._sample is not None
        parts = zip(self._sample.rows, changed.split(self._sample.counts), strict=True)
        found = [rows for rows, one in parts if one.any()]
        name = named(Modules(self._torch), [(rows.of(), rows.label) for rows in found])
        text = (
            f"between steps {step - 1} and {step} of {optimizer} something else wrote its weights: {written} of "
            f"{numbers} elements changed, in {name}"
        )
        return [("outside_writes", SUSPICION, text, {"numbers": numbers, "changed": written})]
