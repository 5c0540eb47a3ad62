"""Whether anything but an optimizer writes its weights, between the end of a step that is looked at and the next one.

Some numbers of each weight are copied behind the step and compared in front of the next, where both are on the device.
What is written and taken back in between, as an average for an evaluation, is not seen.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .parameters import PASS, SUSPICION, Line, Modules, named
from .updates import Rows, is_plain

_NUMBERS = 1 << 14
_ROUNDINGS = 8.0
"""In units of the last place."""


def rows_of(torch: Any, parameters: list[Any], numbers: int) -> list[Rows]:
    """About so many numbers of parameters that are plain, of one type and on one device: that of most."""
    plain = [p for p in parameters if is_plain(torch, p) and p.requires_grad]
    if plain:
        counts = Counter((p.device, p.dtype) for p in plain)
        most = counts.most_common(1)[0][0]
        plain = [p for p in plain if (p.device, p.dtype) == most]
    each = max(1, numbers // max(1, len(plain)))
    return [Rows(p, 0, at, each, 0) for at, p in enumerate(plain)]


class Between:
    """The weights of one optimizer between two of its steps."""

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        """Behind a step; `parameters` are those that no other optimizer writes."""
        self._torch = torch
        self._rows = rows_of(torch, parameters, _NUMBERS)
        self._last = self._weights()

    def end(self) -> Any:
        """In front of the next step: which of the numbers are others now, (N,); None where that is not known."""
        last, self._last = self._last, None
        now = None if last is None else self._weights()
        if now is None:
            return None
        # What is added for one pass and taken away again, as in sharpness-aware minimisation, leaves roundings.
        size = last.abs().clamp_min(last.abs().mean())
        rounding = _ROUNDINGS * self._torch.finfo(last.dtype).eps
        return ~((now - last).abs() <= rounding * size) & ~(now.isnan() & last.isnan())

    def _weights(self) -> Any:
        weights = [rows.of() for rows in self._rows]
        if not weights or any(one is None for one in weights):
            return None
        pairs = zip(self._rows, weights, strict=True)
        return self._torch.cat([rows.of_tensor(one) for rows, one in pairs])

    def lines(self, optimizer: str, step: int, changed: Any) -> list[Line]:
        """Once `changed` is on the host, of what lies in front of step `step`."""
        numbers, beyond = changed.numel(), int(changed.sum())
        if not beyond:
            text = f"{numbers} weights of {optimizer} were in front of step {step} what the step before had left"
            return [("outside_writes", PASS, text, {"numbers": numbers})]
        counts = [int(one.sum()) for one in changed.split([rows.count for rows in self._rows])]
        found = [
            one
            for rows, count in zip(self._rows, counts, strict=True)
            if count and (one := rows.of()) is not None
        ]
        labels = {id(one): rows.label for rows in self._rows if (one := rows.of()) is not None}
        name = named(Modules(self._torch, found), found, labels)
        text = (
            f"between steps {step - 1} and {step} of {optimizer} something else wrote its weights: {beyond} of "
            f"{numbers} numbers changed, in {name}"
        )
        return [("outside_writes", SUSPICION, text, {"numbers": numbers, "changed": beyond})]
