"""Defects of the process that trains: it waits for what never comes, or grows until it is killed.

Each begins at step AFTER, so that the run is known to have worked until then; one is in the loading before
the first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.data.batches import Batch, Batches
from engine.drills.planting import replaced
from engine.teachers.frozen import FrozenDecoder
from engine.train import trainer

AFTER = 6
LEAK_BYTES = 64 << 20
WAIT_CYCLES = 1 << 38
"""Two minutes of an H200: the kernel ends even where nobody ends its process."""


def loader_stalls() -> AbstractContextManager[None]:
    """A loader that reads from a worker which has hung: its pipe stays open and empty."""
    # The end to write into is kept, or the read would come back at once.
    read_end, _write_end = os.pipe()

    def make(take: Callable[..., Batch]) -> Callable[..., Batch]:
        def spoilt(self: Batches, position: int, rows: int) -> Batch:
            if position >= AFTER * self.rows_per_batch:
                os.read(read_end, 1)
            return take(self, position, rows)

        return spoilt

    return replaced(Batches, "take", make)


def load_hangs() -> AbstractContextManager[None]:
    """Weights on a file system that has stopped to answer: the read of them does not come back."""
    read_end, _write_end = os.pipe()

    def make(build: Callable[..., None]) -> Callable[..., None]:
        def spoilt(self: FrozenDecoder, *given: Any, **named: Any) -> None:
            os.read(read_end, 1)
            build(self, *given, **named)

        return spoilt

    return replaced(FrozenDecoder, "__init__", make)


def deadlock() -> AbstractContextManager[None]:
    """Two threads that take two locks in opposite orders."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(here: threading.Lock, there: threading.Lock) -> None:
        with here:
            both.wait()
            with there:
                pass

    def lock_up() -> None:
        threading.Thread(target=take, args=(second, first), daemon=True).start()
        take(first, second)

    return _at_update(lambda step: lock_up() if step == AFTER else None)


def cuda_wait() -> AbstractContextManager[None]:
    """A kernel that does not come to an end: whoever next reads a number from the device waits."""
    return _at_update(lambda step: torch.cuda._sleep(WAIT_CYCLES) if step == AFTER else None)  # type: ignore[no-untyped-call]


def memory_leak() -> AbstractContextManager[None]:
    """Something of each step is kept: a graph, a list of tensors, a cache without a bound."""
    kept: list[torch.Tensor] = []
    return _at_update(lambda _: kept.append(torch.ones(LEAK_BYTES // 4)))


def _at_update(act: Callable[[int], object]) -> AbstractContextManager[None]:
    """`act` with the number of the step, from 1, before each update of the weights."""

    def make(build: Callable[..., torch.optim.AdamW]) -> Callable[..., torch.optim.AdamW]:
        def spoilt(*arguments: Any) -> torch.optim.AdamW:
            optimizer = build(*arguments)
            real, done = optimizer.step, 0

            def step(*given: Any) -> Any:
                nonlocal done
                done += 1
                act(done)
                return real(*given)

            optimizer.step = step  # type: ignore[assignment, method-assign]
            return optimizer

        return spoilt

    return replaced(trainer, "build_optimizer", make)
