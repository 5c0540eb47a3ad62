"""Supervise a run: a small process without torch that starts the trainer, samples the machine, watches the run's logs
and records how the trainer ended.

    launcher --(stdin pipe)--> supervisor --(keep-alive pipe)--> trainer

It runs in its own session, so closing a terminal does not reach it. The reader of each pipe gets an EOF when the
writer is gone, whatever the cause, because the kernel closes a dead process's end:

- The launcher writes one byte before it leaves on purpose (`d` detached, `h` hang-up). An EOF
  without a byte means that it was killed. The run continues in every case, and the watch log records
  which it was.
- The trainer sees the keep-alive pipe close when the supervisor dies. It then saves, logs the reason
  and stops, so that no run goes on unsupervised.

SIGTERM and SIGINT are forwarded to the trainer, which finishes its step and saves. A second signal ends it at once.
Before its first step a trainer has nothing to finish: if it has not exited within a second, because it is inside
native code, the supervisor sends the signal again, then SIGKILL, and kills all its descendants. A trainer whose run has
`watch.on_stall = stop` gets SIGTERM when the watcher reports a stall, and SIGKILL if it does not end. One whose run has
`watch.on_thrash = stop` gets them when the machine is about to hang for lack of memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine import child
from engine.files import open_plain
from engine.log.beats import read_lost_rank
from engine.log.events import (
    TRAINING,
    LauncherGone,
    Note,
    StopForwarded,
    TrainerStarted,
)
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.held import forget_held
from engine.log.write import LogWriter, read_host, repair
from engine.machine.threads import VARIABLE, choose_thread_wait
from engine.signals import AGAIN_S, GRACE_S, descendants, end
from engine.spec import RunSpec, spec_from_dict
from engine.watch import flight_recorder
from engine.watch.exit_cause import exception_name
from engine.watch.hosts import Place
from engine.watch.hosts import lost_hosts as lost_hosts_of
from engine.watch.machine_guard import MemoryActions
from engine.watch.observe import RunObserver

TRAINER = "APR_WORKBENCH_TRAINER"
"""Environment variable with the module and arguments that drills (`engine.drills.planting`) start in place of
`engine.train`; the usual arguments follow them. The watch log records it."""
_LAST_BYTES = 1 << 20
"""Bytes at the end of a log that are searched for the start of training."""
LAUNCHER_BYTES = {b"d": "detached", b"h": "hangup"}


def supervise(run: RunFolder, flags: list[str], place: Place | None = None) -> int:
    """Run the trainer of `run` to its end with the command-line `flags`; return its exit code, or 128 + n if signal n
    ended it. `place` is this host in a run over several hosts, each of which runs its own ranks."""
    if place is not None and place.number:
        run = RunFolder(run.path, read_host())
    with (
        LogWriter(run.watch, writer="supervisor") as watch,
        LogWriter(run.device, writer="sampler") as device,
    ):
        cut = None if run.host else repair(run.events)
        if cut is not None:
            watch.write(Note(level="warning", text=cut))
        return _Supervisor(run, watch, device, place).run_trainer(flags)


class _Supervisor:
    def __init__(
        self,
        run: RunFolder,
        watch: LogWriter,
        device: LogWriter,
        place: Place | None = None,
    ) -> None:
        self.place = place
        self.run, self.watch, self.device = run, watch, device
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.stop_signal: str | None = None
        self.leave_by_s = math.inf
        """Monotonic time, in seconds, at which a trainer that was asked to stop before its first step gets the next,
        stronger signal."""
        self.asked = int(signal.SIGTERM)
        self.started: dict[int, int] = {}
        """Pidfds of the descendants of a trainer that was asked to stop before its first step; they are killed after
        it."""
        self.ended_early: int | None = None
        """The signal that the supervisor had to send a second time."""

    def run_trainer(self, flags: list[str]) -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write)
        self.selector.register(wake_read, selectors.EVENT_READ, "signal")
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "launcher")

        for number in (signal.SIGTERM, signal.SIGINT):
            # A handler may run between any two bytecodes, so it only records the signal; the loop logs and
            # forwards it.
            signal.signal(number, lambda n, _frame: self.signals.append(n))
        if not self.run.host:
            forget_held(self.run)
        settings = _spec(self.run)
        trainer, keep_alive = _start_trainer(self.run, flags, self.place)
        self.observer = RunObserver(
            self.run,
            trainer.pid,
            self.watch,
            self.device,
            sample_seconds=settings.watch.sample_seconds,
            stop=lambda why, now: self._stop(trainer, why, "watch.on_stall", now=now),
        )
        self.watch.write(TrainerStarted(trainer_pid=trainer.pid, supervisor_pid=os.getpid()))
        if os.environ.get(TRAINER):
            text = f"the trainer is `python -m {os.environ[TRAINER]}` ({TRAINER}), not engine.train"
            self.observer.write_watch(Note(level="warning", text=text))
        self.selector.register(os.pidfd_open(trainer.pid), selectors.EVENT_READ, "trainer")
        if not self.run.host:
            self.observer.notify(settings.notify.to)

        self._watch_until_exit(trainer, wake_read)
        returncode = trainer.wait()
        end(self.started.values())
        os.close(keep_alive)
        failed_on_hosts = self.place is not None and self.place.hosts > 1 and returncode != 0
        lost_hosts = lost_hosts_of(self.run) if failed_on_hosts and not self.run.host else ""
        # The end, as recorded in the trainer's log.
        view = Follower(self.run).read_all()
        finished, lost, stderr = view.own_finished, read_lost_rank(self.run), _tail(self.run.stderr)
        exception = exception_name(stderr)
        if self.place is not None and self.run.host and lost is not None:
            # A host other than the first records only the ends of its own ranks.
            own = self.place.ranks(settings.compute.gpus)
            lost = lost if lost.rank in own else None
        if lost is not None:
            # All ranks print to one file, and the first rank may have failed only because it lost the rank that
            # ended.
            report = view.ranks_now.get(lost.rank)
            finished = finished if lost.rank == 0 else report.ended if report is not None else None
            if finished is not None and finished.state == "failed":
                exception = None
                words = finished.reason.partition("\n")[0].removeprefix(f"rank {lost.rank}: ")
                lost = replace(lost, sentence=f"{lost.sentence}, {words}")
        at_stop = view.own_finished is not None and view.own_finished.state == "stopped"
        stop_elsewhere = "of another host" if failed_on_hosts and at_stop else None
        record = partial(
            self.observer.record_exit,
            returncode,
            stop_requested=self.stop_signal or stop_elsewhere,
            finished=finished is not None,
            exception=exception,
            stderr=stderr,
            reason=finished.reason if finished is not None and finished.state == "failed" else "",
            lost_rank=lost,
        )
        host = view.rank_hosts.get(lost.rank, "") if failed_on_hosts and lost is not None else ""
        exit_elsewhere = view.hosts_now[host].own_exit if host in view.hosts_now else None
        if exit_elsewhere is not None and not lost_hosts:
            # The supervisor of the rank's host has recorded what ended the rank.
            self.observer.record_exit_of(host, exit_elsewhere)
        else:
            record(lost_hosts=lost_hosts)
        if failed_on_hosts and self.run.host and (lost_hosts := lost_hosts_of(self.run)):
            record(lost_hosts=lost_hosts)
        self.observer.close_notices()
        if self.ended_early is not None:
            return 128 + self.ended_early
        return returncode if returncode >= 0 else 128 - returncode

    def _watch_until_exit(self, trainer: subprocess.Popen[bytes], wake_read: int) -> None:
        observer = self.observer
        observer.begin()
        self._forward_all(trainer)
        while True:
            self._act_on_memory(trainer, observer.tick())
            while (left_s := observer.left_s) > 0:
                if time.monotonic() >= self.leave_by_s:
                    self._end_early(trainer)
                left_s = min(left_s, max(0.0, self.leave_by_s - time.monotonic()))
                for key, _ in self.selector.select(left_s):
                    match key.data:
                        case "trainer":
                            return
                        case "launcher":
                            self._read_launcher()
                        case _:
                            with contextlib.suppress(BlockingIOError):
                                os.read(wake_read, 4096)
                self._forward_all(trainer)

    def _read_launcher(self) -> None:
        byte = os.read(sys.stdin.fileno(), 1)
        self.selector.unregister(sys.stdin.fileno())
        self.watch.write(LauncherGone(how=LAUNCHER_BYTES.get(byte, "killed")))

    def _forward_all(self, trainer: subprocess.Popen[bytes]) -> None:
        while self.signals:
            number = self.signals.pop(0)
            name = signal.Signals(number).name
            if self.stop_signal is None and not training_has_begun(self.run):
                self.leave_by_s = time.monotonic() + GRACE_S
                self.asked = number
                # Once the trainer is gone, its descendants can no longer be found.
                self.started = descendants(trainer.pid)
            self.stop_signal = name
            self.watch.write(StopForwarded(signal=name))
            trainer.send_signal(number)

    def _end_early(self, trainer: subprocess.Popen[bytes]) -> None:
        """Send the second signal to a trainer that has not exited, and then SIGKILL if it still has not."""
        # If the trainer has started its steps since the first signal, it finishes the present step.
        if training_has_begun(self.run):
            self.leave_by_s, self.started = math.inf, {}
            return
        is_second = self.ended_early is not None
        self.ended_early = self.asked
        self.leave_by_s = math.inf if is_second else time.monotonic() + AGAIN_S
        if not is_second:
            text = f"the trainer is still there {GRACE_S:g} s after {self.stop_signal}, before its first step: "
            self.observer.write_watch(Note(level="info", text=f"{text}it is ended"))
        self.started = descendants(trainer.pid) | self.started
        trainer.send_signal(signal.SIGKILL if is_second else self.asked)

    def _act_on_memory(self, trainer: subprocess.Popen[bytes], actions: MemoryActions) -> None:
        if not (actions.stop or actions.end):
            if actions.why:
                self.observer.write_watch(Note(level="info", text=actions.why))
            return
        settings = self.observer.watcher.settings
        if settings is not None and settings.watch.on_thrash == "stop":
            self._stop(trainer, actions.why, "watch.on_thrash", now=actions.end)
        elif actions.stop:
            text = f"{actions.why}; watch.on_thrash = report"
            self.observer.write_watch(Note(level="warning", text=text))

    def _stop(self, trainer: subprocess.Popen[bytes], why: str, setting: str, *, now: bool) -> None:
        """Stop the trainer, or kill it if `now`, because `setting` is `stop`."""
        number = signal.SIGKILL if now else signal.SIGTERM
        self.stop_signal = f"{number.name}, {setting} = stop"
        self.observer.write_watch(
            Note(level="warning", text=f"{number.name} to the trainer: {why}")
        )
        trainer.send_signal(number)


def training_has_begun(run: RunFolder) -> bool:
    """Return whether the present session of the trainer has started its steps, from the end of the log; False if the
    log cannot be read."""
    try:
        with open_plain(run.events) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            last = file.read()
    except OSError:
        return False
    # A session longer than the end that was read must have steps.
    before, opened, session = last.rpartition(b'"kind":"log_opened"')
    return f'"name":"{TRAINING}"'.encode() in (session if opened else before + session) or (
        not opened and len(last) >= _LAST_BYTES
    )


def _tail(path: Path) -> str:
    """Return the last 16 KiB of a text file, where a traceback ends; empty if it cannot be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _spec(run: RunFolder) -> RunSpec:
    return spec_from_dict(run.read_effective()["spec"])


def _start_trainer(
    run: RunFolder, flags: list[str], place: Place | None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the trainer; return it and the supervisor's end of its keep-alive pipe."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    spec = _spec(run)
    ranks = spec.compute.gpus
    module = shlex.split(os.environ.get(TRAINER, ""))
    if not module:
        module = ["engine.train"] if ranks == 1 else ["engine.train.ranks.torchrun"]
    arguments = [*module[1:], str(run.path), "--keep-alive-fd", str(read_end), *flags]
    command = child.command(module[0], *arguments, options=child.TRACEBACKS)
    command += [] if ranks == 1 else ["--gpus", str(ranks)]
    command += [] if place is None or ranks == 1 else [f"--host={place}"]
    wait = choose_thread_wait(spec.compute.thread_wait, os.environ).choice
    environment = child.environment() | {VARIABLE: wait}
    if ranks > 1:
        environment |= flight_recorder.variables(run.path, environment)
    trainer = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(read_end,), env=environment
    )
    os.close(read_end)
    return trainer, write_end
