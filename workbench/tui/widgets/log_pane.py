"""Pane 5: the log of the run, newest last, with a filter.

A filter is words to look for, whatever their case; with `!` before them, words to leave out
(`!step` hides the steps). It goes back from the newest line, and shows what it has found meanwhile.
"""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.reactive import reactive
from textual.widgets import Input

from workbench.feed import Snapshot
from workbench.tui.widgets.log_view import LogView


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

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._title = title

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
        total = 0 if view.book is None else len(view.book)
        some = f", {view.shown} of {total} lines" if view.pattern else f", {total} lines"
        looked = view.share_filtered
        far = f", looked through {looked:.0%}" if looked < 1 else ""
        title = f"{self._title}, {following}{some}{far}"
        if title != self.border_title:
            self.border_title = title
