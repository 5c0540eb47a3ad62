"""A table whose columns fit their contents, and which rewrites only changed cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.coordinate import Coordinate
from textual.strip import Strip
from textual.widgets import DataTable

Texts = Mapping[str, Sequence[str]]
"""The cell texts of each row, by its key."""


class CellTable(DataTable[Text]):
    """Draws rows; the cursor stays on the first row, and once it was moved on its row, when they change."""

    DEFAULT_CSS = "CellTable { height: 1fr; scrollbar-size-vertical: 1; }"

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0)
        self._head: tuple[list[str], list[int]] = ([], [])
        self._titles: list[Text] = []
        self._texts: Texts = {}
        self._keys: list[str] = []
        self._is_filling = self._is_moved = False

    def watch_cursor_coordinate(
        self, old_coordinate: Coordinate, new_coordinate: Coordinate
    ) -> None:
        super().watch_cursor_coordinate(old_coordinate, new_coordinate)
        # Otherwise a key or the mouse has moved it.
        self._is_moved |= not self._is_filling

    @property
    def key(self) -> str | None:
        """Return the key of the row under the cursor."""
        return self._keys[self.cursor_row] if self.is_valid_row_index(self.cursor_row) else None

    def fill(
        self,
        names: Sequence[str],
        titles: Sequence[Text],
        texts: Texts,
        cells: Callable[[str, Sequence[str]], list[Text]],
    ) -> None:
        """Draw other rows; `cells` renders the texts of one row and must depend on them alone."""
        before, self._is_filling = self.key, True
        widths = [
            max([1, title.cell_len, *(cell_len(row[index]) for row in texts.values())])
            for index, title in enumerate(titles)
        ]
        if ([*names], widths) != self._head:
            # With known column widths Textual need not measure every cell.
            self._head = ([*names], widths)
            self.clear(columns=True)
            for name, title, width in zip(names, titles, widths, strict=True):
                self.add_column(title, key=name, width=width)
            self._keys = []
        keys = list(texts)
        if keys and set(keys) == set(self._keys):
            self._write_changes(texts, cells)
            self._write_titles(titles)
            if keys != self._keys or [*titles] != self._titles:
                self._put_in_order(keys)
        else:
            self.clear()
            self._write_titles(titles)
            for key, words in texts.items():
                self.add_row(*cells(key, words), key=key)
        self._titles = [*titles]
        self._keys, self._texts = keys, texts
        if keys:
            is_kept = self._is_moved and before in texts
            self.move_cursor(row=keys.index(before or "") if is_kept else 0, animate=False)
        self._is_filling = False

    def render_line(self, y: int) -> Strip:
        # Textual renders each cell as a document of its own, in a cache that any change of any cell makes void: for a
        # screen of rows that takes longer than all the rest of a frame. A cell here is one line with one style.
        left, top = self.scroll_offset
        is_header = y < self.header_height
        row = -1 if is_header else y - self.header_height + top
        if row >= self.row_count:
            return Strip.blank(self.size.width, self.rich_style)
        base = self._get_row_style(row, self.rich_style)
        over, last = self._row_styles(row, css_first=True)
        columns = self.ordered_columns
        cells = [column.label for column in columns] if is_header else self.get_row_at(row)
        segments = []
        for index, (column, cell) in enumerate(zip(columns, cells, strict=True)):
            style = base + _mouse_style(row, index) + over + Style.parse(str(cell.style)) + last
            segments.append(Segment(_padded(cell, column.width), style))
        room = self.size.width - sum(column.width for column in columns)
        rest_style = base + self._row_styles(row, css_first=False)[0] + _mouse_style(row, None)
        strip = Strip([*segments, Segment(" " * max(0, room), rest_style)])
        return strip.crop_extend(left, left + self.size.width, self.rich_style).simplify()

    def _row_styles(self, row: int, *, css_first: bool) -> tuple[Style, Style]:
        """Return the styles over and under that of the text of a row's cells, which say where cursor and mouse are."""
        return self._get_styles_to_render_cell(
            row == -1,
            False,
            False,
            row == self.hover_row,
            row == self.cursor_row,
            self.show_cursor,
            self._show_hover_cursor,
            css_first and self.cursor_foreground_priority == "css",
            css_first and self.cursor_background_priority == "css",
        )

    def _write_titles(self, titles: Sequence[Text]) -> None:
        for column, title in zip(self.ordered_columns, titles, strict=True):
            column.label = title

    def _put_in_order(self, keys: Sequence[str]) -> None:
        """Put the rows in another order: for hundreds of them several times as fast as adding them again."""
        first = self._head[0][0]
        places = {id(self.get_cell(key, first)): place for place, key in enumerate(keys)}
        self.sort(first, key=lambda cell: places[id(cell)])

    def _write_changes(
        self, texts: Texts, cells: Callable[[str, Sequence[str]], list[Text]]
    ) -> None:
        """Update the changed cells only, which are few in a long table."""
        for key, words in texts.items():
            before = self._texts[key]
            if before == words:
                continue
            for name, old, new, cell in zip(
                self._head[0], before, words, cells(key, words), strict=True
            ):
                if old != new:
                    self.update_cell(key, name, cell)


@lru_cache(4096)
def _mouse_style(row: int, column: int | None) -> Style:
    """Return the style by which Textual finds the cell under the mouse; None is right of the last column."""
    cell = {"row": row, "column": column or 0}
    return Style.from_meta(cell if column is not None else {**cell, "out_of_bounds": True})


def _padded(cell: Text, width: int) -> str:
    """Return the text of a cell at the width of its column."""
    if cell.justify == "right":
        return " " * (width - cell.cell_len) + cell.plain
    return set_cell_size(cell.plain, width)
