"""CPU seconds, bytes moved so far and resident bytes of a process and all its descendants, from /proc.

    /proc/<pid>/task/<tid>/children   the children of each thread
    /proc/<pid>/stat                  CPU ticks of a process, and of the children it has waited for
    /proc/<pid>/io                    bytes moved by system calls, and bytes read from disks (the only trace of
                                      an mmapped file); includes the children it has waited for

The two counts together tell whether a silent process makes progress: a compiler works in child processes, and
a load only reads. A process that ends passes its counts to its parent, so the sums do not decrease.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.machine.reading import Reading, absent, measured

MOST = 4096
"""Maximum number of processes that are read; a run has some dozens."""
_CPU = re.compile(rb"(?s).*\) \S+(?: \S+){10} (\d+) (\d+) (\d+) (\d+) ")
_RSS = re.compile(rb"^VmRSS:\s+(\d+) kB$", re.MULTILINE)
_IO = re.compile(rb"^(?:rchar|wchar|read_bytes|write_bytes): (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReadings:
    cpu_s: Reading
    """User and system seconds."""
    io_bytes: Reading
    """Bytes read and written, by system calls and at disks; a byte may count twice."""
    rss_bytes: Reading
    """Sum of the resident bytes; shared pages count once for each process."""
    processes: Reading


def read_family(pid: int, proc: Path = Path("/proc")) -> FamilyReadings:
    """Return the sums over `pid` and its descendants; absent if `pid` has ended or a process may not be read. A
    descendant that has just ended adds 0."""
    try:
        pids = members(pid, proc)
    except OSError as error:
        missing = absent(f"not readable: {error.strerror}", f"{proc}/{pid}/task/*/children")
        return FamilyReadings(cpu_s=missing, io_bytes=missing, rss_bytes=missing, processes=missing)
    count = f"{proc}/PID/{{}} of {len(pids)} processes"
    ticks = _sum(pids, proc, "stat", _CPU)

    def reading(total: int | str, file: str, unit: float = 1) -> Reading:
        source = count.format(file)
        return absent(total, source) if isinstance(total, str) else measured(total * unit, source)

    return FamilyReadings(
        cpu_s=reading(ticks, "stat", 1 / os.sysconf("SC_CLK_TCK")),
        io_bytes=reading(_sum(pids, proc, "io", _IO), "io"),
        rss_bytes=reading(_sum(pids, proc, "status", _RSS), "status", 1024),
        processes=measured(len(pids), f"{proc}/{pid}/task/*/children"),
    )


def program_name(pid: int, proc: Path) -> str:
    """Return the file name of a process's program; `?` if it has ended."""
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            words = file.read(4096)
    except OSError:
        return "?"
    name = words.partition(b"\0")[0].rpartition(b"/")[2].decode("ascii", "replace")
    return "".join(c if c.isprintable() and c != ";" else "?" for c in name)[:40] or "?"


def members(pid: int, proc: Path) -> list[int]:
    """Return `pid` and its descendants, about MOST at most. Raises OSError when `pid` does not exist, or the kernel
    does not list children."""
    pids: list[int] = []
    to_visit = [pid]
    while to_visit and len(pids) < MOST:
        current = to_visit.pop()
        pids.append(current)
        try:
            threads = os.listdir(proc / str(current) / "task")
            for thread in threads:
                to_visit += map(
                    int, (proc / str(current) / "task" / thread / "children").read_bytes().split()
                )
        except OSError:
            # A descendant may end at any moment; `pid` itself must exist.
            if current == pid:
                raise
    return pids


def _sum(pids: list[int], proc: Path, file: str, pattern: re.Pattern[bytes]) -> int | str:
    """Sum all numbers that match the pattern, or return why there is no sum. A process that has just ended adds 0."""
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
