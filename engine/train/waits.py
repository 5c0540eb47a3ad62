"""In which phase of a session the run waited while nothing of it worked, or told of its progress all the time, and what
a part of it read and wrote beyond what it is for: by the kernel's accounts of the main thread."""

from __future__ import annotations

from collections.abc import Iterator

from engine.log.events import TRAINING
from engine.machine.accounts import Spent, between, look
from engine.train.earlier_runs import EarlierRuns
from engine.units import format_bytes

MOST_S, MOST_SHARE = 0.3, 0.1
"""Of a phase, what may pass without anybody's work."""
SYNC_S, SYNC_RATE = 2.0, 20e6
"""What a file may take to be safe on a slow disk, and the bytes that one writes in a second."""
OTHERS_WORK = (
    TRAINING,
    "compiling",
    "capturing",
    "tokenizing",
    "waiting for the tokens",
    "meeting",
    "sharding",
)
"""How the phases begin in which other processes work, or a device does."""
SYNCS = ("saving", "writing")
"""How those begin in which files are made safe."""
FEW_BYTES = 4 << 20
"""That any part may read or write: files of the kernel, lines of logs."""
KERNEL_BYTES = 64 << 20
"""Of kernels, that a part on a GPU may load, or compile and keep, as it first uses them."""
FEW_LINES = 20
"""Of progress, that a phase may log, and one more for each second."""
SMALL_WRITE, FEW_WRITES = 16 << 10, 400
"""Bytes of a write that would be small for a large file, and the writes that any part may make."""


class Waits:
    """Looks at each phase of a session as the next one begins."""

    def __init__(self, *, alone: bool, earlier: EarlierRuns | None = None) -> None:
        """A run of several ranks is not `alone`: they wait for one another. What its phases take is told to
        `earlier`."""
        self._alone, self._phase, self._earlier = alone, "", earlier
        self._before, self._lines = look(), 0

    def begin(self, phase: str) -> str:
        """Say that the phase before this one waited for nothing that is known, or logged its progress without end;
        empty when it did not. A phase that goes on is begun again with each line of its progress."""
        if phase == self._phase:
            self._lines += 1
            return ""
        lines, self._lines = self._lines, 0
        before, self._before = self._before, look()
        name, self._phase = self._phase, phase
        if before is None or self._before is None or not name or not self._alone:
            return ""
        spent = between(before, self._before)
        if self._earlier is not None and name != TRAINING:
            self._earlier.phase(name, spent)
        if lines > FEW_LINES + spent.passed_s:
            return f"{name}: its progress was logged {lines:,} times in {spent.passed_s:.2g} s"
        if name.startswith(OTHERS_WORK) or spent.crowded:
            return ""
        most_s = max(MOST_S, MOST_SHARE * spent.passed_s)
        if name.startswith(SYNCS):
            most_s += SYNC_S + spent.written_bytes / SYNC_RATE
        if spent.waited_s < most_s:
            return ""
        return (
            f"{name}: for {spent.waited_s:.2g} s of {spent.passed_s:.2g} the run waited, and nothing of it computed, "
            "wanted a CPU or read a disk: a sleep, a lock, a child process, or a server (of files, too)"
        )

    def so_far(self) -> Spent | None:
        """Return what was spent on the phase that goes on; None where nobody accounts for it."""
        now = look()
        return None if self._before is None or now is None else between(self._before, now)


def beyond(
    part: str, spent: Spent, *, read_bytes: float = 0.0, written_bytes: float = 0.0
) -> Iterator[str]:
    """Say that a part reads more, writes more, or in smaller writes than it is to."""
    for did, found, enough in (
        ("reads", spent.read_bytes, read_bytes),
        ("writes", spent.written_bytes, written_bytes),
    ):
        if found > 1.25 * enough + FEW_BYTES:
            yield (
                f"{part}: it {did} {format_bytes(found)}, {format_bytes(int(enough))} are enough: files are gone "
                "through again, or others than it needs"
            )
    if spent.writes > spent.written_bytes / SMALL_WRITE + FEW_WRITES:
        yield (
            f"{part}: it writes {format_bytes(spent.written_bytes)} in {spent.writes:,} calls: many small ones are slow"
        )
