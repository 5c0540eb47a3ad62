"""A pane of words that scrolls. The panes of device, decisions and result differ only in the
words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from workbench.feed import Snapshot
from workbench.tui.printable import as_title

Words = Callable[[Snapshot], Sequence[str]]
"""The lines of a pane. A line that does not begin with a space is a heading of those that do."""


class TextPane(VerticalScroll):
    """Draws the words of a snapshot."""

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)

    def __init__(self, title: str, words: Words, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.border_title = as_title(title)
        self._words = words
        self._lines: Sequence[str] = ()

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def whole_text(self) -> str:
        """Every line, also those that are scrolled away."""
        return "\n".join(self._lines)

    def watch_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            return
        lines = self._words(snapshot)
        if lines != self._lines:
            before, self._lines = self._lines, lines
            has_parts = any(line.startswith(" ") for line in lines)
            text = self.query_one(Static)
            text.update(
                Content("\n").join(
                    Content.styled(line, "bold" if has_parts and not line.startswith(" ") else "")
                    for line in lines
                ),
                # A layout of the whole screen costs more than everything else in a second.
                layout=not _same_height(before, lines, text.size.width),
            )


def _same_height(before: Sequence[str], after: Sequence[str], width: int) -> bool:
    """Whether the lines that differ take one row each, before and after."""
    if len(before) != len(after):
        return False
    changed = (
        line for pair in zip(before, after, strict=True) if pair[0] != pair[1] for line in pair
    )
    return all(cell_len(line) <= width for line in changed)
