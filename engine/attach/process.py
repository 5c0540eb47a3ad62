"""Watch a running process from outside, without signals, injected code or a permanent debugger.

    engine watch --pid PID
      this process, in the foreground; Ctrl-C ends only the watching
        PID          identified by a pidfd, so that a later process with the same pid is not mistaken for it
          children   included in its readings; ranks of torchrun are named by the RANK in their environment

Readings from /proc, NVML and py-spy go to the run folder; steps and loss are unknown. The kernel reports the exit
status of a process to its parent. Since Linux 6.15 other processes can read it from a pidfd once the process is reaped.
On older kernels the end is unknown, unless the kernel's log or counters show it.
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
"""Maximum time to wait for the parent to reap the process, in seconds; after it the exit status is unknown."""
COUNTERS_S = 60.0
"""Interval in seconds between readings of the kill counters. The last reading but one is the baseline: a process killed
for memory may take seconds to end, and earlier kills are unrelated."""
MOST_RANKS = 16
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040_FF0B, 1 << 3
"""Request and flag from linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info); the struct's first version has 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProcess:
    """A process that the engine did not start, as it was when the watch began."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start; unique together with the pid."""
    arguments: tuple[str, ...]
    folder: str
    pidfd: int
    """Descriptor that refers to this process even if its pid is reused."""

    @property
    def variables(self) -> list[str]:
        """Environment variables that concern its training, as `NAME=VALUE`."""
        environment = _environment(self.pid).items()
        return sorted(
            f"{name}={value}"
            for name, value in environment
            if is_run_variable(name) and not is_secret_name(name)
        )

    def trainers(self) -> list[int]:
        """Return the training processes in its process tree: the ranks; without ranks the Python process with the most
        memory; without Python processes itself."""
        ranks = ranks_in(self.pid)
        if ranks:
            return list(ranks.values())[:MOST_RANKS]
        sizes = {
            pid: Host().process(pid).rss_bytes.number or 0 for pid in _python_processes(self.pid)
        }
        return [max(sizes, key=lambda pid: sizes[pid], default=self.pid)]

    def about(self) -> ProcessFound:
        tree = _process_tree(self.pid)
        return ProcessFound(
            pid=self.pid,
            started_unix_s=_started_unix_s(self.start_ticks),
            user=_user(_owner(self.pid)),
            executable=_link(self.pid, "exe") or self.arguments[0],
            processes=len(tree),
            ranks=ranks_in(self.pid),
            opens_gpu=_opens_gpu(tree),
            no_stacks=no_stacks(),
        )


def find_process(pid: int) -> ForeignProcess:
    """Return the process `pid`. Raises BadInput, with what was found, if it cannot be watched."""

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
    return ForeignProcess(
        pid=pid,
        pidfd=pidfd,
        start_ticks=int(start.number),
        arguments=tuple(words) if words and words[0] else (name,),
        folder=_link(pid, "cwd") or "unknown",
    )


def watch_process(run: RunFolder, found: ForeignProcess, notify: str) -> None:
    """Watch a process until it ends, or until SIGINT, SIGTERM or SIGHUP ends the watch. `notify`: receivers of
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
    """Observe until the process ends or a signal asks to end the watch; return whether the process has ended."""
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
    """Return the exit code of an ended process that is not a child, or minus the number of the signal that ended it;
    None if the kernel does not report it."""
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
        # The parent has not reaped it yet, and the kernel does not notify when it does.
        time.sleep(0.01)


def no_stacks() -> str:
    """Return why Python stacks of another process cannot be read, and what to do; empty if they can be read."""
    if find_command("py-spy").value is None:
        return "py-spy is not installed; pip install py-spy"
    reason = may_attach().absent
    return f"{reason}; {LET_ATTACH}" if reason else ""


def ranks_in(pid: int) -> dict[str, int]:
    """Return the ranks in the process tree of `pid`, by RANK. Children of a rank inherit the variable: the topmost
    process is the rank."""
    ranks: dict[str, int] = {}
    for child in _process_tree(pid):
        rank = _environment(child).get("RANK", "")
        if rank.isdecimal():
            ranks.setdefault(rank, child)
    return dict(sorted(ranks.items(), key=lambda item: int(item[0])))


def _process_tree(pid: int) -> list[int]:
    """Return `pid` and its descendants, parents before children."""
    try:
        return members(pid, PROC)
    except OSError:
        return [pid]


def _python_processes(pid: int) -> list[int]:
    return [
        child for child in _process_tree(pid) if Path(_link(child, "exe")).name.startswith("python")
    ]


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
