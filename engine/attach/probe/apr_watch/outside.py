"""Check whether anything but an optimizer writes its weights between a sampled step and the next one.

Some elements of each weight are copied after the step and compared before the next, on their device. A write that is
reverted in between, such as averaged weights for an evaluation, is not detected.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .parameters import PASS, SUSPICION, Line, Modules, named
from .updates import Rows, Seen, is_plain

_ELEMENTS = 1 << 14
_TOLERANCE_ULP = 8.0
"""Tolerated change of a weight, in units of the last place."""


def rows_of(torch: Any, parameters: list[Any], numbers: int) -> list[Rows]:
    """Sample about `numbers` elements of the plain parameters with the most common device and dtype."""
    plain = [p for p in parameters if is_plain(torch, p) and p.requires_grad]
    if plain:
        counts = Counter((p.device, p.dtype) for p in plain)
        most = counts.most_common(1)[0][0]
        plain = [p for p in plain if (p.device, p.dtype) == most]
    each = max(1, numbers // max(1, len(plain)))
    return [Rows(p, 0, at, each, 0) for at, p in enumerate(plain)]


class Between:
    """Weights of one optimizer between two of its steps."""

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        """Copy weights after a step; `parameters` are those that no other optimizer writes."""
        self._torch = torch
        self._rows = rows_of(torch, parameters, _ELEMENTS)
        self._last = self._weights()

    def end(self, seen: Seen) -> None:
        """Find before the next step which elements changed, if that can be known."""
        last, self._last = self._last, None
        now = None if last is None else self._weights()
        if now is None:
            return
        # A perturbation that is added and removed again (sharpness-aware minimisation) leaves rounding errors.
        size = last.abs().clamp_min(last.abs().mean())
        rounding = _TOLERANCE_ULP * self._torch.finfo(last.dtype).eps
        changed = ~((now - last).abs() <= rounding * size) & ~(now.isnan() & last.isnan())
        seen.later(lambda one: self._lines(seen.name, seen.number, one[0]), {0: changed})

    def _weights(self) -> Any:
        weights = [rows.of() for rows in self._rows]
        if not weights or any(one is None for one in weights):
            return None
        pairs = zip(self._rows, weights, strict=True)
        return self._torch.cat([rows.of_tensor(one) for rows, one in pairs])

    def _lines(self, optimizer: str, step: int, changed: Any) -> list[Line]:
        numbers, written = changed.numel(), int(changed.sum())
        if not written:
            text = f"{numbers} weights of {optimizer} did not change between steps {step - 1} and {step}"
            return [("outside_writes", PASS, text, {"numbers": numbers})]
        parts = changed.split([rows.count for rows in self._rows])
        found = [rows for rows, one in zip(self._rows, parts, strict=True) if one.any()]
        name = named(Modules(self._torch), [(rows.of(), rows.label) for rows in found])
        text = (
            f"between steps {step - 1} and {step} of {optimizer} something else wrote its weights: {written} of "
            f"{numbers} elements changed, in {name}"
        )
        return [("outside_writes", SUSPICION, text, {"numbers": numbers, "changed": written})]
