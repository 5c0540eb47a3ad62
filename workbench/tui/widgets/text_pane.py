"""Lines of text, headings bold, long lines wrapped and indented: in a scrolling pane, or as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from workbench.tui.names import wrapped
from workbench.tui.printable import as_title

LinesFor = Callable[[int], Sequence[str | Content]]
"""Returns the lines for a width."""


def worded(lines: Sequence[str | Content], width: int) -> list[Content]:
    """Return lines as styled rows of a width. A line without leading space is a heading of the indented lines below
    it; one that has styles already stays as it is."""
    has_parts = any(isinstance(line, str) and line.startswith(" ") for line in lines)
    rows = []
    for line in lines:
        if isinstance(line, Content):
            rows.append(line)
            continue
        style = "bold" if has_parts and not line.startswith(" ") else ""
        rows += [Content.styled(row, style) for row in wrapped(line, width)]
    return rows


class TextPane(VerticalScroll, can_focus=True):
    """Draws the lines that are made for its width."""

    DEFAULT_CSS = """
    TextPane { scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    TextPane.-fixed > Static { min-height: 100%; }
    """

    def __init__(self, title: str, *, id: str, help: str = "", is_fixed: bool = False) -> None:
        """Make an empty pane; with `is_fixed` its height does not follow its lines."""
        super().__init__(id=id, classes="pane -fixed" if is_fixed else "pane")
        self._is_fixed = is_fixed
        self.border_title = as_title(title)
        if help:
            self.HELP = help  # type: ignore[misc]
        self._lines_for: LinesFor | None = None
        self._lines: Sequence[str | Content] = ()
        self._drawn: object = None
        """Drawn content and its width."""
        self._height = 0

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def whole_text(self) -> str:
        """Return every line, including those scrolled out of view."""
        return "\n".join(str(line).rstrip() for line in self._lines)

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
        lines = self._lines_for(width)
        if (lines, width) == self._drawn:
            return
        self._lines, self._drawn = lines, (lines, width)
        rows = worded(lines, width)
        # A layout of the whole screen is the most expensive part of an update.
        height = max(len(rows), self.scrollable_content_region.height if self._is_fixed else 0)
        self.query_one(Static).update(Content("\n").join(rows), layout=height != self._height)
        self._height = height


class WordsView(Static):
    """Draws lines at the width it has."""

    lines: reactive[tuple[str, ...]] = reactive((), init=False)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)

    def on_resize(self) -> None:
        self._write()

    watch_lines = on_resize

    def _write(self) -> None:
        self.update(Content("\n").join(worded(self.lines, self.size.width or 80)))
