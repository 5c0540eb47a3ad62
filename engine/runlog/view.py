"""A run folded into one value: `fold(view, source, events) -> view`.

Every surface (terminal, notebook, `engine tail`, diagnosis) draws a `RunView` and nothing else. The
fold is pure: the same lines give the same view, live or a year later, in one batch or in many, and
whichever of the three logs is read first. A view is frozen. Its long columns share storage with the
views before it: a column only grows, and each view knows how many of its entries it owns.

A resumed run repeats the steps after its last checkpoint. The view keeps the repetition and drops
what it replaces, so that a step is never counted twice.

The processes of a run open their logs one after the other: the supervisor first, the trainer once
torch is loaded. As soon as either has opened its log again, what the other wrote about how the
earlier session ended is no longer shown as the state of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, islice, pairwise
from operator import itemgetter, le, lt
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from engine.runlog.events import (
    AlertCleared,
    AlertRaised,
    AnyEvent,
    Checked,
    CheckpointSaved,
    Compiled,
    DataReady,
    DecisionMade,
    Evaluated,
    FactsRead,
    GpuSample,
    HostSample,
    KernelCounts,
    LauncherGone,
    LogOpened,
    MemoryMeasured,
    MemoryPlanned,
    ModelReady,
    NonFinite,
    Note,
    Phase,
    RunFinished,
    RunStarted,
    StackDump,
    StepDone,
    StopRequested,
    StudentSaved,
    TrainerExited,
    TrainerStarted,
    VocabularyCut,
)
from engine.runlog.read import Liveness
from engine.runlog.skim import LINES_KEPT, Skimmed, StepRow, phases_of
from engine.runlog.table import Column
from engine.runlog.table import Table as Table

Source = Literal["events", "device", "watch"]
SOURCES: tuple[Source, ...] = get_args(Source)

STEP_FIELDS = (
    "step",
    "loss",
    "ce",
    "kd",
    "agreement",
    "lr",
    "grad_norm",
    "rows",
    "labelled",
    "tokens",
    "step_s",
    "data_s",
    "teacher_s",
    "position",
    "unix_s",
    "tokens_per_s",
    "clock_s",
)
"""`tokens_per_s` is absent where no time passed; `clock_s` is `unix_s` that never goes back: while a
clock that was set back catches up, it stands still."""
HOST_FIELDS = (
    "unix_s",
    "host_available_bytes",
    "trainer_rss_bytes",
    "trainer_cpu_pct",
    "load1",
    "psi_memory_full_avg10_pct",
    "psi_io_full_avg10_pct",
    "major_faults_per_s",
    "duty_pct",
)
GPU_FIELDS = (
    "unix_s",
    "gpu_util_pct",
    "gpu_mem_util_pct",
    "gpu_mem_used_bytes",
    "gpu_power_w",
    "sm_clock_mhz",
    "gpu_temperature_c",
    "sm_util_pct",
    "sm_occupancy_pct",
    "tensor_util_pct",
    "dram_util_pct",
    "slowed",
)
LOG_LINES_KEPT = LINES_KEPT

LineKey: TypeAlias = tuple[float, Source, int]
"""Time, log and number of a line: an order of all lines that does not depend on who read them
when."""

Sample = TypeVar("Sample", HostSample, GpuSample)
_READINGS = frozenset({HostSample, GpuSample})
_NOT_SHOWN = _READINGS | {StepRow}
"""A step of which only the columns were read is no line: a reader gives the newest lines whole."""
_NOT_A_READING = frozenset({"v", "seq", "t_s", "nf", "index", "absent"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One session of one writer: `unix_s` of its `t_s = 0`."""

    unix_s: float
    pid: int
    session: int = 1
    """1 for the first opening of the log, and one more for each resume."""
    boot_id: str = ""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event as the log pane shows it."""

    unix_s: float
    source: Source
    event: AnyEvent

    @property
    def key(self) -> LineKey:
        return self.unix_s, self.source, self.event.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything the three logs of a run say, as of the last event folded."""

    clocks: dict[Source, Clock] = field(default_factory=dict)
    first_unix_s: float | None = None
    last_unix_s: float | None = None
    sessions: int = 0
    """How many trainers have worked on this run: 1, and one more for each resume."""
    started: RunStarted | None = None
    started_unix_s: float | None = None
    session_unix_s: float | None = None
    phase: Phase | None = None
    phase_unix_s: float | None = None
    heartbeat_unix_s: float | None = None
    """When the trainer last got somewhere: its newest line of this session that is no note."""
    decisions: tuple[DecisionMade, ...] = ()
    data: DataReady | None = None
    models: dict[str, ModelReady] = field(default_factory=dict)
    steps: Table = field(default_factory=lambda: Table(STEP_FIELDS))
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the newest step, by the device's clock."""
    session_row: int = 0
    """The row of `steps` where this session begins."""
    evals: tuple[Evaluated, ...] = ()
    non_finite: tuple[NonFinite, ...] = ()
    checkpoints: tuple[CheckpointSaved, ...] = ()
    notes: tuple[Note, ...] = ()
    note_keys: tuple[LineKey, ...] = ()
    """Where each note stands in time: notes come from more than one log."""
    memory_plan: MemoryPlanned | None = None
    memory_peak: MemoryMeasured | None = None
    """The newest measurement of this session."""
    compiles: tuple[Compiled, ...] = ()
    """What this session had to compile, in order."""
    kernel_counts: KernelCounts | None = None
    vocabulary_cut: VocabularyCut | None = None
    checks: dict[str, Checked] = field(default_factory=dict)
    """The newest answer of each first-minute check of this session, by its id."""
    student: StudentSaved | None = None
    stop_requested: str | None = None
    finished: RunFinished | None = None
    """How this session ended, in its own words; None again as soon as the run is resumed."""
    facts: dict[str, Any] | None = None
    host: HostSample | None = None
    """The newest readings. One that is not taken at every tick keeps its value until a sample says
    that it is gone."""
    hosts: Table = field(default_factory=lambda: Table(HOST_FIELDS))
    gpus: dict[int, GpuSample] = field(default_factory=dict)
    gpu_tables: dict[int, Table] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Why a reading is missing, by field (`gpu0.gpu_power_w`); kept from the sample that said so
    until there is a value."""
    trainer_pid: int | None = None
    trainer_started_unix_s: float | None = None
    exit: TrainerExited | None = None
    exit_unix_s: float | None = None
    launcher_gone: str | None = None
    alerts: dict[str, AlertRaised] = field(default_factory=dict)
    """Those that stand, by id."""
    alert_count: int = 0
    """How often one was raised in this session."""
    marks: tuple[LogLine, ...] = ()
    """What stands out on a time line, of all sessions, in the order of time: alerts that were raised or
    cleared, compiles, and where a trainer began."""
    asides: tuple[LogLine, ...] = ()
    """Every line of the supervisor's logs that is no reading, in the order of time."""
    stack_dump: StackDump | None = None
    """The newest of this session."""
    stack_dump_unix_s: float | None = None
    lines: tuple[LogLine, ...] = ()
    """The newest LOG_LINES_KEPT events of all logs, readings left out, in the order of time."""

    @property
    def total_steps(self) -> int | None:
        return self.started.steps if self.started else None

    @property
    def last_step(self) -> int:
        """Optimizer steps done, 0 before the first."""
        done = self.steps.last("step")
        if done is not None:
            return int(done)
        return self.started.resumed_from or 0 if self.started else 0

    def eval_of(self, subject: str) -> Evaluated | None:
        """The newest evaluation of `student`, `teacher` or `untrained`."""
        return next((e for e in reversed(self.evals) if e.subject == subject), None)

    def state(self, alive: Liveness) -> str:
        """One word: not started, starting, running, stopping, completed, stopped, failed, the word
        of the exit record (killed, crashed, ...), host_lost or vanished.

        What the run wrote itself comes first, then what its parent saw; `vanished` is a dead run of
        which nobody wrote the end, `host_lost` one that began in another boot. A resumed run is
        starting again until it has done a step.
        """
        if self.finished is not None:
            return self.finished.state
        if self.exit is not None:
            return self.exit.state.lower()
        if not alive.trainer and not alive.supervisor:
            if not self.clocks:
                return "not started"
            return "host_lost" if self._began_in_another_boot(alive) else "vanished"
        if self.stop_requested is not None:
            return "stopping"
        return "running" if len(self.steps) > self.session_row else "starting"

    def _began_in_another_boot(self, alive: Liveness) -> bool:
        newest = max(self.clocks.values(), key=lambda clock: clock.unix_s)
        known = not {newest.boot_id, alive.boot_id} & {"", "unknown"}
        return known and newest.boot_id != alive.boot_id

    def tokens_per_second(self, window: int = 20) -> float | None:
        """Tokens per second inside the last `window` steps of this session.

        None before there are any whose time is known.
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
        """Seconds to the last step at the pace of this session so far, evaluations and checkpoints
        included; None until two steps have shown a pace."""
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
        """When the first step of this session was done."""
        if self.session_row >= len(self.steps):
            return None
        return self._step_and_time(self.session_row)[1]

    def _step_and_time(self, row: int) -> tuple[float, float]:
        step, unix_s = self.steps.value("step", row), self.steps.value("unix_s", row)
        assert step is not None and unix_s is not None, "every step has a number and a time"
        return step, unix_s


def fold(view: RunView, source: Source, events: Sequence[Skimmed]) -> RunView:
    """`view` after `events` of one log, in the order they were read from it.

    How the lines are dealt into batches, and in which turn the logs are read, changes nothing.
    """
    if not events:
        return view
    batch = _Batch(view, source)
    openings = (row for row, event in enumerate(events) if row and type(event) is LogOpened)
    for begin, end in pairwise((0, *openings, len(events))):
        batch.take_session(events[begin:end])
    return batch.finish()


class _Batch:
    """Gathers the changes of one batch, so that a long log is folded in one pass and not copied
    once per line. Steps and readings, of which there may be a million, become columns together."""

    def __init__(self, view: RunView, source: Source) -> None:
        self.view, self.source = view, source
        self.clock = view.clocks.get(source)
        self.changes: dict[str, Any] = {}
        self.lists: dict[str, list[Any]] = {}
        self.notes: list[tuple[LineKey, Note]] = []
        self.lines: list[LogLine] = []
        self.marks: list[LogLine] = []
        self.asides: list[LogLine] = []
        self.steps: list[StepDone | StepRow] = []
        self.hosts: list[HostSample] = []
        self.gpus: dict[int, list[GpuSample]] = {}

    def get(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.view, name)

    def list_of(self, name: str) -> list[Any]:
        """A tuple of the view as a list that this batch may append to."""
        if name not in self.lists:
            self.lists[name] = list(getattr(self.view, name))
        return self.lists[name]

    def unix_s(self, event: Skimmed) -> float:
        return self.clock.unix_s + event.t_s if self.clock else event.t_s

    def take_session(self, events: Sequence[Skimmed]) -> None:
        """Events of one session of the writer, its opening first when it is among them."""
        if isinstance(events[0], LogOpened):
            self.open_session(events[0])
        opened_s = self.clock.unix_s if self.clock else 0.0
        times = [opened_s + event.t_s for event in events]
        if self.source == "events":
            self.hear(events, times)
        first, last = self.get("first_unix_s"), self.get("last_unix_s")
        earliest, latest = min(times), max(times)
        self.changes["first_unix_s"] = earliest if first is None else min(first, earliest)
        self.changes["last_unix_s"] = latest if last is None else max(last, latest)
        self.show(events, times)
        # In runs of one kind: a million of steps and readings come for each of the others.
        begin = 0
        for kind, group in groupby(map(type, events)):
            end = begin + sum(1 for _ in group)
            if kind is StepDone or kind is StepRow:
                self.steps += events[begin:end]  # type: ignore[arg-type]
            elif kind is HostSample:
                self.hosts += events[begin:end]  # type: ignore[arg-type]
            elif kind is GpuSample:
                for sample in events[begin:end]:
                    self.gpus.setdefault(sample.index, []).append(sample)  # type: ignore[arg-type,union-attr]
            else:
                for event, unix_s in zip(events[begin:end], times[begin:end], strict=True):
                    self.take(event, unix_s)  # type: ignore[arg-type]
            begin = end
        self.flush()

    def hear(self, events: Sequence[Skimmed], times: list[float]) -> None:
        """Note when the trainer last got somewhere. A note is no sign of that: a thread that only
        watches may write one."""
        for event, unix_s in zip(reversed(events), reversed(times), strict=True):
            if type(event) is not Note:
                self.changes["heartbeat_unix_s"] = unix_s
                return

    def open_session(self, event: LogOpened) -> None:
        session = self.clock.session + 1 if self.clock else 1
        self.clock = Clock(
            unix_s=event.unix_s, pid=event.pid, session=session, boot_id=event.boot_id
        )
        self.changes["clocks"] = {**self.get("clocks"), self.source: self.clock}
        if self.source == "events":
            self.changes |= {"sessions": session, "session_unix_s": self.unix_s(event)}
            self.lists["decisions"] = []
            self.lists["compiles"] = []
            self.changes["checks"] = {}
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
        """What the trainer said about its last session is no longer so."""
        self.changes |= {
            "finished": None,
            "stop_requested": None,
            "phase": None,
            "phase_unix_s": None,
            "heartbeat_unix_s": None,
            "started_unix_s": None,
            "session_row": len(self.get("steps")),
        }

    def forget_exit(self) -> None:
        self.changes |= {"exit": None, "exit_unix_s": None}

    def show(self, events: Sequence[Skimmed], times: list[float]) -> None:
        """Make log lines of the newest events: more than are kept cannot be seen.

        Within a session times never go back: they are of a monotonic clock, in the order of `seq`.
        """
        if self.source != "events":
            self.asides += [
                LogLine(unix_s=unix_s, source=self.source, event=event)  # type: ignore[arg-type]
                for event, unix_s in zip(events, times, strict=True)
                if type(event) not in _READINGS
            ]
        shown = (
            LogLine(unix_s=times[row], source=self.source, event=events[row])  # type: ignore[arg-type]
            for row in range(len(events) - 1, -1, -1)
            if type(events[row]) not in _NOT_SHOWN
        )
        self.lines += reversed(list(islice(shown, LOG_LINES_KEPT)))

    def take(self, event: AnyEvent, unix_s: float) -> None:
        if isinstance(event, AlertRaised | AlertCleared | Compiled | RunStarted):
            self.marks.append(LogLine(unix_s=unix_s, source=self.source, event=event))
        match event:
            case RunStarted():
                self.flush()
                self.changes |= {"started": event, "started_unix_s": unix_s}
                self.rewind(event.resumed_from or 0)
            case Phase():
                self.changes |= {"phase": event, "phase_unix_s": unix_s}
            case DecisionMade():
                self.list_of("decisions").append(event)
            case DataReady():
                self.changes["data"] = event
            case ModelReady():
                self.changes["models"] = {**self.get("models"), event.role: event}
            case MemoryPlanned():
                self.changes["memory_plan"] = event
            case MemoryMeasured():
                self.changes["memory_peak"] = event
            case Compiled():
                self.list_of("compiles").append(event)
            case KernelCounts():
                self.changes["kernel_counts"] = event
            case VocabularyCut():
                self.changes["vocabulary_cut"] = event
            case Checked():
                self.changes["checks"] = {**self.get("checks"), event.id: event}
            case Evaluated():
                self.list_of("evals").append(event)
            case NonFinite():
                self.list_of("non_finite").append(event)
            case CheckpointSaved():
                self.list_of("checkpoints").append(event)
            case Note():
                self.notes.append(((unix_s, self.source, event.seq), event))
            case StudentSaved():
                self.changes["student"] = event
            case StopRequested():
                self.changes["stop_requested"] = event.reason
            case RunFinished():
                self.changes["finished"] = event
            case FactsRead():
                self.changes["facts"] = event.facts
            case TrainerStarted():
                self.changes |= {"trainer_pid": event.trainer_pid, "launcher_gone": None}
                self.changes["trainer_started_unix_s"] = unix_s
                self.forget_exit()
            case TrainerExited():
                self.changes |= {"exit": event, "exit_unix_s": unix_s}
            case LauncherGone():
                self.changes["launcher_gone"] = event.how
            case AlertRaised():
                self.changes["alerts"] = {**self.get("alerts"), event.id: event}
                self.changes["alert_count"] = self.get("alert_count") + 1
            case AlertCleared():
                standing = self.get("alerts")
                self.changes["alerts"] = {n: a for n, a in standing.items() if n != event.id}
            case StackDump():
                self.changes |= {"stack_dump": event, "stack_dump_unix_s": unix_s}
            case _:
                pass  # the others are log lines and no more

    def rewind(self, step: int) -> None:
        """Drop what a resume from `step` replaces."""
        table: Table = self.get("steps")
        keep = len(table)
        while keep and (table.value("step", keep - 1) or 0) > step:
            keep -= 1
        if keep < len(table):
            self.changes["steps"] = table.cut(keep)
        self.changes["session_row"] = keep
        for name in ("evals", "non_finite", "checkpoints"):
            self.lists[name] = [event for event in self.list_of(name) if event.step <= step]
        self.changes["student"] = None

    def flush(self) -> None:
        """Turn the steps and readings gathered so far, all of one session, into rows."""
        if self.steps:
            opened_s = self.clock.unix_s if self.clock else 0.0
            times = [opened_s + step.t_s for step in self.steps]
            table: Table = self.get("steps")
            clock_s = accumulate([table.last("clock_s") or times[0], *times], max)
            columns = {**_columns(self.steps, times), "clock_s": list(clock_s)[1:]}
            self.changes["steps"] = table.extended_by(columns)
            self.changes["phases"] = phases_of(self.steps[-1])
            self.steps = []
        if self.hosts:
            self.changes["hosts"] = self.extended(self.get("hosts"), self.hosts)
            self.changes["host"] = self.newest(self.get("host"), self.hosts, "")
            self.hosts = []
        for index, samples in self.gpus.items():
            table = self.get("gpu_tables").get(index, Table(GPU_FIELDS))
            tables = {**self.get("gpu_tables"), index: self.extended(table, samples)}
            newest = self.newest(self.get("gpus").get(index), samples, f"gpu{index}.")
            self.changes |= {"gpu_tables": tables, "gpus": {**self.get("gpus"), index: newest}}
        self.gpus = {}

    def extended(self, table: Table, samples: Sequence[HostSample | GpuSample]) -> Table:
        columns = {
            name: [getattr(sample, name) for sample in samples]
            for name in table.columns
            if name != "unix_s"
        }
        return table.extended_by({**columns, "unix_s": [self.unix_s(s) for s in samples]})

    def newest(self, before: Sample | None, samples: Sequence[Sample], prefix: str) -> Sample:
        """The newest value of each reading; puts the reasons for those without one into `absent`.

        A reading without a value was either not taken at that tick, and keeps the one it had, or it
        is gone. The first sample of those that lack it says why, the others do not repeat it.
        """
        said: dict[str, tuple[int, str]] = {}
        for row, sample in enumerate(samples):
            if sample.absent:
                said |= {name: (row, reason) for name, reason in sample.absent.items()}
        fields = [n for n in samples[0].__struct_fields__ if n not in _NOT_A_READING]
        values: dict[str, Any] = {}
        for name in fields:
            for row in range(len(samples) - 1, said.get(name, (-1,))[0], -1):
                if (value := getattr(samples[row], name)) is not None:
                    values[name] = value
                    break
        reasons = {name: reason for name, (_, reason) in said.items() if name not in values}
        unknown = set(fields) - values.keys() - reasons.keys()
        if before is not None:
            values |= {n: v for n in unknown if (v := getattr(before, n)) is not None}
        known = {prefix + name for name in values}
        self.changes["absent"] = {
            **{name: reason for name, reason in self.get("absent").items() if name not in known},
            **{prefix + name: reason for name, reason in reasons.items()},
        }
        return msgspec.structs.replace(samples[-1], **values)

    def finish(self) -> RunView:
        self.changes |= {name: tuple(items) for name, items in self.lists.items()}
        if self.notes:
            known = zip(self.view.note_keys, self.view.notes, strict=True)
            notes = sorted([*known, *self.notes], key=itemgetter(0))
            self.changes["note_keys"] = tuple(key for key, _ in notes)
            self.changes["notes"] = tuple(note for _, note in notes)
        if self.marks:
            marks = [*self.view.marks, *self.marks]
            self.changes["marks"] = tuple(sorted(marks, key=lambda line: line.key))
        if self.asides:
            asides = [*self.view.asides, *self.asides]
            self.changes["asides"] = tuple(sorted(asides, key=lambda line: line.key))
        if self.lines:
            self.changes["lines"] = _newest_lines(self.view.lines, self.lines)
        self.drop_outdated()
        return replace(self.view, **self.changes)

    def drop_outdated(self) -> None:
        """Forget the end of an earlier session once either process of the next has opened its log.

        Sessions are counted first and clocks compared second: a step of the wall clock within a run
        that was never resumed must not undo its end.
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


def _columns(steps: Sequence[StepDone | StepRow], times: list[float]) -> dict[str, Column]:
    """STEP_FIELDS of many steps; written out because this is three times as fast as by name."""
    return {
        "step": [step.step for step in steps],
        "loss": [step.loss for step in steps],
        "ce": [step.ce for step in steps],
        "kd": [step.kd for step in steps],
        "agreement": [step.agreement for step in steps],
        "lr": [step.lr for step in steps],
        "grad_norm": [step.grad_norm for step in steps],
        "rows": [step.rows for step in steps],
        "labelled": [step.labelled for step in steps],
        "tokens": [step.tokens for step in steps],
        "step_s": [step.step_s for step in steps],
        "data_s": [step.data_s for step in steps],
        "teacher_s": [step.teacher_s for step in steps],
        "position": [step.position for step in steps],
        "unix_s": times,
        "tokens_per_s": [
            step.tokens / step.step_s if step.step_s is not None and step.step_s > 0 else None
            for step in steps
        ],
    }


def _newest_lines(lines: tuple[LogLine, ...], new: list[LogLine]) -> tuple[LogLine, ...]:
    """The newest of both in the order of time."""
    merged = [*lines, *new]
    # Almost always the new lines are in order and the latest: then nothing has to be sorted.
    times = [line.unix_s for line in merged]
    of_one_log = len({line.source for line in merged}) == 1
    if not all(map(le if of_one_log else lt, times, times[1:])):
        merged.sort(key=lambda line: line.key)
    return tuple(merged[-LOG_LINES_KEPT:])
