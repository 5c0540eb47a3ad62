"""Pane 2: how fast the run goes, and where the time of a step goes, as bars beside the bound."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.reactive import reactive
from textual.widgets import Static

from workbench.feed import Snapshot
from workbench.words import ledger_words


class LedgerPane(VerticalScroll):
    """Draws the step ledger of a snapshot."""

    HELP: ClassVar[str] = """# Pace

    Tokens a second and the time of a step, then the ledger of the newest step by the device's own clock:
    where its time went, phase by phase. `idle` is time in which the device had nothing to do. The bound is
    what the datasheet's matrix rate would allow for the run's own arithmetic.
    """
    DEFAULT_CSS = "LedgerPane { scrollbar-size-vertical: 1; }"

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)

    def __init__(self, *, ascii_only: bool, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii_only = ascii_only
        self._lines: list[str] = []
        self.border_title = "2 pace and step ledger"

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def whole_text(self) -> str:
        """Every line, also those that are scrolled away."""
        return "\n".join(self._lines)

    def watch_snapshot(self) -> None:
        self._write()

    def on_resize(self) -> None:
        self._write()

    def _write(self) -> None:
        if self.snapshot is None or not self.is_mounted:
            return
        width = self.scrollable_content_region.width
        lines = ledger_words(self.snapshot, max(width, 20), ascii_only=self._ascii_only)
        before, self._lines = self._lines, lines
        if lines != before:
            # Each line fits, so only another number of them takes a layout of the whole screen.
            text = "\n".join(lines)
            self.query_one(Static).update(text, layout=len(before) != len(lines))
