"""Guards of the supervisor against exhausted memory and clock jumps.

`MemoryGuard` ends a run before its machine hangs for lack of memory. Where GPU and host share memory a
machine can hang without the kernel's OOM killer ever running: no user can log in to stop the run, and the
counters that would prove the cause stay at zero. Two readings together warn of this; each of them alone is harmless:

    MemAvailable    under FLOOR_SHARE of the memory, at least FLOOR_LEAST_BYTES and at most
                    FLOOR_MOST_BYTES: what the page cache holds counts as available
    PSI full avg10  at least PRESSURE_PCT: the share of the last 10 s in which every process waited
                    for memory

When both conditions have held for HELD_S, the trainer is asked to save and stop; if both still hold GRACE_S later, it
is killed. On a kernel without PSI the second reading is missing: the guard is then off, which is reported once.

`ClockWatch` reports when the machine slept or its wall clock was set while a run went on. It compares three clocks at
every poll: monotonic time, which stops while the machine is suspended; boot time, which does not; and wall time,
which people and NTP may set. Durations in the logs use the monotonic clock, so neither event lengthens one. But times
of day before and after a clock step do not fit together, and a duration across a suspension leaves out the
suspension.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.machine.host import Host
from engine.units import format_bytes

FLOOR_SHARE = 0.02
FLOOR_LEAST_BYTES = 256 << 20
FLOOR_MOST_BYTES = 2 << 30
PRESSURE_PCT = 20.0
HELD_S = 5.0
GRACE_S = 15.0
LEAST_JUMP_S = 1.0
"""Smallest jump that is reported, in seconds: a shorter one is an NTP correction, or the time between two
readings."""
SUSPENDED = "the machine was suspended for"


@dataclass(frozen=True, slots=True)
class MemoryActions:
    """Actions to take because of the machine's memory."""

    low: bool = False
    """Whether to sync the readings to disk now, because they may be the last."""
    stop: bool = False
    """Whether to ask the trainer to stop."""
    end: bool = False
    """Whether to kill the trainer now."""
    why: str = ""
    """Readings that caused `stop` or `end`, or the reason why the guard is off."""


class MemoryGuard:
    def __init__(
        self, host: Host | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host or Host()
        self._monotonic = monotonic
        self._since_s: float | None = None
        self._stopped_s: float | None = None
        self._ended = False
        self._has_reported = False

    def check(self) -> MemoryActions:
        """Check the readings; to be called once a second. `stop` and `end` are each returned once."""
        memory, (_, full) = self._host.memory(), self._host.psi_pct("memory")
        available, total = memory.available_bytes.number, memory.total_bytes.number
        if available is None or total is None or full.number is None:
            missing = full.absent or memory.available_bytes.absent or memory.total_bytes.absent
            has_reported, self._has_reported = self._has_reported, True
            text = f"not guarded against running out of memory: {missing}"
            return MemoryActions() if has_reported else MemoryActions(why=text)
        floor = min(max(FLOOR_SHARE * total, FLOOR_LEAST_BYTES), FLOOR_MOST_BYTES)
        low = available < floor
        if not (low and full.number >= PRESSURE_PCT):
            self._since_s = None
            return MemoryActions(low=low)
        now_s = self._monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        why = (
            f"{format_bytes(available)} of {format_bytes(total)} memory are available (under"
            f" {format_bytes(floor)}) and all processes wait for memory {full.number:.0f} % of the time"
        )
        if self._stopped_s is None and now_s - self._since_s >= HELD_S:
            self._stopped_s = now_s
            return MemoryActions(low=True, stop=True, why=why)
        if self._stopped_s is not None and not self._ended and now_s - self._stopped_s >= GRACE_S:
            self._ended = True
            return MemoryActions(low=True, end=True, why=why)
        return MemoryActions(low=True)


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockWatch:
    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        boot: Callable[[], float] = _boot_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._boot, self._wall = monotonic, boot, wall
        self._last_offsets = self._offsets()

    def _offsets(self) -> tuple[float, float]:
        monotonic, boot, wall = self._monotonic(), self._boot(), self._wall()
        return boot - monotonic, wall - boot

    def check(self) -> list[str]:
        """Return one sentence for each suspension and clock step since the last call."""
        before, self._last_offsets = self._last_offsets, self._offsets()
        slept, set_by = (new - old for new, old in zip(self._last_offsets, before, strict=True))
        changes = []
        if slept >= LEAST_JUMP_S:
            changes.append(f"{SUSPENDED} {slept:.0f} s; durations do not count it")
        if abs(set_by) >= LEAST_JUMP_S:
            changes.append(f"the wall clock was set by {set_by:+.0f} s; durations do not count it")
        return changes
