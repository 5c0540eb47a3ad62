"""Defects between a store of teacher outputs and the loss: what is read is intact, and not the teacher's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from engine.drills.planting import replaced
from engine.teachers.store.teacher import CachedTeacher, Reader, Reading


def stored_rows_turned() -> AbstractContextManager[None]:
    def make(begin: Callable[..., Reading]) -> Callable[..., Reading]:
        def spoilt(self: Reader, keys: Sequence[bytes]) -> Reading:
            return begin(self, [*keys[-1:], *keys[:-1]])

        return spoilt

    return replaced(Reader, "begin", make)


def stored_outputs_scaled() -> AbstractContextManager[None]:
    def make(on_device: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: CachedTeacher, *given: Any) -> tuple[Tensor, ...]:
            return tuple(0.5 * field for field in on_device(self, *given))

        return spoilt

    return replaced(CachedTeacher, "_on_device", make)
