"""The cursor of a time line: which steps are shown, which one is under the cursor, and the keys that move it.

What is on the x axis is a step or a time; both ends of it are those of the whole run, also while an earlier
state of the run is shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from engine.log.table import Table
from engine.log.view import RunView
from workbench.feed import Snapshot
from workbench.marks import Happening
from workbench.tui.timeline import margin_of, marks_near
from workbench.tui.window import Window


class TimelineCursor(Widget, can_focus=True):
    """Has a window on the run and a cursor in it; draws nothing."""

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
    by_time: reactive[bool] = reactive(False)
    window: reactive[Window] = reactive(Window())

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
