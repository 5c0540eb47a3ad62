"""What the supervisor looks after on the machine: memory that runs out, and clocks that jump.

`MemoryGuard` ends a run before its machine hangs for want of memory. Where GPU and host share memory a
machine can stop answering without the kernel's OOM killer ever being called: nobody can log in to stop the
run, and the counters that would prove the cause stay at zero. Two readings together say that this is near,
and each alone is harmless:

    MemAvailable    under FLOOR_SHARE of the memory, at least FLOOR_LEAST_BYTES and at most
                    FLOOR_MOST_BYTES: what the page cache holds counts as available
    PSI full avg10  at least PRESSURE_PCT: the share of the last 10 s in which every process waited
                    for memory

When both have held for HELD_S the trainer is asked to stop, which saves; what still holds GRACE_S later
ends it. A kernel without PSI gives no second reading: then nothing is guarded, and that is said once.

`ClockWatch` says whether the machine slept or its wall clock was set while a run went on. Three clocks are
compared at every poll: monotonic, which stops while the machine is suspended; boot time, which does
not; and wall time, which people and NTP may set. Durations in the logs are of the
monotonic clock, so neither event lengthens one; times of day after a step do not fit those before it, and
a time measured across a suspension says nothing.
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
"""A shorter jump is a correction of NTP, or the time between two readings."""
SUSPENDED = "the machine was suspended for"


@dataclass(frozen=True, slots=True)
class Warned:
    """What has to be done about the machine's memory, if anything."""

    low: bool = False
    """Readings are worth bringing to the disk now: they may be the last."""
    stop: bool = False
    """Ask the trainer to stop."""
    end: bool = False
    """End it now."""
    why: str = ""
    """The readings behind `stop` or `end`, or why nothing is guarded."""


class MemoryGuard:
    def __init__(
        self, host: Host | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host or Host()
        self._monotonic = monotonic
        self._since_s: float | None = None
        self._stopped_s: float | None = None
        self._ended = False
        self._blind = False

    def look(self) -> Warned:
        """One look, meant for once a second. `stop` and `end` are each said once."""
        memory, (_, full) = self._host.memory(), self._host.psi_memory_pct()
        available, total = memory.available_bytes.number, memory.total_bytes.number
        if available is None or total is None or full.number is None:
            missing = full.absent or memory.available_bytes.absent or memory.total_bytes.absent
            said, self._blind = self._blind, True
            text = f"not guarded against running out of memory: {missing}"
            return Warned() if said else Warned(why=text)
        floor = min(max(FLOOR_SHARE * total, FLOOR_LEAST_BYTES), FLOOR_MOST_BYTES)
        low = available < floor
        if not (low and full.number >= PRESSURE_PCT):
            self._since_s = None
            return Warned(low=low)
        now_s = self._monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        why = (
            f"{format_bytes(available)} of {format_bytes(total)} memory are available (under"
            f" {format_bytes(floor)}) and all processes wait for memory {full.number:.0f} % of the time"
        )
        if self._stopped_s is None and now_s - self._since_s >= HELD_S:
            self._stopped_s = now_s
            return Warned(low=True, stop=True, why=why)
        if self._stopped_s is not None and not self._ended and now_s - self._stopped_s >= GRACE_S:
            self._ended = True
            return Warned(low=True, end=True, why=why)
        return Warned(low=True)


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
        self._known = self._offsets()

    def _offsets(self) -> tuple[float, float]:
        monotonic, boot, wall = self._monotonic(), self._boot(), self._wall()
        return boot - monotonic, wall - boot

    def look(self) -> list[str]:
        """What happened to the clocks since the last look, a sentence each."""
        before, self._known = self._known, self._offsets()
        slept, set_by = (new - old for new, old in zip(self._known, before, strict=True))
        said = []
        if slept >= LEAST_JUMP_S:
            said.append(f"{SUSPENDED} {slept:.0f} s; durations do not count it")
        if abs(set_by) >= LEAST_JUMP_S:
            said.append(f"the wall clock was set by {set_by:+.0f} s; durations do not count it")
        return said
