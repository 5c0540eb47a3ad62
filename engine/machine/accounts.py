"""What the kernel accounts to the main thread of this process: what it read and wrote by system calls, and how long it
waited while nobody of the process worked for it.

    /proc/self/task/<tid>/schedstat   seconds on a CPU, and seconds in which it wanted one
    /proc/self/task/<tid>/io          bytes and calls; pages of a mapped file are not among them
    /proc/pressure/{io,memory}        seconds in which anybody on the machine waited for a disk, or for memory

    waited = passed - own seconds of both kinds - those of threads that compute for it - stalls of disks

What is left is time that no computing explains: a sleep, a lock, a peer, a server that does not answer, that of a file
system too. Threads of Python may all have been waited for, one after the other; of the threads of a parallel loop, the
slowest.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SELF = Path("/proc/self/task")
PRESSURE = Path("/proc/pressure")
_TOTAL = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)
_IO = re.compile(r"^(rchar|wchar|syscr|syscw|read_bytes): (\d+)$", re.MULTILINE)
IN_LOOP, BUSY = 0.3, 0.05
"""Of the seconds that a thread of a parallel loop computes, the share for which the main thread may have waited: the
work is divided evenly. Where the main thread itself wanted a CPU for such a share of its own, it may have been all."""
CROWDED = 0.25
"""Of the seconds that threads of a run had a CPU, those for which others had theirs: at each end of a parallel loop the
main thread may have waited for another of its threads, and times say nothing."""
DISK_RATE = 20e6
"""Bytes per second that a slow disk reads, where the kernel does not say how long it was waited for."""


class _Thread(NamedTuple):
    name: str
    """Empty for a thread that Python did not start."""
    cpu_s: float
    wanted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The counts of this process so far."""

    at_s: float
    cpu_s: float
    """Of all threads, those that have ended too."""
    threads: Mapping[int, _Thread]
    io: Mapping[str, int]
    stalled_s: float | None
    """None where the kernel does not account for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What the main thread has done between two looks."""

    passed_s: float
    cpu_s: float
    """In which it was on a CPU itself."""
    wanted_share: float
    """How long threads of this process wanted a CPU, of how long they had one."""
    wanted_s: float
    """How long they did, all together."""
    waited_s: float
    """In which nobody of this process worked for it."""
    read_bytes: int
    reads: int
    """Calls; as `writes`."""
    written_bytes: int
    writes: int

    @property
    def crowded(self) -> bool:
        """Whether others had the CPUs that threads of this process wanted."""
        return self.wanted_share > CROWDED


def look() -> Accounts | None:
    """Return the counts so far, asked by the main thread; None from another one, or without Linux's accounting."""
    main = os.getpid()
    if threading.get_native_id() != main:
        return None
    names = {one.native_id: one.name for one in threading.enumerate()}
    found = {}
    try:
        for tid in map(int, os.listdir(SELF)):
            if (thread := _thread(tid, names.get(tid, ""))) is not None:
                found[tid] = thread
        io = dict(_IO.findall((SELF / str(main) / "io").read_text()))
        stalled_s = _stalled_s()
    except OSError:
        return None
    if main not in found:
        return None
    return Accounts(
        at_s=time.perf_counter(),
        cpu_s=time.process_time(),
        threads=found,
        io={name: int(count) for name, count in io.items()},
        stalled_s=stalled_s,
    )


def _stalled_s() -> float | None:
    if not PRESSURE.is_dir():
        return None
    found = [_TOTAL.search((PRESSURE / one).read_text()) for one in ("io", "memory")]
    return sum(int(one[1]) for one in found if one is not None) / 1e6


def _thread(tid: int, name: str) -> _Thread | None:
    try:
        cpu, wanted, _ = (SELF / str(tid) / "schedstat").read_text().split()
    except (OSError, ValueError):
        # It may end at any moment.
        return None
    return _Thread(name, int(cpu) / 1e9, int(wanted) / 1e9)


def between(before: Accounts, after: Accounts) -> Spent:
    main, passed_s = os.getpid(), after.at_s - before.at_s
    nothing = _Thread("", 0.0, 0.0)
    spent = {
        tid: (one.name, one.cpu_s - was.cpu_s, one.wanted_s - was.wanted_s)
        for tid, one in after.threads.items()
        for was in (before.threads.get(tid, nothing),)
    }
    _, own_s, wanted_s = spent.pop(main)
    share = IN_LOOP if wanted_s < BUSY * own_s else 1.0
    named_s = sum(cpu_s + wanted_s for name, cpu_s, wanted_s in spent.values() if name)
    of_loop_s = max(
        (share * cpu_s + wanted_s for name, cpu_s, wanted_s in spent.values() if not name),
        default=0.0,
    )
    had_s = own_s + sum(cpu_s for _, cpu_s, _ in spent.values())
    ended_s = max(0.0, after.cpu_s - before.cpu_s - had_s)
    all_wanted_s = wanted_s + sum(one for *_, one in spent.values())
    io = {name: count - before.io.get(name, 0) for name, count in after.io.items()}
    stalled_s = io.get("read_bytes", 0) / DISK_RATE
    if before.stalled_s is not None and after.stalled_s is not None:
        stalled_s = after.stalled_s - before.stalled_s
    return Spent(
        passed_s=passed_s,
        cpu_s=own_s,
        wanted_share=all_wanted_s / max(had_s, 1e-9),
        wanted_s=all_wanted_s,
        waited_s=max(0.0, passed_s - own_s - wanted_s - named_s - of_loop_s - ended_s - stalled_s),
        read_bytes=io.get("rchar", 0),
        reads=io.get("syscr", 0),
        written_bytes=io.get("wchar", 0),
        writes=io.get("syscw", 0),
    )
