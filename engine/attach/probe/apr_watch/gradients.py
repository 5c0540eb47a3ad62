"""Whether a step has the gradients of its own backward passes, all of them and no others.

Chain: whether gradients of a step are still part of the next one's, since nothing zeroed them in between. Some rows of
the gradients are held against each other at each place where they may change: behind a step, in front of each backward
pass and behind it, in front of the next step. Where something else than a backward pass changed them, or there are
none, the chain is broken, and the rest of the step costs a comparison.

Windows: whether steps that accumulate take whole windows. At every backward pass a few gradients are asked whether they
are there and were written, which reads no number of theirs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from .outside import rows_of
from .parameters import FAIL, PASS, SUSPICION, Line
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
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._rows = rows_of(self._torch, parameters, _NUMBERS)
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
            return [("kept_gradients", FAIL, text, {"steps": self._steps})]
        if holds:
            return []
        text = f"the gradients of a step of {optimizer} hold nothing of the step before"
        return [("kept_gradients", PASS, text, {})]


_FEW = 4
"""So many parameters of an optimizer are asked for their gradients at every backward pass."""
_SETTLED = 3
"""Steps that take as many backward passes, from which on it is known how many a window has."""


class Windows:
    """The backward passes between the steps of one optimizer.

    A window that the end of a pass over the data cuts short may be stepped as it is. Here it is not: its gradients are
    removed, or become part of the next window, or the training ends with them.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._few: list[weakref.ref[Any]] = []
        self._marks: list[Any] = []
        """Of the gradient of each: None where there is none, else what differs once it is written."""
        self._passes = self._removed = 0
        """Since the step before: those whose gradients are there, and those whose gradients are not any more."""
        self._are_taken = False
        """Another optimizer stepped behind these passes; they may be meant for it alone."""
        self._has_ended = False
        """A pass over data has ended since the step before."""
        self._counts: Counter[int] = Counter()
        self._steps = 0
        self._long = 0
        """The passes of the step before, where they are more than a window has."""

    def leave(self) -> None:
        """Something cannot be seen."""
        self.is_open = False

    def data_ended(self) -> None:
        self._has_ended = True

    def other_stepped(self) -> None:
        self._are_taken = self._are_taken or self._passes > 0

    def backward_begins(self) -> None:
        now = self._look()
        if self._passes and now != self._marks:
            if any(one is not None for one in now):
                # Zeroed in place, scaled or clipped: nobody knows which.
                self.leave()
            self._removed += 0 if self._are_taken else self._passes
            self._passes, self._are_taken = 0, False
        self._marks = now

    def backward_ends(self) -> None:
        now = self._look()
        self._passes += now != self._marks
        self._marks = now

    def _look(self) -> list[Any]:
        few = [ref() for ref in self._few]
        if any(one is None for one in few):
            return self._marks
        gradients = [one.grad for one in few]  # type: ignore[union-attr]
        return [None if one is None else (id(one), one._version) for one in gradients]

    @property
    def may_change(self) -> bool:
        """Not where its optimizer is gone and nothing was left, or something cannot be seen."""
        return self.is_open and (self._passes > 0 or all(ref() is not None for ref in self._few))

    @property
    def _usual(self) -> int:
        """The passes that a window has; 0 where that is not known."""
        ((usual, times),) = self._counts.most_common(1) or [(0, 0)]
        return usual if times >= _SETTLED and 2 * times >= self._steps else 0

    def step(self, torch: Any, optimizer: Any, number: int) -> list[Line]:
        """In front of a step, the optimizer's `number`-th."""
        passes, removed, are_taken = self._passes, self._removed, self._are_taken
        has_ended, long = self._has_ended, self._long
        is_first = not self._few
        self._passes = self._removed = self._long = 0
        self._are_taken = self._has_ended = False
        self._choose(torch, optimizer)
        if is_first:
            return []
        if not passes:
            self.leave()
            return []
        usual, name = self._usual, type(optimizer).__name__
        self._steps += 1
        self._counts[passes] += not removed and not are_taken
        if usual == 1 and passes == 1 and not removed:
            text = f"each step of {name} takes the gradients of one backward pass"
            return [("accumulation_windows", PASS, text, {"passes": 1})]
        if usual < 2 or are_taken:
            return []
        if passes == usual and 0 < removed < usual:
            text = (
                f"the gradients of {removed} backward passes in front of step {number} of {name} were removed without "
                f"a step, where a step takes those of {usual}"
            )
            return [_cut(text, removed, usual)]
        if passes == usual and long:
            text = (
                f"step {number - 1} of {name} took the gradients of {long} backward passes, where others take those "
                f"of {usual}: a window that the end of the data cut short went on in the next pass"
            )
            return [_cut(text, long - usual, usual)]
        if not removed and has_ended and usual < passes < 2 * usual:
            self._long = passes
        if not removed and has_ended and passes <= usual:
            text = f"each step of {name} takes the gradients of one window, the last of a pass over the data too"
            return [("accumulation_windows", PASS, text, {"passes": usual})]
        return []

    def end(self) -> list[Line]:
        """At the end of a training that was not broken off."""
        left, usual = self._passes, self._usual
        self._passes = 0
        if not self.is_open or self._are_taken or not 0 < left < usual:
            return []
        text = (
            f"the training ended with the gradients of {left} backward passes that no step took, where a step takes "
            f"those of {usual}"
        )
        return [_cut(text, left, usual)]

    def _choose(self, torch: Any, optimizer: Any) -> None:
        found: list[Any] = []
        for group in optimizer.param_groups:
            for one in group["params"]:
                if len(found) < _FEW and is_plain(torch, one) and one.grad is not None:
                    found.append(one)
        if not found or any(
            type(one.grad) is not torch.Tensor or one.grad.is_inference() for one in found
        ):
            self.leave()
        self._few = [weakref.ref(one) for one in found]


def _cut(text: str, passes: int, usual: int) -> Line:
    return ("accumulation_windows", SUSPICION, text, {"passes": passes, "window": usual})
