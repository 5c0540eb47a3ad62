"""Whether gradients of a step are still part of the next one's: nothing zeroed them in between.

Some rows of the gradients are held against each other at each place where they may change: behind a step, in front of
each backward pass and behind it, in front of the next step. Where something else than a backward pass changed them,
or there are none, the chain is broken, and the rest of the step costs a comparison.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .parameters import CONTRADICTION, PASS, Line
from .updates import Rows, fits, is_plain

_NUMBERS = 1 << 14
_PASSES = 16
"""Backward passes of a step whose gradients are held against each other; of a step with more nothing is known."""


class Chain:
    """The gradients of one optimizer's parameters."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.is_open = self._is_broken = False
        """Broken: it is known that the step before left nothing."""
        self._rows: list[Rows] = []
        self._last: Any = None
        self._passes = 0
        self._holds: list[Any] = []
        """What has to be true, each on the device."""
        self._adds: list[Any] = []
        """Of which one has to be true."""
        self._before: Any = None
        self._steps = 0
        """Steps in a row that held the gradients of the step before."""

    def begin(self, optimizer: Any) -> None:
        """Behind a step."""
        torch = self._torch
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        plain = [p for p in parameters if is_plain(torch, p) and p.requires_grad]
        if plain:
            # Of one type, that of most parameters.
            counts = Counter((p.device, p.dtype) for p in plain)
            most = counts.most_common(1)[0][0]
            plain = [p for p in plain if (p.device, p.dtype) == most]
        each = max(1, _NUMBERS // max(1, len(plain)))
        self._rows = [Rows(p, 0, at, each, 0) for at, p in enumerate(plain)]
        self._holds, self._adds, self._passes = [], [], 0
        self._last = self._gradients()
        self.is_open = self._last is not None
        self._is_broken = self._last is None and bool(self._rows)
        if self.is_open:
            self._holds.append((self._last != 0).any())

    def leave(self) -> None:
        """Something cannot be seen."""
        self.is_open = self._is_broken = False

    def backward_begins(self) -> None:
        if self._passes >= _PASSES:
            self.leave()
            return
        self._passes += 1
        self._before = self._gradients()
        self._hold(self._before is not None and (self._before == self._last).all())

    def backward_ends(self) -> None:
        self._last = self._gradients()
        if self._last is None:
            self._hold(False)
        else:
            self._adds.append((self._last != self._before).any())

    def end(self) -> Any:
        """In front of the next step: whether the chain holds, as a tensor or not; None where it is not known."""
        if not self.is_open:
            return False if self._is_broken else None
        self.is_open = False
        now = self._gradients()
        if now is None:
            return False if self._rows else None
        if not self._adds:
            return None
        # Clipping and averaging multiply all gradients by one factor.
        last, now = self._last.double(), now.double()
        factor = (last @ now) / (last @ last)
        expected = factor * last
        rounding = 4 * self._torch.finfo(self._last.dtype).eps
        self._holds += [
            factor > 0,
            ((now - expected).abs() <= rounding * expected.abs()).all(),
            self._torch.stack(self._adds).any(),
        ]
        return self._torch.stack(self._holds).all()

    def _hold(self, condition: Any) -> None:
        if condition is False or (condition.is_cpu and not condition):
            self.is_open, self._is_broken = False, bool(self._rows)
        else:
            self._holds.append(condition)

    def _gradients(self) -> Any:
        """Some of their numbers, (N,); None where there are none, and no rows where they cannot be looked at."""
        found: list[tuple[Rows, Any, Any]] = []
        for rows in self._rows:
            parameter: Any = rows.of()
            gradient = None if parameter is None else parameter.grad
            if parameter is None or not (
                gradient is None or fits(self._torch, gradient, parameter)
            ):
                self._rows = []
                return None
            found.append((rows, parameter, gradient))
        if all(gradient is None for _, _, gradient in found):
            return None
        pieces = [
            parameter.new_zeros(rows.count) if gradient is None else rows.of_tensor(gradient)
            for rows, parameter, gradient in found
        ]
        with self._torch.no_grad():
            return self._torch.cat(pieces)

    def lines(self, optimizer: str, step: int, holds: bool) -> list[Line]:
        """Once it is known whether the chain into an optimizer's step `step` holds."""
        self._steps = self._steps + 1 if holds else 0
        if self._steps >= 2:
            text = (
                f"the gradients of step {step - 2} of {optimizer} are still part of those of step {step}: nothing "
                f"zeroed them in between"
            )
            return [("kept_gradients", CONTRADICTION, text, {"steps": self._steps})]
        if holds:
            return []
        text = f"the gradients of a step of {optimizer} hold nothing of the step before"
        return [("kept_gradients", PASS, text, {})]
