"""The logs of a run folded into its view: `fold(view, source, events) -> view`.

The fold is pure: the same lines give the same view, live or a year later, in one batch or in many, whichever
of the three logs is read first, and whether their steps and readings come as events or as packs.

A resumed run repeats the steps after its last checkpoint. The view keeps the repetition and drops
what it replaces, so that a step is never counted twice.

The processes of a run open their logs one after the other: the supervisor first, the trainer once
torch is loaded. As soon as either has opened its log again, what the other wrote about how the
earlier session ended is no longer shown as the state of the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, islice, pairwise
from operator import itemgetter, le, lt
from typing import Any, TypeVar

import msgspec

from engine.log.events import (
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
from engine.log.extremes import Known
from engine.log.pack import (
    NOT_A_READING,
    PACKED_GPUS,
    PACKED_HOSTS,
    PACKED_STEPS,
    Columns,
    Pack,
)
from engine.log.read import decode_line
from engine.log.skim import LINES_KEPT, Skimmed, StepRow, phases_of
from engine.log.table import GPU_FIELDS, Column, Packed, Table, as_packed, pack
from engine.log.view import Clock, LineKey, LogLine, RunView, Source

LOG_LINES_KEPT = LINES_KEPT

Sample = TypeVar("Sample", HostSample, GpuSample)
_READINGS = frozenset({HostSample, GpuSample})
_NOT_SHOWN = _READINGS | {StepRow}
"""A step of which only the columns were read is no line: a reader gives the newest lines whole."""


def fold(view: RunView, source: Source, events: Sequence[Skimmed] | Sequence[Pack]) -> RunView:
    """`view` after `events` of one log, or packs of them, in the order they were read from it.

    How the lines are dealt into batches, and in which turn the logs are read, changes nothing.
    """
    if not events:
        return view
    batch = _Batch(view, source)
    if isinstance(events[0], Pack):
        batch.take_packs(events)  # type: ignore[arg-type]
        return batch.finish()
    lines: Sequence[Skimmed] = events  # type: ignore[assignment]
    openings = (row for row, event in enumerate(lines) if row and type(event) is LogOpened)
    for begin, end in pairwise((0, *openings, len(lines))):
        batch.take_session(lines[begin:end])
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
        self.span(min(times), max(times))
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
        self.drop_outdated()

    def take_packs(self, packs: Sequence[Pack]) -> None:
        """Packs of one session of the writer, none of which opens it."""
        opened_s = self.clock.unix_s if self.clock else 0.0
        self.span(
            opened_s + min(one.earliest_s for one in packs),
            opened_s + max(one.latest_s for one in packs),
        )
        heard = [one.heard_s for one in packs if one.heard_s is not None]
        if heard and self.source == "events":
            self.changes["heartbeat_unix_s"] = opened_s + heard[-1]
        others = [decode_line(line, "") for one in packs for line in one.others]
        others_s = [opened_s + event.t_s for event in others]
        self.show(others, others_s)
        for event, unix_s in zip(others, others_s, strict=True):
            self.take(event, unix_s)
        for line in (line for one in packs for line in one.readings):
            self.take_sample(decode_line(line, ""))  # type: ignore[arg-type]
        if steps := [one.steps for one in packs if one.steps is not None]:
            table: Table = self.get("steps")
            times, columns = _joined(steps, PACKED_STEPS, opened_s)
            in_order = all(one.in_order for one in packs) and all(
                before.last_s <= after.earliest_s for before, after in pairwise(packs)
            )
            if not in_order or (table.last("clock_s") or times[0]) > times[0]:
                times = array("d", _never_back(table, times))
            columns["clock_s"] = as_packed(times), [bytes(len(times))]
            self.changes["steps"] = table.extended_packed(columns, _known(steps))
            self.changes["phases"] = phases_of([one.phases for one in packs if one.steps][-1])
        if hosts := [one.hosts for one in packs if one.hosts is not None]:
            _, columns = _joined(hosts, PACKED_HOSTS, opened_s)
            self.changes["hosts"] = self.get("hosts").extended_packed(columns)
        for index in {index for one in packs for index in one.gpus}:
            gpus = [one.gpus[index] for one in packs if index in one.gpus]
            self.extend_gpu(index, _joined(gpus, PACKED_GPUS, opened_s)[1])
        self.note_newest()
        self.drop_outdated()

    def span(self, earliest: float, latest: float) -> None:
        """Widen the time that the view tells of."""
        first, last = self.get("first_unix_s"), self.get("last_unix_s")
        self.changes["first_unix_s"] = earliest if first is None else min(first, earliest)
        self.changes["last_unix_s"] = latest if last is None else max(last, latest)

    def take_sample(self, sample: HostSample | GpuSample) -> None:
        if isinstance(sample, HostSample):
            self.hosts.append(sample)
        else:
            self.gpus.setdefault(sample.index, []).append(sample)

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
            self.changes |= {"checks": {}, "checked_again": (0, 0.0)}
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
                if event.id in self.get("checks"):
                    count, seconds = self.get("checked_again")
                    self.changes["checked_again"] = count + 1, seconds + (event.cost_s or 0.0)
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
            columns = {**_columns(self.steps, times), "clock_s": _never_back(table, times)}
            self.changes["steps"] = table.extended_by(columns)
            self.changes["phases"] = phases_of(self.steps[-1].phases)
            self.steps = []
        if self.hosts:
            packed = self.columns_of(self.hosts, PACKED_HOSTS)
            self.changes["hosts"] = self.get("hosts").extended_packed(packed)
        for index, samples in self.gpus.items():
            self.extend_gpu(index, self.columns_of(samples, PACKED_GPUS))
        self.note_newest()

    def columns_of(
        self, samples: Sequence[HostSample | GpuSample], names: Sequence[str]
    ) -> dict[str, Packed]:
        columns = {name: pack([getattr(sample, name) for sample in samples]) for name in names}
        return {**columns, "unix_s": pack([self.unix_s(sample) for sample in samples])}

    def extend_gpu(self, index: int, columns: Mapping[str, Packed]) -> None:
        tables: dict[int, Table] = self.get("gpu_tables")
        table = tables.get(index) or Table(GPU_FIELDS)
        self.changes["gpu_tables"] = {**tables, index: table.extended_packed(columns)}

    def note_newest(self) -> None:
        """Keep the newest values of the samples gathered so far."""
        if self.hosts:
            self.changes["host"] = self.newest(self.get("host"), self.hosts, "")
            self.hosts = []
        for index, samples in self.gpus.items():
            newest = self.newest(self.get("gpus").get(index), samples, f"gpu{index}.")
            self.changes["gpus"] = {**self.get("gpus"), index: newest}
        self.gpus = {}

    def newest(self, before: Sample | None, samples: Sequence[Sample], prefix: str) -> Sample:
        """The newest value of each reading; puts the reasons for those without one into `absent`.

        A reading without a value was either not taken at that tick, and keeps the one it had, or it
        is gone. The first sample of those that lack it says why, the others do not repeat it.
        """
        said: dict[str, tuple[int, str]] = {}
        for row, sample in enumerate(samples):
            if sample.absent:
                said |= {name: (row, reason) for name, reason in sample.absent.items()}
        fields = [n for n in samples[0].__struct_fields__ if n not in NOT_A_READING]
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


def _joined(
    parts: Sequence[Columns], names: Sequence[str], opened_s: float
) -> tuple[array[float], dict[str, Packed]]:
    """The times of packs, and their columns behind each other, by name; the times are `unix_s`."""
    elapsed = array("d")
    for part in parts:
        elapsed.frombytes(part.numbers_of(0))
    times = array("d", [opened_s + t_s for t_s in elapsed])
    columns: dict[str, Packed] = {
        name: (
            [part.numbers_of(place) for part in parts],
            [part.absent_of(place) for part in parts],
        )
        for place, name in enumerate(names, start=1)
    }
    columns["unix_s"] = as_packed(times), [bytes(len(times))]
    return times, columns


def _known(parts: Sequence[Columns]) -> dict[str, list[Known]]:
    """The ranges that are in packs of steps, by the name of the column."""
    known: dict[str, list[Known]] = {}
    first = 0
    for part in parts:
        for place, ranges in part.ranges.items():
            known.setdefault(PACKED_STEPS[place - 1], []).append((first, part.rows, ranges))
        first += part.rows
    return known


def _never_back(steps: Table, times: Sequence[float]) -> list[float]:
    """The greatest time up to each of `times`, those in the table included."""
    return list(accumulate([steps.last("clock_s") or times[0], *times], max))[1:]


def _newest_lines(lines: tuple[LogLine, ...], new: list[LogLine]) -> tuple[LogLine, ...]:
    """The newest of both in the order of time."""
    merged = [*lines, *new]
    # Almost always the new lines are in order and the latest: then nothing has to be sorted.
    times = [line.unix_s for line in merged]
    of_one_log = len({line.source for line in merged}) == 1
    if not all(map(le if of_one_log else lt, times, times[1:])):
        # Times and numbers, in the order of `LogLine.key`, of which a property would be asked for each.
        keys = [(line.unix_s, line.source, line.event.seq) for line in merged]
        merged = [merged[place] for place in sorted(range(len(merged)), key=keys.__getitem__)]
    return tuple(merged[-LOG_LINES_KEPT:])
