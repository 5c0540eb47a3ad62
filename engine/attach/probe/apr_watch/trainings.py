"""Which optimizer's steps are steps, and where a training begins.

A training begins with the first step of an optimizer that was made after the first step of the training before: a
second stage, or the next model of a sweep. Optimizers made before that, as the two of a GAN, belong to one training,
and the one that stepped first leads it. If an earlier leader steps again, the trainings are interleaved, and all
that follows is one.
"""

from __future__ import annotations

import weakref
from typing import Any

MOST = 100
"""Trainings of one process; what follows belongs to the last of them."""


class Trainings:
    def __init__(self) -> None:
        self.number = 0
        """Of the training in progress; 0 before the first."""
        self._is_open = False
        self._leader: weakref.ref[Any] | None = None
        self._chosen: weakref.ref[Any] | None = None
        self._made: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()
        self._led: weakref.WeakSet[Any] = weakref.WeakSet()
        self._interleaved = False

    @property
    def newest(self) -> int:
        """The number of the training in progress, or of the one that is about to begin."""
        return self.number if self._is_open else self.number + 1

    def optimizer_made(self, optimizer: Any, mark: Any) -> None:
        """Remember in which training it was made, and at which mark of the clock."""
        self._made[optimizer] = self.number, mark

    def mark_of(self, optimizer: Any) -> Any:
        """The mark at which an optimizer was made; None if that was before the first training."""
        return self._made.get(optimizer, (0, None))[1]

    def begin_with(self, optimizer: Any) -> bool:
        """Whether this step of an optimizer, which has been done, begins a training; it has begun then."""
        if not self._begins(optimizer):
            return False
        self.number += 1
        self._is_open = True
        self._lead(optimizer)
        return True

    def _begins(self, optimizer: Any) -> bool:
        if self._chosen is not None:
            return not self._is_open and self._chosen() is optimizer
        if not self._is_open:
            return True
        made = self._made.get(optimizer, (0, None))[0]
        return made == self.number < MOST and not self._interleaved

    def are_led_by(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is one of the training."""
        leader = self._leader() if self._leader is not None else None
        if leader is optimizer:
            return self._is_open
        if self._chosen is not None:
            return False
        again = optimizer in self._led
        self._interleaved |= again
        if again or leader is None:
            self._lead(optimizer)
            return True
        return False

    def _lead(self, optimizer: Any) -> None:
        self._leader = weakref.ref(optimizer)
        self._led.add(optimizer)

    def choose(self, optimizer: Any) -> None:
        """From now on the steps of this optimizer alone are steps, and its next one begins a training."""
        self._chosen, self._is_open = weakref.ref(optimizer), False

    def end(self) -> None:
        """The next step, of whichever optimizer, begins a training."""
        self._chosen, self._is_open = None, False
