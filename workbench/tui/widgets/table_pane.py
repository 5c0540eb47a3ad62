"""A pane of rows and columns of words, which scrolls both ways; the head of each column has the
letter and the colour of a run."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import ScrollableContainer
from textual.content import Content
from textual.widgets import Static

from workbench.tui.series import series_style
from workbench.tui.widgets.status_line import shortened

GAP = "  "
WIDEST = 28
"""Cells of a column; a longer value, such as a path, is cut in its middle."""


def aligned(rows: Sequence[Sequence[str]], *, right: bool) -> list[list[str]]:
    """Cells as wide as the widest of their column, the first column to the left."""
    cut = [[shortened(cell, WIDEST) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cut, strict=True)]
    return [
        [
            cell.rjust(width) if right and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cut
    ]


class TablePane(ScrollableContainer):
    """Draws a table of the runs of some styles."""

    DEFAULT_CSS = """
    TablePane > Static { width: auto; height: auto; text-wrap: nowrap; }
    TablePane { scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }
    """

    def __init__(self, title: str, *, right: bool, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.border_title = title
        self._right = right
        self._drawn: object = None

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def show(
        self,
        slots: Sequence[int],
        names: Sequence[str],
        rows: Sequence[Sequence[str]],
        note: str = "",
    ) -> None:
        """Rows of a name and one cell for each run; `note` stands below them."""
        wanted = (tuple(slots), tuple(names), [tuple(row) for row in rows], note)
        if wanted == self._drawn:
            return
        self._drawn = wanted
        letters = ["", *(series_style(slot).letter for slot in slots)]
        head, named, *cells = aligned([letters, ["run", *names], *rows], right=self._right)
        lines = [
            Content(GAP).join(
                Content.styled(cell, f"bold {series_style(slots[index - 1]).colour}")
                if index
                else Content.styled(cell, "bold")
                for index, cell in enumerate(line)
            )
            for line in (head, named)
        ]
        lines += [Content(GAP.join(row)) for row in cells]
        lines += [Content(note)] if note else []
        self.query_one(Static).update(Content("\n").join(lines))
