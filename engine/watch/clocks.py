"""Whether the machine slept or its wall clock was set while a run went on.

Three clocks are compared at every look: monotonic, which stands still while the machine is suspended;
boot time, which does not; and wall time, which people and NTP may set. Durations in the logs are of the
monotonic clock, so neither event lengthens one; times of day after a step do not fit those before it, and
a time measured across a suspension says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 1.0
"""A shorter jump is a correction of NTP, or the time between two readings."""
SUSPENDED = "the machine was suspended for"


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
        if slept >= LEAST_S:
            said.append(f"{SUSPENDED} {slept:.0f} s; durations do not count it")
        if abs(set_by) >= LEAST_S:
            said.append(f"the wall clock was set by {set_by:+.0f} s; durations do not count it")
        return said
