"""Pane 1: loss, marks and step time of a run over one x axis, with a cursor."""

from __future__ import annotations

import math
from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Region
from textual.reactive import reactive
from textual.strip import Strip

from engine.log.table import Table
from engine.log.text import clock_text
from engine.log.view import RunView
from workbench.feed import Snapshot
from workbench.traces import WindowTraces
from workbench.tui.canvas import Row, fit
from workbench.tui.run_line import LOSSES, fault_words, heldout_marks, levels_of, step_words
from workbench.tui.timeline import TimeLine, clock_ticks, dots_of, render_timeline
from workbench.tui.widgets.timeline_cursor import TimelineCursor

TWO_ROWS = 18
"""From so many rows on, what is under the cursor takes two."""
GAP_STEPS = 1.5
GAP_OF_MEDIAN, GAP_S = 20.0, 5.0
"""On an axis of time, steps further apart than this many times a step, and than this, are not joined."""


class TimelinePane(TimelineCursor):
    """Draws the time line of a snapshot."""

    HELP = """# Time line

    Training loss with its parts CE and KD, held-out losses, and the loss of guessing (ln V) as lines to
    compare with; below it the marks, and how long each step took, all over the same x. Every column shows
    the lowest and highest of all steps on it. NaN is a cross, and no line goes over it or over a gap.

    Marks: × (X in ASCII) not finite, ! alert, R resumed, F a flip of this run began, C a compile that a step
    waited for, c a compile, s checkpoint saved. Where several are in one column, the first of these is
    drawn, and the line under the cursor names all. On a small screen they stand on the axis.
    """
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

    log_y: reactive[bool] = reactive(False)

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
        # In a replay the step under the cursor may not be done yet: then it is the newest.
        done = min(row, len(steps) - 1)
        words = step_words(steps, done) if done >= 0 else "nothing is logged here yet"
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
