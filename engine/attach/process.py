"""Watch a running process from outside, without signals, injected code or a permanent debugger.

    engine watch --pid PID
      this process, in the foreground; Ctrl-C ends only the watching
        PID          followed by a pidfd, so that a later process with the same pid is not mistaken for it
          children   counted with it; those of torchrun are named by the RANK in their environment

Readings of /proc, NVML and py-spy go to the run folder; steps and loss are unknown. The kernel reports the exit status
of a process to its parent. Others get it from a pidfd once the process is reaped (since Linux 6.15). Without it, how it
ended is unknown unless the kernel's log or counters show it.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import selectors
import signal
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput
from engine.log.events import Note, ProcessFound, TrainerStarted
from engine.log.folder import RunFolder
from engine.log.write import LogWriter
from engine.machine.family import members
from engine.machine.host import Host
from engine.machine.kernel_files import read_table, read_text
from engine.machine.kill_counters import read_kill_counters
from engine.machine.reading import Reading
from engine.machine.surroundings import LET_ATTACH, find_command, is_run_variable, may_attach
from engine.redact import is_secret_name
from engine.watch.observe import RunObserver

PROC = Path("/proc")
SAMPLE_SECONDS = 1.0
EXIT_STATUS_S = 2.0
"""Maximum time for the parent to reap the process, in seconds, before its exit status counts as unknown."""
COUNTERS_S = 60.0
"""Interval in seconds of readings of the kill counters, of which the last but one counts: a process killed for memory
may take seconds to end, and earlier kills are unrelated."""
MOST_RANKS = 16
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040_FF0B, 1 << 3
"""Request and flag of linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), whose first version has 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A process that the engine did not start, as found at the beginning."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start; unique together with the pid."""
    arguments: tuple[str, ...]
    folder: str
    pidfd: int
    """Descriptor that stays with this process, also when another one gets its number."""

    @property
    def variables(self) -> list[str]:
        """Environment variables about its training, as `NAME=VALUE`."""
        environment = _environment(self.pid).items()
        return sorted(
            f"{name}={value}"
            for name, value in environment
            if is_run_variable(name) and not is_secret_name(name)
        )

    def trainers(self) -> list[int]:
        """Return the training processes of its tree: its ranks, else the largest Python process, else itself."""
        ranks = ranks_below(self.pid)
        if ranks:
            return list(ranks.values())[:MOST_RANKS]
        sizes = {pid: Host().process(pid).rss_bytes.number or 0 for pid in _python_below(self.pid)}
        return [max(sizes, key=lambda pid: sizes[pid], default=self.pid)]

    def about(self) -> ProcessFound:
        tree = _below(self.pid)
        return ProcessFound(
            pid=self.pid,
            started_unix_s=_started_unix_s(self.start_ticks),
            user=_user(_owner(self.pid)),
            executable=_link(self.pid, "exe") or self.arguments[0],
            processes=len(tree),
            ranks=ranks_below(self.pid),
            opens_gpu=_opens_gpu(tree),
            no_stacks=no_stacks(),
        )


def find_process(pid: int) -> Stranger:
    """Return the process `pid`. Raises BadInput if it cannot be watched, with what was found instead."""

    def refused(what: str, hint: str | None = None) -> BadInput:
        return BadInput.expected("--pid", pid, "a running process", what, hint=hint)

    status, start = read_table(PROC / str(pid) / "status"), Host().process(pid).start_ticks
    if status.missing is not None or start.number is None:
        raise refused("none", "ps -eo pid,user,args | grep python")
    if pid == os.getpid():
        raise refused("this command itself", "name the process that trains")
    group = status.number("Tgid").number
    if group != pid:
        raise refused(f"a thread of process {group}", f"engine watch --pid {group}")
    if status.number("VmSize").number is None:
        raise refused("one that has ended or is the kernel's", "name the process that trains")
    owner = _owner(pid)
    if os.geteuid() not in (0, owner):
        raise refused(f"one of user {_user(owner)}", f"sudo engine watch --pid {pid}")
    text = read_text(PROC / str(pid) / "cmdline")
    words = [] if isinstance(text, Reading) else text.rstrip("\0").split("\0")
    name = str(status.word("Name", "(.*)", str).value or "unknown")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise refused("one that has ended") from None
    return Stranger(
        pid=pid,
        pidfd=pidfd,
        start_ticks=int(start.number),
        arguments=tuple(words) if words and words[0] else (name,),
        folder=_link(pid, "cwd") or "unknown",
    )


def watch_process(run: RunFolder, found: Stranger, notify: str) -> None:
    """Watch a process until it has ended, or until SIGINT, SIGTERM or SIGHUP ends the watching; `notify` says who gets
    messages."""
    stop_fd = os.eventfd(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: os.eventfd_write(stop_fd, 1))
    with ExitStack() as stack:
        watch = stack.enter_context(LogWriter(run.watch, writer="supervisor"))
        device = stack.enter_context(LogWriter(run.device, writer="sampler"))
        watch.write(TrainerStarted(trainer_pid=found.pid, supervisor_pid=os.getpid()))
        watch.write(found.about())
        observer = RunObserver(
            run,
            found.pid,
            watch,
            device,
            sample_seconds=SAMPLE_SECONDS,
            stop=lambda why, now: None,
            attached_pids=found.trainers,
        )
        observer.begin()
        observer.notify(notify)
        if _wait(observer, found.pidfd, stop_fd):
            _record_end(observer, found.pidfd)
            observer.close_notices()
        else:
            text = "the watching was ended; the process continues"
            observer.write_watch(Note(level="info", text=text))


def _wait(observer: RunObserver, pidfd: int, stop_fd: int) -> bool:
    """Observe; return True once the process has ended, False on a request to end the watching."""
    selector = selectors.DefaultSelector()
    selector.register(pidfd, selectors.EVENT_READ, True)
    selector.register(stop_fd, selectors.EVENT_READ, False)
    newest = observer.before
    next_s = time.monotonic() + COUNTERS_S
    while True:
        reading = observer.tick()
        if reading.why:
            observer.write_watch(Note(level="warning", text=reading.why))
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + COUNTERS_S
            observer.before, newest = newest, read_kill_counters(cgroup=newest.cgroup)
        for key, _ in selector.select(max(0.0, observer.left_s)):
            return bool(key.data)


def _record_end(observer: RunObserver, pidfd: int) -> None:
    observer.watcher.tick()
    code = exit_code(observer.pid, pidfd)
    if code is None:
        observer.record_unseen_exit()
    else:
        observer.record_exit(code, stop_requested=None, finished=code == 0, is_ours=False)


def exit_code(pid: int, pidfd: int) -> int | None:
    """Return the exit code of an ended process that is no child, or minus the number of the signal that ended it; None
    where the kernel does not report it."""
    deadline = time.monotonic() + EXIT_STATUS_S
    while True:
        answer = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
        except OSError:
            known = 0  # Linux before 6.13, or before 6.15 once the process is reaped
        else:
            (known,) = struct.unpack_from("=Q", answer)
        if known & _PIDFD_INFO_EXIT:
            (status,) = struct.unpack_from("=i", answer, 60)
            return os.waitstatus_to_exitcode(status)
        if not (PROC / str(pid)).exists() or time.monotonic() > deadline:
            return None
        # Its parent is about to reap it, without any notification.
        time.sleep(0.01)


def no_stacks() -> str:
    """Return why Python stacks of another process cannot be read, and what to do; empty where they can."""
    if find_command("py-spy").value is None:
        return "py-spy is not installed; pip install py-spy"
    reason = may_attach().absent
    return f"{reason}; {LET_ATTACH}" if reason else ""


def ranks_below(pid: int) -> dict[str, int]:
    """Return the ranks in the process tree of `pid`, by RANK. Children of a rank inherit the variable, so the topmost
    process counts."""
    ranks: dict[str, int] = {}
    for child in _below(pid):
        rank = _environment(child).get("RANK", "")
        if rank.isdecimal():
            ranks.setdefault(rank, child)
    return dict(sorted(ranks.items(), key=lambda item: int(item[0])))


def _below(pid: int) -> list[int]:
    """Return `pid` and its descendants, parents before children."""
    try:
        return members(pid, PROC)
    except OSError:
        return [pid]


def _python_below(pid: int) -> list[int]:
    return [child for child in _below(pid) if Path(_link(child, "exe")).name.startswith("python")]


def _environment(pid: int) -> dict[str, str]:
    """Return the initial environment of a process; empty without permission."""
    text = read_text(PROC / str(pid) / "environ")
    lines: Sequence[str] = () if isinstance(text, Reading) else text.split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _opens_gpu(pids: Sequence[int]) -> bool | None:
    try:
        for pid in pids:
            for file in (PROC / str(pid) / "fd").iterdir():
                with suppress(FileNotFoundError):
                    if str(file.readlink()).startswith(_GPU_FILES):
                        return True
    except OSError:
        return None
    return False


def _link(pid: int, name: str) -> str:
    """Return the target of a link in /proc/PID; empty without permission."""
    try:
        return os.readlink(PROC / str(pid) / name)
    except OSError:
        return ""


def _owner(pid: int) -> int:
    return int(read_table(PROC / str(pid) / "status").number("Uid").number or 0)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _started_unix_s(start_ticks: int) -> float:
    boot_s = read_table(PROC / "stat").number("btime").number or 0
    return boot_s + start_ticks / os.sysconf("SC_CLK_TCK")
