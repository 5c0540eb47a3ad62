"""Incidents of a training process that begin outside of the engine's code, planted by replacing one function of the
engine while a context lasts: a read that does not come back, a slow disk, a lock, a kernel that does not end, memory
that is never given back, a cache with another file.

The function that plants a drill has its id as name. Those that hang begin at step AFTER, except `load_hangs`.

    python -m engine.drills.planting DRILL -- ARGUMENTS

is the trainer of a run in which a drill plants its fault. It takes the arguments of `python -m engine.train` and does
the same, but for the function that the drill replaces. A supervisor starts it when APR_WORKBENCH_TRAINER names it, and
records that in the log of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.data.batches import Batches
from engine.log.events import StepDone
from engine.log.write import LogWriter
from engine.teachers.frozen import FrozenDecoder
from engine.train import trainer
from engine.train.__main__ import main as train

if TYPE_CHECKING:
    from engine.kernels.compiler import Variant

AFTER = 6
"""Step at which a hang begins."""
LEAK_BYTES = 64 << 20
"""Bytes that each step leaks."""
WAIT_CYCLES = 1 << 38
"""Two minutes of an H200, so that the kernel ends by itself."""
WAIT_S = 0.75
"""Seconds added to each step, which takes some tenths of a second in the short run of a drill."""


def plant(id: str) -> AbstractContextManager[None]:
    """Return a context inside which the fault of the drill `id` is planted."""
    planted: AbstractContextManager[None] = globals()[id]()
    return planted


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(its old value)` for as long as the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _before(owner: Any, name: str, act: Callable[..., object]) -> AbstractContextManager[None]:
    """Call `act` with the arguments of `owner.name` before each call of it."""

    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def planted_call(*given: Any, **named: Any) -> Any:
            act(*given, **named)
            return call(*given, **named)

        return planted_call

    return replaced(owner, name, make)


# A loader, a disk


def loader_stalls() -> AbstractContextManager[None]:
    """A loader that reads from a worker that hangs: its pipe stays open and empty."""
    # The write end stays open, or the read would return at once.
    read_end, _write_end = os.pipe()

    def read(batches: Batches, position: int, rows: int) -> None:
        if position >= AFTER * batches.rows_per_batch:
            os.read(read_end, 1)

    return _before(Batches, "take", read)


def rows_slow_ahead() -> AbstractContextManager[None]:
    """Every batch but the first is fetched ahead, during the backward pass of the step before."""
    return _before(
        Batches, "take", lambda _, position, rows: time.sleep(WAIT_S) if position else None
    )


def load_hangs() -> AbstractContextManager[None]:
    """Weights on a file system that no longer responds: the read does not return."""
    read_end, _write_end = os.pipe()
    return _before(FrozenDecoder, "__init__", lambda *_, **named: os.read(read_end, 1))


def log_slow() -> AbstractContextManager[None]:
    def wait(_: LogWriter, event: Any) -> None:
        if isinstance(event, StepDone):
            time.sleep(WAIT_S)

    return _before(LogWriter, "write", wait)


# A lock, a kernel, memory


def deadlock() -> AbstractContextManager[None]:
    """Two threads take two locks in opposite orders."""
    first, second, barrier = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(first_lock: threading.Lock, second_lock: threading.Lock) -> None:
        with first_lock:
            barrier.wait()
            with second_lock:
                pass

    def lock_up() -> None:
        threading.Thread(target=take, args=(second, first), daemon=True).start()
        take(first, second)

    return _at_update(lambda step: lock_up() if step == AFTER else None)


def cuda_wait() -> AbstractContextManager[None]:
    """A kernel that does not end: whoever next reads a value from the device waits."""
    return _at_update(lambda step: torch.cuda._sleep(WAIT_CYCLES) if step == AFTER else None)  # type: ignore[no-untyped-call]


def memory_leak() -> AbstractContextManager[None]:
    """Keep memory of each step, as a retained graph, a list of tensors or an unbounded cache does."""
    kept: list[torch.Tensor] = []
    return _at_update(lambda _: kept.append(torch.ones(LEAK_BYTES // 4)))


def _at_update(act: Callable[[int], object]) -> AbstractContextManager[None]:
    """Call `act` with the number of the step, from 1, before each update of the weights."""

    def make(build: Callable[..., torch.optim.AdamW]) -> Callable[..., torch.optim.AdamW]:
        def planted_call(*arguments: Any) -> torch.optim.AdamW:
            optimizer, steps = build(*arguments), itertools.count(1)

            def before(*_: Any) -> None:
                act(next(steps))

            optimizer.register_step_pre_hook(before)
            return optimizer

        return planted_call

    return replaced(trainer, "build_optimizer", make)


# A cache of compiled kernels


@contextlib.contextmanager
def stale_body() -> Iterator[None]:
    """The cache on disk holds, under the key of the first kernel that is requested, a kernel that was
    compiled for another constant."""
    from engine.kernels import registry

    def make(compile_for: Callable[..., tuple[Any, bool]]) -> Callable[..., tuple[Any, bool]]:
        planted: list[Variant] = []

        def planted_call(variant: Variant, arch: int) -> tuple[Any, bool]:
            if not planted:
                planted.append(variant)
                _copy_over(
                    compile_for(variant, arch)[0],
                    compile_for(_with_other_constant(variant), arch)[0],
                )
            return compile_for(variant, arch)

        return planted_call

    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder, replaced(registry, "compile_for", make):
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def _with_other_constant(variant: Variant) -> Variant:
    """Return the same kernel with its last integer constant doubled."""
    name, value = next(
        (name, value) for name, value in reversed(variant.constants) if type(value) is int
    )
    constants = tuple((n, 2 * value if n == name else v) for n, v in variant.constants)
    return dataclasses.replace(variant, constants=constants)


def _copy_over(victim: Any, other: Any) -> None:
    """Copy every file of the compiled kernel `other`, the index included, over that of `victim`."""
    victim_folder, other_folder = (
        Path(next(iter(b.metadata_group.values()))).parent for b in (victim, other)
    )
    for file in other_folder.iterdir():
        content = file.read_bytes()
        if file.name.startswith("__grp__"):
            content = content.replace(str(other_folder).encode(), str(victim_folder).encode())
        (victim_folder / file.name).write_bytes(content)


def main() -> int:
    drill, _, *arguments = sys.argv[1:]
    sys.argv = [sys.argv[0], *arguments]
    with plant(drill):
        return train()


if __name__ == "__main__":
    sys.exit(main())
