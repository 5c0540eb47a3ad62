"""Put weights in managed memory: a pool of torch's own caching allocator, over managed segments.

    scope = memory_scope("managed", device)
    with scope.use():
        teacher = load_decoder(...)          # every CUDA tensor made here is managed

Managed (unified) memory has one address on host and device, and its pages migrate between them. On a machine
whose GPU shares the host's memory nothing migrates; on one with its own memory the pages are moved there
before the first use. torch has no backend for managed memory, but it has memory pools: inside `use`, the
caching allocator takes its segments from `managed_alloc.c` and otherwise works as usual. So results are
bit-identical.

The pool holds what the calling thread allocates inside `use`: the weights of both models, and the optimizer's
moments when the first step runs in it. Not covered:

- `use` affects only the calling thread. Autograd runs the backward pass of CUDA tensors in
  threads of its own, so gradients and intermediates of the backward pass are native.
- A tensor keeps its memory when `use` ends. Memory freed inside stays with the pool for the
  next `use` and is not available to native tensors.
- Stream capture: a new segment waits for the stream.

The pool never allocates more than is free, and raises BadInput instead; the C file defines what is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import BadInput, EngineError
from engine.machine.host import Host
from engine.runtime.c_library import CompiledLibrary, compiled_library

SOURCE = Path(__file__).with_name("managed_alloc.c")
KNOB = "memory.allocator"
DRIVER = "libcuda.so.1"

# Memory left free. On a GPU with its own memory: for kernels and library workspaces. On the host: enough that
# it does not start to swap, from which it may not recover.
DISCRETE_RESERVE_BYTES = 512 * 2**20
INTEGRATED_RESERVE_BYTES = 8 * 2**30
INTEGRATED_RESERVE_SHARE = 0.08
_NO_LIMIT = 2**64 - 1


class ManagedStats(ctypes.Structure):
    """`struct managed_stats` of the C file."""

    _fields_ = (
        ("held_bytes", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("asked", ctypes.c_uint64),
        ("refused", ctypes.c_uint64),
    )
    held_bytes: int
    peak_bytes: int
    asked: int
    """Allocations requested from the driver."""
    refused: int
    """Requests that were refused."""


class ManagedLibrary:
    """The compiled and loaded C file with the driver library it found. Its state is process-wide."""

    def __init__(
        self, compiled: CompiledLibrary, driver: str = DRIVER, meminfo: str = "/proc/meminfo"
    ) -> None:
        self.compiled = compiled
        self._c = ctypes.CDLL(str(compiled.path))
        if self._c.managed_open(driver.encode(), meminfo.encode()) != 0:
            raise EngineError(
                f"{KNOB}: managed — expected a CUDA driver to ask, found: {self.last_error()}",
                hint=f"`--set {KNOB}=native` leaves the memory to torch",
            )

    def set_limits(self, *, limit_bytes: int | None, reserve_bytes: int) -> None:
        """Hold at most `limit_bytes` at once (None: no limit), and leave `reserve_bytes` of the free memory
        untouched."""
        limit = _NO_LIMIT if limit_bytes is None else limit_bytes
        self._c.managed_limits(ctypes.c_uint64(limit), ctypes.c_uint64(reserve_bytes))

    def stats(self) -> ManagedStats:
        out = ManagedStats()
        self._c.managed_read_stats(ctypes.byref(out))
        return out

    def last_error(self) -> str:
        out = ctypes.create_string_buffer(512)
        self._c.managed_last_error(out, ctypes.c_size_t(len(out)))
        return out.value.decode(errors="replace")


class ManagedPool:
    """Managed memory of one device. Create it with `managed_pool`; there is one per device, because a pool must
    outlive its tensors."""

    def __init__(self, device: torch.device, library: ManagedLibrary) -> None:
        self.device, self.library = device, library
        path = str(library.compiled.path)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "managed_alloc", "managed_free")
        self._pool = torch.cuda.MemPool(allocator.allocator())  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Allocate the CUDA tensors of this thread in managed memory. Raises BadInput for more than is free."""
        refused_before = self.library.stats().refused
        try:
            with torch.cuda.use_mem_pool(self._pool, self.device):
                yield
        except torch.OutOfMemoryError as error:
            if self.library.stats().refused == refused_before:
                raise
            raise BadInput(
                f"{KNOB}: managed memory of {self.device} — {self.library.last_error()}",
                hint="a smaller model or train.rows needs less",
            ) from error

    def bytes(self) -> int:
        """Bytes held from the driver now, in whole segments, by all managed pools of this process."""
        return int(self.library.stats().held_bytes)


@functools.cache
def load_managed_library() -> ManagedLibrary:
    """Return the process's only library, compiled at first use."""
    return ManagedLibrary(compiled_library(SOURCE))


@functools.cache
def _pool_of(index: int) -> ManagedPool:
    return ManagedPool(torch.device("cuda", index), load_managed_library())


def managed_pool(device: torch.device) -> ManagedPool:
    """Return the managed pool of a CUDA device, with the reserve for its kind. Raises BadInput for another device or
    without a C compiler."""
    if device.type != "cuda":
        raise BadInput.expected(
            KNOB, "managed", "a CUDA device", device.type, hint=f"`--set {KNOB}=native`"
        )
    current = torch.cuda.current_device()  # initialises CUDA, which a pool needs
    pool = _pool_of(current if device.index is None else device.index)
    pool.library.set_limits(limit_bytes=None, reserve_bytes=default_reserve_bytes(pool.device))
    return pool


def default_reserve_bytes(device: torch.device) -> int:
    """Return 512 MiB for a GPU with its own memory, and for shared host memory the larger of 8 GiB and 8 %."""
    if not torch.cuda.get_device_properties(device).is_integrated:
        return DISCRETE_RESERVE_BYTES
    total = Host().memory().total_bytes.number
    return max(INTEGRATED_RESERVE_BYTES, round(INTEGRATED_RESERVE_SHARE * (total or 0)))


@dataclass(frozen=True, slots=True)
class MemoryScope:
    """The memory of CUDA tensors that are allocated inside `use`; a run builds its models in it."""

    choice: str
    pool: ManagedPool | None
    """None for native memory."""

    def use(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.pool is None else self.pool.use()

    @property
    def compiled(self) -> CompiledLibrary | None:
        """The library that implements the pool, for the log."""
        return None if self.pool is None else self.pool.library.compiled


def memory_scope(choice: str, device: torch.device) -> MemoryScope:
    """Return the scope of `memory.allocator`: `native` is torch's default, `managed` needs a CUDA device. Raises
    BadInput."""
    return MemoryScope(choice, None if choice == "native" else managed_pool(device))
