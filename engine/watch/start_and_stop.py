"""Start and stop runs, for `engine distill`, the terminal, notebooks and experiments."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import BinaryIO

from engine import child
from engine.bytecode import with_bytecode
from engine.errors import BadInput, InternalError, RunLogError, write_error
from engine.log.fold import Follower
from engine.log.folder import RunFolder, read_command
from engine.log.read import id_of
from engine.log.write import read_host
from engine.signals import descendants, end
from engine.watch.hosts import Place

START_DEADLINE_S = 30.0
"""Seconds within which a supervisor must open its log."""
POLL_S = 0.02
ENDING_S = 5.0
"""Maximum seconds to wait until killed processes are gone."""


class Launched:
    """A supervisor that this process started and is attached to. Call `leave` before exiting; exiting without it
    is recorded as a kill."""

    def __init__(
        self, run: RunFolder, process: subprocess.Popen[bytes], begun_unix_s: float
    ) -> None:
        self.run, self.process = run, process
        self.begun_unix_s = begun_unix_s
        """Wall time just before the start: older log lines belong to earlier sessions."""

    def send(self, number: int) -> None:
        """Send a signal to the supervisor, which forwards it to the trainer."""
        self.process.send_signal(number)

    def leave(self, byte: bytes) -> None:
        """Detach from the supervisor by writing the reason, b'd' (detached) or b'h' (hang-up). The run continues."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(byte)
            self.process.stdin.close()
        except BrokenPipeError:
            return  # the supervisor ended first, so no message is needed

    def end(self) -> None:
        """Kill the run's remaining processes, and wait until none of them writes any more, ENDING_S at most."""
        tree = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
        end(tree.values())
        self.process.wait()
        self.leave(b"d")
        deadline_s = time.monotonic() + ENDING_S
        while _has_writer(self.run) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def _has_writer(run: RunFolder) -> bool:
    alive = run.liveness()
    return alive.trainer or alive.supervisor


def launch(
    run: RunFolder,
    *,
    resume: bool = False,
    allow_fallback: bool = False,
    allow_restart: bool = False,
    place: Place | None = None,
) -> Launched:
    """Start the supervisor of `run` in its own session and wait until it holds the run's watch log. With
    `resume` the run continues from its newest checkpoint; `allow_fallback` permits an older one, and
    `allow_restart` permits step 0 although a checkpoint exists. `place` is this host in a run over several hosts.
    Raises RunLogError if the run is running or its output cannot be opened, InternalError if the supervisor does not
    start."""
    if place is not None and place.number:
        run = RunFolder(run.path, read_host())
    if run.liveness().trainer or run.liveness().supervisor:
        raise RunLogError(
            f"run folder: {run.path} — expected a run that is not running, found a running one",
            hint=f"follow it with `engine tail -f {run.path}`",
        )
    command = child.command("engine.watch", str(run.path))
    command += ["--resume"] if resume else []
    command += ["--allow-fallback"] if allow_fallback else []
    command += ["--allow-restart"] if allow_restart else []
    command += [] if place is None else [f"--host={place}"]
    begun_unix_s = time.time()
    with _open_output(run.stderr) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=with_bytecode(child.environment()),
        )
    try:
        _wait_for_supervisor(run, process)
    except KeyboardInterrupt:
        # The supervisor has nothing to save yet.
        process.terminate()
        raise
    return Launched(run, process, begun_unix_s)


def _open_output(path: Path) -> BinaryIO:
    """Open the file for the supervisor's output. Refuses a FIFO, which would block, and a link, which could point to
    any of the user's files."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise write_error("run folder", path, "to open it for writing", error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunLogError.expected("run folder", path, "a regular file", "something else")
    return open(descriptor, "ab")


def _wait_for_supervisor(run: RunFolder, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not run.liveness().supervisor and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise InternalError(
                f"supervisor: expected it to open {run.watch} within {START_DEADLINE_S:.0f} s, found nothing"
            )
        time.sleep(POLL_S)
    if process.poll() not in (None, 0) and not run.watch.exists():
        last_line = run.stderr.read_text(errors="replace").strip().splitlines()[-1:]
        raise InternalError(
            f"supervisor: expected it to start, found exit {process.returncode}: {' '.join(last_line)}"
        )


def _check_holds(pid: int, log: Path) -> None:
    """Raise BadInput if a process does not have the log open, because it is then not the log's writer."""
    try:
        wanted = id_of(log.stat())
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if id_of(link.stat()) == wanted:
                    return
    except PermissionError:
        return  # another user's process: the kernel refuses the signal
    except OSError:
        pass
    raise BadInput.expected(
        "run log",
        log,
        f"to be open in process {pid}, which it names as its writer",
        "that it is not",
    )


def stop(run: RunFolder, *, now: bool = False) -> str:
    """Ask a run to finish its step, save and stop; with `now`, end it without saving. A watched command gets SIGTERM,
    with `now` SIGKILL. Return a description of what was done. Raises BadInput if the run is not running or gets no
    signal."""
    follower = Follower(run)
    view = follower.read_all()
    if not follower.alive.trainer and not follower.alive.supervisor:
        raise BadInput(
            f"run {run.name} — expected a run that is still running, found that it is {follower.state}"
        )
    watcher = view.clocks.get("watch")
    if _is_command(run):
        if watcher is None or view.trainer_pid is None or not follower.alive.supervisor:
            raise BadInput(
                f"run {run.name} — expected a process that watches its command, found none"
            )
        if view.process is not None:
            raise BadInput.expected(
                "run",
                run.name,
                "a command that was started to be watched",
                "a process that was already running, which is only watched and gets no signal",
                hint=f"end it yourself: kill {view.trainer_pid}",
            )
        # The process that holds the log has recorded the pid of the command.
        _check_holds(watcher.pid, run.watch)
        number = signal.SIGKILL if now else signal.SIGTERM
        # Before the signal: the supervisor looks for this file when it records the end of the command.
        with contextlib.suppress(OSError):
            run.stop_asked.touch()
        _signal(run, view.trainer_pid, number)
        return f"sent {number.name} to the command of run {run.name}"
    # A pid from the log is used only if its process has the log open, because a log may name any pid.
    if follower.alive.supervisor and watcher is not None and not now:
        _check_holds(watcher.pid, run.watch)
        _signal(run, watcher.pid, signal.SIGTERM)
        return f"asked run {run.name} to finish its step, save and stop"
    trainer = view.clocks.get("events")
    if follower.alive.trainer and trainer is not None:
        pid = trainer.pid
        _check_holds(pid, run.events)
    elif follower.alive.supervisor and watcher is not None and view.trainer_pid is not None:
        # The trainer has not opened its log yet, but its supervisor has recorded its pid.
        pid = view.trainer_pid
        _check_holds(watcher.pid, run.watch)
    else:
        raise BadInput(
            f"run {run.name} — expected a trainer, found none yet", hint="try again in a moment"
        )
    _signal(run, pid, signal.SIGKILL if now else signal.SIGTERM)
    return f"{'killed' if now else 'asked'} the trainer of run {run.name}{'' if now else ' to save and stop'}"


def _is_command(run: RunFolder) -> bool:
    """Return whether the run is a watched command; False if its settings cannot be read."""
    try:
        return read_command(run) is not None
    except RunLogError:
        return False


def _signal(run: RunFolder, pid: int, number: int) -> None:
    """Send a signal. Raises BadInput if the process belongs to another user, or has ended in the meantime."""
    try:
        os.kill(pid, number)
    except PermissionError as error:
        owner = run.events.stat().st_uid if run.events.exists() else run.path.stat().st_uid
        raise BadInput.expected(
            "run", run.path, "processes of this user", f"those of the user with id {owner}"
        ) from error
    except ProcessLookupError as error:
        raise BadInput.expected(
            "run", run.path, "a run that is still running", "that it has just ended"
        ) from error
