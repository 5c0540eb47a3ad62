"""A grid of characters to draw on, with finer dots inside the cells where the alphabet has them.

A braille cell is 2 dots wide and 4 high; its code point is 0x2800 plus one bit for each dot:

    0x01 0x08
    0x02 0x10
    0x04 0x20
    0x40 0x80

In ASCII a cell is one dot. Drawn rows are tuples of `Span(text, role)`: a role names what a piece
of text is ("trace0", "axis"); the widget gives it a colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

BRAILLE_BLANK = 0x2800
BRAILLE_BITS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Bit of each dot, by its column and its row from the bottom."""


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    role: str


Row = tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters of one alphabet."""

    traces: tuple[str, ...]
    """The legend entry of each of up to six traces; its first character is the dot in ASCII."""
    bars: str
    """Characters of a bar, from empty to full."""
    mark: str
    cross: str
    level: str
    below: str
    """A value at or below 0 on a logarithmic axis."""
    above: str
    """A value beyond the end of an axis that clips outliers."""
    vertical: str
    tick: str
    corner: str
    horizontal: str
    down_tick: str


UNICODE = Glyphs(
    traces=("⣤⣤",) * 6,
    bars="▁▂▃▄▅▆▇█",
    mark="◆",
    cross="×",
    level="╌",
    below="▾",
    above="▴",
    vertical="│",
    tick="┤",
    corner="└",
    horizontal="─",
    down_tick="┬",
)
ASCII = Glyphs(
    traces=("#", "o", ".", "*", "=", "~"),
    bars="_.-=+*#@",
    mark="H",
    cross="X",
    level="-",
    below="v",
    above="^",
    vertical="|",
    tick="+",
    corner="+",
    horizontal="-",
    down_tick="+",
)


class Canvas:
    """A grid of `columns` x `rows` cells. Dots count from the bottom left corner, cells from the top left one."""

    def __init__(self, columns: int, rows: int, *, ascii_only: bool) -> None:
        self.columns, self.rows = columns, rows
        self.dots_per_column, self.dots_per_row = (1, 1) if ascii_only else (2, 4)
        self._ascii_only = ascii_only
        cells = columns * rows
        self._chars = [" "] * cells
        self._bits = bytearray(cells)
        self._roles: list[str | None] = [None] * cells

    @property
    def dots_up(self) -> int:
        return self.rows * self.dots_per_row

    def cell(self, x: int, y: int) -> tuple[int, int]:
        """Return column and row of the cell that holds a dot."""
        return x // self.dots_per_column, self.rows - 1 - y // self.dots_per_row

    def dot(self, x: int, y: int, char: str, role: str) -> None:
        """Set one dot; in ASCII set the whole cell to `char`. A cell has the role of the last thing drawn in it."""
        self.run(x, y, y, char, role)

    def run(self, x: int, low: int, high: int, char: str, role: str) -> None:
        """Set the dots of one column of dots from `low` to `high`."""
        for y in range(low, high + 1):
            column, row = self.cell(x, y)
            at = row * self.columns + column
            self._roles[at] = role
            if self._ascii_only:
                self._chars[at] = char
            else:
                self._bits[at] |= BRAILLE_BITS[x % 2][y % 4]

    def char(self, column: int, row: int, char: str, role: str) -> None:
        """Put a character over whatever is in a cell."""
        at = row * self.columns + column
        self._chars[at], self._bits[at], self._roles[at] = char, 0, role

    def role(self, column: int, row: int) -> str | None:
        """Return the role of what is in a cell, None when it is empty."""
        return self._roles[row * self.columns + column]

    def text(self, row: int) -> list[Span]:
        """Return one row of cells, counted from the top."""
        begin = row * self.columns
        end = begin + self.columns
        # Dots drawn over a character replace it.
        chars = [
            chr(BRAILLE_BLANK | bits) if bits else char
            for char, bits in zip(self._chars[begin:end], self._bits[begin:end], strict=True)
        ]
        spans, start = [], 0
        for role, group in groupby(self._roles[begin:end]):
            stop = start + len(list(group))
            spans.append(Span("".join(chars[start:stop]), role or "axis"))
            start = stop
        return spans


def plain(rows: Sequence[Row]) -> list[str]:
    """Return rows without their roles."""
    return ["".join(span.text for span in row) for row in rows]


def fit(spans: Sequence[Span], width: int) -> Row:
    """Cut or pad spans to a width. Every character is one cell wide."""
    row: list[Span] = []
    left = width
    for span in spans:
        if text := span.text[:left]:
            row.append(Span(text, span.role))
            left -= len(text)
    return (*row, Span(" " * left, "axis")) if left else tuple(row)


def centred(text: str, width: int, height: int) -> list[Row]:
    """Return one line of text in the middle of an empty area."""
    line = Span(f"{text[:width]:^{width}}", "axis")
    return [fit([line] if y == (height - 1) // 2 else [], width) for y in range(height)]


def name_places(placed: Iterable[tuple[int, str]], columns: int) -> tuple[str, list[int]]:
    """Return a row of labels centred at their columns, earlier ones first, and the columns of those that fit."""
    words, named = [" "] * columns, []
    for column, text in placed:
        start = min(max(0, column - len(text) // 2), columns - len(text))
        # One free cell on each side keeps neighbours apart.
        around = words[max(0, start - 1) : start + len(text) + 1]
        if start >= 0 and all(char == " " for char in around):
            words[start : start + len(text)] = text
            named.append(column)
    return "".join(words), named


def flow(lengths: Sequence[int], width: int, gap: int) -> list[range]:
    """Return which items go on which line, each line as full as possible; an item that is too long gets its own
    line."""
    lines, start, used = [], 0, 0
    for index, length in enumerate(lengths):
        if index > start and used + gap + length > width:
            lines.append(range(start, index))
            start, used = index, 0
        used += length + (gap if index > start else 0)
    return [*lines, range(start, len(lengths))]
