"""Pane 5: the log of the run, newest last, with a filter.

A filter is words to look for, whatever their case; with `!` before them, words to leave out
(`!step` hides the steps). Lines too long for the pane go on below, indented.
"""

from __future__ import annotations

import textwrap
from typing import ClassVar

from rich.segment import Segment
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import MouseScrollUp
from textual.geometry import Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from engine.runlog.events import (
    AlertRaised,
    Evaluated,
    NonFinite,
    Note,
    StackDump,
    StepDone,
    TrainerExited,
)
from engine.runlog.text import line_text
from engine.runlog.view import LogLine
from workbench.feed import Snapshot


def role_of(line: LogLine) -> str:
    """What kind of line it is; the words say it too."""
    match line.event:
        case NonFinite() | AlertRaised():
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


def matches(text: str, pattern: str) -> bool:
    """Whether a line is to be shown under a filter."""
    if pattern.startswith("!"):
        return len(pattern) == 1 or pattern[1:].casefold() not in text.casefold()
    return pattern.casefold() in text.casefold()


def wrapped(text: str, width: int) -> list[str]:
    """A line as rows of a width; rows after the first are indented to where the words of the first
    begin."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(width, 12), subsequent_indent="         ") or [""]


class LogView(ScrollView, can_focus=True):
    """The scrolling lines of a log pane."""

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
    lines: reactive[tuple[LogLine, ...]] = reactive((), always_update=True)
    pattern: reactive[str] = reactive("")

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, tuple[LogLine, str]] = {}
        self._rows: list[tuple[str, str]] = []
        self.shown = 0

    def watch_lines(self) -> None:
        # A line stays the same object from view to view: only new ones are put into words.
        known = self._texts
        self._texts = {id(x): known.get(id(x)) or (x, line_text(x)) for x in self.lines}
        self._lay_out()

    def watch_pattern(self) -> None:
        self._lay_out()

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self.scroll_end(animate=False)

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        width = self.scrollable_content_region.width
        if width <= 0:
            return
        shown = [line for line in self._texts.values() if matches(line[1], self.pattern)]
        self.shown = len(shown)
        self._rows = [(r, role_of(line)) for line, text in shown for r in wrapped(text, width)]
        self.virtual_size = Size(width, len(self._rows))
        if self.follow:
            self.scroll_end(animate=False, immediate=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        index = y + round(self.scroll_y)
        if index >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        text, role = self._rows[index]
        strip = Strip([Segment(text, self.get_component_rich_style(role))])
        return strip.adjust_cell_length(self.size.width, self.rich_style)

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
    DEFAULT_CSS = """
    LogPane {
        Input { display: none; height: 1; border: none; padding: 0; }
        &.-filtering Input { display: block; }
    }
    """

    snapshot: reactive[Snapshot | None] = reactive(None)

    def compose(self) -> ComposeResult:
        yield LogView()
        words = "show lines with these words; !words hides them"
        # Disabled until a filter is typed, so that no other key can end up in it.
        yield Input(placeholder=words, compact=True, disabled=True)

    def on_mount(self) -> None:
        self.watch(self.view, "follow", self._write_title)

    @property
    def view(self) -> LogView:
        return self.query_one(LogView)

    def watch_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None and snapshot.view.lines is not self.view.lines:
            self.view.lines = snapshot.view.lines
            self._write_title()

    def toggle_follow(self) -> None:
        self.view.follow = not self.view.follow

    def start_filter(self) -> None:
        """Let the user type a filter."""
        self.add_class("-filtering")
        self.query_one(Input).disabled = False
        self.query_one(Input).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "clear_filter" or self.has_class("-filtering")

    def action_clear_filter(self) -> None:
        self.query_one(Input).value = ""
        self._leave_filter(kept=False)

    @on(Input.Changed)
    def filter_by(self, event: Input.Changed) -> None:
        event.stop()
        self.view.pattern = event.value
        self._write_title()

    @on(Input.Submitted)
    def keep_filter(self, event: Input.Submitted) -> None:
        event.stop()
        self._leave_filter(kept=bool(event.value))

    def _leave_filter(self, *, kept: bool) -> None:
        self.set_class(kept, "-filtering")
        self.query_one(Input).disabled = True
        self.view.focus()

    def _write_title(self) -> None:
        view = self.view
        following = "following" if view.follow else "not following, f goes to the end"
        some = f", {view.shown} of {len(view.lines)} lines" if view.pattern else ""
        self.border_title = f"5 log, {following}{some}"
