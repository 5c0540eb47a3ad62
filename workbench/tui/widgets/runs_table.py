"""The table of runs: one row each, sorted by a column. Columns give way in an order of importance: what decides
between runs stays longest, and no column is cut to a stump. A marked run shows its letter before its name, in the
colour of that letter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from engine.log.filters import number_of, setting_text
from engine.log.sparkline import sparkline
from engine.units import format_count, format_seconds, format_value
from engine.watch.runs_feed import CURVE_POINTS, RunRow
from workbench.plot.series import series_style
from workbench.tui.names import cut_at_end, distinct_names, shortened
from workbench.tui.printable import drawable
from workbench.tui.widgets.status_line import LEVEL_ROLES, state_role

ABSENT = "-"
ROOMY = 100
"""Width in cells from which columns are two cells apart and names keep more cells."""
NAME_CELLS = (16, 24)
"""Cells below which a name is not cut, on a narrow and on a wide terminal."""
VERDICT_CELLS = 64
"""Cells of a verdict below which columns after the settings that differ give way: its cause is in them."""
SETTING_CELLS = 16
SETTINGS_SHOWN = 12
"""Maximum number of differing settings that have a column."""
NAMED = frozenset({"run.name", "run.out", "teacher.path", "student.path", "train.steps"})
"""Settings that other columns show: the name of the run or of a model, and the number of steps."""


def _text_or_absent(write: Callable[[float], str], value: float | None) -> str:
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


Key = float | str | tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    text: Callable[[RunRow], str]
    value: Callable[[RunRow], Key]
    rank: int
    """Rank of the column: columns of the highest rank are left out first."""
    title: str = ""
    """Heading; the name is used if it is empty."""
    right: bool = True
    largest_first: bool = False
    least: int = 0
    """The fewest cells it can be cut to; 0 for a column that is shown whole or not at all."""


def _text_column(name: str, text: Callable[[RunRow], str], rank: int, least: int = 0) -> Column:
    return Column(
        name=name,
        text=lambda row: text(row) or ABSENT,
        value=lambda row: text(row) or None,
        rank=rank,
        right=False,
        least=least,
    )


NAME = Column(
    name="name",
    # A character that is not drawn would take a cell when names are cut to a width.
    text=lambda r: drawable(r.name, ascii_only=False),
    value=lambda r: r.name,
    rank=0,
    right=False,
)
STATE = Column(
    name="state",
    text=lambda r: r.state,
    value=lambda r: r.state,
    rank=0,
    right=False,
)
AGE = "age"
VERDICT, TAGS = "verdict", "tags"
SETTING, LATER_SETTING, FIRST_SETTINGS = 60, 85, 3
"""The rank of the first settings that differ, and of the others."""
BEFORE = (
    NAME,
    STATE,
    Column(name="step", text=_steps_text, value=_share, rank=30, largest_first=True),
    Column(
        name="loss",
        text=lambda row: _text_or_absent(format_value, row.loss),
        value=lambda row: row.loss,
        rank=20,
    ),
    Column(
        name="held-out",
        text=lambda row: _text_or_absent(format_value, row.heldout),
        value=lambda row: row.heldout,
        rank=40,
    ),
)
"""The columns before the settings that differ."""
AFTER = (
    Column(
        name="alerts",
        text=alerts_text,
        value=_worst,
        rank=70,
        largest_first=True,
    ),
    _text_column(VERDICT, lambda row: row.verdict, 15, least=24),
    _text_column(TAGS, lambda row: " ".join(row.tags), 74, least=12),
    _text_column("teacher", lambda row: row.teacher, 140, least=12),
    _text_column("student", lambda row: row.student, 130, least=12),
    Column(
        name="tok/s",
        text=lambda row: _text_or_absent(format_count, row.tokens_per_second),
        value=lambda row: row.tokens_per_second,
        rank=100,
        largest_first=True,
    ),
    Column(
        name=AGE,
        text=lambda row: format_seconds(row.age_s),
        value=lambda row: row.age_s,
        rank=120,
    ),
    Column(
        name="left",
        text=lambda row: _text_or_absent(format_seconds, row.left_s),
        value=lambda row: row.left_s,
        rank=150,
    ),
)


WIDENED = (NAME.name, VERDICT, TAGS, "teacher", "student")
"""The columns that get what is left of the width, in this order."""


def curve_column(*, ascii_only: bool) -> Column:
    """Return the column of loss curves, drawn in ASCII if asked."""
    return Column(
        name="loss curve",
        text=lambda row: sparkline(row.curve, CURVE_POINTS, ascii_only=ascii_only) or ABSENT,
        value=lambda row: row.curve[-1] if row.curve else None,
        rank=76,
        right=False,
    )


def differing(rows: Sequence[RunRow]) -> list[Column]:
    """Return a column for each setting that differs between the runs that have it, in the order of the specs, numeric
    ones first: at most SETTINGS_SHOWN, and none of NAMED."""
    texts_by_name: dict[str, dict[str, object]] = {}
    for settings in {id(row.settings): row.settings for row in rows}.values():
        for name, value in settings.items():
            texts_by_name.setdefault(name, {}).setdefault(setting_text(value), value)
    values = {
        name: list(by_text.values())
        for name, by_text in texts_by_name.items()
        if len(by_text) > 1 and name not in NAMED
    }
    numeric = {name for name in values if all(number_of(v) is not None for v in values[name])}
    names = sorted(values, key=lambda name: name not in numeric)[:SETTINGS_SHOWN]
    shorts = [name.rpartition(".")[2] for name in names]
    taken = {column.name for column in (*BEFORE, *AFTER)}
    return [
        _setting_column(
            name,
            name if shorts.count(short) > 1 or short in taken else short,
            SETTING if index < FIRST_SETTINGS else LATER_SETTING,
            is_number=name in numeric,
        )
        for index, (name, short) in enumerate(zip(names, shorts, strict=True))
    ]


def _setting_column(name: str, title: str, rank: int, *, is_number: bool) -> Column:
    def text(row: RunRow) -> str:
        if (value := row.settings.get(name)) is None:
            return ABSENT
        words = setting_text(value)
        # The end of a path distinguishes it best.
        return shortened(words.rstrip("/").rpartition("/")[2] or words, SETTING_CELLS)

    def key(row: RunRow) -> Key:
        value = row.settings.get(name)
        if value is None:
            return None
        return number_of(value) if is_number else setting_text(value)

    return Column(name=name, title=title, text=text, value=key, rank=rank, right=is_number)


def in_order(rows: Sequence[RunRow], column: Column, *, backwards: bool) -> list[RunRow]:
    """Return rows sorted by a column; a missing value or NaN comes last in both orders."""
    known: list[tuple[Key, RunRow]] = []
    unknown: list[RunRow] = []
    for row in rows:
        key = column.value(row)
        # Only NaN is not equal to itself.
        if key is None or key != key:
            unknown.append(row)
        else:
            known.append((key, row))
    known.sort(key=lambda pair: (pair[0],), reverse=backwards)
    return [row for _, row in known] + unknown


class RunsTable(ScrollView, can_focus=True):
    """Draws rows below their headings; `sorted_by` is the name of a column, `backwards` reverses its order, and
    `marked` maps marked runs to the index of their style. When the rows change, the cursor stays on the first row
    until the user moves it, and then on its run. A click on a heading sorts."""

    class Highlighted(Message):
        """Another run may be under the cursor."""

    class Chosen(Message):
        """The run under the cursor was clicked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "cursor_to(-1)", show=False),
        Binding("down", "cursor_to(1)", show=False),
        Binding("pageup", "cursor_page(-1)", show=False),
        Binding("pagedown", "cursor_page(1)", show=False),
        Binding("home,ctrl+home", f"cursor_to({-(10**9)})", show=False),
        Binding("end,ctrl+end", f"cursor_to({10**9})", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "runs--heading",
        "runs--cursor",
        "runs--primary",
        "runs--success",
        "runs--warning",
        "runs--error",
        "runs--muted",
    }
    DEFAULT_CSS = """
    RunsTable {
        height: 1fr; scrollbar-size-vertical: 1; background: $surface;
        .runs--heading { background: $panel; text-style: bold; }
        .runs--cursor {
            background: $block-cursor-blurred-background; color: $block-cursor-blurred-foreground;
            text-style: $block-cursor-blurred-text-style;
        }
        &:focus .runs--cursor {
            background: $block-cursor-background; color: $block-cursor-foreground;
            text-style: $block-cursor-text-style;
        }
        .runs--primary { color: $text-primary; }
        .runs--success { color: $text-success; }
        .runs--warning { color: $text-warning; }
        .runs--error { color: $text-error; }
        .runs--muted { color: $text-muted; }
    }
    """

    # Lines that have changed are drawn, and nothing else: at each poll only ages change.
    rows_shown: reactive[tuple[RunRow, ...]] = reactive((), init=False, repaint=False)
    sorted_by: reactive[str] = reactive(AGE, init=False, repaint=False)
    backwards: reactive[bool] = reactive(False, init=False, repaint=False)
    marked: reactive[Mapping[Path, int]] = reactive({}, init=False, repaint=False)
    cursor_row: reactive[int] = reactive(0, init=False, repaint=False)

    def __init__(self, *, ascii_only: bool) -> None:
        super().__init__()
        self._before = (*BEFORE, curve_column(ascii_only=ascii_only))
        self._by_key: dict[str, RunRow] = {}
        self._columns: tuple[Column, ...] = (*self._before, *AFTER)
        self._settings: tuple[int, ...] = ()
        self._shown: tuple[Column, ...] = ()
        self._titles: list[str] = []
        self._widths: list[int] = []
        self._lines: list[tuple[str, list[str]]] = []
        """Key and cells of each row, in order."""
        self._is_moved = False

    def on_resize(self) -> None:
        self._fill()
        self._show_cursor()

    watch_sorted_by = watch_backwards = watch_marked = on_resize

    def sort_by(self, name: str) -> None:
        """Sort by a column; the same column again reverses the order."""
        if name == self.sorted_by:
            self.backwards = not self.backwards
        else:
            largest_first = any(c.largest_first for c in self._columns if c.name == name)
            self.set_reactive(RunsTable.backwards, largest_first)
            self.sorted_by = name

    def sort_by_place(self, place: int) -> None:
        """Sort by a column that is shown, counted from 0."""
        if place < len(self._shown):
            self.sort_by(self._shown[place].name)

    # The cursor.

    @property
    def _key(self) -> str:
        """Return the key of the row under the cursor."""
        return self._lines[self.cursor_row][0] if self.cursor_row < len(self._lines) else ""

    @property
    def selected(self) -> RunRow | None:
        """Return the row under the cursor."""
        return self._by_key.get(self._key)

    def watch_cursor_row(self, before: int, row: int) -> None:
        self._draw_rows((before, row))
        self._show_cursor()
        self.post_message(self.Highlighted())

    def _show_cursor(self) -> None:
        """Scroll until the row under the cursor is visible."""
        first = max(0, self.cursor_row - self.size.height + 2)
        y = min(max(self.scroll_y, first), self.cursor_row)
        self.scroll_to(y=y, animate=False, immediate=True)

    def action_cursor_to(self, offset: int) -> None:
        """Move the cursor by some rows, as far as there are any."""
        self._is_moved = True
        self.cursor_row = min(max(0, self.cursor_row + offset), max(0, len(self._lines) - 1))

    def action_cursor_page(self, pages: int) -> None:
        self.action_cursor_to(pages * max(1, self.size.height - 1))

    def on_click(self, event: Click) -> None:
        row = event.y - 1 + round(self.scroll_y)
        if event.y == 0:
            ends = list(accumulate(self._widths))
            self.sort_by_place(bisect_right(ends, event.x))
            self.post_message(self.Highlighted())
        elif row == self.cursor_row and row < len(self._lines):
            self.post_message(self.Chosen())
        elif row < len(self._lines):
            self.action_cursor_to(row - self.cursor_row)

    # Drawing.

    def render_line(self, y: int) -> Strip:
        row = y - 1 + round(self.scroll_y)
        base, over = self.rich_style, Style()
        if y == 0:
            base, cells = self.get_component_rich_style("runs--heading"), self._titles
            styles = [over] * len(cells)
        elif row < len(self._lines):
            key, cells = self._lines[row]
            styles = [self._style_of(column, self._by_key[key]) for column in self._shown]
            if row == self.cursor_row:
                over = self.get_component_rich_style("runs--cursor")
        else:
            return Strip.blank(self.size.width, base)
        segments = [
            Segment(text, base + style + over)
            for text, style in zip(self._padded(cells), styles, strict=True)
        ]
        return Strip(segments).adjust_cell_length(self.size.width, base + over).simplify()

    def _padded(self, cells: Sequence[str]) -> list[str]:
        """Return the cells of a row at the widths of their columns."""
        return [
            " " * (width - cell_len(text)) + text if column.right else set_cell_size(text, width)
            for column, text, width in zip(self._shown, cells, self._widths, strict=True)
        ]

    def _style_of(self, column: Column, row: RunRow) -> Style:
        if column is NAME and (slot := self.marked.get(row.path)) is not None:
            return Style(color=series_style(slot).colour, bold=True)
        role = ""
        if column.name == VERDICT:
            role = LEVEL_ROLES.get(row.level, "")
        elif column is STATE:
            role = state_role(row.state)
        return self.get_component_rich_style(f"runs--{role}", partial=True) if role else Style()

    def _draw_rows(self, rows: Iterable[int]) -> None:
        """Draw some rows again."""
        for row in rows:
            self.refresh_line(row + 1)

    def watch_rows_shown(self) -> None:
        self._by_key = {str(row.path): row for row in self.rows_shown}
        settings = tuple(id(row.settings) for row in self.rows_shown)
        if settings != self._settings:
            # The mapping of a run is another one when its settings were read again.
            self._settings = settings
            self._columns = (*self._before, *differing(self.rows_shown), *AFTER)
        self._fill()

    @property
    def _gap(self) -> str:
        return "  " if self.size.width >= ROOMY else " "

    def _title(self, column: Column) -> str:
        title = " " * self._before_text(column) + (column.title or column.name)
        if column.name == self.sorted_by:
            title += "▼" if self.backwards else "▲"
        else:
            # Another order must not change the widths.
            title = f" {title}" if column.right else f"{title} "
        return title

    def _before_text(self, column: Column) -> int:
        """Return the cells before a text: the gap to the column before, for a name the letter of its mark."""
        return 2 if column is NAME else len(self._gap)

    def _all_texts(self, rows: Iterable[RunRow]) -> dict[str, list[str]]:
        """Choose the columns that fit, and return the cell texts of each row."""
        texts = {str(row.path): [column.text(row) for column in self._columns] for row in rows}
        wanted = {}
        for place, column in enumerate(self._columns):
            cells = max((cell_len(words[place]) for words in texts.values()), default=0)
            if texts and all(words[place] == ABSENT for words in texts.values()):
                continue
            wanted[column.name] = max(
                cell_len(self._title(column)) - self._before_text(column), cells
            )
        widths = self._fitted(wanted, self.size.width - self.scrollbar_size_vertical)
        self._shown = tuple(column for column in self._columns if column.name in widths)
        places = [(self._columns.index(column), column) for column in self._shown[1:]]
        names = distinct_names([words[0] for words in texts.values()], widths[NAME.name])
        gap = self._gap
        return {
            key: [
                f"{self._letter(key)} {name}",
                *(
                    gap + (cut_at_end(words[i], widths[c.name]) if c.least else words[i])
                    for i, c in places
                ),
            ]
            for (key, words), name in zip(texts.items(), names, strict=True)
        }

    def _fitted(self, wanted: Mapping[str, int], room: int) -> dict[str, int]:
        """Return the width of each column that fits, without its gap. In the order of their ranks columns get the
        least they need; what is left goes to the name, the verdict and the rest of the texts."""
        name_least = NAME_CELLS[self.size.width >= ROOMY]
        widths: dict[str, int] = {}
        for column in sorted(self._columns, key=lambda column: column.rank):
            if column.name not in wanted:
                continue
            if column.rank > SETTING and VERDICT in widths:
                added = max(0, min(room, min(wanted[VERDICT], VERDICT_CELLS) - widths[VERDICT]))
                widths[VERDICT] += added
                room -= added
            least = name_least if column is NAME else column.least
            cells = min(wanted[column.name], least or wanted[column.name])
            if not column.rank or cells + self._before_text(column) <= room:
                widths[column.name] = cells
                room -= cells + self._before_text(column)
        for name in WIDENED:
            if name in widths:
                added = min(room, wanted[name] - widths[name])
                widths[name] += added
                room -= added
        return widths

    def _letter(self, key: str) -> str:
        slot = self.marked.get(self._by_key[key].path)
        return " " if slot is None else series_style(slot).letter

    def _fill(self) -> None:
        """Choose the columns and the order of the rows, and draw what has changed by that."""
        if not self.size.width:
            return
        key, before = self._key, (self._titles, self._widths, self._lines)
        by_name = {column.name: column for column in self._columns}
        column = by_name.get(self.sorted_by) or by_name[AGE]
        rows = in_order(self.rows_shown, column, backwards=self.backwards)
        texts = self._all_texts(rows)
        self._lines = list(texts.items())
        self._titles = [self._title(column) for column in self._shown]
        self._widths = [
            max(cell_len(cell) for cell in cells)
            for cells in zip(self._titles, *texts.values(), strict=True)
        ]
        keys = list(texts)
        self.set_reactive(
            RunsTable.cursor_row, keys.index(key) if self._is_moved and key in texts else 0
        )
        self.virtual_size = Size(self.size.width, len(rows) + 1)
        if (self._titles, self._widths) != before[:2]:
            self.refresh()
        else:
            both = zip_longest(before[2], self._lines)
            self._draw_rows([row for row, (old, new) in enumerate(both) if old != new])
