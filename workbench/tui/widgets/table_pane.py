"""A pane of lines about several runs; each run has its letter and its colour. The lines are made for
the width that the pane has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from workbench.tui.printable import as_title
from workbench.tui.run_columns import Line, Piece
from workbench.tui.series import series_style

LinesFor = Callable[[int], Sequence[Line]]
"""The lines at a width."""


def drawn(piece: Piece) -> Content:
    """Words as they are drawn."""
    colour = "" if piece.slot is None else series_style(piece.slot).colour
    return Content.styled(piece.text, " ".join(x for x in ("bold" * piece.bold, colour) if x))


class TablePane(VerticalScroll, can_focus=True):
    """Draws the lines that are made for its width."""

    DEFAULT_CSS = """
    TablePane { scrollbar-size-vertical: 1; }
    TablePane > Static { height: auto; text-wrap: nowrap; }
    """

    def __init__(self, title: str, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.border_title = as_title(title)
        self._lines_for: LinesFor | None = None
        self._lines: list[Line] = []

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def whole_text(self) -> str:
        """Every line, also those that are scrolled away."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self._lines)

    def on_resize(self) -> None:
        self._write()

    def show(self, lines_for: LinesFor) -> None:
        """Draw other lines."""
        self._lines_for = lines_for
        self._write()

    def _write(self) -> None:
        width = self.scrollable_content_region.width
        if self._lines_for is None or width <= 0:
            return
        lines = list(self._lines_for(width))
        if lines == self._lines:
            return
        before, self._lines = self._lines, lines
        self.query_one(Static).update(
            Content("\n").join(Content("").join(map(drawn, line)) for line in lines),
            layout=len(before) != len(lines),
        )
