"""A scrolling pane of lines: the text of a snapshot, or of several runs, each with its letter and colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from workbench.plot.series import series_style
from workbench.tui.printable import as_title
from workbench.tui.run_lines import Line, Piece

LinesFor = Callable[[int], Sequence[str | Line]]
"""Returns the lines for a width."""


def drawn(piece: Piece) -> Content:
    """Return a piece with its style."""
    colour = "" if piece.slot is None else series_style(piece.slot).colour
    return Content.styled(piece.text, " ".join(x for x in ("bold" * piece.bold, colour) if x))


def text_of(line: str | Line) -> str:
    """Return a line without its colours."""
    return line if isinstance(line, str) else "".join(piece.text for piece in line).rstrip()


class TextPane(VerticalScroll, can_focus=True):
    """Draws the lines that are made for its width."""

    DEFAULT_CSS = "TextPane { scrollbar-size-vertical: 1; }"

    def __init__(self, title: str, *, id: str, help: str = "") -> None:
        super().__init__(id=id, classes="pane")
        self.border_title = as_title(title)
        self.HELP = help or None  # type: ignore[misc]
        self._lines_for: LinesFor | None = None
        self._lines: Sequence[str | Line] = ()

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def whole_text(self) -> str:
        """Return every line, including those scrolled out of view."""
        return "\n".join(map(text_of, self._lines))

    def on_resize(self) -> None:
        self._write()

    def show_title(self, title: str) -> None:
        # Setting it draws it.
        if (words := as_title(title)) != self.border_title:
            self.border_title = words

    def show(self, lines_for: LinesFor) -> None:
        """Draw other lines."""
        self._lines_for = lines_for
        self._write()

    def _write(self) -> None:
        width = self.scrollable_content_region.width
        # A hidden pane has no width; it is written when it gets one.
        if self._lines_for is None or width <= 0:
            return
        before, lines = self._lines, self._lines_for(width)
        if lines == before:
            return
        self._lines = lines
        text = self.query_one(Static)
        # A layout of the whole screen is the most expensive part of an update.
        layout = not _same_height(before, lines, text.size.width)
        text.update(Content("\n").join(_contents(lines)), layout=layout)


def _contents(lines: Sequence[str | Line]) -> list[Content]:
    """Return styled lines. A plain line without leading space is a heading of the indented lines below it."""
    has_parts = any(isinstance(line, str) and line.startswith(" ") for line in lines)
    return [
        Content.styled(line, "bold" if has_parts and not line.startswith(" ") else "")
        if isinstance(line, str)
        else Content("").join(map(drawn, line))
        for line in lines
    ]


def _same_height(before: Sequence[str | Line], after: Sequence[str | Line], width: int) -> bool:
    """Whether the lines that differ take one row each, before and after."""
    if len(before) != len(after):
        return False
    changed = (
        line for pair in zip(before, after, strict=True) if pair[0] != pair[1] for line in pair
    )
    return all(cell_len(text_of(line)) <= width for line in changed)
