"""Weights in managed memory: a pool of torch's own caching allocator, over managed segments.

    scope = memory_scope("managed", device)
    with scope.use():
        teacher = load_decoder(...)          # every CUDA tensor made here is managed

Managed (unified) memory has one address on host and device, and its pages move between them. On a
machine whose GPU shares the host's memory nothing moves; on one with memory of its own the pages
are put there before the first use. torch has no backend for it, but it has pools: inside `use`, the
caching allocator takes its segments from `managed_alloc.c` and does the rest as always. So results
are bit for bit the same, and `engine.runtime.pointers` proves where a tensor is.

What lives there is what the calling thread makes inside `use`: the weights of both models, and the
optimizer's moments when the first step runs in it. Not covered:

- `use` counts for the calling thread alone. Autograd runs the backward pass of CUDA tensors in
  threads of its own, so gradients, and what it makes on the way, are native.
- A tensor keeps its memory when `use` ends; what was freed inside stays with the pool, for the
  next `use`, and is not there for native tensors.
- Stream capture: a new segment waits for the stream.

The pool never asks for more than is free, and says so in a BadInput; the C file says what free is.
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
from engine.runtime.pointers import DRIVER

SOURCE = Path(__file__).with_name("managed_alloc.c")
KNOB = "memory.allocator"
CHOICES = ("native", "managed")

# What stays free. Of a GPU's own memory, room for kernels and library workspaces; of the host's,
# enough that it does not begin to swap, which it may not come back from.
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
    """Times the driver was asked for memory."""
    refused: int
    """Times a request was turned down."""


class ManagedLibrary:
    """The C file, compiled and loaded, with the driver it found. Its state is the process's."""

    def __init__(
        self, compiled: CompiledLibrary, driver: str = DRIVER, meminfo: str = "/proc/meminfo"
    ) -> None:
        self.compiled = compiled
        self._c = ctypes.CDLL(str(compiled.path))
        self._c.managed_alloc.restype = ctypes.c_void_p
        self._c.managed_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._c.managed_free.restype = None
        self._c.managed_free.argtypes = (
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        if self._c.managed_open(driver.encode(), meminfo.encode()) != 0:
            raise EngineError(
                f"{KNOB}: managed — expected a CUDA driver to ask, found: {self.last_error()}",
                hint=f"`--set {KNOB}=native` leaves the memory to torch",
            )

    def set_limits(self, *, limit_bytes: int | None, reserve_bytes: int) -> None:
        """At most `limit_bytes` held at once (None: no limit), and `reserve_bytes` of what is free
        never taken.
        """
        limit = _NO_LIMIT if limit_bytes is None else limit_bytes
        self._c.managed_limits(ctypes.c_uint64(limit), ctypes.c_uint64(reserve_bytes))

    def alloc(self, size: int, device: int) -> int | None:
        """The address of a segment as torch would get it, None when refused."""
        pointer: int | None = self._c.managed_alloc(size, device, None)
        return pointer

    def free(self, pointer: int, size: int, device: int) -> None:
        self._c.managed_free(pointer, size, device, None)

    def stats(self) -> ManagedStats:
        out = ManagedStats()
        self._c.managed_read_stats(ctypes.byref(out))
        return out

    def last_error(self) -> str:
        out = ctypes.create_string_buffer(512)
        self._c.managed_last_error(out, ctypes.c_size_t(len(out)))
        return out.value.decode(errors="replace")


class ManagedPool:
    """Managed memory of one device. `managed_pool` makes it; there is one for each device, because
    a pool must outlive its tensors.
    """

    def __init__(self, device: torch.device, library: ManagedLibrary) -> None:
        self.device, self.library = device, library
        path = str(library.compiled.path)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "managed_alloc", "managed_free")
        self._pool = torch.cuda.MemPool(allocator.allocator())  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """CUDA tensors this thread makes inside are managed. Raises BadInput for more than is free."""
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
        """Held from the driver now, in whole segments, by all managed pools of this process."""
        return int(self.library.stats().held_bytes)


@functools.cache
def load_managed_library() -> ManagedLibrary:
    """The one library of this process, compiled at first use."""
    return ManagedLibrary(compiled_library(SOURCE))


@functools.cache
def _pool_of(index: int) -> ManagedPool:
    return ManagedPool(torch.device("cuda", index), load_managed_library())


def managed_pool(
    device: torch.device, *, limit_bytes: int | None = None, reserve_bytes: int | None = None
) -> ManagedPool:
    """The managed pool of a CUDA device, with its limits set anew.

    `limit_bytes` bounds what the process holds at once; `reserve_bytes` stays free (None: a share
    fit for the kind of device). Raises BadInput for another device or without a C compiler.
    """
    if device.type != "cuda":
        raise BadInput.expected(
            KNOB, "managed", "a CUDA device", device.type, hint=f"`--set {KNOB}=native`"
        )
    current = torch.cuda.current_device()  # begins CUDA, which a pool needs
    pool = _pool_of(current if device.index is None else device.index)
    if reserve_bytes is None:
        reserve_bytes = default_reserve_bytes(pool.device)
    pool.library.set_limits(limit_bytes=limit_bytes, reserve_bytes=reserve_bytes)
    return pool


def default_reserve_bytes(device: torch.device) -> int:
    """512 MiB of a GPU's own memory; of memory shared with the host, 8 GiB or 8 %, the larger."""
    if not torch.cuda.get_device_properties(device).is_integrated:
        return DISCRETE_RESERVE_BYTES
    total = Host().memory().total_bytes.number
    return max(INTEGRATED_RESERVE_BYTES, round(INTEGRATED_RESERVE_SHARE * (total or 0)))


@dataclass(frozen=True, slots=True)
class MemoryScope:
    """Where CUDA tensors made inside `use` live; what a run builds its models in."""

    choice: str
    pool: ManagedPool | None
    """None when native."""

    def use(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.pool is None else self.pool.use()

    @property
    def compiled(self) -> CompiledLibrary | None:
        """The library behind the pool, for the log."""
        return None if self.pool is None else self.pool.library.compiled


def memory_scope(choice: str, device: torch.device) -> MemoryScope:
    """The scope of `memory.allocator`: `native` is torch as it is, `managed` needs a CUDA device.
    Raises BadInput.
    """
    if choice not in CHOICES:
        raise BadInput.expected(KNOB, "memory", f"one of {', '.join(CHOICES)}", choice)
    return MemoryScope(choice, None if choice == "native" else managed_pool(device))
