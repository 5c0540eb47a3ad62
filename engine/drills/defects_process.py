"""Defects of the training process: it waits for something that never comes, or grows until it is killed.

Each begins at step AFTER, so that the run has worked until then, except `load_hangs`, which hangs before the
first step, and `memory_leak`, which leaks from the first step on.
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
"""Two minutes of an H200: the kernel ends even if nobody ends its process."""


def loader_stalls() -> AbstractContextManager[None]:
    """A loader that reads from a worker that hangs: its pipe stays open and empty."""
    # The write end stays open, or the read would return at once.
    read_end, _write_end = os.pipe()

    def make(take: Callable[..., Batch]) -> Callable[..., Batch]:
        def spoilt(self: Batches, position: int, rows: int) -> Batch:
            if position >= AFTER * self.rows_per_batch:
                os.read(read_end, 1)
            return take(self, position, rows)

        return spoilt

    return replaced(Batches, "take", make)


def load_hangs() -> AbstractContextManager[None]:
    """Weights on a file system that no longer responds: the read does not return."""
    read_end, _write_end = os.pipe()

    def make(build: Callable[..., None]) -> Callable[..., None]:
        def spoilt(self: FrozenDecoder, *given: Any, **named: Any) -> None:
            os.read(read_end, 1)
            build(self, *given, **named)

        return spoilt

    return replaced(FrozenDecoder, "__init__", make)


def deadlock() -> AbstractContextManager[None]:
    """Two threads take two locks in opposite orders."""
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
    """A kernel that does not end: whoever next reads a value from the device waits."""
    return _at_update(lambda step: torch.cuda._sleep(WAIT_CYCLES) if step == AFTER else None)  # type: ignore[no-untyped-call]


def memory_leak() -> AbstractContextManager[None]:
    """Something of each step is kept: a graph, a list of tensors, an unbounded cache."""
    kept: list[torch.Tensor] = []
    return _at_update(lambda _: kept.append(torch.ones(LEAK_BYTES // 4)))


def _at_update(act: Callable[[int], object]) -> AbstractContextManager[None]:
    """Call `act` with the number of the step, from 1, before each update of the weights."""

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
