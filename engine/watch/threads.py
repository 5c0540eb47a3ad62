"""What the threads of a process are doing, from outside, through /proc: two looks, some time apart.

    /proc/PID/task/TID/stat      name, state, CPU time
    /proc/PID/task/TID/syscall   the number of the system call it is in, `running` when in none
    /proc/PID/task/TID/stack     the kernel's functions, for root alone; `wchan`, the innermost, for others

From the state alone a deadlock, a slow disk and a quiet poll are all "S". What tells them apart:

    T, t                        stopped by a signal, or held by a debugger
    D                           in the kernel, and not even a kill reaches it: a disk, a network, a driver
    R, or more than half a core computing
    S in futex                  waiting for a lock or for another thread
    S in poll, select, epoll    waiting for input
    S in read, recv             waiting to read: a pipe, a socket
    S in nanosleep              sleeping
    S in ioctl                  inside a driver

Not covered: which lock, and who holds it; the C function that made the call, which needs a debugger.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.machine.reading import Reading, absent, measured

BUSY_PCT = 50.0
_X86 = {
    **{
        0: "read",
        1: "write",
        7: "poll",
        16: "ioctl",
        23: "select",
        35: "nanosleep",
        45: "recvfrom",
    },
    **{61: "wait4", 74: "fsync", 75: "fdatasync", 202: "futex", 230: "clock_nanosleep"},
    **{232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll"},
    **{281: "epoll_pwait", 2: "open", 17: "pread64", 47: "recvmsg"},
}
_ARM = {
    **{22: "epoll_pwait", 29: "ioctl", 56: "openat", 63: "read", 64: "write", 67: "pread64"},
    **{72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex"},
    **{101: "nanosleep", 115: "clock_nanosleep", 207: "recvfrom", 212: "recvmsg", 260: "wait4"},
}
SYSTEM_CALLS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})

COMPUTING, STOPPED, UNINTERRUPTIBLE = (
    "computing",
    "stopped by a signal",
    "in the kernel, not interruptible",
)
LOCK, INPUT, READING, SLEEPING = (
    "waiting for a lock",
    "waiting for input",
    "waiting to read",
    "sleeping",
)
DRIVER, CHILD, DISK = "inside a driver call", "waiting for a child process", "waiting for the disk"
ENDED, WAITING = "ended", "waiting"
_WAITS = {
    "futex": LOCK,
    **dict.fromkeys(("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait"), INPUT),
    **dict.fromkeys(("read", "pread64", "recvfrom", "recvmsg"), READING),
    **dict.fromkeys(("open", "openat"), "waiting to open a file"),
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), SLEEPING),
    **dict.fromkeys(("wait4", "waitid"), CHILD),
    **dict.fromkeys(("fsync", "fdatasync"), DISK),
    "write": "waiting to write",
    "ioctl": DRIVER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One thread at one moment."""

    tid: int
    name: str
    letter: str
    """R, S, D, T, t, Z, ... of /proc."""
    cpu_s: float
    call: Reading
    """The system call it is in, by name or number; absent when in none or when it may not be read."""
    kernel: Reading
    """The innermost function of the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    tid: int
    name: str
    state: str
    """One of the words above."""
    cpu_pct: float | None
    """Between the two looks; 100 is one core."""
    call: Reading
    kernel: Reading

    def line(self) -> str:
        cpu = "not measured" if self.cpu_pct is None else f"{self.cpu_pct:.0f} %"
        return (
            f"{self.tid} {self.name}: {self.state}, CPU {cpu}, in {self.call}, kernel {self.kernel}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """All threads at one moment."""

    pid: int
    at_s: float
    threads: dict[int, Look]


def look_at(
    pid: int, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
) -> Looks:
    """Every thread of a process now; none when there is no such process."""
    threads: dict[int, Look] = {}
    try:
        names = sorted(os.listdir(proc / str(pid) / "task"), key=int)
    except OSError:
        names = []
    for name in names:
        look = _look(proc / str(pid) / "task" / name, int(name))
        if look is not None:
            threads[look.tid] = look
    return Looks(pid=pid, at_s=clock(), threads=threads)


def _look(folder: Path, tid: int) -> Look | None:
    try:
        text = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None  # it ended between the listing and the look
    match = re.fullmatch(r"(?s)\d+ \((.*)\) (\S)(?: \S+){10} (\d+) (\d+) .*", text)
    if match is None:
        return None
    ticks = int(match[3]) + int(match[4])
    return Look(
        tid=tid,
        name=match[1],
        letter=match[2],
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        call=_call(folder / "syscall"),
        kernel=_kernel(folder),
    )


def _call(path: Path) -> Reading:
    try:
        first = path.read_text().split()[:1]
    except OSError as error:
        return absent(f"not readable: {error.strerror}", str(path))
    if not first or not first[0].lstrip("-").isdecimal() or int(first[0]) < 0:
        return absent("in no system call", str(path))
    number = int(first[0])
    return measured(SYSTEM_CALLS.get(number, f"system call {number}"), str(path))


def _kernel(folder: Path) -> Reading:
    try:
        lines = (folder / "stack").read_text().splitlines()
        if lines and (match := re.match(r"\[<\S+>\] (\w+)", lines[0])):
            return measured(match[1], str(folder / "stack"))
    except OSError:
        pass  # for root alone; the next file is for everybody
    try:
        word = (folder / "wchan").read_text().strip()
    except OSError as error:
        return absent(f"not readable: {error.strerror}", str(folder / "wchan"))
    # "0" is what the kernel shows of a running thread, and of any where symbols are hidden.
    if word in ("", "0"):
        return absent("the kernel does not say", str(folder / "wchan"))
    return measured(word, str(folder / "wchan"))


def compare(before: Looks, after: Looks) -> list[Thread]:
    """Every thread of the second look, the main thread first, then those that used the CPU most."""
    passed_s = after.at_s - before.at_s
    threads = []
    for tid, look in after.threads.items():
        earlier = before.threads.get(tid)
        pct = None
        if earlier is not None and passed_s > 0:
            pct = 100 * (look.cpu_s - earlier.cpu_s) / passed_s
        threads.append(
            Thread(
                tid=tid,
                name=look.name,
                state=_state(look, pct),
                cpu_pct=pct,
                call=look.call,
                kernel=look.kernel,
            )
        )
    threads.sort(key=lambda t: (t.tid != after.pid, -(t.cpu_pct or 0.0)))
    return threads


def _state(look: Look, cpu_pct: float | None) -> str:
    if look.letter in "Tt":
        return STOPPED
    if look.letter == "D":
        return UNINTERRUPTIBLE
    if look.letter in "ZX":
        return ENDED
    if look.letter == "R" or (cpu_pct is not None and cpu_pct >= BUSY_PCT):
        return COMPUTING
    return _WAITS.get(str(look.call.value), WAITING)
