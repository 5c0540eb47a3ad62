"""A table whose columns fit their contents, and which rewrites only changed cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text
from textual.widgets import DataTable

Texts = Mapping[str, Sequence[str]]
"""The cell texts of each row, by its key."""


class CellTable(DataTable[Text]):
    """Draws rows; the cursor stays on its row when they change."""

    DEFAULT_CSS = "CellTable { height: 1fr; scrollbar-size-vertical: 1; }"

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0)
        self._head: tuple[list[str], list[int]] = ([], [])
        self._titles: list[Text] = []
        self._texts: Texts = {}
        self._keys: list[str] = []

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
        before = self.key
        widths = [
            max([1, title.cell_len, *(cell_len(row[place]) for row in texts.values())])
            for place, title in enumerate(titles)
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
        if before is not None and before in texts:
            self.move_cursor(row=keys.index(before), animate=False)

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
