"""The state of a run as one value, folded from its logs by `engine.log.fold`.

Every surface (terminal, notebook, `engine tail`, diagnosis) shows what a run has logged from its `RunView`. A view is
frozen. Its long columns share storage with earlier views: a column only grows, and each view knows how many
of its entries belong to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec

from engine.log.beats import Beat
from engine.log.events import (
    FAIL,
    TRAINING,
    AnyEvent,
    CheckpointSaved,
    Compiled,
    DataReady,
    DecisionMade,
    Evaluated,
    GpuSample,
    HostSample,
    Imported,
    Judged,
    KernelCounts,
    MemoryMeasured,
    MemoryPlanned,
    ModelReady,
    Note,
    Phase,
    ProcessFound,
    ReceiptWritten,
    RunFinished,
    RunStarted,
    ScriptEnded,
    StackDump,
    StepDone,
    StudentSaved,
    TrainerExited,
    Watched,
    Wrote,
)
from engine.log.read import Liveness
from engine.log.table import HOST_FIELDS, STEP_FIELDS
from engine.log.table import Table as Table

Source: TypeAlias = str
"""Name of a log: one of SOURCES; `rank 1`, `rank 2`, ... for the log of a rank other than the first; `device HOST` or
`watch HOST` for those of a host other than the first."""
SOURCES: tuple[Source, ...] = ("events", "device", "watch")

GOING_ON = ("not started", "starting", "running", "stopping")
"""States of a run that has not ended."""
MEMORY_KEPT = 512
"""Number of points kept of each logged value with `mem` in its name."""
STEPS_KEPT = 8
"""Number of newest steps kept as whole events, because a row of the steps table has no phases."""
WROTE_KEPT, WROTE_FIRST = 1000, 10
"""Number of `Wrote` events kept: the first WROTE_FIRST and the newest."""
LONGEST_STATE = 32
HOST_LOST = "HOST_LOST"
"""State of an exit record: a machine was lost while the run was on it."""

SILENT_S = 120.0
"""Seconds without a written line after which a run on another machine counts as lost. Its sampler writes every few
seconds, and a mounted folder may show a file as it was a minute ago.
"""

IMPORTS, FIRST_STEP = "Python and torch", "the first step"
"""Names of the phases of a start that the log does not record as phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One session of one writer: `unix_s` is the wall time of its `t_s = 0`."""

    unix_s: float
    pid: int
    session: int = 1
    """Number of the session: 1 for the first opening of the log, and one more for each resume."""
    boot_id: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Failures that a rank other than the first reported in its newest session. Each text begins with `rank N: `."""

    clock: Clock
    failed: Mapping[str, Judged] = field(default_factory=dict)
    """Checks whose newest result on this rank is a failure, by id."""
    ended: RunFinished | None = None
    """End of a rank that failed; None if it did not fail."""
    ended_unix_s: float = 0.0


class Failed(NamedTuple):
    """A check that failed on a rank."""

    rank: int
    check: Judged


class ErrorNote(NamedTuple):
    """A note at level error, of a rank."""

    rank: int
    unix_s: float
    note: Note


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event as the log view of the terminal shows it."""

    unix_s: float
    source: Source
    event: AnyEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of a run according to its logs, as of the last event folded."""

    clocks: dict[Source, Clock] = field(default_factory=dict)
    first_unix_s: float | None = None
    last_unix_s: float | None = None
    sessions: int = 0
    """Number of sessions of the first rank so far: 1, and one more for each resume."""
    started: RunStarted | None = None
    started_unix_s: float | None = None
    watched: Watched | None = None
    """The watched script; None for a run of the engine."""
    process: ProcessFound | None = None
    """The process that was already running when watching began; it has no probe."""
    script_ended: ScriptEnded | None = None
    imported: Imported | None = None
    """Files of another tool that the run was imported from; None if it was not imported."""
    logged: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)
    """Step and newest value of each name that the script logs by `apr_watch.log`."""
    memory_logged: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Steps and values of each logged name with `mem` in it, thinned to MEMORY_KEPT."""
    session_unix_s: float | None = None
    first_rank_unix_s: float | None = None
    """The time of the newest line of the first rank's log."""
    before_unix_s: float | None = None
    """The time of the last line of the first rank's log in the previous session; None in the first session."""
    ranks: Mapping[int, RankReport] = field(default_factory=dict)
    """Reports of the ranks other than the first that have opened their logs."""
    further_hosts: Mapping[str, RunView] = field(default_factory=dict)
    """Readings of each host other than the first, and the records of its supervisor, by name of the host."""
    beats: tuple[Beat, ...] = ()
    """Progress of the ranks when the view was read; empty if a single process trains."""
    phase: Phase | None = None
    phase_unix_s: float | None = None
    start_phases: tuple[tuple[str, float], ...] = ()
    """The first phases of this session, with the time at which each began."""
    heartbeat_unix_s: float | None = None
    """Time of the trainer's newest line in this session, notes excluded: its last progress."""
    decisions: tuple[DecisionMade, ...] = ()
    data: DataReady | None = None
    models: dict[str, ModelReady] = field(default_factory=dict)
    steps: Table = field(default_factory=lambda: Table(STEP_FIELDS))
    recent_steps: tuple[StepDone, ...] = ()
    """The newest steps, STEPS_KEPT at most."""
    session_row: int = 0
    """The row of `steps` where this session begins."""
    evals: tuple[Evaluated, ...] = ()
    non_finite: tuple[Judged, ...] = ()
    wrote: tuple[Wrote, ...] = ()
    """The first WROTE_FIRST and the newest, WROTE_KEPT in all."""
    identities: tuple[Judged, ...] = ()
    """Results of the identities of a watched script, once for each level."""
    checkpoints: tuple[CheckpointSaved, ...] = ()
    note_lines: tuple[LogLine, ...] = ()
    """The notes of all logs as log lines, ordered by time."""
    memory_plan: MemoryPlanned | None = None
    memory_peak: MemoryMeasured | None = None
    """The newest measurement of this session."""
    compiles: tuple[Compiled, ...] = ()
    """Compiles of this session, in order."""
    kernel_counts: KernelCounts | None = None
    own_checks: dict[str, Judged] = field(default_factory=dict)
    """The newest result of each first-minute check of this session on the first rank, by its id."""
    audited_steps: tuple[int, ...] = ()
    """Steps of this session that were audited, in order."""
    student: StudentSaved | None = None
    receipt: ReceiptWritten | None = None
    stop_requested: str | None = None
    own_finished: RunFinished | None = None
    """End of this session on the first rank; None again once the run is resumed."""
    own_finished_unix_s: float = 0.0
    facts: dict[str, Any] | None = None
    host: HostSample | None = None
    """The newest readings of the host."""
    hosts: Table = field(default_factory=lambda: Table(HOST_FIELDS))
    gpus: dict[int, GpuSample] = field(default_factory=dict)
    gpu_tables: dict[int, Table] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Reason why a reading is missing, by field (`gpu0.gpu_power_w`). The first sample without the reading gives the
    reason, which is kept until the reading has a value."""
    trainer_pid: int | None = None
    trainer_started_unix_s: float | None = None
    own_exit: TrainerExited | None = None
    """End of this session as recorded by the first host's supervisor."""
    exit_unix_s: float | None = None
    launcher_gone: str | None = None
    alerts: dict[str, Judged] = field(default_factory=dict)
    """Active alerts by id."""
    alert_count: int = 0
    """Number of alerts raised in this session."""
    marks: tuple[LogLine, ...] = ()
    """The marks of a timeline over all sessions, ordered by time: alerts raised or cleared, compiles, and
    trainer starts."""
    asides: tuple[LogLine, ...] = ()
    """Every line of the supervisor's logs that is not a reading, ordered by time."""
    stack_dump: StackDump | None = None
    """The newest stack dump of this session."""
    stack_dump_unix_s: float | None = None
    lines: tuple[LogLine, ...] = ()
    """The newest LINES_KEPT events of all logs except readings, ordered by time."""

    @property
    def hosts_now(self) -> dict[str, RunView]:
        """The hosts of this session other than the first: those whose supervisor started after the previous session
        ended."""
        before = -math.inf if self.before_unix_s is None else self.before_unix_s
        return {
            host: view
            for host, view in sorted(self.further_hosts.items())
            if "watch" in view.clocks and view.clocks["watch"].unix_s > before
        }

    @property
    def rank_hosts(self) -> dict[int, str]:
        """The host of each rank of this session that has opened its log, by rank."""
        first = {0: self.clocks["events"].host} if "events" in self.clocks else {}
        return first | {rank: report.clock.host for rank, report in sorted(self.ranks_now.items())}

    @property
    def exit(self) -> TrainerExited | None:
        """End of this session as recorded by the first host's supervisor; if it recorded none, another host's record
        that a host was lost."""
        others = (view.own_exit for view in self.hosts_now.values())
        lost = (end for end in others if end is not None and end.state == HOST_LOST)
        return self.own_exit or next(lost, None)

    @property
    def ranks_now(self) -> dict[int, RankReport]:
        """The ranks of this session: those that opened their log after the previous session ended."""
        before = -math.inf if self.before_unix_s is None else self.before_unix_s
        return {rank: r for rank, r in self.ranks.items() if r.clock.unix_s > before}

    def failures(self, id: str) -> list[Failed]:
        """Return the ranks on which a check has failed in this session."""
        own = self.own_checks.get(id)
        failures = [] if own is None or own.level != FAIL else [Failed(0, own)]
        for rank, report in sorted(self.ranks_now.items()):
            if (check := report.failed.get(id)) is not None:
                # The first rank may have logged the failure for that rank.
                failures = [failed for failed in failures if failed.check.text != check.text]
                failures.append(Failed(rank, check))
        return failures

    @property
    def checks(self) -> dict[str, Judged]:
        """The newest result of each first-minute check of this session, by its id; a check that failed on any rank
        has failed."""
        checks = dict(self.own_checks)
        for id in {id: None for report in self.ranks_now.values() for id in report.failed}:
            first, *others = self.failures(id)
            text = "; ".join([first.check.text, *(failed.check.text for failed in others)])
            checks[id] = msgspec.structs.replace(first.check, text=text)
        return checks

    @property
    def errors(self) -> tuple[ErrorNote, ...]:
        """The notes of this session at level error, ordered by time; equal notes of several ranks count once."""
        begins = {f"rank {rank}": r.clock.unix_s for rank, r in self.ranks_now.items()}
        begins |= {source: clock.unix_s for source, clock in self.clocks.items()}
        errors = [
            ErrorNote(rank_of(line.source), line.unix_s, note)
            for line, note in zip(self.note_lines, self.notes, strict=True)
            if note.level == "error" and line.unix_s >= begins.get(line.source, math.inf)
        ]
        return tuple(without_repeats(errors))

    @property
    def first_failed_end(self) -> RunFinished | None:
        """The end record of the rank that failed before all others; None if that is rank 0, or if no rank failed."""
        failed = [report for report in self.ranks_now.values() if report.ended is not None]
        first = min(failed, key=lambda report: report.ended_unix_s, default=None)
        own = self.own_finished
        if first is None or (
            own is not None
            and own.state == "failed"
            and self.own_finished_unix_s <= first.ended_unix_s
        ):
            return None
        return first.ended

    @property
    def ended_by_rank(self) -> RunFinished | None:
        """The end record of the rank that ended this session, written by that rank or its launcher; None if it was
        rank 0 or no rank."""
        own, exit_ = self.own_finished, self.exit
        step = self.last_step if own is None else own.step
        if own is not None and own.state == "completed":
            return None
        # The first rank ended without a record, and the others failed because they lost the connection to it.
        if own is None and exit_ is not None and exit_.rank == 0:
            return None
        if (end := self.first_failed_end) is not None:
            return msgspec.structs.replace(end, step=step)
        if exit_ is None or not exit_.rank or not exit_.returncode:
            return None
        # If the rank recorded its own end, the first rank failed before it.
        if (own is not None and own.state == "stopped") or (
            (report := self.ranks_now.get(exit_.rank)) is not None and report.ended is not None
        ):
            return None
        code = exit_.returncode if exit_.returncode > 0 else 128 - exit_.returncode
        return RunFinished(state="failed", reason=exit_.sentence, exit_code=code, step=step)

    @property
    def finished(self) -> RunFinished | None:
        """The end of this session, as the run recorded it. If one rank ended the session, it is the end of that rank:
        the other ranks failed because they lost the connection to it."""
        # While its processes exist, the first rank may still record an end.
        own, exit_ = self.own_finished, self.exit
        if own is None and (exit_ is None or self.first_failed_end is None):
            return None
        # A rank that fails because a host was lost did not end the run.
        if (
            exit_ is not None
            and exit_.state == HOST_LOST
            and (own is None or own.state == "failed")
        ):
            return None
        return self.ended_by_rank or own

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(line.event for line in self.note_lines if isinstance(line.event, Note))

    @property
    def is_foreign(self) -> bool:
        """Whether the run was watched or imported, not made by the engine: it has no spec."""
        return any((self.watched, self.process, self.imported))

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole training, from the settings or from the framework of a watched script; None if
        unknown."""
        if self.started:
            return self.started.steps
        return self.recent_steps[-1].total_steps if self.recent_steps else None

    @property
    def batch(self) -> tuple[int, int] | None:
        """Number of the current batch in the epoch, and number of batches of the epoch, of a watched script."""
        newest = self.recent_steps[-1] if self.recent_steps else None
        if newest is None or newest.batch is None or not newest.batches:
            return None
        return newest.batch, newest.batches

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds of each phase of the newest step, by the device's clock."""
        return self.recent_steps[-1].phases if self.recent_steps else {}

    @property
    def host_s(self) -> Mapping[str, float]:
        """Seconds of each of HOST_PARTS between the records of the last two steps."""
        return self.recent_steps[-1].host if self.recent_steps else {}

    @property
    def last_step(self) -> int:
        """Number of optimizer steps done, 0 before the first."""
        done = self.steps.last("step")
        if done is not None:
            return int(done)
        return self.started.resumed_from or 0 if self.started else 0

    def eval_of(self, subject: str) -> Evaluated | None:
        """Return the newest evaluation of `student`, `teacher` or `untrained`."""
        return next((e for e in reversed(self.evals) if e.subject == subject), None)

    def state(self, alive: Liveness) -> str:
        """Return the state of the run: not started, starting, running, stopping, completed, stopped, failed, the
        state in the exit record (killed, crashed, ...), host_lost, vanished or unwatched.

        The trainer's own record of the end counts before its supervisor's. `vanished` is a dead run without a record
        of its end. `host_lost` is a dead run that began before this machine's last boot, or on another machine that
        has written nothing for SILENT_S. A resumed run is `starting` until it has done a step. `unwatched` is a
        process that was already running when watching began and is no longer watched: it may still run.
        """
        if self.finished is not None:
            return _end_state(self.finished.state)
        if self.exit is not None:
            return _end_state(self.exit.state.lower())
        elsewhere = self.host_elsewhere(alive.host) != ""
        if (
            not alive.trainer
            and not alive.supervisor
            and not (elsewhere and alive.silent_s < SILENT_S)
        ):
            if not self.clocks:
                return "not started"
            if self.ended_by_rank is not None:
                return "failed"
            if elsewhere or self._began_in_another_boot(alive):
                return "host_lost"
            return "vanished" if self.process is None else "unwatched"
        if self.process is not None:
            return "running"
        if self.stop_requested is not None:
            return "stopping"
        return "running" if len(self.steps) > self.session_row else "starting"

    def host_elsewhere(self, here: str) -> str:
        """Return the name of the machine of the run's newest session; empty if it is this machine, or unknown."""
        known = [clock for clock in self.clocks.values() if clock.host]
        host = max(known, key=lambda clock: clock.unix_s).host if known else ""
        return host if here and host != here else ""

    def _began_in_another_boot(self, alive: Liveness) -> bool:
        newest = max(self.clocks.values(), key=lambda clock: clock.unix_s)
        both_known = not {newest.boot_id, alive.boot_id} & {"", "unknown"}
        return both_known and newest.boot_id != alive.boot_id

    def tokens_per_second(self, window: int = 20) -> float | None:
        """Return tokens per second over the last `window` steps of this session.

        None until this session has steps with a known time.
        """
        begin = max(self.session_row, len(self.steps) - window)
        tokens, seconds = self.steps.values("tokens", begin), self.steps.values("step_s", begin)
        timed = [
            (n, s)
            for n, s in zip(tokens, seconds, strict=True)
            if n is not None and s is not None and 0 < s < math.inf
        ]
        return sum(n for n, _ in timed) / sum(s for _, s in timed) if timed else None

    def eta_s(self) -> float | None:
        """Return the seconds until the last step, at the pace of this session so far with its evaluations and
        checkpoints; None before this session's second step, or if the number of steps is unknown."""
        if self.total_steps is None or self.session_row >= len(self.steps):
            return None
        first_step, first_unix_s = self._step_and_time(self.session_row)
        last_step, last_unix_s = self._step_and_time(-1)
        if last_step <= first_step or last_unix_s <= first_unix_s:
            return None
        pace_s = (last_unix_s - first_unix_s) / (last_step - first_step)
        return max(0, self.total_steps - self.last_step) * pace_s

    @property
    def first_step_unix_s(self) -> float | None:
        """Wall time at which the first step of this session finished."""
        if self.session_row >= len(self.steps):
            return None
        return self._step_and_time(self.session_row)[1]

    def start_s(self) -> dict[str, float]:
        """Return the seconds of each phase from the trainer's start to its first step, or to its newest line before a
        first step."""
        opened, end = self.session_unix_s, self.first_step_unix_s or self.heartbeat_unix_s
        if opened is None or end is None:
            return {}
        begun = [("setting up", opened), *self.start_phases]
        if self.trainer_started_unix_s is not None and self.trainer_started_unix_s <= opened:
            begun.insert(0, (IMPORTS, self.trainer_started_unix_s))
        seconds: dict[str, float] = {}
        for (name, from_s), (_, to_s) in pairwise([*begun, ("", end)]):
            if from_s >= end:
                break
            name = FIRST_STEP if name == TRAINING else name
            seconds[name] = seconds.get(name, 0.0) + max(0.0, min(to_s, end) - from_s)
        return seconds

    def _step_and_time(self, row: int) -> tuple[float, float]:
        step, unix_s = self.steps.value("step", row), self.steps.value("unix_s", row)
        assert step is not None and unix_s is not None, "every step has a number and a time"
        return step, unix_s


def host_of(source: Source) -> str:
    """Return the host whose log `source` is; empty for a log of the first host."""
    kind, _, host = source.partition(" ")
    return host if kind in ("device", "watch") else ""


def rank_of(source: Source) -> int:
    """Return the rank whose log `source` is; 0 for the logs of the first rank and of supervisors."""
    return int(source.removeprefix("rank ")) if source.startswith("rank ") else 0


def without_repeats(notes: Iterable[ErrorNote]) -> list[ErrorNote]:
    """Leave out each note whose text a lower rank has also written."""
    notes = list(notes)
    lowest: dict[str, int] = {}
    for rank, _, note in notes:
        text = note.text.removeprefix(f"rank {rank}: ")
        lowest[text] = min(rank, lowest.get(text, rank))
    return [e for e in notes if lowest[e.note.text.removeprefix(f"rank {e.rank}: ")] == e.rank]


def _end_state(state: str) -> str:
    """Return the state named by an end record; a general state if the record's is not a word or is a state of a
    running run."""
    is_word = len(state) <= LONGEST_STATE and state.isidentifier()
    return state if is_word and state not in GOING_ON else "failed"
