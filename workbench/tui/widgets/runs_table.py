"""The table of runs: one row each, sorted by a column, showing those that a filter names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from textual.reactive import reactive
from textual.widgets import DataTable

from engine.units import format_count, format_seconds, format_value
from workbench.feed import RunRow
from workbench.tui.widgets.status_line import shortened

ABSENT = "-"
NAME_CELLS = 12


def _progress(row: RunRow) -> str:
    return f"{row.last_step}/{row.total_steps}" if row.total_steps is not None else ABSENT


def _share(row: RunRow) -> float | None:
    return row.last_step / row.total_steps if row.total_steps else None


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    text: Callable[[RunRow], str]
    value: Callable[[RunRow], float | str | None]
    right: bool = True


COLUMNS = (
    Column("name", lambda row: row.name, lambda row: row.name, right=False),
    Column("state", lambda row: row.state, lambda row: row.state, right=False),
    Column("step", _progress, _share),
    Column(
        "loss",
        lambda row: ABSENT if row.loss is None else format_value(row.loss),
        lambda row: row.loss,
    ),
    Column(
        "held-out",
        lambda row: ABSENT if row.heldout is None else format_value(row.heldout),
        lambda row: row.heldout,
    ),
    Column(
        "tok/s",
        lambda row: (
            ABSENT if row.tokens_per_second is None else format_count(row.tokens_per_second)
        ),
        lambda row: row.tokens_per_second,
    ),
    Column(
        "age",
        lambda row: ABSENT if row.age_s is None else format_seconds(max(0.0, row.age_s)),
        lambda row: row.age_s,
    ),
)
AGE = len(COLUMNS) - 1


def in_order(rows: Sequence[RunRow], index: int, *, backwards: bool) -> list[RunRow]:
    """Rows sorted by a column; one that has no number there, or NaN, comes last in both orders."""
    value = COLUMNS[index].value
    known = [row for row in rows if value(row) is not None and value(row) == value(row)]
    unknown = [row for row in rows if row not in known]
    return sorted(known, key=lambda row: (value(row),), reverse=backwards) + unknown


def matching(rows: Sequence[RunRow], pattern: str) -> list[RunRow]:
    """Rows whose name or state holds the words of a filter."""
    wanted = pattern.casefold()
    return [row for row in rows if wanted in f"{row.name} {row.state}".casefold()]


class RunsTable(DataTable[Text]):
    """Draws rows; `sorted_by` is the index of a column, `backwards` turns its order around."""

    DEFAULT_CSS = "RunsTable { height: 1fr; scrollbar-size-vertical: 1; }"

    rows_shown: reactive[tuple[RunRow, ...]] = reactive((), init=False)
    sorted_by: reactive[int] = reactive(AGE, init=False)
    backwards: reactive[bool] = reactive(False, init=False)

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=1, zebra_stripes=False)
        self._paths: list[Path] = []

    def on_mount(self) -> None:
        for index, column in enumerate(COLUMNS):
            self.add_column(self._title(index), key=column.name)

    def on_resize(self) -> None:
        self._fill()

    def sort_by(self, index: int) -> None:
        """Sort by a column; once more turns the order around."""
        if index == self.sorted_by:
            self.backwards = not self.backwards
        else:
            self.backwards = False
            self.sorted_by = index

    @property
    def selected(self) -> RunRow | None:
        """The row under the cursor."""
        if not self._paths or not self.is_valid_row_index(self.cursor_row):
            return None
        path = self._paths[self.cursor_row]
        return next((row for row in self.rows_shown if row.path == path), None)

    def watch_rows_shown(self) -> None:
        self._fill()

    def watch_sorted_by(self) -> None:
        self._fill()

    def watch_backwards(self) -> None:
        self._fill()

    def _title(self, index: int) -> Text:
        column = COLUMNS[index]
        arrow = ("▼" if self.backwards else "▲") if index == self.sorted_by else ""
        return Text(column.name + arrow, justify="right" if column.right else "left")

    def _cells(self, rows: Sequence[RunRow]) -> list[list[Text]]:
        """The cells of each row; names get the width that the other columns leave."""
        texts = [[column.text(row) for column in COLUMNS] for row in rows]
        others = [
            max([len(column.name) + 1, *(len(row[index]) for row in texts)])
            for index, column in enumerate(COLUMNS)
        ][1:]
        padding = 2 * self.cell_padding * len(COLUMNS)
        room = self.size.width - self.scrollbar_size_vertical - padding - sum(others)
        return [
            [
                Text(
                    text if index else shortened(text, max(NAME_CELLS, room)),
                    justify="right" if COLUMNS[index].right else "left",
                    no_wrap=True,
                )
                for index, text in enumerate(row)
            ]
            for row in texts
        ]

    def _fill(self) -> None:
        if not self.columns:
            return
        titles = [self._title(index) for index in range(len(COLUMNS))]
        is_titled = titles == [header.label for header in self.ordered_columns]
        for header, title in zip(self.ordered_columns, titles, strict=True):
            header.label = title
        rows = in_order(self.rows_shown, self.sorted_by, backwards=self.backwards)
        paths = [row.path for row in rows]
        if paths == self._paths and is_titled:
            for row, cells in zip(rows, self._cells(rows), strict=True):
                for cell, column in zip(cells, COLUMNS, strict=True):
                    if self.get_cell(str(row.path), column.name) != cell:
                        self.update_cell(str(row.path), column.name, cell, update_width=True)
            return
        selected = self.selected
        self._paths = paths
        self.clear()
        for row, cells in zip(rows, self._cells(rows), strict=True):
            self.add_row(*cells, key=str(row.path))
        if selected is not None and selected.path in paths:
            self.move_cursor(row=paths.index(selected.path), animate=False)
