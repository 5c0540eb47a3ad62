"""The trainer's own account of its memory: one small file, readable at any time.

    <run>/memory.held        step, source, held, reserved, peak: two little-endian u64 and three float64 in bytes

NVML and /proc count what a process has taken. Only the allocator knows how much of it is in use: on a GPU,
the bytes of tensors (held) and what it has reserved on the device; the difference is fragmentation and cache.
torch does not count CPU memory: there the trainer passes on the kernel's numbers.

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


class HeldWriter:
    """Writes the trainer's memory after steps."""

    def __init__(
        self,
        run: RunFolder,
        measure: Callable[[], Held],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure` is called at most once in SPACING_S by `clock`."""
        self._path, self._measure, self._clock = run.path / NAME, measure, clock
        self._file: int | None = None
        self._next_s = -math.inf

    def look(self, step: int) -> None:
        """Record the memory after `step`, when it is due."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SPACING_S
        found = self._measure()
        reserved = math.nan if found.reserved_bytes is None else found.reserved_bytes
        place = SOURCES.index(found.source)
        record = _HELD.pack(step, place, found.held_bytes, reserved, found.peak_bytes)
        # A full disk may lose a reading; it must not end a run.
        with contextlib.suppress(OSError):
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o644)
            os.pwrite(self._file, record, 0)


def read_held(run: RunFolder) -> Held | None:
    """Read the newest record; None when there is none."""
    try:
        data = read_bytes(run.path / NAME, "memory held", limits.BEAT)
    except BadInput:
        return None
    if len(data) != _HELD.size:
        return None
    step, place, held, reserved, peak = _HELD.unpack(data)
    if place >= len(SOURCES):
        return None
    return Held(
        source=SOURCES[place],
        held_bytes=held,
        reserved_bytes=None if math.isnan(reserved) else reserved,
        peak_bytes=peak,
        step=step,
    )


def held_readings(run: RunFolder) -> dict[str, Reading]:
    """Return the same as readings of a host sample."""
    found, place = read_held(run), NAME
    names = ("memory_held_bytes", "memory_reserved_bytes", "memory_peak_bytes", "memory_source")
    if found is None:
        return dict.fromkeys(
            names, absent("the trainer has done no step that it could tell of", place)
        )
    nothing_kept = absent("torch keeps no memory of a CPU back", found.source)
    values = (
        _measured(found.held_bytes, found.source),
        nothing_kept
        if found.reserved_bytes is None
        else _measured(found.reserved_bytes, found.source),
        _measured(found.peak_bytes, found.source),
        measured(found.source, place),
    )
    return dict(zip(names, values, strict=True))


def _measured(value: float, source: str) -> Reading:
    return measured(value, source) if math.isfinite(value) else absent("was not said", source)


def forget_held(run: RunFolder) -> None:
    """Remove the record of an earlier session."""
    (run.path / NAME).unlink(missing_ok=True)
