"""Decide which optimizer's steps are logged, and when a training begins.

A new training (a second stage, or the next model of a sweep) begins with the first step of an optimizer that was
created after the first step of the current training. Optimizers that were created before, as the two of a GAN, belong
to the current training. Its leader is the optimizer that stepped first; the leader's steps are logged. If the leader of
an earlier training steps again, the trainings are interleaved, and no further training begins.
"""

from __future__ import annotations

import weakref
from typing import Any

MAX_TRAININGS = 100
"""Maximum number of trainings of one process; later steps belong to the last one."""


class Trainings:
    def __init__(self) -> None:
        self.number = 0
        """Number of the training in progress; 0 before the first."""
        self._leader: weakref.ref[Any] | None = None
        self._created: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Number of the training in which each optimizer was created; 0 if before the first training."""
        self._led: weakref.WeakSet[Any] = weakref.WeakSet()
        self._interleaved = False

    def optimizer_created(self, optimizer: Any) -> None:
        """Record in which training an optimizer was created."""
        self._created[optimizer] = self.number

    def begin_with(self, optimizer: Any) -> bool:
        """Return whether this completed step of an optimizer begins a training; if so, begin it."""
        if not self._begins(optimizer):
            return False
        self.number += 1
        self._lead(optimizer)
        return True

    def _begins(self, optimizer: Any) -> bool:
        if not self.number:
            return True
        training = self._created.get(optimizer, 0)
        return training == self.number < MAX_TRAININGS and not self._interleaved

    def counts_steps_of(self, optimizer: Any) -> bool:
        """Return whether a step of this optimizer is logged as a step of the training."""
        leader = self._leader() if self._leader is not None else None
        if leader is optimizer:
            return True
        has_led = optimizer in self._led
        self._interleaved |= has_led
        if has_led or leader is None:
            self._lead(optimizer)
            return True
        return False

    def _lead(self, optimizer: Any) -> None:
        self._leader = weakref.ref(optimizer)
        self._led.add(optimizer)
