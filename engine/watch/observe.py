"""Observe the process of a run from outside: sample the machine, follow the logs, and record how it ended.

It neither starts nor stops the process: the watcher asks the supervisor to stop it (`stop`). The only signal that the
watcher itself sends makes the process write its stacks (`engine.watch.stacks`). Two supervisors are built on it: that
of the engine's trainer (`engine.watch.supervisor`) and that of a watched command (`engine.attach.supervisor`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from engine.errors import BadInput, DiskFull, RunLogError
from engine.log.beats import Beat, LostRank
from engine.log.events import Event, FactsRead, GpuSample, HostSample, Note, TrainerExited
from engine.log.folder import RunFolder
from engine.log.held import held_readings
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.machine.facts import read_facts
from engine.machine.kill_counters import read_kill_counters
from engine.machine.nvml import open_nvml
from engine.machine.sampler import Sampler
from engine.watch.exit_cause import (
    Certainty,
    ExitAttribution,
    ExitState,
    attribute_exit,
    attribute_unseen_exit,
    find_kernel_line,
    memory_words,
)
from engine.watch.machine_guard import ClockWatch, MemoryActions, MemoryGuard
from engine.watch.watcher import Watcher

if TYPE_CHECKING:
    from engine.watch.notices import Notices

TICK_S = 1.0


class RunObserver:
    """Observes the process `pid` of a run."""

    def __init__(
        self,
        run: RunFolder,
        pid: int,
        watch: LogWriter,
        device: LogWriter,
        *,
        sample_seconds: float,
        stop: Callable[[str, bool], None],
        process: Callable[[RunView, Beat | None], tuple[int, str]] | None = None,
        attached_pids: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """`stop(why, now)` is called at a stall if the run's settings say that a stall ends it. `process` returns the
        process that trains (which `pid` may only have started) or one of its ranks, and the file to which that
        process writes its stacks. If `pid` was already running, so that no probe inside it reports the training
        processes, `attached_pids` returns them, the first rank first."""
        self.run, self.pid, self.watch, self.device = run, pid, watch, device
        self._is_first = not run.host
        """Whether this is the first host, which alone does what concerns the whole run and not one machine."""
        self._begun_s = time.monotonic()
        self.before = read_kill_counters(pid=pid)
        """The kernel's counters at the start, with which the counters at the end are compared."""
        self._sample_seconds = sample_seconds
        self._guard, self._clocks = MemoryGuard(), ClockWatch()
        self._integrated_gpu = False
        self.watcher = Watcher(
            run, pid, self.write_watch, stop, process=process, attached_pids=attached_pids
        )
        self._process, self._attached_pids = process, attached_pids
        self.notices: Notices | None = None

    def begin(self) -> None:
        """Log the facts of the machine, and prepare to sample it."""
        nvml = open_nvml()
        facts = read_facts(nvml=nvml)
        self._integrated_gpu = facts.has_integrated_gpu is True
        self.write_device(FactsRead(facts=facts.as_event_fields()))
        self._sampler = Sampler(
            self._trainer_pid,
            nvml=nvml,
            tick_s=self._sample_seconds,
            own_memory=partial(held_readings, self.run) if self._is_first else dict,
            family=None if self._attached_pids is None else self.pid,
            launched=self.pid,
        )
        self._next_tick_s = time.monotonic()
        self._next_sample_s = self._next_tick_s if self._sample_seconds else math.inf

    def tick(self) -> MemoryActions:
        """Sample, read the logs and evaluate the rules, each when it is due. Return the actions that the machine's
        memory requires."""
        if time.monotonic() >= self._next_sample_s:
            self._next_sample_s = max(self._next_sample_s + self._sampler.tick_s, time.monotonic())
            self._sample()
        if self._is_first:
            self.watcher.tick()
        if self.notices is not None:
            self.notices.tick(self.watcher.follower)
        actions = self._check_machine()
        # Missed ticks (a suspended machine) are skipped.
        self._next_tick_s = max(self._next_tick_s + TICK_S, time.monotonic())
        return actions

    @property
    def left_s(self) -> float:
        """Seconds to the next tick."""
        return self._next_tick_s - time.monotonic()

    def write_device(self, event: Event) -> None:
        # A full disk may lose readings. It must not lose the exit record, and the trainer stops by itself
        # when it cannot write.
        with contextlib.suppress(DiskFull):
            self.device.write(event)

    def write_watch(self, event: Event) -> None:
        # A full disk may lose the watcher's events too.
        with contextlib.suppress(DiskFull):
            self.watch.write(event)

    def record_exit(
        self,
        returncode: int,
        *,
        stop_requested: str | None,
        finished: bool,
        exception: str | None = None,
        stderr: str = "",
        reason: str = "",
        lost_rank: LostRank | None = None,
        lost_hosts: str = "",
        is_ours: bool = True,
    ) -> None:
        """Write how the process ended. `finished`: it recorded its own end. `lost_hosts` describes the lost machines
        without which it could not continue; empty if none was lost. `is_ours`: its exit codes have the engine's
        meanings."""
        if self._is_first:
            self.watcher.judge_end()
        after = read_kill_counters(cgroup=self.before.cgroup)
        killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        line, unreadable = (
            find_kernel_line(self.pid, since_s=self._begun_s)
            if killed
            else (None, "not looked for")
        )
        exit_ = attribute_exit(
            returncode,
            self.before,
            after,
            stop_requested=stop_requested,
            kernel_line=line,
            finished=finished,
            exception=exception,
            stderr=stderr,
            reason=reason,
            integrated_gpu=self._integrated_gpu,
            memory=memory_words(self.watcher.view),
            is_ours=is_ours,
        )
        if lost_rank is not None:
            exit_ = replace(exit_, sentence=f"{lost_rank.sentence}: {exit_.sentence}")
        rank = None if lost_rank is None else lost_rank.rank
        if lost_hosts:
            exit_ = replace(
                exit_,
                state=ExitState.HOST_LOST,
                cause=lost_hosts.partition(":")[0],
                certainty=Certainty.STRONG,
                sentence=f"{lost_hosts}. {exit_.sentence}",
            )
        self._write_exit(returncode, exit_, unreadable if killed else None, rank)

    def record_exit_of(self, host: str, exit_: TrainerExited) -> None:
        """Write that the process ended because of a rank on another host, as that host's supervisor recorded it."""
        self.watcher.judge_end()
        sentence = f"on host {host}: {exit_.sentence}"
        self.watch.write(msgspec.structs.replace(exit_, trainer_pid=self.pid, sentence=sentence))
        self.watch.sync()

    def notify(self, wanted: str) -> None:
        """Send messages to the receivers `wanted` from now on; if a receiver cannot be found, log a note and send no
        messages."""
        # Imported here: few runs need it, and the trainer's start must not wait for it.
        from engine.notify.receivers import choose_receivers

        try:
            receivers = choose_receivers(wanted, os.environ)
        except BadInput as error:
            self.write_watch(Note(level="warning", text=f"no messages are sent: {error.message}"))
            return
        if receivers:
            from engine.watch.notices import Notices

            self.notices = Notices(self.run, receivers, self.write_watch)

    def close_notices(self, *, ended: bool = True) -> None:
        """Send the message that the run ended, if `ended`, and wait for unfinished messages. Call it when everything
        about the end is in the log."""
        if self.notices is not None:
            self.notices.close(self.watcher.follower, ended=ended)

    def record_unseen_exit(self) -> None:
        """Write how a process ended whose exit status is not known."""
        after = read_kill_counters(cgroup=self.before.cgroup)
        line, unreadable = find_kernel_line(self.pid, since_s=self._begun_s)
        memory = memory_words(self.watcher.view)
        exit_ = attribute_unseen_exit(self.before, after, kernel_line=line, memory=memory)
        self._write_exit(None, exit_, unreadable)

    def _write_exit(
        self,
        returncode: int | None,
        exit_: ExitAttribution,
        unreadable: str | None,
        rank: int | None = None,
    ) -> None:
        self.watch.write(
            TrainerExited(
                trainer_pid=self.pid,
                returncode=returncode,
                state=str(exit_.state),
                signal=exit_.signal_name,
                cause=exit_.cause,
                certainty=exit_.certainty,
                sentence=exit_.sentence,
                rank=rank,
            )
        )
        if unreadable is not None:
            self.watch.write(
                Note(level="info", text=f"the kernel's log was not read: {unreadable}")
            )
        self.watch.sync()

    def _trainer_pid(self) -> int:
        if self._attached_pids is not None:
            return self._attached_pids()[0]
        return self.pid if self._process is None else self._process(self.watcher.view, None)[0]

    def _sample(self) -> None:
        for sample in self._sampler.sample():
            kind = {"host": HostSample, "gpu": GpuSample}[sample.kind]
            self.write_device(kind(**sample.fields, absent=sample.absent))
        if (news := self._sampler.news()) is not None:
            self.write_watch(Note(level="info", text=news))

    def _check_machine(self) -> MemoryActions:
        for sentence in self._clocks.check():
            self.write_watch(Note(level="warning", text=sentence))
        actions = self._guard.check()
        if actions.low:
            # Sync now: if the machine hangs, the last readings are all that remains.
            with contextlib.suppress(RunLogError, DiskFull):
                self.device.sync()
        return actions
