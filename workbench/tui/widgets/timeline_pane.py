"""Pane 1: loss, marks and step time of a run over one x axis, with a cursor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from engine.runlog.table import Table
from engine.runlog.text import clock_text
from engine.runlog.view import RunView
from workbench.feed import Snapshot
from workbench.marks import Happening
from workbench.traces import WindowTraces
from workbench.tui.canvas import Row, fit
from workbench.tui.run_line import LOSSES, fault_words, heldout_marks, levels_of, step_words
from workbench.tui.timeline import (
    TimeLine,
    clock_ticks,
    dots_of,
    margin_of,
    marks_near,
    render_timeline,
)
from workbench.tui.window import Window

FASTER = 10
"""Shift moves the cursor so many times as far."""
TWO_ROWS = 18
"""From so many rows on, what is under the cursor takes two."""
GAP_STEPS = 1.5
GAP_OF_MEDIAN, GAP_S = 20.0, 5.0
"""On an axis of time, steps further apart than this many times a step, and than this, are not joined."""


class TimelinePane(Widget, can_focus=True):
    """Draws the time line of a snapshot."""

    HELP = """# Time line

    Training loss with its parts CE and KD, held-out losses, and the loss of guessing (ln V) as lines to
    compare with; below it the marks, and how long each step took, all over the same x. Every column shows
    the lowest and highest of all steps on it. NaN is a cross, and no line goes over it or over a gap.

    Marks: × (X in ASCII) not finite, ! alert, R resumed, F a flip of this run began, C a compile that a step
    waited for, c a compile, s checkpoint saved. Where several are in one column, the first of these is
    drawn, and the line under the cursor names all.
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
        Binding("enter", "open", "open mark", tooltip="what the mark under the cursor is"),
        Binding("plus,equals_sign", "zoom(0.5)", "zoom in", tooltip="half as much of the run"),
        Binding("minus", "zoom(2.0)", "zoom out", tooltip="twice as much of the run"),
        Binding("0", "whole", "whole run", tooltip="the whole run again"),
        Binding("comma", "pan(-0.5)", "pan", tooltip="half a width back"),
        Binding("full_stop", "pan(0.5)", "pan", tooltip="half a width on"),
        Binding("t", "by_time", "time axis", tooltip="x is the step, or the time"),
        Binding("escape", "drop", "no cursor", show=False, tooltip="take the cursor away"),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "plot--trace0",
        "plot--trace1",
        "plot--trace2",
        "plot--mark",
        "plot--level",
        "plot--cross",
        "plot--axis",
        "plot--legend",
        "plot--cursor",
    }
    DEFAULT_CSS = """
    TimelinePane {
        .plot--trace0 { color: $text-primary; text-style: bold; }
        .plot--trace1 { color: $text-warning; }
        .plot--trace2 { color: $text-success; }
        .plot--mark { color: $text-accent; text-style: bold; }
        .plot--level { color: $text-muted; }
        .plot--cross { color: $text-error; text-style: bold; }
        .plot--axis { color: $text-muted; }
        .plot--legend { color: $foreground; }
        .plot--cursor { color: $text-accent; }
    }
    """

    class Moved(Message):
        """The cursor is at another time."""

        def __init__(self, unix_s: float) -> None:
            super().__init__()
            self.unix_s = unix_s

    class Opened(Message):
        """Marks under the cursor are asked for."""

        def __init__(self, marks: list[Happening]) -> None:
            super().__init__()
            self.marks = marks

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)
    whole: reactive[Snapshot | None] = reactive(None, repaint=False)
    """The run that gives the ends of the axis, when `snapshot` is an earlier state of it."""
    marks: reactive[tuple[Happening, ...]] = reactive(())
    log_y: reactive[bool] = reactive(False)
    by_time: reactive[bool] = reactive(False)
    window: reactive[Window] = reactive(Window())

    def __init__(self, *, ascii_only: bool, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii_only = ascii_only
        self._traces = WindowTraces()
        self._drawn: tuple[object, ...] | None = None
        self._rows: list[Row] = []

    def watch_snapshot(self, before: Snapshot | None, snapshot: Snapshot | None) -> None:
        if _view_of(before) is not _view_of(snapshot):
            self.refresh()

    watch_whole = watch_snapshot

    def watch_log_y(self) -> None:
        self._write_title()

    def watch_by_time(self) -> None:
        self._write_title()

    def watch_window(self) -> None:
        self._write_title()

    def _write_title(self) -> None:
        words = ["1 loss, nats per token", "log axis" if self.log_y else ""]
        words += ["by time" if self.by_time else ""]
        words += ["zoomed, 0 shows all" if self.window.span is not None else ""]
        self.border_title = ", ".join(word for word in words if word)

    # What is where

    @property
    def _x(self) -> str:
        return "clock_s" if self.by_time else "step"

    @property
    def _table(self) -> Table:
        snapshot = self.whole or self.snapshot
        return RunView().steps if snapshot is None else snapshot.view.steps

    def _ends(self) -> tuple[float, float]:
        table = self._table
        places = [self._place(mark) for mark in self.marks] if not len(table) else []
        first = table.value(self._x, 0) if len(table) else min(places, default=0.0)
        last = table.last(self._x) if len(table) else max(places, default=1.0)
        return first or 0.0, last or 0.0

    def _place(self, mark: Happening) -> float:
        return mark.unix_s if self.by_time else mark.step

    def _row_of(self, x: float) -> int:
        return min(self._table.find(self._x, x), max(0, len(self._table) - 1))

    @property
    def cursor_unix_s(self) -> float | None:
        """The time under the cursor; None without one."""
        if self.window.cursor is None or not len(self._table):
            return None
        return self._table.value("clock_s", self._row_of(self.window.cursor))

    def show_time(self, unix_s: float) -> None:
        """Put the cursor at a time, without a message."""
        if len(self._table):
            row = min(self._table.find("clock_s", unix_s), len(self._table) - 1)
            self.window = self.window.moved(self._table.value(self._x, row) or 0.0, *self._ends())

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "drop":
            # In a replay the cursor is the time, and escape ends it.
            return self.window.cursor is not None and self.whole is None
        if action == "open":
            return bool(self._under())
        if action == "mark":
            return bool(self.marks)
        if action in ("whole", "pan"):
            return self.window.span is not None
        return True

    def _move_to(self, x: float) -> None:
        self.window = self.window.moved(x, *self._ends())
        if (unix_s := self.cursor_unix_s) is not None:
            self.post_message(self.Moved(unix_s))

    def action_move(self, columns: int) -> None:
        table = self._table
        if not len(table):
            return
        low, high = self.window.bounds(*self._ends())
        rows = table.find(self._x, high) - table.find(self._x, low) + 1
        cells = max(1, self.size.width - margin_of(self.size.width) - 2)
        cursor = self.window.cursor
        here = len(table) - 1 if cursor is None else self._row_of(cursor)
        row = here + columns * max(1, rows // cells) if cursor is not None or columns < 0 else here
        self._move_to(table.value(self._x, min(max(0, row), len(table) - 1)) or 0.0)

    def action_end_of(self, side: int) -> None:
        self._move_to(self._ends()[0 if side < 0 else 1])

    def action_mark(self, side: int) -> None:
        first, last = self._ends()
        at = self.window.cursor
        if at is None:
            at = first - 1 if side > 0 else last + 1
        places = sorted({min(max(self._place(mark), first), last) for mark in self.marks})
        beyond = [x for x in places if (x > at if side > 0 else x < at)]
        if beyond:
            self._move_to(beyond[0] if side > 0 else beyond[-1])

    def _under(self) -> list[Happening]:
        """The marks in the column of the cursor."""
        if self.window.cursor is None:
            return []
        low, high = self.window.bounds(*self._ends())
        cells = max(1, self.size.width - margin_of(self.size.width) - 2)
        placed = [(min(max(self._place(m), low), high), m) for m in self.marks]
        return marks_near(placed, self.window.cursor, (high - low) / cells / 2 + 0.5)

    def action_open(self) -> None:
        if marks := self._under():
            self.post_message(self.Opened(marks))

    def action_zoom(self, factor: float) -> None:
        self.window = self.window.zoomed(factor, *self._ends())

    def action_whole(self) -> None:
        self.window = Window(cursor=self.window.cursor)

    def action_pan(self, share: float) -> None:
        self.window = self.window.panned(share, *self._ends())

    def action_by_time(self) -> None:
        unix_s = self.cursor_unix_s
        self.by_time = not self.by_time
        self.window = Window()
        if unix_s is not None:
            self.show_time(unix_s)

    def action_drop(self) -> None:
        self.window = replace(self.window, cursor=None)

    def on_click(self, event: Click) -> None:
        low, high = self.window.bounds(*self._ends())
        width = self.size.width
        offset = event.get_content_offset(self)
        cells = max(1, width - margin_of(width) - 3)
        if offset is not None and len(self._table):
            share = min(max((offset.x - margin_of(width) - 2) / cells, 0.0), 1.0)
            row = self._row_of(low + share * (high - low))
            self._move_to(self._table.value(self._x, row) or 0.0)

    # Drawing

    def time_line(self, width: int) -> TimeLine:
        """What is drawn on a width."""
        snapshot = self.snapshot
        if snapshot is None:
            return TimeLine(low=0.0, high=1.0, losses=())
        view, steps = snapshot.view, snapshot.view.steps
        low, high = self.window.bounds(*self._ends())
        count, gap = dots_of(width, ascii_only=self._ascii_only), GAP_STEPS
        if self.by_time:
            typical = steps.value("step_s", len(steps) // 2) if len(steps) else None
            known = typical is not None and math.isfinite(typical)
            gap = max(GAP_S, GAP_OF_MEDIAN * typical if known and typical is not None else 0.0)
        names = (*LOSSES, "step_s")
        *traces, pace = self._traces.traces(steps, names, low, high, count, x=self._x, gap=gap)
        placed = ((self._place(mark), mark) for mark in self.marks)
        # What came after the last step, or before the first, stands at that end of the axis.
        first, last = self._ends()
        return TimeLine(
            low=low,
            high=high,
            losses=tuple(traces),
            pace=pace,
            heldout=heldout_marks(view, low, high, by_time=self.by_time),
            levels=levels_of(view),
            marks=tuple(
                (min(max(x, first), last), mark)
                for x, mark in placed
                if low <= min(max(x, first), last) <= high
            ),
            fault=fault_words(view),
            cursor=self.window.cursor,
            readout=self._readout(steps),
            log_y=self.log_y,
            x_name="time" if self.by_time else "step",
            x_text=clock_text if self.by_time else lambda x: f"{x:.0f}",
            ticks=clock_ticks if self.by_time else None,
        )

    def _readout(self, steps: Table) -> tuple[str, ...]:
        cursor = self.window.cursor
        if cursor is None or not len(self._table):
            return ()
        row = self._row_of(cursor)
        words = "nothing is logged here yet"
        if row < len(steps):
            words = step_words(steps, row)
        under = [mark.title for mark in self._under()]
        many = f" (and {len(under) - 3} more)" if len(under) > 3 else ""
        marks = "; ".join(under[:3]) + many + (" (enter)" if under else "")
        if self.size.height >= TWO_ROWS:
            return (words, marks)
        return (f"{marks} | {words}" if marks else words,)

    def render_lines(self, crop: Region) -> list[Strip]:
        # Lines are asked for one by one: the plot is drawn once for all of them.
        wanted = (
            _view_of(self.snapshot),
            _view_of(self.whole),
            self.marks,
            self.window,
            self.log_y,
            self.by_time,
            self.size,
        )
        # Views are long: the same one is known by itself.
        if self._drawn is None or any(
            a is not b and (isinstance(a, RunView) or a != b)
            for a, b in zip(wanted, self._drawn, strict=True)
        ):
            self._drawn = wanted
            line = self.time_line(self.size.width)
            self._rows = render_timeline(line, *self.size, ascii_only=self._ascii_only)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        row = self._rows[y] if y < len(self._rows) else fit((), self.size.width)
        return Strip(
            [
                Segment(span.text, self.get_component_rich_style(f"plot--{span.role}"))
                for span in row
            ],
            self.size.width,
        )


def _view_of(snapshot: Snapshot | None) -> RunView | None:
    return None if snapshot is None else snapshot.view
