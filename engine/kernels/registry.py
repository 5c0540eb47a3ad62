"""Compile each kernel once, launch it, and record whether it was already compiled.

    launch(variant, grid, *arguments)     the only way to run a kernel
    warm(variant)                         compiles and loads without running
    registry.seal()                       ends warm-up: a later compilation is recorded as `after warm-up`
    registry.drain()                      returns the compilations since the last call, for the run log
    registry.summary()                    hits and misses of each kernel

A miss is a variant that this process had not compiled for the device. Its record has the time that it
took, whether Triton's cache on disk had it, and, after warm-up, its difference from the warmed variants.
Every other launch is a hit. A kernel from disk is verified before it is used (`compiler.py`).

A launch uses the compiled kernel that belongs to the key, not Triton's own just-in-time path: that
path specialises on the values of integers and the alignment of pointers, so a run could compile in
the middle because a row count happened to be 1.

Threads may launch, compile and read counts concurrently. Two threads that need the same variant
compile it once; two that need different ones do not wait for each other.

Under `TRITON_INTERPRET=1` kernels run on the CPU in Triton's interpreter, and nothing is compiled.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from engine.errors import InternalError
from engine.kernels.compile_record import CompileRecord, KernelCounts
from engine.kernels.compiler import ALIGNMENT_BYTES, Constant, KernelKey, Variant, key_for
from engine.kernels.compiler import compile_for as compile_for

_POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}
_RANGES = {"i32": 1 << 31, "i64": 1 << 63}
"""Range of an integer argument: from -range to range - 1."""


def pointer_type(dtype: torch.dtype) -> str:
    """Return Triton's name of a pointer to elements of `dtype`."""
    return _POINTERS[dtype]


def compiled_as(
    function: Any,
    *types: Any,
    warps: int,
    stages: int,
    fp_fusion: bool = True,
    **constants: Constant,
) -> Variant:
    """Return the variant of `function` with these types and constants.

    `types` are the types of its runtime arguments in order: a dtype for a pointer to such elements,
    or Triton's own name. `constants` are in the order of the signature.
    """
    names = (type_ if isinstance(type_, str) else pointer_type(type_) for type_ in types)
    pairs = tuple(constants.items())
    return Variant(function, tuple(names), pairs, warps, stages, fp_fusion)


def current_arch(device: int) -> int:
    """Return the compute capability of a CUDA device; 90 is 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


# contract: kernel-keys-v1
class KernelRegistry:
    """The compiled kernels of one process, on all its devices.

    With `arch` (90 is compute capability 9.0) it compiles for that architecture instead of for the
    current device, and loads and launches nothing. This works on a machine without a GPU.
    """

    def __init__(self, arch: int | None = None) -> None:
        self._arch = arch
        self._bodies: dict[tuple[Variant, int], Any] = {}
        self._keys: dict[tuple[Variant, int], KernelKey] = {}
        self._turns: dict[tuple[Variant, int], threading.Lock] = {}
        # Held during look-ups and counting, never during a compilation.
        self._lock = threading.Lock()
        self._records: list[CompileRecord] = []
        self._warmed: dict[tuple[Variant, int], KernelKey] | None = None
        self._interpreted: set[Variant] = set()
        self._counts: dict[str, Counter[str]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._noted = threading.local()

    @contextmanager
    def noting(self) -> Iterator[list[Variant]]:
        """Within the context, record this thread's launches in order instead of running them. The recorded
        variants are those to warm up before the same code runs.
        """
        noted: list[Variant] = []
        self._noted.variants = noted
        try:
            yield noted
        finally:
            self._noted.variants = None

    def launch(
        self, variant: Variant, grid: tuple[int, ...], *arguments: Tensor | int | float
    ) -> None:
        """Run a kernel on the current stream of the current device. `arguments` are the runtime
        arguments in order.
        """
        noted: list[Variant] | None = getattr(self._noted, "variants", None)
        if noted is not None:
            noted.append(variant)
            return
        constants = [value for _, value in variant.constants]
        if knobs.runtime.interpret:
            check_arguments(variant, arguments, device=-1)
            self._interpreted.add(variant)
            variant.function[grid](*arguments, *constants)
            return
        device = torch.cuda.current_device()
        check_arguments(variant, arguments, device)
        body = self.get_or_compile(variant)
        full = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        body[full](*arguments, *constants, stream=stream)

    def get_or_compile(self, variant: Variant) -> Any:
        """Return the compiled kernel of `variant`, loaded on the current device; counts a hit or a
        miss.
        """
        device = self._device()
        body = self._bodies.get((variant, device))
        if body is None:
            return self._compile(variant, device)
        with self._lock:
            self._counts[variant.name]["hits"] += 1
        return body

    def warm(self, variant: Variant) -> None:
        """Compile and load `variant` for the current device, unless that was already done. Counts
        no hit.
        """
        if knobs.runtime.interpret:
            self._interpreted.add(variant)
            return
        device = self._device()
        if (variant, device) not in self._bodies:
            self._compile(variant, device)

    def seal(self) -> None:
        """Mark the end of warm-up."""
        with self._lock:
            self._warmed = dict(self._keys)

    def drain(self) -> list[CompileRecord]:
        """Return the misses since the last call, in order."""
        with self._lock:
            records, self._records = self._records, []
        return records

    def summary(self) -> tuple[KernelCounts, ...]:
        """Return the counts since the process started, by kernel name."""
        with self._lock:
            return tuple(
                KernelCounts(
                    kernel=name,
                    hits=counts["hits"],
                    misses=counts["misses"],
                    disk_hits=counts["disk hits"],
                    after_warm_up=counts["after warm-up"],
                    seconds=self._seconds[name],
                )
                for name, counts in sorted(self._counts.items())
            )

    def requested(self) -> frozenset[Variant]:
        """Return every variant that was launched or warmed, compiled or interpreted."""
        with self._lock:
            return frozenset(self._interpreted) | {variant for variant, _ in self._bodies}

    def _device(self) -> int:
        return torch.cuda.current_device() if self._arch is None else 0

    def _compile(self, variant: Variant, device: int) -> Any:
        place = (variant, device)
        with self._lock:
            turn = self._turns.setdefault(place, threading.Lock())
        with turn:
            body = self._bodies.get(place)
            if body is not None:
                return body
            arch = self._arch or current_arch(device)
            begun = time.perf_counter()
            body, disk_hit = compile_for(variant, arch)
            if self._arch is None:
                # Loads it, which allocates memory on the device; only one thread may do it.
                body._init_handles()
            seconds = time.perf_counter() - begun
            self._note(place, key_for(variant, arch), seconds, disk_hit)
            with self._lock:
                self._bodies[place] = body
            return body

    def _note(
        self, place: tuple[Variant, int], key: KernelKey, seconds: float, disk_hit: bool
    ) -> None:
        with self._lock:
            self._keys[place] = key
            late = self._warmed is not None
            differs = _nearest(key, place[1], self._warmed or {})
            counts = self._counts.setdefault(key.kernel, Counter())
            counts["misses"] += 1
            counts["disk hits"] += disk_hit
            counts["after warm-up"] += late
            self._seconds[key.kernel] += seconds
            self._records.append(
                CompileRecord(
                    kernel=key.kernel,
                    key=str(key),
                    digest=key.digest,
                    seconds=seconds,
                    disk_hit=disk_hit,
                    after_warm_up=late,
                    differs=differs,
                    reason=(
                        "no variant of this kernel was warmed" if late and not differs else None
                    ),
                )
            )


def _nearest(
    key: KernelKey, device: int, warmed: dict[tuple[Variant, int], KernelKey]
) -> tuple[tuple[str, str, str], ...]:
    """Return how `key` differs from the most similar warmed key of its kernel; empty if there is
    none.
    """
    differences = []
    for (_, where), other in warmed.items():
        if other.kernel == key.kernel:
            here = (("device", str(device), str(where)),) if where != device else ()
            differences.append((*key.differing(other), *here))
    return min(differences, key=len, default=())


def check_arguments(
    variant: Variant, arguments: tuple[Tensor | int | float, ...], device: int
) -> None:
    """Raise InternalError if an argument is not what the variant was compiled for.

    `device` is the index of the CUDA device, -1 for the CPU.
    """
    for type_, argument in zip(variant.types, arguments, strict=True):
        if isinstance(argument, Tensor):
            is_on_device = argument.get_device() == device
            is_aligned = argument.data_ptr() % ALIGNMENT_BYTES == 0
            fits = _POINTERS.get(argument.dtype) == type_ and is_on_device and is_aligned
        elif type_ in _RANGES:
            limit = _RANGES[type_]
            fits = isinstance(argument, int) and -limit <= argument < limit
        else:
            fits = type_.startswith("fp") and isinstance(argument, int | float)
        if not fits:
            # Described only after a mismatch: this runs at every launch, and printing a tensor waits for
            # the device.
            found: object = argument
            if isinstance(argument, Tensor):
                found = f"{argument.dtype} on {argument.device} at byte {argument.data_ptr()}"
            raise InternalError(
                f"kernel {variant.name}: expected {type_}, a tensor on device {device} at a multiple of "
                f"{ALIGNMENT_BYTES} bytes, found {found}"
            )


REGISTRY = KernelRegistry()
"""The registry of this process."""

launch = REGISTRY.launch
