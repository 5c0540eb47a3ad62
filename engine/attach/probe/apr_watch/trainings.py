"""Decide which optimizer's steps count, and where a training begins.

A training begins with the first step of an optimizer created after the first step of the previous training: a second
stage, or the next model of a sweep. Optimizers created before that, as the two of a GAN, belong to one training, led by
the one that stepped first. If an earlier leader steps again, the trainings are interleaved: no new one begins.
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
        """Training in which each optimizer was created; 0 if before the first."""
        self._led: weakref.WeakSet[Any] = weakref.WeakSet()
        self._interleaved = False

    def optimizer_made(self, optimizer: Any) -> None:
        """Remember in which training an optimizer was created."""
        self._created[optimizer] = self.number

    def begin_with(self, optimizer: Any) -> bool:
        """Begin a training if this completed step of an optimizer begins one; return whether it does."""
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
        """Return whether a step of this optimizer counts."""
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
