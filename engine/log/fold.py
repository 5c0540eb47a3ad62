"""Fold the logs of a run into its view: `fold(view, source, events) -> view`. `Follower` reads the logs as they are
written and folds what is new.

The fold is pure. The same lines give the same view: live or a year later, in one batch or in many, and whichever
of the logs is read first.

A resumed run repeats the steps after its last checkpoint. The view keeps the repetition and drops what it
replaces, so that a step is never counted twice.

The processes of a run open their logs one after the other: the supervisor first, the trainer once torch is
loaded. As soon as either has opened its log again, the other's record of how the earlier session ended is no
longer shown as the state of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.log.beats import read_beats
from engine.log.events import (
    ALERT,
    CHECK,
    FAIL,
    IDENTITY,
    NUMBER,
    PASS,
    STAGE,
    SUSPICION,
    WITHDRAWN,
    AnyEvent,
    CheckpointSaved,
    Compiled,
    DataReady,
    DecisionMade,
    Evaluated,
    FactsRead,
    GpuSample,
    HostSample,
    Imported,
    Judged,
    KernelCounts,
    LauncherGone,
    Logged,
    LogOpened,
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
    StepRow,
    StopRequested,
    StudentSaved,
    TrainerExited,
    TrainerStarted,
    Watched,
    Wrote,
)
from engine.log.folder import RunFolder
from engine.log.read import (
    LINES_KEPT,
    READ_BYTES,
    BrokenLog,
    Liveness,
    LogReader,
    RankReader,
)
from engine.log.table import ABSENT, GPU_FIELDS, Table, columns_of, split
from engine.log.view import (
    MEMORY_KEPT,
    SOURCES,
    STEPS_KEPT,
    WROTE_FIRST,
    WROTE_KEPT,
    Clock,
    LogLine,
    RankReport,
    RunView,
    Source,
    host_of,
    rank_of,
)

if TYPE_CHECKING:
    from engine.log.table import Numbers

LOG_LINES_KEPT = LINES_KEPT
_NEWEST: dict[type, str] = {
    DataReady: "data",
    MemoryPlanned: "memory_plan",
    MemoryMeasured: "memory_peak",
    KernelCounts: "kernel_counts",
    StudentSaved: "student",
    ReceiptWritten: "receipt",
    Watched: "watched",
    ScriptEnded: "script_ended",
    ProcessFound: "process",
    Imported: "imported",
    RunFinished: "own_finished",
}
"""View fields that hold the newest event of a kind."""
_ALL: dict[type, str] = {
    DecisionMade: "decisions",
    Compiled: "compiles",
    Evaluated: "evals",
    CheckpointSaved: "checkpoints",
}
"""View fields that hold all events of a kind."""

OF_RANKS = (LogOpened, Judged, Note, RunFinished)
"""Event kinds that the view needs from the log of a rank other than the first."""

START_PHASES_KEPT = 500
"""Maximum number of phases kept of a start, because tokenizing a large corpus logs its progress as phases."""

Sample = TypeVar("Sample", HostSample, GpuSample)
_NOT_SHOWN = frozenset({HostSample, GpuSample, StepRow})


def fold(view: RunView, source: Source, events: Sequence[AnyEvent]) -> RunView:
    """Return `view` after `events` of one log, in the order they were read.

    The result depends neither on how the events are split over calls nor on the order in which the logs are
    read.
    """
    if not events:
        return view
    if host_of(source):
        return _fold_host(view, source, events)
    changes = _Changes(view, source)
    if rank_of(source):
        changes.take_rank(events)
    else:
        for part in _parts(events):
            changes.take(part)
    return changes.finish()


def _parts(events: Sequence[AnyEvent]) -> Iterator[Sequence[AnyEvent]]:
    """Yield groups of consecutive events; an event that opens a session or rewinds the steps begins a new group."""
    begins = (row for row, event in enumerate(events) if type(event) in (LogOpened, RunStarted))
    for begin, end in pairwise(sorted({0, *begins, len(events)})):
        yield events[begin:end]


def _fold_host(view: RunView, source: Source, events: Sequence[AnyEvent]) -> RunView:
    """Fold a log of a host other than the first into that host's own view, and add its lines to the run's lines."""
    kind, host = source.split(" ", 1)
    own = _Changes(view.further_hosts.get(host, RunView()), kind)
    for part in _parts(events):
        own.take(part)
    changes = _Changes(view, source)
    changes.lines = [msgspec.structs.replace(line, source=source) for line in own.lines]
    changes.asides = [msgspec.structs.replace(line, source=source) for line in own.asides]
    changes.changes["further_hosts"] = {**view.further_hosts, host: own.finish()}
    return changes.finish()


class _Changes:
    """Collects the changes of some events, so that a long log is folded in one pass and the view is not copied
    once per line."""

    def __init__(self, view: RunView, source: Source) -> None:
        self.view, self.source = view, source
        self.clock = view.clocks.get(source)
        self.changes: dict[str, Any] = {}
        self.lists: dict[str, list[Any]] = {}
        self.notes: list[LogLine] = []
        self.lines: list[LogLine] = []
        self.marks: list[LogLine] = []
        self.asides: list[LogLine] = []

    def get(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.view, name)

    def list_of(self, name: str) -> list[Any]:
        """Return a tuple of the view as a list that may be appended to."""
        if name not in self.lists:
            self.lists[name] = list(getattr(self.view, name))
        return self.lists[name]

    def dict_of(self, name: str) -> dict[str, Any]:
        """Return a dict of the view as a copy that may be changed, made once: a copy for each event would cost
        quadratic time."""
        if name not in self.changes:
            self.changes[name] = dict(getattr(self.view, name))
        copied: dict[str, Any] = self.changes[name]
        return copied

    def unix_s(self, event: AnyEvent) -> float:
        return self.clock.unix_s + event.t_s if self.clock else event.t_s

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Take consecutive events of one session. If the event that opens the session is among them, it is the
        first."""
        groups, others = split(events)
        tables = {name: columns_of(name, rows) for name, rows in groups.items()}
        if others and isinstance(others[0], LogOpened):
            self.open_session(others[0])
        self.show(events)
        progress_s = [float(columns["t_s"].max()) for columns in tables.values()]
        starts = [float(columns["t_s"].min()) for columns in tables.values()]
        times = [event.t_s for event in others]
        opened_s = self.clock.unix_s if self.clock else 0.0
        self.span(opened_s + min(starts + times), opened_s + max(progress_s + times))
        if self.source == "events":
            before_s = self.get("first_rank_unix_s")
            newest = opened_s + max(progress_s + times)
            self.changes["first_rank_unix_s"] = (
                newest if before_s is None else max(before_s, newest)
            )
        # A note is not progress: a monitoring thread may write one while training hangs.
        progress_s += [event.t_s for event in others if type(event) is not Note]
        if progress_s and self.source == "events":
            heartbeat_s = self.get("heartbeat_unix_s")
            self.changes["heartbeat_unix_s"] = max(
                opened_s + max(progress_s), opened_s if heartbeat_s is None else heartbeat_s
            )
        for event in others:
            self.take_other(event, self.unix_s(event))
        for name, columns in tables.items():
            self.extend(name, columns, opened_s)
        for name, rows in groups.items():
            if name == "step":
                whole = [row for row in rows if type(row) is StepDone]
                recent = (*self.get("recent_steps"), *whole)
                self.changes["recent_steps"] = recent[-STEPS_KEPT:]
            elif name == "host":
                self.changes["host"] = self.newest(rows, "")
            else:
                index = rows[0].index
                self.changes["gpus"] = {**self.get("gpus"), index: self.newest(rows, f"{name}.")}
        self.drop_outdated()

    def take_rank(self, events: Sequence[AnyEvent]) -> None:
        """Keep only the failures that a rank other than the first has logged; all else is also in the first rank's
        log."""
        rank = rank_of(self.source)
        ranks = dict(self.get("ranks"))
        for event in events:
            if isinstance(event, LogOpened):
                clock = Clock(
                    unix_s=event.unix_s, pid=event.pid, boot_id=event.boot_id, host=event.host
                )
                ranks[rank] = RankReport(clock=clock)
                continue
            # A log without `log_opened` is broken from its beginning.
            report = ranks.get(rank) or RankReport(clock=Clock(unix_s=0.0, pid=0))
            if isinstance(event, Judged):
                failed = {id: check for id, check in report.failed.items() if id != event.id}
                report = ranks[rank] = replace(report, failed=failed)
            if (failure := failure_of_rank(rank, event)) is None:
                continue
            unix_s = report.clock.unix_s + event.t_s
            if isinstance(failure, Judged):
                report = replace(report, failed={**report.failed, failure.id: failure})
            elif isinstance(failure, RunFinished):
                report = replace(report, ended=failure, ended_unix_s=unix_s)
            ranks[rank] = report
            line = LogLine(unix_s=unix_s, source=self.source, event=failure)
            if isinstance(failure, Note):
                self.notes.append(line)
            self.asides.append(line)
            self.lines.append(line)
        self.changes["ranks"] = ranks

    def extend(self, name: str, columns: dict[str, Numbers], opened_s: float) -> None:
        """Add rows to a table, with the columns that are computed from the given ones."""
        import numpy as np

        columns = dict(columns)
        columns["unix_s"] = opened_s + columns.pop("t_s")
        if name == "host":
            self.changes["hosts"] = self.get("hosts").extended_by(columns)
        elif name == "step":
            table: Table = self.get("steps")
            before = table.last("clock_s")
            times, step_s = columns["unix_s"], columns["step_s"]
            floor = -np.inf if before is None else before
            columns["clock_s"] = np.maximum.accumulate(np.maximum(times, floor))
            columns["tokens_per_s"] = pace = np.full(len(times), ABSENT)
            with np.errstate(over="ignore"):
                np.divide(columns["tokens"], step_s, out=pace, where=step_s > 0)
            self.changes["steps"] = table.extended_by(columns)
        else:
            tables: dict[int, Table] = self.get("gpu_tables")
            index = int(name.removeprefix("gpu"))
            table = tables.get(index) or Table(GPU_FIELDS)
            self.changes["gpu_tables"] = {**tables, index: table.extended_by(columns)}

    def span(self, earliest: float, latest: float) -> None:
        """Extend the time range that the view covers."""
        first, last = self.get("first_unix_s"), self.get("last_unix_s")
        self.changes["first_unix_s"] = earliest if first is None else min(first, earliest)
        self.changes["last_unix_s"] = latest if last is None else max(last, latest)

    def open_session(self, event: LogOpened) -> None:
        session = self.clock.session + 1 if self.clock else 1
        self.clock = Clock(
            unix_s=event.unix_s,
            pid=event.pid,
            session=session,
            boot_id=event.boot_id,
            host=event.host,
        )
        self.changes["clocks"] = {**self.get("clocks"), self.source: self.clock}
        if self.source == "events":
            self.changes |= {"sessions": session, "session_unix_s": self.unix_s(event)}
            self.changes["before_unix_s"] = self.get("first_rank_unix_s")
            self.lists["decisions"] = []
            self.lists["compiles"] = []
            self.lists["start_phases"] = []
            self.lists["audited_steps"] = []
            self.changes |= {"own_checks": {}}
            self.changes |= {"memory_plan": None, "memory_peak": None, "kernel_counts": None}
            self.forget_session()
        elif self.source == "device":
            self.changes |= {"host": None, "gpus": {}, "absent": {}}
        else:
            self.changes |= {"trainer_pid": None, "trainer_started_unix_s": None}
            self.changes["launcher_gone"] = None
            self.changes |= {"alerts": {}, "alert_count": 0}
            self.changes |= {"stack_dump": None, "stack_dump_unix_s": None}
            self.forget_exit()

    def forget_session(self) -> None:
        """Drop the trainer's state of the previous session."""
        self.changes |= {
            "own_finished": None,
            "own_finished_unix_s": 0.0,
            "stop_requested": None,
            "phase": None,
            "phase_unix_s": None,
            "heartbeat_unix_s": None,
            "started_unix_s": None,
            "session_row": len(self.get("steps")),
        }

    def forget_exit(self) -> None:
        self.changes |= {"own_exit": None, "exit_unix_s": None}

    def show(self, events: Sequence[AnyEvent]) -> None:
        """Make log lines of the newest events, LINES_KEPT at most.

        Within a session `t_s` never decreases: it is monotonic and follows `seq`.
        """

        def line(event: AnyEvent) -> LogLine:
            return LogLine(unix_s=self.unix_s(event), source=self.source, event=event)

        shown = (event for event in reversed(events) if type(event) not in _NOT_SHOWN)
        if self.source == "events":
            self.lines += reversed([line(event) for event in islice(shown, LOG_LINES_KEPT)])
            return
        asides = [line(event) for event in shown][::-1]
        self.asides += asides
        self.lines += asides[-LOG_LINES_KEPT:]

    def take_other(self, event: AnyEvent, unix_s: float) -> None:
        if isinstance(event, Compiled | RunStarted) or (
            isinstance(event, Judged) and event.by == ALERT
        ):
            self.marks.append(LogLine(unix_s=unix_s, source=self.source, event=event))
        if (name := _NEWEST.get(type(event))) is not None:
            self.changes[name] = event
        elif (name := _ALL.get(type(event))) is not None:
            self.list_of(name).append(event)
        match event:
            case RunStarted():
                self.changes |= {"started": event, "started_unix_s": unix_s}
                self.rewind(event.resumed_from or 0)
            case Wrote():
                self.list_of("wrote").append(event)
                del self.list_of("wrote")[WROTE_FIRST : WROTE_FIRST - WROTE_KEPT]
            case Phase():
                self.changes |= {"phase": event, "phase_unix_s": unix_s}
                if (
                    self.source == "events"
                    and len(self.list_of("start_phases")) < START_PHASES_KEPT
                ):
                    self.list_of("start_phases").append((event.name, unix_s))
            case ModelReady():
                self.dict_of("models")[event.role] = event
            case Judged():
                self.take_judged(event)
            case Logged():
                newest = {name: (event.step, value) for name, value in event.values.items()}
                self.dict_of("logged").update(newest)
                for name, value in event.values.items():
                    if "mem" in name.lower() and value is not None:
                        traces = self.dict_of("memory_logged")
                        points = (*traces.get(name, ()), (event.step, value))
                        traces[name] = points if len(points) <= MEMORY_KEPT else points[::2]
            case Note():
                self.notes.append(LogLine(unix_s=unix_s, source=self.source, event=event))
            case RunFinished():
                self.changes["own_finished_unix_s"] = unix_s
            case StopRequested():
                self.changes["stop_requested"] = event.reason
            case FactsRead():
                self.changes["facts"] = event.facts
            case TrainerStarted():
                self.changes |= {"trainer_pid": event.trainer_pid, "launcher_gone": None}
                self.changes["trainer_started_unix_s"] = unix_s
                self.forget_exit()
            case TrainerExited():
                self.changes |= {"own_exit": event, "exit_unix_s": unix_s}
            case LauncherGone():
                self.changes["launcher_gone"] = event.how
            case StackDump():
                self.changes |= {"stack_dump": event, "stack_dump_unix_s": unix_s}
            case _:
                pass  # other kinds appear only as log lines

    def take_judged(self, event: Judged) -> None:
        if event.by == NUMBER:
            self.list_of("non_finite").append(event)
        elif event.by == IDENTITY:
            if event.level == PASS and WITHDRAWN in event.numbers:
                kept = self.list_of("identities")
                kept[:] = [old for old in kept if (old.id, old.level) != (event.id, SUSPICION)]
            self.list_of("identities").append(event)
        elif event.by == ALERT and event.level == PASS:
            self.dict_of("alerts").pop(event.id, None)
        elif event.by == ALERT:
            self.dict_of("alerts")[event.id] = event
            self.changes["alert_count"] = self.get("alert_count") + 1
        elif event.by == CHECK:
            self.dict_of("own_checks")[event.id] = event
            # For a step that was not audited, only a failed comparison is logged.
            if event.id.startswith(STAGE) and event.level != FAIL:
                audited = self.list_of("audited_steps")
                if event.step not in audited[-1:]:
                    audited.append(event.step)

    def rewind(self, step: int) -> None:
        """Drop the steps and events after `step`, which a resume from `step` repeats."""
        table: Table = self.get("steps")
        keep = table.find("step", step + 1)
        if keep < len(table):
            self.changes["steps"] = table.cut(keep)
        self.changes["session_row"] = keep
        for name in ("evals", "non_finite", "checkpoints"):
            self.lists[name] = [event for event in self.list_of(name) if event.step <= step]
        self.changes["student"] = self.changes["receipt"] = None

    def newest(self, samples: Sequence[Sample], prefix: str) -> Sample:
        """Return the newest sample, and add the reasons for its missing readings to `absent`.

        The first sample that lacks a reading gives the reason; later ones do not repeat it.
        """
        absent = dict(self.get("absent"))
        since = {name.removeprefix(prefix): 0 for name in absent if name.startswith(prefix)}
        for row, sample in enumerate(samples):
            for name, reason in sample.absent.items():
                absent[prefix + name], since[name] = reason, row + 1
        for name, row in since.items():
            if any(getattr(sample, name, None) is not None for sample in samples[row:]):
                del absent[prefix + name]
        self.changes["absent"] = absent
        return samples[-1]

    def finish(self) -> RunView:
        self.changes |= {name: tuple(items) for name, items in self.lists.items()}
        if self.notes:
            self.changes["note_lines"] = _in_order(self.view.note_lines, self.notes)
        if self.marks:
            self.changes["marks"] = _in_order(self.view.marks, self.marks)
        if self.asides:
            self.changes["asides"] = _in_order(self.view.asides, self.asides)
        if self.lines:
            self.changes["lines"] = _in_order(self.view.lines, self.lines)[-LOG_LINES_KEPT:]
        return replace(self.view, **self.changes)

    def drop_outdated(self) -> None:
        """Drop the records of an earlier session's end once the supervisor or the trainer of the next session has
        opened its log.

        Sessions are compared first and clocks second, so that a step of the wall clock within a run that was
        never resumed does not hide its end.
        """
        trainer, supervisor = self.get("clocks").get("events"), self.get("clocks").get("watch")
        if trainer is None or supervisor is None:
            return
        if supervisor.session > trainer.session and supervisor.unix_s > trainer.unix_s:
            self.forget_session()
        ended_unix_s = self.get("exit_unix_s")
        if (
            ended_unix_s is not None
            and trainer.session > supervisor.session
            and trainer.unix_s > ended_unix_s
        ):
            self.forget_exit()


def failure_of_rank(rank: int, event: AnyEvent) -> Judged | Note | RunFinished | None:
    """Return the failure in a line of another rank's log, with the rank in its text; None for any other line."""
    match event:
        case Judged(by="check", level="fail"):
            return msgspec.structs.replace(event, text=f"rank {rank}: {event.text}")
        case Note(level="error"):
            return msgspec.structs.replace(event, text=f"rank {rank}: {event.text}")
        case RunFinished(state="failed"):
            return msgspec.structs.replace(event, reason=f"rank {rank}: {event.reason}")
    return None


def _in_order(lines: tuple[LogLine, ...], new: list[LogLine]) -> tuple[LogLine, ...]:
    return tuple(sorted([*lines, *new], key=attrgetter("unix_s", "source", "event.seq")))


class Follower:
    """Polls the logs of one run. `view` is the newest frozen RunView; `alive` has the processes that existed at the
    last poll."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        logs = run.logs()
        self._readers: dict[Source, LogReader] = {
            source: LogReader(logs[source], older_as_rows=True) for source in SOURCES
        }
        self._further: dict[Source, RankReader] = {}
        """Readers of the logs of the other ranks and hosts, added as they appear."""
        self.view = RunView()
        self.alive = Liveness(trainer=False, supervisor=False)
        self.is_behind = False
        """Whether the newest `read_all` reached its time limit before the end of the logs."""
        self._shown: dict[Source, int] = {}

    def new_lines(self) -> list[LogLine]:
        """Return the log lines of the view that no earlier call returned, ordered by time.

        Lines are identified by log and number, not by time: a line of one log may be read after a later line
        of another.
        """
        lines = [
            line for line in self.view.lines if line.event.seq > self._shown.get(line.source, -1)
        ]
        for line in lines:
            self._shown[line.source] = max(line.event.seq, self._shown.get(line.source, -1))
        return lines

    def reader(self, source: Source) -> LogReader:
        """Return the reader of one of the logs."""
        return self._readers[source]

    @property
    def share_read(self) -> float:
        """Share of the bytes on disk that have been read, 0 to 1."""
        sizes = {reader: _size(reader.path) for reader in self._readers.values()}
        done = sum(min(reader.read_bytes, size) for reader, size in sizes.items())
        return done / sum(sizes.values()) if sum(sizes.values()) else 1.0

    @property
    def state(self) -> str:
        """State of the run according to the view; valid once everything on disk has been read."""
        return self.view.state(self.alive)

    def poll(self, max_bytes: int = READ_BYTES) -> bool:
        """Read new lines, at most about `max_bytes` of each log; return whether the view changed.

        Raises BrokenLog if a log cannot be read further, after folding the sound lines of all three logs.
        """
        # Liveness is read before the logs: a process that ends in between has already written its last line.
        self.alive = self.run.liveness()
        before = self.view
        fault: BrokenLog | None = None
        for source in SOURCES:
            try:
                events: Sequence[AnyEvent] = self._readers[source].poll(max_bytes)
            except BrokenLog as broken:
                events, fault = broken.before, fault or broken
            self.view = fold(self.view, source, events)
        self._poll_further(max_bytes)
        if fault is not None:
            raise fault
        return self.view is not before

    def _poll_further(self, max_bytes: int) -> None:
        """Read the logs of the other hosts, and the failures in the other ranks' logs, which are few lines.

        A log that cannot be read further becomes an error in the view, so that the run's other logs are still read.
        """
        has_ranks = False
        for source, path in self.run.logs().items():
            if source in SOURCES:
                continue
            reader = self._further.setdefault(source, RankReader(path))
            events = reader.poll(max_bytes)
            if rank_of(source):
                has_ranks = True
                events = [event for event in events if type(event) in OF_RANKS]
            self.view = fold(self.view, source, events)
        if has_ranks and (beats := tuple(read_beats(self.run))) != self.view.beats:
            self.view = replace(self.view, beats=beats)

    def _bytes_read(self) -> int:
        readers = [*self._readers.values(), *self._further.values()]
        return sum(reader.read_bytes for reader in readers)

    def read_all(self, until_s: float = math.inf) -> RunView:
        """Read until nothing new is left, or until a time of the monotonic clock, in which case `is_behind` is set.

        Raises BrokenLog only at the end: every poll reads a part of each log, so that a broken log does not prevent
        the others from being read to their end. `view` then has all that could be read.
        """
        fault: BrokenLog | None = None
        self.is_behind = True
        while True:
            before = self._bytes_read()
            try:
                self.poll()
            except BrokenLog as broken:
                fault = broken
            if self._bytes_read() == before:
                break
            if time.monotonic() >= until_s:
                return self.view
        self.is_behind = False
        if fault is not None:
            raise fault
        return self.view


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
