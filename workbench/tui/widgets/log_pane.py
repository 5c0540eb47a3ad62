"""The log of a run, newest last, with a filter; only visible lines are read from disk.

A filter is a text to search for, ignoring case; with `!` before it, a text to leave out (`!step` hides the
steps). It searches backwards from the newest line, and shows its results as it finds them. Lines too long
for the width are wrapped and indented.
"""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import MouseScrollUp
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input
from textual.worker import get_current_worker

from engine.log.events import (
    PASS,
    Evaluated,
    Judged,
    Note,
    StackDump,
    StepDone,
    TrainerExited,
)
from engine.log.text import line_text
from engine.log.view import LogLine
from workbench.feed import Snapshot
from workbench.log_pages import Log
from workbench.paths import with_short_paths
from workbench.tui.names import wrapped
from workbench.tui.widgets.filter_line import FilterLine

FILTER_ROWS = 4000
"""Lines searched between two updates of the screen."""


def role_of(line: LogLine) -> str:
    """Return the style of a line; its text carries the same meaning."""
    match line.event:
        case Judged(by="number" | "alert", level=level) if level != PASS:
            return "log--bad"
        case Note(level="error" | "warning"):
            return "log--bad"
        case TrainerExited(returncode=code) if code != 0:
            return "log--bad"
        case StepDone():
            return "log--step"
        case Evaluated() | StackDump():
            return "log--key"
    return "log--plain"


def rows_of(line: LogLine, width: int) -> list[tuple[str, str]]:
    """Return a line as rows of a width, each with its style."""
    return [(row, role_of(line)) for row in wrapped(with_short_paths(line_text(line)), width)]


class LogView(ScrollView, can_focus=True):
    """The scrolling lines of a log pane; only visible lines are read from disk."""

    HELP = """# Log

    Every line of the run, newest last. It follows the end until you scroll up; f follows again.
    / filters: text to search for, ignoring case, or !text to leave out.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "log--bad",
        "log--step",
        "log--key",
        "log--plain",
    }
    DEFAULT_CSS = """
    LogView {
        overflow-x: hidden;
        overflow-y: scroll;
        scrollbar-size-vertical: 1;
        .log--bad { color: $text-error; text-style: bold; }
        .log--step { color: $text-muted; }
        .log--key { color: $text-accent; }
        .log--plain { color: $foreground; }
    }
    """

    follow: reactive[bool] = reactive(True)
    book: reactive[Log | None] = reactive(None)
    pattern: reactive[str] = reactive("")

    class Filtered(Message):
        """Rows that match the filter, of the rows [begin, end) of the log."""

        def __init__(self, pattern: str, begin: int, end: int, rows: list[int]) -> None:
            super().__init__()
            self.pattern = pattern
            self.begin, self.end, self.rows = begin, end, rows

    def __init__(self) -> None:
        super().__init__()
        self._found: list[int] = []
        """Rows that match the filter, of the rows `_sought` of the log."""
        self._sought: tuple[int, int] = (0, 0)
        self._drawn: object = None
        self._rows: list[tuple[str, str]] = []

    @property
    def shown(self) -> int:
        """Return the number of matching lines found so far; without a filter, of all lines."""
        if not self.pattern:
            return 0 if self.book is None else len(self.book)
        return len(self._found)

    @property
    def share_filtered(self) -> float:
        """Return the share of the log that the filter has searched, 0 to 1; 1 without a filter."""
        total = 0 if self.book is None else len(self.book)
        return (self._sought[1] - self._sought[0]) / total if self.pattern and total else 1.0

    def watch_book(self, before: Log | None, log: Log | None) -> None:
        if before is not None and log is not None and self.pattern:
            if len(log) < self._sought[1] or log.asides[: len(before.asides)] != before.asides:
                # Lines have moved, so matches in the old rows are not valid for the new ones.
                self._filter_again()
            else:
                self._filter(log, self.pattern)
        self._lay_out()

    def watch_pattern(self) -> None:
        self._filter_again()
        self._lay_out()

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self.scroll_end(animate=False)

    def on_resize(self) -> None:
        self._lay_out()

    def _filter_again(self) -> None:
        self._found = []
        total = 0 if self.book is None else len(self.book)
        self._sought = (total, total)
        if self.pattern and self.book is not None:
            self._filter(self.book, self.pattern)

    @work(thread=True, exclusive=True, group="filter")
    def _filter(self, log: Log, pattern: str) -> None:
        """Search the new lines, then backwards from there, newest first."""
        worker = get_current_worker()
        low, high = self._sought
        stretches = [(high, len(log))] if len(log) > high else []
        while low > 0:
            stretches.append((max(0, low - FILTER_ROWS), low))
            low = max(0, low - FILTER_ROWS)
        for start, stop in stretches:
            if worker.is_cancelled:
                return
            rows = log.matching(start, stop, pattern)
            self.post_message(self.Filtered(pattern, start, stop, rows))

    @on(Filtered)
    def take_filtered(self, message: Filtered) -> None:
        """Show the matches, unless the filter has changed meanwhile."""
        if message.pattern != self.pattern:
            return
        low, high = self._sought
        if message.end == low:
            self._found[:0] = message.rows
            self._sought = (message.begin, high)
            if not self.follow and message.rows:
                self.scroll_to(y=self.scroll_y + len(message.rows), animate=False)
        elif message.begin == high:
            self._found += message.rows
            self._sought = (low, message.end)
        self._lay_out()

    def _lay_out(self) -> None:
        width = self.scrollable_content_region.width
        if width <= 0:
            return
        self._drawn = None
        # The scroll bar is always visible, so a new length needs no layout of the screen.
        self.set_reactive(LogView.virtual_size, Size(width, self.shown))
        self.vertical_scrollbar.window_virtual_size = self.shown
        if self.follow:
            self.scroll_end(animate=False, immediate=True)
        self.refresh()

    def _lines(self, start: int, stop: int) -> list[LogLine]:
        if self.book is None:
            return []
        if not self.pattern:
            return self.book.lines(start, stop)
        rows = self._found[max(0, start) : max(0, stop)]
        return [line for row in rows for line in self.book.lines(row, row + 1)]

    def _draw(self) -> None:
        """Wrap the visible lines. At the end of the log the last row of its last line is at the bottom;
        elsewhere the first row of the first line is at the top."""
        height, width = self.size.height, self.scrollable_content_region.width
        top = round(self.scroll_y)
        if top >= self.shown - height:
            last = self._lines(self.shown - height, self.shown)
            self._rows = [row for line in last for row in rows_of(line, width)][-height:]
        else:
            lines = self._lines(top, top + height)
            self._rows = [row for line in lines for row in rows_of(line, width)]

    def render_lines(self, crop: Region) -> list[Strip]:
        wanted = (self.book, self.pattern, self._sought, self.scroll_y, self.size)
        if wanted != self._drawn:
            self._drawn = wanted
            self._draw()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        text, role = self._rows[y] if y < len(self._rows) else ("", "log--plain")
        style, width = self.get_component_rich_style(role), self.size.width
        return Strip([Segment(text, style)]).adjust_cell_length(width, style)

    def action_scroll_up(self) -> None:
        self.follow = False
        super().action_scroll_up()

    def action_page_up(self) -> None:
        self.follow = False
        super().action_page_up()

    def action_scroll_home(self) -> None:
        self.follow = False
        super().action_scroll_home()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.follow = False


class LogPane(Vertical):
    """The log of a snapshot."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear_filter", "clear filter", show=False),
    ]
    virtual_size = reactive(Size(0, 0), repaint=False)
    """It never scrolls, its view does: another size needs no second layout."""
    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._title = title

    def compose(self) -> ComposeResult:
        yield LogView()
        yield FilterLine("show lines with this text; !text hides them")

    def on_mount(self) -> None:
        self.watch(self.view, "follow", self._write_title)

    @property
    def view(self) -> LogView:
        return self.query_one(LogView)

    def watch_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None and snapshot.log is not self.view.book:
            self.view.book = snapshot.log
            self._write_title()

    @on(LogView.Filtered)
    def tell_progress(self) -> None:
        self._write_title()

    def toggle_follow(self) -> None:
        self.view.follow = not self.view.follow

    def start_filter(self) -> None:
        """Let the user type a filter."""
        self.query_one(FilterLine).begin()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "clear_filter" or self.query_one(FilterLine).display

    def action_clear_filter(self) -> None:
        self.query_one(FilterLine).drop()
        self.view.focus()

    @on(Input.Changed)
    def filter_by(self, event: Input.Changed) -> None:
        event.stop()
        self.view.pattern = event.value
        self._write_title()

    @on(Input.Submitted)
    def keep_filter(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one(FilterLine).leave()
        self.view.focus()

    def _write_title(self) -> None:
        view = self.view
        following = "following" if view.follow else "not following, f follows the end"
        total = 0 if view.book is None else len(view.book)
        count_words = f", {view.shown} of {total} lines" if view.pattern else f", {total} lines"
        searched = view.share_filtered
        progress_words = f", searched {searched:.0%}" if searched < 1 else ""
        title = f"{self._title}, {following}{count_words}{progress_words}"
        if title != self.border_title:
            self.border_title = title
