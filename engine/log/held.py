"""Record the memory that the trainer itself reports, in one small file that can be read at any time.

    <run>/memory.held        step, source, held, reserved, peak: two little-endian u64 and three float64 in bytes

NVML and /proc report the memory that a process has taken. Only the allocator knows how much of it is in use: on a
GPU, the bytes of tensors (held) and the bytes reserved on the device; the difference is fragmentation and cache.
torch does not track CPU memory: on a CPU the trainer records the kernel's numbers.

The trainer writes at the end of a step, at most once in SPACING_S; the sampler adds the numbers to its own
readings, so that all of them form one series. A record is one write at a fixed offset and not a log: a torn
or missing record reads as "not known", and a failed write is ignored.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine import limits
from engine.errors import BadInput
from engine.files import read_bytes
from engine.log.folder import RunFolder
from engine.machine.reading import Reading, absent, measured

SPACING_S = 1.0
"""Minimum seconds between two records."""
NAME = "memory.held"
ALLOCATOR, PROCESS = "torch.cuda.memory_stats", "/proc/self/status VmRSS, VmHWM"
SOURCES = (ALLOCATOR, PROCESS)
_HELD = struct.Struct("<QQddd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    source: str
    """One of SOURCES."""
    held_bytes: float
    reserved_bytes: float | None
    """Bytes reserved by the allocator; None if nothing is reserved, as in a CPU process."""
    peak_bytes: float
    """Peak of `held_bytes` in this session."""
    step: int = 0
    """The last finished step."""


class MemoryWriter:
    """Writes the trainer's memory after steps."""

    def __init__(
        self,
        run: RunFolder,
        measure: Callable[[], Held],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure` is called at most once in SPACING_S seconds of `clock`."""
        self._path, self._measure, self._clock = run.path / NAME, measure, clock
        self._file: int | None = None
        self._next_s = -math.inf

    def record(self, step: int) -> None:
        """Record the memory after `step`, when it is due."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SPACING_S
        held = self._measure()
        reserved = math.nan if held.reserved_bytes is None else held.reserved_bytes
        source = SOURCES.index(held.source)
        data = _HELD.pack(step, source, held.held_bytes, reserved, held.peak_bytes)
        # A full disk may lose a reading; it must not end a run.
        with contextlib.suppress(OSError):
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o644)
            os.pwrite(self._file, data, 0)


def read_held(run: RunFolder) -> Held | None:
    """Read the newest record; None if there is none or it is invalid."""
    try:
        data = read_bytes(run.path / NAME, "memory held", limits.BEAT)
    except BadInput:
        return None
    if len(data) != _HELD.size:
        return None
    step, source, held, reserved, peak = _HELD.unpack(data)
    if source >= len(SOURCES):
        return None
    return Held(
        source=SOURCES[source],
        held_bytes=held,
        reserved_bytes=None if math.isnan(reserved) else reserved,
        peak_bytes=peak,
        step=step,
    )


def held_readings(run: RunFolder) -> dict[str, Reading]:
    """Return the newest record as readings of a host sample."""
    record = read_held(run)
    names = ("memory_held_bytes", "memory_reserved_bytes", "memory_peak_bytes", "memory_source")
    if record is None:
        return dict.fromkeys(names, absent("the trainer has recorded no step yet", NAME))
    values = (
        _measured(record.held_bytes, record.source),
        absent("torch reserves no memory on a CPU", record.source)
        if record.reserved_bytes is None
        else _measured(record.reserved_bytes, record.source),
        _measured(record.peak_bytes, record.source),
        measured(record.source, NAME),
    )
    return dict(zip(names, values, strict=True))


def _measured(value: float, source: str) -> Reading:
    return (
        measured(value, source) if math.isfinite(value) else absent("not a finite number", source)
    )


def forget_held(run: RunFolder) -> None:
    """Remove the record of an earlier session."""
    (run.path / NAME).unlink(missing_ok=True)
