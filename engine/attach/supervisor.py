"""`python -m engine.attach.supervisor RUN`: observe a command from a separate process that is not its parent.

    engine watch --(stdin pipe)--> this process        sends the command's pid, and at the end its exit code

It runs in a separate session, reads the probe's log and the machine, raises alerts, and records how the command ended.
It sends no signal and stops no process: if it dies, the command is not affected. If the process that started the
command dies first, the command continues, and its exit code stays unknown.

A script that watches itself (`apr_watch.start`) is at the other end of the pipe: it sends its pid, and OVER when the
watch ends. Its probe logs how it ended.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import selectors
import signal
import sys
import time
from functools import partial
from pathlib import Path

from engine.errors import EngineError
from engine.log.beats import Beat, read_lost_rank
from engine.log.events import IDENTITY, LauncherGone, Note, TrainerExited, TrainerStarted
from engine.log.folder import RunFolder, is_run, open_run, read_command
from engine.log.text import event_text
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.notify.receivers import ALL, NOTIFY_VARIABLE
from engine.terminal import say
from engine.watch.exit_cause import Certainty, ExitState
from engine.watch.observe import RunObserver
from engine.watch.stacks import FOLDER
from engine.watch.verdict_line import SUSPECT, WRONG, run_verdict_lines, verdict_of

SAMPLE_SECONDS = 1.0
OVER = b"over\n"
ENDED_S = 2.0
"""Maximum time to wait for the exit code after the end of the command, in seconds."""


class _Training:
    """One training of the command: its run folder and observer."""

    def __init__(self, run: RunFolder, pid: int, command: RunFolder) -> None:
        """Begin to observe. `pid`: the command, or for a later training the process that created its folder; `command`:
        the run folder of the command, to which all processes write their stacks."""
        self.run, self.is_command = run, run == command
        self._watch = LogWriter(run.watch, writer="supervisor")
        self._device = LogWriter(run.device, writer="sampler")
        self._watch.write(TrainerStarted(trainer_pid=pid, supervisor_pid=os.getpid()))
        self._watch.write(Note(level="info", text=_about(run)))
        self.observer = RunObserver(
            run,
            pid,
            self._watch,
            self._device,
            sample_seconds=SAMPLE_SECONDS,
            stop=lambda why, now: None,
            process=partial(training_process, command, pid),
        )
        self.observer.begin()
        self.observer.notify(os.environ.get(NOTIFY_VARIABLE, ALL))
        self._seen_over = self.is_recorded = False

    def close(self) -> None:
        # The end of a later training is not the end of the command.
        self.observer.close_notices(ended=self.is_command)
        self._watch.close()
        self._device.close()

    def tick(self) -> None:
        reading = self.observer.tick()
        if reading.why:
            self.observer.write_watch(Note(level="warning", text=reading.why))
        if not self.is_recorded and self._is_over():
            # Wait one tick: the exit code of the command arrives shortly after the last log line.
            if self._seen_over:
                self.record_end()
            self._seen_over = True

    def _is_over(self) -> bool:
        """Return whether a training began in this folder and no process writes its log any more."""
        view = self.observer.watcher.view
        return view.watched is not None and not self.run.liveness().trainer

    def record_end(self) -> None:
        """Record the end of a training by its probe's log, since its process is not a child of this one."""
        if self.is_recorded:
            return
        self.is_recorded = True
        watcher = self.observer.watcher
        watcher.tick()
        watcher.judge_end()
        if self.is_command:
            watcher.training_is_over = True
            text = "the training ended, the command continues"
            self.observer.write_watch(Note(level="info", text=text))
            return
        pid = watcher.view.watched.pid if watcher.view.watched is not None else self.observer.pid
        self.observer.write_watch(exit_of(watcher.view, pid))


def exit_of(view: RunView, pid: int) -> TrainerExited:
    """Return the end of a training whose exit code is unknown."""
    ended = view.script_ended
    if ended is None:
        state, certainty = ExitState.UNKNOWN, Certainty.NONE
        text = "it logged no end: ended by a signal or os._exit, or its log could not be written"
    else:
        state = ExitState.COMPLETED if ended.exception is None else ExitState.FAILED
        certainty, text = Certainty.PROVED, event_text(ended)
    return TrainerExited(
        trainer_pid=pid,
        returncode=None,
        state=str(state),
        signal=None,
        cause=ended.exception or "its script ended" if ended is not None else "not known",
        certainty=str(certainty),
        sentence=f"{text}; only its parent knows its exit code",
    )


class _Reporter:
    """Printer of verdicts on the command's stderr, once for each problem."""

    def __init__(self, run: RunFolder, number: int | None) -> None:
        """`number`: file descriptor to print to; None prints nothing."""
        self._run, self._number = run, number
        self._reported: set[str] = set()

    def tick(self, view: RunView) -> None:
        if self._number is None or view.watched is None:
            return
        verdict = verdict_of(view, "running", self._run.path)
        # Warnings of rules appear only in the summary: other work on the machine may cause them.
        is_sure = verdict.level == WRONG or verdict.id.startswith(IDENTITY)
        if verdict.level not in (WRONG, SUSPECT) or not is_sure or verdict.id in self._reported:
            return
        self._reported.add(verdict.id)
        lines = run_verdict_lines(view, "running", self._run.path)
        text = "".join(f"engine watch: {line}\n" for line in lines)
        try:
            os.write(self._number, text.encode())
        except OSError:
            self._number = None


class _Trainings:
    """The command's first training, and its later trainings while they run."""

    def __init__(self, run: RunFolder, pid: int, report_fd: int | None) -> None:
        about = read_command(run)
        self._reporter = _Reporter(run, report_fd)
        self.started_own_watch = about is not None and about.pid is not None
        self.command = _Training(run, pid, run)
        self._later: list[_Training] = []
        self._number = 2

    def tick(self) -> None:
        self._find_later()
        for training in (self.command, *self._later):
            training.tick()
        self._reporter.tick(self.command.observer.watcher.view)
        self._drop_recorded()

    @property
    def left_s(self) -> float:
        """Seconds to the next tick."""
        return min(training.observer.left_s for training in (self.command, *self._later))

    def _find_later(self) -> None:
        run = self.command.run
        while os.path.lexists(path := later_run(run, self._number).path):
            about = read_command(RunFolder(path)) if is_run(path) else None
            if about is not None and about.part_of == run.name and about.pid:
                self._later.append(_Training(RunFolder(path), about.pid, run))
            elif about is None and not is_run(later_run(run, self._number + 1).path):
                return  # it is being created
            self._number += 1

    def _drop_recorded(self) -> None:
        for training in [recorded for recorded in self._later if recorded.is_recorded]:
            training.close()
            self._later.remove(training)

    def end(self, code: int | None) -> None:
        """Record how the command and its later trainings ended."""
        self._find_later()
        for training in self._later:
            training.record_end()
        self._drop_recorded()
        observer = self.command.observer
        if code is None and self.started_own_watch:
            observer.watcher.judge_end()
            observer.write_watch(exit_of(observer.watcher.view, observer.pid))
        elif code is None:
            text = "the command ended; its exit code is unknown, as the process that started it is gone"
            observer.write_watch(Note(level="warning", text=text))
        else:
            observer.watcher.tick()
            run, ended = self.command.run, observer.watcher.view.script_ended
            lost = read_lost_rank(run) if code else None
            observer.record_exit(
                code,
                stop_requested="engine stop" if run.stop_asked.exists() else None,
                finished=code == 0,
                exception=ended.exception if ended is not None else None,
                lost_rank=lost,
                is_ours=False,
            )
        self.command.close()


def supervise(run: RunFolder, report_fd: int | None = None) -> int:
    """Observe the command of `run` and its later trainings until they end. `report_fd`: file descriptor to print
    problems to, or None."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Use unbuffered input: the selector does not see bytes in a buffer.
    launcher = io.FileIO(sys.stdin.fileno(), closefd=False)
    pid = launcher.readline()
    if not pid.endswith(b"\n"):
        with LogWriter(run.watch, writer="supervisor") as watch:
            watch.write(Note(level="error", text="the command was not started"))
        return 1
    trainings = _Trainings(run, int(pid), report_fd)
    trainings.end(_wait_for_end(trainings, launcher))
    return 0


def later_run(run: RunFolder, number: int) -> RunFolder:
    """Return the folder of a later training of a command; the second training has `number` 2."""
    return RunFolder(run.path.with_name(f"{run.path.name}-{number}"))


def training_process(
    run: RunFolder, pid: int, view: RunView, rank: Beat | None = None
) -> tuple[int, str]:
    """Return the training process of the command `pid`, and the file of its stacks. It is the first that exists of: the
    process of `rank`; the process that has stepped an optimizer; the newest living process that has imported torch; the
    command itself.

    `run` is the run folder of the command, to which all processes write their stacks."""
    if rank is not None:
        pid = rank.pid
    elif view.watched is not None:
        pid = view.watched.pid
    else:
        paths = sorted((run.path / FOLDER).glob("[0-9]*.txt"), key=_made_ns)
        numbers = [int(path.stem) for path in paths if path.stem.isdecimal()]
        pid = next((n for n in reversed(numbers) if Path(f"/proc/{n}").exists()), pid)
    return pid, str(run.path.absolute() / FOLDER / f"{pid}.txt")


def _made_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _about(run: RunFolder) -> str:
    """Return the command, its folder and its commit as text."""
    command = read_command(run)
    assert command is not None, "engine watch has written it"
    commit = f", commit {command.commit}" if command.commit else ""
    later = f"; a later training of {command.part_of}" if command.part_of else ""
    return f"command: {command.line}, in {command.folder}{commit}{later}"


def _wait_for_end(trainings: _Trainings, launcher: io.FileIO) -> int | None:
    """Observe until the command has ended; return its exit code, or None if it is unknown."""
    observer, selector = trainings.command.observer, selectors.DefaultSelector()
    selector.register(launcher, selectors.EVENT_READ, "launcher")
    # If the command has ended already, its launcher sends the exit code.
    with contextlib.suppress(ProcessLookupError):
        selector.register(os.pidfd_open(observer.pid), selectors.EVENT_READ, "command")
    ended_by_s = math.inf
    while True:
        trainings.tick()
        while (left := min(trainings.left_s, ended_by_s - time.monotonic())) > 0:
            for key, _ in selector.select(left):
                if key.data == "launcher" and (line := launcher.readline()).endswith(b"\n"):
                    return None if line == OVER else int(line)
                # Either the launcher or the command is gone: the other may still send something.
                selector.unregister(key.fileobj)
                if key.data == "launcher" and not trainings.started_own_watch:
                    observer.watch.write(LauncherGone(how="killed"))
                ended_by_s = time.monotonic() + ENDED_S if key.data == "command" else ended_by_s
            if not selector.get_map():
                return None
        if time.monotonic() >= ended_by_s:
            return None


def main() -> int:
    try:
        report_fd = int(sys.argv[2]) if len(sys.argv) > 2 else None
        return supervise(open_run(Path(sys.argv[1])), report_fd)
    except EngineError as error:
        say(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
