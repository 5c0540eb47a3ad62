"""Defects between a store of teacher outputs and the loss: what is read is intact, and not the teacher's answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from engine.drills.planting import replaced
from engine.teachers.store.teacher import CachedTeacher, Reader, Reading

LATE = 23
"""Batches that are read as they should be."""


def stored_rows_turned(after: int = 0) -> AbstractContextManager[None]:
    """Each row of a batch gets what is stored of the row before it, from batch `after` + 1 on."""
    read = itertools.count()

    def make(begin: Callable[..., Reading]) -> Callable[..., Reading]:
        def spoilt(self: Reader, keys: Sequence[bytes]) -> Reading:
            right = next(read) < after
            return begin(self, keys if right else [*keys[-1:], *keys[:-1]])

        return spoilt

    return replaced(Reader, "begin", make)


def stored_rows_turned_later() -> AbstractContextManager[None]:
    return stored_rows_turned(LATE)


def stored_outputs_scaled() -> AbstractContextManager[None]:
    def make(on_device: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: CachedTeacher, *given: Any) -> tuple[Tensor, ...]:
            return tuple(0.5 * field for field in on_device(self, *given))

        return spoilt

    return replaced(CachedTeacher, "_on_device", make)
