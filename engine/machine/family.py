"""What a process and all that it started have done so far: processor seconds and bytes, from /proc.

    /proc/<pid>/task/<tid>/children   who was started, by each thread
    /proc/<pid>/stat                  CPU ticks of a process, and of the children it has waited for
    /proc/<pid>/io                    bytes it moved with system calls, and bytes that came from disks, which is
                                      all that a file mapped into memory shows; those of children it has waited for
                                      are in it

A silence is progress or it is not: a compiler works in processes of its own, a load only reads. Both counts
together tell. A process that ends takes its counts to its parent, so that sums do not go back.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.machine.reading import Reading, absent, measured

MOST = 4096
"""Processes that are looked at: a run has some dozens."""
_CPU = re.compile(rb"(?s).*\) \S+(?: \S+){10} (\d+) (\d+) (\d+) (\d+) ")
_IO = re.compile(rb"^(?:rchar|wchar|read_bytes|write_bytes): (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReadings:
    cpu_s: Reading
    """User and system seconds."""
    io_bytes: Reading
    """Read and written, by system calls and at disks: a byte may count twice."""


def read_family(pid: int, proc: Path = Path("/proc")) -> FamilyReadings:
    """The sums over `pid` and its descendants; absent where one of them cannot be read."""
    try:
        pids = _members(pid, proc)
    except OSError as error:
        missing = absent(f"not readable: {error.strerror}", f"{proc}/{pid}/task/*/children")
        return FamilyReadings(cpu_s=missing, io_bytes=missing)
    count = f"{proc}/PID/{{}} of {len(pids)} processes"
    ticks = _sum(pids, proc, "stat", _CPU)
    moved = _sum(pids, proc, "io", _IO)
    return FamilyReadings(
        cpu_s=absent(ticks, count.format("stat"))
        if isinstance(ticks, str)
        else measured(ticks / os.sysconf("SC_CLK_TCK"), count.format("stat")),
        io_bytes=absent(moved, count.format("io"))
        if isinstance(moved, str)
        else measured(moved, count.format("io")),
    )


def _members(pid: int, proc: Path) -> list[int]:
    """`pid` and its descendants. Raises OSError where `pid` is not there, or the kernel has no such lists."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < MOST:
        one = left.pop()
        found.append(one)
        try:
            threads = os.listdir(proc / str(one) / "task")
            for thread in threads:
                left += map(
                    int, (proc / str(one) / "task" / thread / "children").read_bytes().split()
                )
        except OSError:
            # What was started may end at any moment; what started it must be there.
            if one == pid:
                raise
    return found


def _sum(pids: list[int], proc: Path, file: str, pattern: re.Pattern[bytes]) -> int | str:
    """Of all numbers of the pattern; why there is no sum. Who has just ended has none."""
    total = 0
    for pid in pids:
        try:
            text = (proc / str(pid) / file).read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            if pid == pids[0]:
                return "the process has ended"
            continue
        except OSError as error:
            return f"not readable: {error.strerror}"
        total += sum(int(n) for match in pattern.finditer(text) for n in match.groups())
    return total
