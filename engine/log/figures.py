"""The numbers in the charts of a run and their references, for the terminal, the report and the notebook.

A training loss is the mean over the rows of one step of an objective that mixes cross entropy and divergence. A
held-out loss is a cross entropy, always over the same rows, for the student as for the teacher. So only held-out
losses can be compared with the teacher's, and they have a separate chart.

    gap closed    (start - student) / (start - teacher), each a held-out cross entropy
    lanes         readings as shares of their maximum: utilisation of 100 %, memory of the total
    mem, own      memory of a GPU or of the machine used by all processes, and the part used by the trainer. On a GPU
                  that is NVML's number for it and its descendants, or, if NVML gives none and the run has one GPU,
                  the bytes reserved by its allocator; on the machine its resident bytes
"""

# Shapes: C cells of a lane

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.log.events import Compiled, Judged
from engine.log.table import Table
from engine.log.view import LogLine, RunView

LOSSES = ("loss", "ce", "kd")
STUDENT_SUBJECTS = ("untrained", "student")
LEAST_GAP = 1e-3
"""Smallest gap between start and teacher of which the closed share is shown, in nats."""


def held_out(view: RunView) -> list[tuple[float, float]]:
    """Return step and loss, in nats, of each evaluation of the student on held-out text, beginning with the untrained
    student; of several evaluations at one step, the newest."""
    losses = {
        float(done.step): done.loss
        for done in view.evals
        if done.subject in STUDENT_SUBJECTS and done.loss is not None
    }
    return sorted(losses.items())


def references(view: RunView) -> dict[str, float]:
    """Return the held-out losses with which the student's is compared: those of the teacher and of the untrained
    student."""
    losses = {}
    for subject, name in (("teacher", "teacher"), ("untrained", "start")):
        done = view.eval_of(subject)
        if done is not None and done.loss is not None and math.isfinite(done.loss):
            losses[name] = done.loss
    return losses


def gap_closed(view: RunView) -> float | None:
    """Return the share of the held-out gap between the untrained student and the teacher that the student has closed;
    None if it is not known, if the student was not evaluated after it began, or if the gap is below LEAST_GAP."""
    known, losses = references(view), held_out(view)
    if len(losses) < 2 or len(known) < 2 or known["start"] - known["teacher"] < LEAST_GAP:
        return None
    newest = losses[-1][1]
    share = (known["start"] - newest) / (known["start"] - known["teacher"])
    return share if math.isfinite(share) else None


def gap_text(view: RunView) -> str:
    """Format the share of the gap that is closed; empty if it is not known."""
    share = gap_closed(view)
    if share is None:
        return ""
    return f"gap closed: {share:.0%}" if share >= 0 else f"worse than at the start: {share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart: a column over the unix time of its rows."""

    name: str
    of: str = ""
    """Device of a reading, such as `CPU` or `GPU 0`."""
    table: Table
    column: str
    full: float = 1.0
    """Divisor of the values for drawing."""
    whole: float | None = None
    """For a column of free bytes, the total from which the values are first subtracted; None for any other column."""

    def drawn(self, value: float) -> float:
        """Return a value of the column as it is drawn."""
        return (value if self.whole is None else self.whole - value) / self.full

    @property
    def times(self) -> str:
        """Name of the column with the time; in a table of steps, the non-decreasing one."""
        return "clock_s" if "clock_s" in self.table.columns else "unix_s"

    # For a lane, which is drawn in percent.

    @property
    def newest(self) -> float | None:
        """The newest reading as a share."""
        value = self.table.last(self.column)
        return None if value is None or not math.isfinite(value) else self.drawn(value) / 100

    def at(self, unix_s: float) -> float | None:
        """Return the reading at a time as a share."""
        return self.shares([unix_s, math.nextafter(unix_s, math.inf)])[0]

    def shares(self, edges_s: Sequence[float]) -> list[float | None]:
        """Return the mean share in each of the C intervals between C + 1 non-decreasing unix times, (C,)."""
        means = self.table.means(self.column, "unix_s", edges_s)
        return [None if mean is None else self.drawn(mean) / 100 for mean in means]


def lanes_of(view: RunView) -> list[Curve]:
    """Return the lanes of each GPU, the most important first; without a GPU, the lanes of CPU and memory. A lane is a
    reading in percent of its maximum; it is left out if the maximum is unknown or nothing was read."""
    readings: list[tuple[str, str, Table, str, float | None]] = []
    for index, table in sorted(view.gpu_tables.items()):
        newest = view.gpus.get(index)
        has_counters = table.last("sm_util_pct") is not None
        busy = ("SM", "sm_util_pct") if has_counters else ("GPU", "gpu_util_pct")
        total = None if newest is None else newest.gpu_mem_total_bytes
        limit = None if newest is None else newest.gpu_power_limit_w
        suffix, device = str(index) if len(view.gpu_tables) > 1 else "", f"GPU {index}"
        readings += [
            (f"{busy[0]}{suffix}", device, table, busy[1], 100.0),
            (f"mem{suffix}", device, table, "gpu_mem_used_bytes", total),
            (f"own{suffix}", device, *_trainer_memory(view, index), total),
            (f"W{suffix}", device, table, "gpu_power_w", limit),
            (f"TC{suffix}", device, table, "tensor_util_pct", 100.0),
        ]
    kinds = 5
    if not readings:
        cores, total = _cores(view), _machine_bytes(view)
        full_cpu = None if cores is None else 100.0 * cores
        readings = [
            ("CPU", "CPU", view.hosts, "family_cpu_pct", full_cpu),
            ("mem", "CPU", view.hosts, "host_available_bytes", total),
            ("own", "CPU", view.hosts, "trainer_rss_bytes", total),
        ]
        kinds = 3
    return [
        Curve(
            name=name,
            of=device,
            table=table,
            column=column,
            full=full / 100,
            whole=full if column == "host_available_bytes" else None,
        )
        for kind in range(kinds)
        for name, device, table, column, full in readings[kind::kinds]
        if full and _was_read(table, column)
    ]


def _was_read(table: Table, column: str) -> bool:
    """Return whether a column has any finite reading: the newest entry may be absent, as after the trainer's end."""
    return table.last(column) is not None or table.range(column).low is not None


def _trainer_memory(view: RunView, index: int) -> tuple[Table, str]:
    """Return the table and column of the trainer's memory on a GPU."""
    table = view.gpu_tables[index]
    # The allocator reports one process, without the GPU that the process uses.
    if len(view.gpu_tables) == 1 and not _was_read(table, "family_gpu_mem_bytes"):
        return view.hosts, "memory_reserved_bytes"
    return table, "family_gpu_mem_bytes"


def _machine_bytes(view: RunView) -> float | None:
    """Return the memory of the machine in bytes."""
    return None if view.host is None else view.host.host_total_bytes


def _cores(view: RunView) -> float | None:
    facts = view.facts or {}
    count = facts.get("cpu_effective", facts.get("cpu_count"))
    return float(count) if isinstance(count, int | float) else None


# The charts of reports and notebooks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at one time: an alert or a compile."""

    unix_s: float
    sign: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart: curves with one y axis over the time of the run."""

    id: str
    title: str
    unit: str = ""
    """`s`, `bytes`, `%` (the axis is then 0 to 100 %), or empty."""
    curves: tuple[Curve, ...]
    levels: tuple[tuple[str, float], ...] = ()
    marks: tuple[Mark, ...] = ()
    points: bool = False
    """Whether each row is shown as a point, because rows are few and values between them are not known."""


EVALS = ("step", "clock_s", "loss")


def figures_of(view: RunView) -> list[Figure]:
    """Return the charts of a run, in order."""
    steps = view.steps
    figures = []
    if len(held_out(view)) > 1:
        closed = gap_text(view)
        figures.append(
            Figure(
                id="held-out",
                title=f"held-out loss, nats{closed and '; '}{closed}",
                curves=(Curve(name="student", table=_evaluated(view), column="loss"),),
                levels=tuple(references(view).items()),
                points=True,
            )
        )
    losses = [Curve(name=name, table=steps, column=name) for name in LOSSES]
    figures.append(Figure(id="training", title="training loss, nats", curves=tuple(losses)))
    pace = (("step", "step_s"), ("data", "data_s"), ("teacher (host)", "teacher_s"))
    figures += [
        _steps_figure("pace", "step time, and its wait for data", steps, pace, unit="s"),
        _steps_figure("rate", "learning rate", steps, (("lr", "lr"),)),
        _steps_figure("norm", "gradient norm", steps, (("norm", "grad_norm"),)),
    ]
    lanes, marks = lanes_of(view), marks_of(view)
    for device in dict.fromkeys(lane.of for lane in lanes):
        curves = tuple(lane for lane in lanes if lane.of == device)
        figures.append(Figure(id=device, title=device, unit="%", curves=curves, marks=marks))
    figures.append(
        Figure(
            id="memory",
            title="memory: used by all processes, and by the trainer",
            unit="bytes",
            curves=_memory_curves(view),
        )
    )
    return figures


def _steps_figure(
    id: str, title: str, steps: Table, columns: Sequence[tuple[str, str]], *, unit: str = ""
) -> Figure:
    """Return a chart of those of `columns` (name and column of the steps table) that have a value; of the first if
    none has."""
    curves = [Curve(name=name, table=steps, column=column) for name, column in columns]
    shown = [curve for curve in curves if _was_read(steps, curve.column)] or curves[:1]
    return Figure(id=id, title=title, unit=unit, curves=tuple(shown))


def _memory_curves(view: RunView) -> tuple[Curve, ...]:
    """Return curves of the used memory of each GPU and of the machine, each followed by the trainer's part."""
    curves = []
    for index, table in sorted(view.gpu_tables.items()):
        curves.append(Curve(name=f"GPU {index}", table=table, column="gpu_mem_used_bytes"))
        own, column = _trainer_memory(view, index)
        curves.append(Curve(name=f"own of GPU {index}", table=own, column=column))
    hosts, total = view.hosts, _machine_bytes(view)
    if total is not None:
        in_use = Curve(name="machine", table=hosts, column="host_available_bytes", whole=total)
        curves.append(in_use)
    return (*curves, Curve(name="own RSS", table=hosts, column="trainer_rss_bytes"))


def first_seen(view: RunView, line: LogLine) -> tuple[int, float]:
    """Return the first step of an alert, and its time; for a line without a step, 0 and the time of the line."""
    event, steps = line.event, view.steps
    step = (event.first_step or event.step) if isinstance(event, Judged) else 0
    row = min(steps.find("step", step), len(steps) - 1) if step else -1
    at = steps.value("clock_s", row) if row >= 0 else None
    return (0, line.unix_s) if at is None else (step, at)


def marks_of(view: RunView) -> tuple[Mark, ...]:
    """Return a mark for each alert raised and each compile of a run."""
    marks = []
    for line in view.marks:
        event = line.event
        if isinstance(event, Judged) and event.raises_alert:
            marks.append(Mark(unix_s=first_seen(view, line)[1], sign="!", text=f"alert {event.id}"))
        elif isinstance(event, Compiled):
            late = " while a step waited" if event.after_warm_up else ""
            sign = "C" if late else "c"
            marks.append(Mark(unix_s=line.unix_s, sign=sign, text=f"compiled {event.kernel}{late}"))
    return tuple(marks)


def _evaluated(view: RunView) -> Table:
    """Return the student's held-out losses as a table; the loss before training is placed at the first step."""
    table, steps = Table(EVALS), view.steps
    losses = held_out(view)
    rows = (
        [min(steps.find("step", step), len(steps) - 1) for step, _ in losses] if len(steps) else []
    )
    places = [(steps.value("step", row), steps.value("clock_s", row)) for row in rows]
    return table.extended(
        {"step": step, "clock_s": at, "loss": loss}
        for (_, loss), (step, at) in zip(losses, places, strict=False)
    )
