"""Lines of text: headings bold, and long lines wrapped and indented."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

MIN_WIDTH = 16


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line to rows of a width; rows after the first are indented by two more cells."""
    if len(line) <= width:
        return [line]
    indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
    return textwrap.wrap(
        line,
        max(width, MIN_WIDTH),
        subsequent_indent=indent,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def worded(lines: Sequence[str], width: int) -> Content:
    """Return styled lines. A line without leading space is a heading of the indented lines below it."""
    has_parts = any(line.startswith(" ") for line in lines)
    return Content("\n").join(
        Content.styled(row, "bold" if has_parts and not line.startswith(" ") else "")
        for line in lines
        for row in wrapped(line, width)
    )


class WordsView(Static):
    """Draws lines at the width it has."""

    lines: reactive[tuple[str, ...]] = reactive((), init=False)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)

    def on_resize(self) -> None:
        self._write()

    watch_lines = on_resize

    def _write(self) -> None:
        self.update(worded(self.lines, self.size.width or 80))
