"""Lines of text: headings bold, and long lines wrapped and indented."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from workbench.tui.names import wrapped


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
