"""Check that a step uses exactly the gradients of the backward passes since the previous step.

Chain: whether a step's gradients still contain those of the previous step, because the script did not zero them. Some
rows of the gradients are copied after a step, before and after each backward pass, and before the next step. The chain
breaks if there are no gradients at one of these points, or if something other than a backward pass changed them; then
nothing more is copied in this step.

Windows: whether with gradient accumulation each step uses a complete window of backward passes. At every backward pass
the existence and version of a few gradients are read, not their values.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

from .parameters import FAIL, PASS, SUSPICION, Line, held_by
from .sampled import Sample, SampledStep, is_plain, sample_of

_ELEMENTS = 1 << 14
_MAX_PASSES = 16
"""Maximum number of backward passes of a step in a chain; a step with more is not judged."""


class Chain:
    """Check of whether one optimizer's gradients at a step contain the previous step's gradients."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.is_open = self._is_broken = False
        """`is_open`: the gradients may still contain the previous step's. `_is_broken`: they certainly do not."""
        self._sample: Sample | None = None
        self._points: list[Any] = []
        """Sampled gradients after the previous step, and before and after each backward pass since."""
        self._steps = 0
        """Number of consecutive steps whose gradients contained the previous step's."""

    def begin(self, optimizer: Any) -> None:
        """Start the chain after a step."""
        self._sample = sample_of(self._torch, held_by(optimizer), _ELEMENTS)
        self._points, self.is_open, self._is_broken = [], True, False
        self.sample()

    def leave(self) -> None:
        """Stop judging, because something cannot be observed."""
        self.is_open = self._is_broken = False

    def sample(self) -> None:
        """Copy the gradients at the begin or end of a backward pass."""
        gradients = self._sample and self._sample.read("grad")
        if self._sample is None or gradients is None or len(self._points) > 2 * _MAX_PASSES:
            self.leave()
        elif self._sample.has_gradients:
            self._points.append(gradients)
        else:
            self.is_open, self._is_broken = False, True

    def end(self, sampled: SampledStep) -> None:
        """Have the chain judged before the next step, if it was observed to the end."""
        if self.is_open:
            self.sample()
        if self._is_broken:
            sampled.judge_later(lambda _: self._lines(sampled.name, sampled.number, False), {})
        elif self.is_open and len(self._points) > 3:
            points = dict(enumerate(self._points))
            sampled.judge_later(
                lambda tensors: self._lines(
                    sampled.name, sampled.number, self._holds(*tensors.values())
                ),
                points,
            )
        self._points = []
        # Judging starts again with the next `begin`.
        self.leave()

    def _holds(self, first: Any, *others: Any) -> bool:
        """Return whether the gradients before a step still contain those after the previous step."""
        *passes, newest = others
        before_passes, after_passes = passes[::2], passes[1::2]
        equal = self._torch.equal
        # Clipping and averaging may have multiplied all gradients by one factor.
        previous, newest = after_passes[-1].double(), newest.double()
        factor = (previous @ newest) / (previous @ previous)
        rounding = 4 * self._torch.finfo(first.dtype).eps
        return bool(
            first.any()
            and all(map(equal, before_passes, [first, *after_passes]))
            and not all(map(equal, before_passes, after_passes))
            and factor > 0
            and ((newest - factor * previous).abs() <= rounding * (factor * previous).abs()).all()
        )

    def _lines(self, optimizer: str, step: int, holds: bool) -> list[Line]:
        self._steps = self._steps + 1 if holds else 0
        if self._steps >= 2:
            text = (
                f"the gradients of step {step} of {optimizer} still contain those of step {step - 2}: nothing zeroed "
                f"them in between"
            )
            return [("kept_gradients", FAIL, text, {"steps": self._steps})]
        if holds:
            return []
        text = f"the gradients of a step of {optimizer} contain nothing of the step before"
        return [("kept_gradients", PASS, text, {})]


_DIVIDED = 2
"""Number of such steps from which they are reported."""
_MAX_WATCHED = 4
"""Number of parameters of an optimizer whose gradients are checked at every backward pass."""
_SETTLED = 3
"""Number of steps with the same number of backward passes from which this number is taken as the window size."""
_WHOLE = 64
"""Number of first steps with one backward pass each after which the training counts as one without accumulation."""


class Windows:
    """Windows of backward passes between the steps of one optimizer.

    A window that the end of an epoch cuts short may be used in a step as it is. It is reported if its gradients are
    zeroed unused, are added to the next window, or are left at the end of the training.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._watched: list[weakref.ref[Any]] = []
        self._marks: list[Any] = []
        """Identity and version of each gradient tensor, which change when it is written; None without a gradient."""
        self._passes = self._removed = 0
        """Numbers of backward passes since the last step whose gradients exist, and whose gradients were zeroed."""
        self._are_taken = False
        """Whether another optimizer stepped after these passes: the passes may belong to that optimizer."""
        self._has_ended = False
        """Whether an epoch has ended since the last step."""
        self._counts: Counter[int] = Counter()
        self._steps = 0
        self._divided = 0
        """Number of steps that zeroed gradients of losses which were divided by the number of all passes."""
        self._long = 0
        """Number of passes of the previous step if it exceeded a window; else 0."""

    def leave(self) -> None:
        """Stop judging, because something cannot be observed."""
        self.is_open = False

    def data_ended(self) -> None:
        self._has_ended = True

    def other_stepped(self) -> None:
        self._are_taken = self._are_taken or self._passes > 0

    def backward_begins(self) -> None:
        marks = self._read_marks()
        if self._passes and marks != self._marks:
            if any(mark is not None for mark in marks):
                # The gradients were zeroed in place, scaled or clipped; which is unknown.
                self.leave()
            self._removed += 0 if self._are_taken else self._passes
            self._passes, self._are_taken = 0, False
        self._marks = marks

    def backward_ends(self) -> None:
        marks = self._read_marks()
        self._passes += marks != self._marks
        self._marks = marks

    def _read_marks(self) -> list[Any]:
        parameters = [ref() for ref in self._watched]
        if any(parameter is None for parameter in parameters):
            return self._marks
        gradients = [parameter.grad for parameter in parameters]  # type: ignore[union-attr]
        return [
            None if gradient is None else (id(gradient), gradient._version)
            for gradient in gradients
        ]

    @property
    def may_change(self) -> bool:
        """Whether later events can change the verdict: judging has not stopped, and unused passes or the optimizer
        exist."""
        return self.is_open and (
            self._passes > 0 or all(ref() is not None for ref in self._watched)
        )

    @property
    def _usual(self) -> int:
        """Number of passes in a window; 0 if unknown."""
        usual, times = max(self._counts.items(), key=lambda one: one[1], default=(0, 0))
        return usual if times >= _SETTLED and 2 * times >= self._steps else 0

    def step(self, torch: Any, optimizer: Any, number: int, divisor: int) -> list[Line]:
        """Return the verdict before the optimizer's `number`-th step. `divisor`: number by which each loss of the step
        was divided; 0 if unknown."""
        passes, removed, are_taken = self._passes, self._removed, self._are_taken
        has_ended, long = self._has_ended, self._long
        is_first = not self._watched
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
        if removed and not are_taken and divisor == passes + removed:
            self._divided += 1
            text = (
                f"step {number} of {name} takes the gradients of {passes} of {divisor} backward passes, each of a loss "
                f"divided by {divisor}: the others were zeroed"
            )
            return [_cut(text, passes, divisor)] if self._divided >= _DIVIDED else []
        self._counts[passes] += not removed and not are_taken
        if usual == 1 and passes == 1 and not removed:
            if self._counts[1] == self._steps == _WHOLE:
                self.leave()
            text = f"each step of {name} takes the gradients of one backward pass"
            return [("accumulation_windows", PASS, text, {"passes": 1})]
        if usual < 2 or are_taken:
            return []
        if passes == usual and 0 < removed < usual:
            text = (
                f"the gradients of {removed} backward passes before step {number} of {name} were removed without a "
                f"step, where a step takes those of {usual}"
            )
            return [_cut(text, removed, usual)]
        if passes == usual and long:
            text = (
                f"step {number - 1} of {name} took the gradients of {long} backward passes, where others take those "
                f"of {usual}: a window cut short by the end of an epoch continued in the next epoch"
            )
            return [_cut(text, long - usual, usual)]
        if not removed and has_ended and usual < passes < 2 * usual:
            self._long = passes
        if not removed and has_ended and passes <= usual:
            text = f"each step of {name} takes the gradients of one window, also the last step of an epoch"
            return [("accumulation_windows", PASS, text, {"passes": usual})]
        return []

    def end(self) -> list[Line]:
        """Return the verdict at the regular end of a training."""
        passes, usual = self._passes, self._usual
        self._passes = 0
        if not self.is_open or self._are_taken or not 0 < passes < usual:
            return []
        text = (
            f"the training ended with the gradients of {passes} backward passes that no step took, where a step takes "
            f"those of {usual}"
        )
        return [_cut(text, passes, usual)]

    def _choose(self, torch: Any, optimizer: Any) -> None:
        watched = [ref() for ref in self._watched]
        if watched and all(
            parameter is not None and _is_readable(torch, parameter.grad) for parameter in watched
        ):
            return
        with_gradient = (
            parameter for parameter in held_by(optimizer) if parameter.grad is not None
        )
        chosen = list(
            itertools.islice(
                (parameter for parameter in with_gradient if is_plain(torch, parameter)),
                _MAX_WATCHED,
            )
        )
        if not chosen or not all(_is_readable(torch, parameter.grad) for parameter in chosen):
            self.leave()
        self._watched = [weakref.ref(parameter) for parameter in chosen]


def _is_readable(torch: Any, gradient: Any) -> bool:
    return type(gradient) is torch.Tensor and not gradient.is_inference()


def _cut(text: str, passes: int, usual: int) -> Line:
    return ("accumulation_windows", SUSPICION, text, {"passes": passes, "window": usual})
