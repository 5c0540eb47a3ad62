"""The table of runs: one row each, sorted by a column, with as many columns as fit the width. A marked
run shows its letter before its name, in the colour of that letter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text
from textual.reactive import reactive

from engine.units import format_count, format_seconds, format_value
from workbench.plot.series import series_style
from workbench.runs_feed import RunRow
from workbench.tui.names import told_apart
from workbench.tui.widgets.cell_table import CellTable
from workbench.tui.widgets.status_line import bar_text

ABSENT = "-"
NAME_CELLS = 12
ROOMY = 100
"""From this width on, columns are two cells apart."""
BAR_CELLS = 8


def _maybe(write: Callable[[float], str], value: float | None) -> str:
    return ABSENT if value is None else write(value)


def _steps_text(row: RunRow) -> str:
    """Return the steps done, of how many where that is known."""
    if row.total_steps is not None:
        return f"{row.last_step}/{row.total_steps}"
    return str(row.last_step) if row.last_step else ABSENT


def _share(row: RunRow) -> float | None:
    return row.last_step / row.total_steps if row.total_steps else None


def alerts_text(row: RunRow) -> str:
    """Format the worst severity and the number of active alerts: `error 3` is three, at least one of them an error."""
    if not row.alerts:
        return ABSENT
    return f"{'error' if row.alerts[0][0] == 'error' else 'warn'} {len(row.alerts)}"


def _worst(row: RunRow) -> tuple[int, int]:
    return sum(severity == "error" for severity, _ in row.alerts), len(row.alerts)


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    text: Callable[[RunRow], str]
    value: Callable[[RunRow], float | str | tuple[int, int] | None]
    least_width: int
    """Least width of the table in which the column is shown."""
    right: bool = True
    largest_first: bool = False


COLUMNS = (
    Column("name", lambda row: row.name, lambda row: row.name, 0, right=False),
    Column("state", lambda row: row.state, lambda row: row.state, 0, right=False),
    Column(
        "step",
        lambda row: _steps_text(row),
        _share,
        56,
        largest_first=True,
    ),
    Column("loss", lambda row: _maybe(format_value, row.loss), lambda row: row.loss, 56),
    Column("held-out", lambda row: _maybe(format_value, row.heldout), lambda row: row.heldout, 76),
    Column(
        "tok/s",
        lambda row: _maybe(format_count, row.tokens_per_second),
        lambda row: row.tokens_per_second,
        70,
        largest_first=True,
    ),
    Column("alerts", alerts_text, _worst, 0, largest_first=True),
    Column(
        "age",
        lambda row: _maybe(format_seconds, None if row.age_s is None else max(0.0, row.age_s)),
        lambda row: row.age_s,
        76,
    ),
    Column("left", lambda row: _maybe(format_seconds, row.left_s), lambda row: row.left_s, 116),
)
AGE = [column.name for column in COLUMNS].index("age")
STEP = [column.name for column in COLUMNS].index("step")


def in_order(rows: Sequence[RunRow], index: int, *, backwards: bool) -> list[RunRow]:
    """Return rows sorted by a column; a missing value or NaN comes last in both orders."""
    value = COLUMNS[index].value
    known: list[RunRow] = []
    unknown: list[RunRow] = []
    for row in rows:
        key = value(row)
        # Only NaN is not equal to itself.
        (unknown if key is None or key != key else known).append(row)
    return sorted(known, key=lambda row: (value(row),), reverse=backwards) + unknown


def _is_as_before(before: RunRow, row: RunRow) -> bool:
    """Whether nothing of a run has changed but its age."""
    return replace(before, age_s=row.age_s) == row


class RunsTable(CellTable):
    """Draws rows; `sorted_by` is the index of a column, `backwards` reverses its order, and `marked` maps marked
    runs to the index of their style."""

    rows_shown: reactive[tuple[RunRow, ...]] = reactive((), init=False)
    sorted_by: reactive[int] = reactive(AGE, init=False)
    backwards: reactive[bool] = reactive(False, init=False)
    marked: reactive[Mapping[Path, int]] = reactive({}, init=False)

    def __init__(self, *, ascii_only: bool) -> None:
        super().__init__()
        self._ascii_only = ascii_only
        self._by_key: dict[str, RunRow] = {}
        self._known: dict[str, tuple[tuple[int, ...], RunRow, list[str]]] = {}
        self._is_roomy = False
        self._shown: tuple[int, ...] = ()

    def on_resize(self) -> None:
        self._fill()

    watch_sorted_by = watch_backwards = watch_marked = on_resize

    def sort_by(self, index: int) -> None:
        """Sort by a column; the same column again reverses the order."""
        if index == self.sorted_by:
            self.backwards = not self.backwards
        else:
            self.set_reactive(RunsTable.backwards, COLUMNS[index].largest_first)
            self.sorted_by = index

    @property
    def selected(self) -> RunRow | None:
        """Return the row under the cursor."""
        return self._by_key.get(self.key or "")

    def watch_rows_shown(self) -> None:
        self._by_key = {str(row.path): row for row in self.rows_shown}
        self._known = {key: known for key, known in self._known.items() if key in self._by_key}
        self._fill()

    @property
    def _gap(self) -> str:
        return "  " if self._is_roomy else " "

    def _title(self, index: int) -> Text:
        column = COLUMNS[index]
        arrow = ("▼" if self.backwards else "▲") if index == self.sorted_by else ""
        before = self._gap if index else "  "
        return Text(f"{before}{column.name}{arrow}", justify="right" if column.right else "left")

    def _text(self, row: RunRow, index: int) -> str:
        text = COLUMNS[index].text(row)
        if index == STEP and self._is_roomy and row.total_steps:
            bar = bar_text(row.last_step, row.total_steps, BAR_CELLS, ascii_only=self._ascii_only)
            text = f"{bar:>{BAR_CELLS + 5}} {text}"
        return self._gap + text

    def _all_texts(self, rows: Iterable[RunRow]) -> dict[str, list[str]]:
        """Return the cell texts of each row; names get the width that the other columns leave."""
        texts = {str(row.path): self._words(row) for row in rows}
        others = [
            max([self._title(index).cell_len, *(len(row[place]) for row in texts.values())])
            for place, index in enumerate(self._shown[1:])
        ]
        room = self.size.width - self.scrollbar_size_vertical - 2 - sum(others)
        names = tuple(self._by_key[key].name for key in texts)
        short = told_apart(names, max(NAME_CELLS, room))
        return {
            key: [f"{self._letter(key)} {name}", *words]
            for (key, words), name in zip(texts.items(), short, strict=True)
        }

    def _words(self, row: RunRow) -> list[str]:
        """Return the cell texts of a row after its name; for an unchanged run only the age is recomputed."""
        known = self._known.get(str(row.path))
        if known is None or known[0] != self._shown or not _is_as_before(known[1], row):
            known = (self._shown, row, [self._text(row, index) for index in self._shown[1:]])
            self._known[str(row.path)] = known
        words = [*known[2]]
        if AGE in self._shown:
            words[self._shown.index(AGE) - 1] = self._text(row, AGE)
        return words

    def _letter(self, key: str) -> str:
        slot = self.marked.get(self._by_key[key].path)
        return " " if slot is None else series_style(slot).letter

    def _cells(self, key: str, texts: Sequence[str]) -> list[Text]:
        slot = self.marked.get(self._by_key[key].path)
        styles = ["" if slot is None else f"bold {series_style(slot).colour}"]
        styles += [""] * (len(texts) - 1)
        return [
            Text(text, style, justify="right" if COLUMNS[index].right else "left", no_wrap=True)
            for text, style, index in zip(texts, styles, self._shown, strict=True)
        ]

    def _fill(self) -> None:
        width = self.size.width
        if not width:
            return
        if self._is_roomy != (width >= ROOMY):
            self._is_roomy = width >= ROOMY
            self._known.clear()
        self._shown = tuple(i for i, c in enumerate(COLUMNS) if c.least_width <= width)
        rows = in_order(self.rows_shown, self.sorted_by, backwards=self.backwards)
        names = [COLUMNS[index].name for index in self._shown]
        titles = [self._title(index) for index in self._shown]
        self.fill(names, titles, self._all_texts(rows), self._cells)
