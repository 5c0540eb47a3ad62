"""`python -m engine.attach.supervisor RUN`: looks at a command from outside, beside it and never above it.

    engine watch --(stdin pipe)--> this process        pid of the command; later, how it ended

It is in a session of its own. It reads the probe's log and the machine, raises alerts, and records how the command
ended. It signals nothing and stops nothing: when it dies, the command does not notice. When the process that
started the command dies first, the command goes on, and its exit code is not known.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
import time
from functools import partial
from pathlib import Path

from engine.errors import EngineError
from engine.log.events import LauncherGone, Note, TrainerStarted
from engine.log.folder import RunFolder, open_run, read_command
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.terminal import say
from engine.watch.observe import RunObserver
from engine.watch.stacks import FOLDER

SAMPLE_SECONDS = 1.0
ENDED_S = 2.0
"""How long the exit code may come after the end of the command."""


class _Launcher:
    """Reads what the process that started the command says, line by line."""

    def __init__(self) -> None:
        self.is_there = True
        self._read = b""

    def line(self) -> str | None:
        """Return the next line; None when there is none yet, or when that process is gone. Waits for one of both
        unless a line has been read already."""
        if self.is_there and b"\n" not in self._read:
            found = os.read(sys.stdin.fileno(), 4096)
            self.is_there = bool(found)
            self._read += found
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        return line.decode()


def supervise(run: RunFolder) -> int:
    """Observe the command of `run` to its end."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    launcher = _Launcher()
    with (
        LogWriter(run.watch, writer="supervisor") as watch,
        LogWriter(run.device, writer="sampler") as device,
    ):
        pid = launcher.line()
        if pid is None:
            watch.write(Note(level="error", text="the command was not started"))
            return 1
        watch.write(TrainerStarted(trainer_pid=int(pid), supervisor_pid=os.getpid()))
        watch.write(Note(level="info", text=_about(run)))
        observer = RunObserver(
            run,
            int(pid),
            watch,
            device,
            sample_seconds=SAMPLE_SECONDS,
            stop=lambda why, now: None,
            process=partial(training_process, run, int(pid)),
        )
        code = _wait_for_end(observer, launcher)
        if code is None:
            text = "the command ended; its exit code went with the process that started it"
            watch.write(Note(level="warning", text=text))
        else:
            observer.record_exit(code, stop_requested=None, finished=code == 0, is_ours=False)
    return 0


def training_process(run: RunFolder, pid: int, view: RunView) -> tuple[int, str]:
    """Return the process below the command `pid` that trains, and the name of the file to which it writes its stacks:
    the one that has stepped an optimizer, else the newest that has imported torch, else the command."""
    if view.watched is not None:
        pid = view.watched.pid
    else:
        paths = sorted((run.path / FOLDER).glob("[0-9]*.txt"), key=_made_ns)
        numbers = [int(path.stem) for path in paths if path.stem.isdecimal()]
        pid = next((n for n in reversed(numbers) if Path(f"/proc/{n}").exists()), pid)
    return pid, f"{pid}.txt"


def _made_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _about(run: RunFolder) -> str:
    """Say what runs, and where."""
    command = read_command(run)
    assert command is not None, "engine watch has written it"
    commit = f", commit {command.commit}" if command.commit else ""
    return f"command: {command.line}, in {command.folder}{commit}"


def _wait_for_end(observer: RunObserver, launcher: _Launcher) -> int | None:
    """Observe until the command has ended; returns its exit code, or None where nobody is left to tell it."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "launcher")
    # A command that has ended already is told of by its launcher.
    with contextlib.suppress(ProcessLookupError):
        selector.register(os.pidfd_open(observer.pid), selectors.EVENT_READ, "command")
    observer.begin()
    ended_by_s = math.inf
    while True:
        found = observer.tick()
        if found.why:
            observer.write_watch(Note(level="warning", text=found.why))
        while (left := min(observer.left_s, ended_by_s - time.monotonic())) > 0:
            for key, _ in selector.select(left):
                if key.data == "launcher" and (line := launcher.line()) is not None:
                    return int(line)
                # Either of them is gone: the other may still come.
                selector.unregister(key.fileobj)
                if key.data == "launcher":
                    observer.watch.write(LauncherGone(how="killed"))
                ended_by_s = time.monotonic() + ENDED_S if key.data == "command" else ended_by_s
            if not selector.get_map():
                return None
        if time.monotonic() >= ended_by_s:
            return None


def main() -> int:
    try:
        return supervise(open_run(Path(sys.argv[1])))
    except EngineError as error:
        say(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
