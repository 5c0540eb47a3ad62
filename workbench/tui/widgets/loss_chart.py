"""The loss chart of a run: losses, marks, step time and the machine's readings over one x axis, its timeline, with a
cursor and its keys.

What is on top is one of `CURVES`: the losses on held-out text with those that they are compared with, the
training loss, or its parts. The x axis is the step; before the first step it is the time.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive

from engine.log.downsample import GAP, Trace, points_of, window_traces
from engine.log.figures import LOSSES, gap_text, held_out, lanes_of, references
from engine.log.table import Table
from engine.log.text import clock_text, number_text
from engine.log.view import RunView
from engine.units import format_count, format_seconds, format_value
from workbench.feed import Snapshot
from workbench.marks import PRIORITY, SIGNS, Mark
from workbench.plot.chart import (
    Band,
    Chart,
    LaneRow,
    Level,
    Line,
    Point,
    Sign,
    columns_of,
    margin_of,
)
from workbench.plot.window import Window
from workbench.tui.widgets.chart_view import ChartView

CURVES = ("held-out", "training", "parts")
"""Charts that can be shown on top."""
LETTERS = {"loss": "L", "ce": "C", "kd": "K"}


class LossChart(ChartView, can_focus=True):
    """Draws the timeline of a snapshot, with a window on the run and a cursor in it."""

    HELP = """# Time line

    On top the student's losses on held-out text, with the teacher's and its own at the start as levels: only
    these can be compared, and the gap closed says how far the student has come. Without evaluations, or on
    demand, the training loss is on top, or the training loss with its parts CE and KD; a teacher has no loss that
    corresponds to their mixture. Below it in bands of their own the training loss, unless it is on top, and the step
    times, then lanes: how busy the GPU's SMs were, its memory (`mem`: of all processes, `own`: the trainer's), its
    power
    as a share of the limit and how busy its tensor cores were, per GPU; without a GPU, CPU and memory; before the
    first step they are all there is. Every column shows the lowest
    and highest of all its steps. NaN and infinity are drawn as crosses; lines break there and at gaps.

    Marks: × (X in ASCII) not finite, ! alert, R resumed, C a compile that a step waited for, s checkpoint
    saved, c any other compile. Of several in one column the first of these is drawn, and the line under the cursor
    names all. On a small screen they are drawn on the axis.
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "cursor", tooltip="the cursor to an earlier step"),
        Binding("right", "move(1)", "cursor", tooltip="the cursor to a later step"),
        Binding("shift+left,less_than_sign", "move(-10)", "faster", tooltip="ten columns back"),
        Binding("shift+right,greater_than_sign", "move(10)", "faster", tooltip="ten columns on"),
        Binding("home", "end_of(-1)", "first", tooltip="the cursor to the first step"),
        Binding("end", "end_of(1)", "last", tooltip="the cursor to the newest step"),
        Binding("left_square_bracket", "mark(-1)", "mark", tooltip="to the mark before"),
        Binding("right_square_bracket", "mark(1)", "mark", tooltip="to the next mark"),
        Binding("enter", "open", "open mark", tooltip="details of the mark under the cursor"),
        Binding("plus,equals_sign", "zoom(0.5)", "zoom in", tooltip="half as much of the run"),
        Binding("minus", "zoom(2.0)", "zoom out", tooltip="twice as much of the run"),
        Binding("0", "whole", "whole run", tooltip="the whole run again"),
        Binding(
            "c", "curves", "curves", tooltip="held-out losses, the training loss, or its parts"
        ),
        Binding("escape", "drop", "no cursor", show=False, tooltip="remove the cursor"),
    ]

    class Opened(Message):
        """The user wants the marks under the cursor."""

        def __init__(self, marks: list[Mark]) -> None:
            super().__init__()
            self.marks = marks

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)
    marks: reactive[tuple[Mark, ...]] = reactive(())
    window: reactive[Window] = reactive(Window())
    log_y: reactive[bool] = reactive(False)
    curves: reactive[str] = reactive("")
    """The curves of CURVES that the user chose; empty, or not in the run: held-out losses if there are any, else the
    training loss."""

    def __init__(self, title: str, *, ascii_only: bool, id: str) -> None:
        super().__init__(ascii_only=ascii_only, id=id, classes="pane")
        self._title = title

    def watch_snapshot(self, before: Snapshot | None, snapshot: Snapshot | None) -> None:
        if _view_of(before) is not _view_of(snapshot):
            self.refresh()
            self._write_title()

    def watch_window(self) -> None:
        self._write_title()

    watch_log_y = watch_curves = watch_window

    def _write_title(self) -> None:
        snapshot = self.snapshot
        # The unit of a watched script's loss is unknown.
        title = self._title if snapshot is None or snapshot.command is None else "1 loss"
        words = [title, "" if snapshot is None else self._on_top(snapshot.view)]
        words += ["log axis" if self.log_y else ""]
        words += ["zoomed, 0 shows all" if self.window.span is not None else ""]
        title = ", ".join(word for word in words if word)
        # Setting it draws it.
        if title != self.border_title:
            self.border_title = title

    # Drawing.

    def redraw_key(self) -> tuple[object, ...]:
        how = self.window, self.log_y, self.curves
        return (_view_of(self.snapshot), self.marks, *how)

    def _on_top(self, view: RunView) -> str:
        """Return which of CURVES is on top."""
        has = {"training": True, "parts": True, "held-out": len(held_out(view)) > 1}
        return (
            self.curves if has.get(self.curves) else "held-out" if has["held-out"] else "training"
        )

    def current_chart(self) -> Chart:
        snapshot = self.snapshot
        if snapshot is None:
            return Chart(signs=())
        view, steps = snapshot.view, snapshot.view.steps
        low, high = self.window.bounds(*self._ends())
        # Other tools log every N steps; a line is open where its own usual distance is exceeded.
        gap = GAP * max(1.0, steps.spacing("loss", "step"))
        names = (*LOSSES, "step_s")
        *traces, pace = window_traces(steps, names, low, high, self.dots, gap=gap)
        # Marks after the last step, or before the first, are drawn at that end of the axis.
        first, last = self._ends()
        placed = [(min(max(self._place(mark), first), last), mark) for mark in self.marks]
        on_top = self._on_top(view)
        lines, points, bands = self._lines(view, traces, on_top, low, high)
        return Chart(
            low=low,
            high=high,
            lines=lines,
            bands=(*bands, Band(trace=pace, name="step time", y_text=format_seconds, clip=True)),
            lanes=self._lanes(view, low, high),
            note=gap_text(view),
            points=points,
            levels=levels_of(view) if on_top == "held-out" else (),
            signs=signs_of(placed, ascii_only=self._ascii_only),
            cursor=self.window.cursor,
            readout=self._readout(steps),
            log_y=self.log_y,
            x_name="time" if self._is_by_time else "step",
            x_text=clock_text if self._is_by_time else "{:.0f}".format,
            ticks=clock_ticks if self._is_by_time else None,
        )

    def _lines(
        self, view: RunView, traces: Sequence[Trace], on_top: str, low: float, high: float
    ) -> tuple[tuple[Line, ...], tuple[Point, ...], tuple[Band, ...]]:
        """Return the lines on top with their points, and the bands below them."""
        loss = traces[0]
        if on_top == "held-out":
            points = heldout_points(view, low, high)
            trace = points_of("held-out", [(point.x, point.y) for point in points])
            line = Line(trace=trace, slot=0)
            return (line,), points, (Band(trace=loss, name="training loss"),)
        if on_top == "training":
            name = "loss" if self._is_watched else "training loss"
            return (Line(trace=replace(loss, name=name), slot=0),), (), ()
        parts = [trace for trace in traces if not trace.is_empty]
        lines = (Line(trace=t, slot=n, letter=LETTERS[t.name]) for n, t in enumerate(parts))
        return tuple(lines), (), ()

    def _lanes(self, view: RunView, low: float, high: float) -> tuple[LaneRow, ...]:
        cells = columns_of(self.size.width)
        edges = [low + (high - low) * index / cells for index in range(cells + 1)]
        # The last reading is at the end of the axis.
        edges[-1] = math.nextafter(high, math.inf)
        times = self._times(edges)
        return tuple(
            LaneRow(name=lane.name, shares=lane.shares(times), newest=lane.newest)
            for lane in lanes_of(view)
        )

    def _times(self, xs: Sequence[float]) -> Sequence[float]:
        """Return the unix times of some x; a step is placed where it ended."""
        return xs if self._is_by_time else self._table.interpolated("clock_s", "step", xs)

    def _readout(self, steps: Table) -> tuple[str, ...]:
        cursor = self.window.cursor
        if cursor is None or not len(self._table):
            return ()
        words = step_words(steps, self._row_of(cursor))
        under = [mark.title for mark in self._under()]
        hidden_words = f" (and {len(under) - 3} more)" if len(under) > 3 else ""
        marks = "; ".join(under[:3]) + hidden_words + (" (enter)" if under else "")
        words = "  ".join([words, *self._lane_words(cursor)])
        text = f"{marks} | {words}" if marks else words
        return tuple(textwrap.wrap(text, self.size.width))

    def _lane_words(self, cursor: float) -> list[str]:
        """Return the readings under the cursor."""
        snapshot = self.snapshot
        lanes = [] if snapshot is None else lanes_of(snapshot.view)
        (unix_s,) = self._times([cursor])
        shares = [(lane.name, lane.at(unix_s)) for lane in lanes]
        return [f"{name} {share:.0%}" for name, share in shares if share is not None]

    # Positions.

    @property
    def _is_watched(self) -> bool:
        return self.snapshot is not None and self.snapshot.command is not None

    @property
    def _is_by_time(self) -> bool:
        return not len(self._table)

    @property
    def _table(self) -> Table:
        return RunView().steps if self.snapshot is None else self.snapshot.view.steps

    def _ends(self) -> tuple[float, float]:
        table = self._table
        if len(table):
            return table.value("step", 0) or 0.0, table.last("step") or 0.0
        # Before the first step there are the times of marks and readings.
        snapshot = self.snapshot
        lanes = [] if snapshot is None else lanes_of(snapshot.view)
        times = [mark.unix_s for mark in self.marks]
        for read in (lane.table for lane in lanes):
            times += [read.value("unix_s", 0) or 0.0, read.last("unix_s") or 0.0]
        return min(times, default=0.0), max(times, default=1.0)

    def _place(self, mark: Mark) -> float:
        return mark.unix_s if self._is_by_time else mark.step

    def _row_of(self, x: float) -> int:
        return min(self._table.find("step", x), max(0, len(self._table) - 1))

    # Keys.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "drop":
            return self.window.cursor is not None
        if action == "open":
            return bool(self._under())
        if action == "mark":
            return bool(self.marks)
        if action == "whole":
            return self.window.span is not None
        return True

    def _move_to(self, x: float) -> None:
        self.window = self.window.moved(x, *self._ends())

    def action_move(self, columns: int) -> None:
        table = self._table
        if not len(table):
            return
        low, high = self.window.bounds(*self._ends())
        rows = table.find("step", high) - table.find("step", low) + 1
        cells = columns_of(self.size.width)
        cursor = self.window.cursor
        current_row = len(table) - 1 if cursor is None else self._row_of(cursor)
        row = (
            current_row + columns * max(1, rows // cells)
            if cursor is not None or columns < 0
            else current_row
        )
        self._move_to(table.value("step", min(max(0, row), len(table) - 1)) or 0.0)

    def action_end_of(self, side: int) -> None:
        self._move_to(self._ends()[0 if side < 0 else 1])

    def action_mark(self, side: int) -> None:
        first, last = self._ends()
        cursor = self.window.cursor
        if cursor is None:
            cursor = first - 1 if side > 0 else last + 1
        places = sorted({min(max(self._place(mark), first), last) for mark in self.marks})
        candidates = [x for x in places if (x > cursor if side > 0 else x < cursor)]
        if candidates:
            self._move_to(candidates[0] if side > 0 else candidates[-1])

    def _under(self) -> list[Mark]:
        """Return the marks in the column of the cursor."""
        if self.window.cursor is None:
            return []
        low, high = self.window.bounds(*self._ends())
        cells = columns_of(self.size.width)
        placed = [(min(max(self._place(m), low), high), m) for m in self.marks]
        return marks_near(placed, self.window.cursor, (high - low) / cells / 2 + 0.5)

    def action_open(self) -> None:
        if marks := self._under():
            self.post_message(self.Opened(marks))

    def action_zoom(self, factor: float) -> None:
        self.window = self.window.zoomed(factor, *self._ends())

    def action_whole(self) -> None:
        self.window = Window(cursor=self.window.cursor)

    def action_curves(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        at = CURVES.index(self._on_top(snapshot.view))
        self.curves = CURVES[(at + 1) % len(CURVES)]

    def action_drop(self) -> None:
        self.window = replace(self.window, cursor=None)

    def on_click(self, event: Click) -> None:
        low, high = self.window.bounds(*self._ends())
        width = self.size.width
        offset = event.get_content_offset(self)
        cells = max(1, columns_of(width) - 1)
        if offset is not None and len(self._table):
            share = min(max((offset.x - margin_of(width) - 2) / cells, 0.0), 1.0)
            row = self._row_of(low + share * (high - low))
            self._move_to(self._table.value("step", row) or 0.0)


def signs_of(placed: Sequence[tuple[float, Mark]], *, ascii_only: bool) -> tuple[Sign, ...]:
    """Return marks with their x as signs, the most urgent last."""
    order = sorted(placed, key=lambda item: PRIORITY.index(item[1].kind), reverse=True)
    return tuple(
        Sign(
            x=x,
            text=SIGNS[mark.kind][ascii_only],
            role="cross" if mark.kind in ("nan", "alert") else "mark",
        )
        for x, mark in order
    )


def marks_near(marks: Sequence[tuple[float, Mark]], x: float, within: float) -> list[Mark]:
    """Return the marks at most `within` from x, nearest first; of equally near ones the most urgent first."""
    near = [(abs(place - x), PRIORITY.index(mark.kind), mark) for place, mark in marks]
    return [m for d, _, m in sorted(near, key=lambda item: item[:2]) if d <= within]


ROUND_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def clock_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` unix times in [low, high] that are round on a local clock."""
    wanted = (high - low) / max(1, count)
    every = next((s for s in ROUND_SECONDS if s >= wanted), None)
    if every is None:
        every = 86400 * math.ceil(wanted / 86400)
    offset = time.localtime(low).tm_gmtoff
    first = math.ceil((low + offset) / every) * every - offset
    return [first + every * index for index in range(int((high - first) // every) + 1)]


def heldout_points(view: RunView, low: float, high: float) -> tuple[Point, ...]:
    """Return the held-out losses of the student in a window of steps."""
    points = []
    for x, loss in held_out(view):
        if len(view.steps):
            x = max(x, view.steps.value("step", 0) or 0.0)
        if low <= x <= high:
            points.append(Point(x=x, y=loss))
    return tuple(points)


def levels_of(view: RunView) -> tuple[Level, ...]:
    """Return what the losses on held-out text are compared with: those of the teacher and of the start."""
    return tuple(Level(y=loss, name=name) for name, loss in references(view).items())


def step_words(steps: Table, row: int) -> str:
    """Render all numbers of one step."""

    def text(name: str, digits: int = 4) -> str:
        return format_value(steps.value(name, row), digits)

    pace = steps.value("tokens_per_s", row)
    parts = [
        f"step {steps.value('step', row):.0f} at {clock_text(steps.value('unix_s', row) or 0.0)}:",
        *(f"{n} {text(n)}" for n in LOSSES if steps.value(n, row) is not None),
        format_seconds(steps.value("step_s", row)),
        *([] if pace is None else [f"{format_count(pace)} tok/s"]),
        f"|g| {text('grad_norm', 3)}",
        f"lr {number_text(steps.value('lr', row), '.2e')}",
    ]
    return "  ".join(parts)


def _view_of(snapshot: Snapshot | None) -> RunView | None:
    return None if snapshot is None else snapshot.view
