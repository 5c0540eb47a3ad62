"""All runs in the given folders, newest first, however they were started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.widgets import Input, Static

from engine.errors import BadInput
from engine.log.filters import Filter, parse_filter
from engine.log.folder import RunFolder
from engine.log.notes import change_notes
from engine.units import format_count, format_value
from engine.watch.runs_feed import RunRow, RunsFeed, RunsSnapshot
from workbench.feed import Target
from workbench.paths import path_text
from workbench.plot.series import SERIES, series_style
from workbench.tui.context import Context
from workbench.tui.layout import is_low
from workbench.tui.names import shortened
from workbench.tui.screens.actions import (
    RESUME,
    STOP,
    ask_to_resume,
    ask_to_stop,
)
from workbench.tui.screens.form import FormScreen
from workbench.tui.screens.polling import Polled, PollingScreen, RunChosen
from workbench.tui.widgets.fields import Field, Values
from workbench.tui.widgets.filter_line import FilterLine
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.runs_table import RunsTable
from workbench.tui.widgets.text_pane import TextPane, WordsView

FILTER_HINT = "lr>0.001  state:failed  tag:baseline  /regex/  words; all must hold"
WIDE = 160
"""Width in cells from which the run under the cursor is shown next to the table."""
SORT_KEYS = Binding.Group("sort")
ABOUT_RUN = frozenset({"open", "mark", "tags", "note", "sort"})
"""The actions that need a run under the cursor."""
MARKS_NEEDED = {"compare": 2, "unmark": 1}
"""The actions that need marked runs, and how many."""


NO_RUNS = """\
No run in {folders} yet.

Start one from another terminal:

  engine distill SPEC               a run of your own, from a file of settings
  engine watch -- python train.py   a training script of your own, as it is
  apr-workbench demo                the example run, with this screen on it

It appears here as soon as it has begun."""


class RunsScreen(PollingScreen):
    """Draws the snapshots of one RunsFeed."""

    NOTES = (
        "Runs are found in the given folders and one level below, however they were started.",
        "All terms of a filter must hold: `lr>0.001 state:failed tag:baseline /lr-\\d/ sweep`. A setting",
        "has its short name or section.key; a word is searched in names, states, alerts and reasons.",
        "Marks stay on their runs until they are removed; the letter and the colour are those of",
        "the run in the comparison.",
    )

    AUTO_FOCUS = "RunsTable"
    ACTING = frozenset({"stop", "resume", "tags", "note"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "app.help", "help", tooltip="this help"),
        Binding("q", "app.quit", "quit", tooltip="close the workbench; runs continue"),
        Binding("enter", "open", "open", tooltip="open the run under the cursor"),
        Binding("slash", "filter", "filter", tooltip="filter by settings, state, tag, words"),
        Binding("escape", "clear_filter", "clear", tooltip="remove the filter"),
        Binding("space", "mark", "mark", tooltip="mark the run for a comparison, or unmark it"),
        Binding("c", "compare", "compare", tooltip="compare the 2 to 6 runs marked with space"),
        Binding("u", "unmark", "unmark all", show=False, tooltip="remove all marks"),
        STOP,
        RESUME,
        Binding("t", "tags", "tags", tooltip="edit the tags of the run, words to filter by"),
        Binding("e", "note", "note", tooltip="edit the note of the run"),
        *(
            Binding(
                str(digit),
                f"sort({digit - 1})",
                "sort",
                group=SORT_KEYS,
                tooltip="sort by that column; again: reverse order",
            )
            for digit in range(1, 10)
        ),
        Binding("r", "refresh", "refresh", tooltip="refresh now"),
    ]
    CSS = """
    RunsScreen {
        #head {
            height: 1; padding: 0 1; background: $panel; text-style: bold;
            text-wrap: nowrap; text-overflow: ellipsis;
        }
        FilterLine { padding: 0 1; }
        #rows { height: 1fr; }
        RunsTable { width: 1fr; }
        #preview { height: 6; padding: 0 1; background: $panel; }
        #wrong { display: none; padding: 0 1; height: auto; max-height: 2; color: $text-error; }
        #empty { padding: 1 2; display: none; height: 1fr; }
    }
    RunsScreen.-empty {
        #empty { display: block; }
        #rows { display: none; }
    }
    RunsScreen.-low #preview { height: 2; }
    RunsScreen.-wide {
        #rows { layout: horizontal; }
        #preview {
            width: 28%; min-width: 46; max-width: 90; height: 1fr; border: round $panel;
            background: $background;
        }
    }
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._feed = RunsFeed(context.folders, first_share=0.0)
        self._snapshot: RunsSnapshot | None = None
        self._pattern, self._filter = "", Filter()
        self._marked: dict[Path, int] = {}
        self._is_stale = False
        """Whether the description still shows the run that was under the cursor before."""

    def compose(self) -> ComposeResult:
        yield Static("reading runs", id="head", markup=False)
        yield FilterLine(FILTER_HINT, id="filter")
        yield Static(id="wrong", markup=False)
        with Container(id="rows"):
            yield RunsTable(ascii_only=self.context.ascii_only)
            yield TextPane("run", id="preview", is_fixed=True)
        yield WordsView(id="empty")
        yield KeyBar()

    def poll(self) -> Polled:
        return Polled(self._feed.poll())

    @on(Polled)
    def show(self, message: Polled) -> None:
        """Pass the rows to the table."""
        self._snapshot = message.snapshot
        present = {row.path for row in message.snapshot.rows}
        if not present.issuperset(self._marked):
            self._marked = {path: slot for path, slot in self._marked.items() if path in present}
        self._draw()

    @property
    def _rows(self) -> tuple[RunRow, ...]:
        return () if self._snapshot is None else self._snapshot.rows

    def _draw(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        rows = [row for row in snapshot.rows if self._filter.matches(row.subject)]
        with self.app.batch_update():
            self._write_head(self._heading(snapshot, len(rows)))
            self.set_class(not rows, "-empty")
            words = empty_list_text(snapshot, self._pattern).splitlines()
            self.query_one("#empty", WordsView).lines = tuple(words)
            table = self.query_one(RunsTable)
            table.marked, table.rows_shown = dict(self._marked), tuple(rows)
            self._draw_detail()
        if rows and self.focused is None:
            # A hidden table cannot have the focus; it can as soon as it is drawn.
            self.call_after_refresh(self.query_one(RunsTable).focus)

    def _heading(self, snapshot: RunsSnapshot, count: int) -> str:
        """Return the first line, at most as wide as the screen where possible; `count` is the number of runs
        that match the filter."""
        total = len(snapshot.rows)
        counted = f"{total}" if not self._pattern else f"{count} of {total}"
        parts = []
        running = sum(row.alive for row in snapshot.rows)
        parts += [f"{running} running"] if running else []
        with_alerts = sum(bool(row.alerts) and row.alive for row in snapshot.rows)
        parts += [f"! {with_alerts} with alerts"] if with_alerts else []
        if self._marked:
            parts.append(
                f"marked {''.join(series_style(slot).letter for slot in sorted(self._marked.values()))}"
            )
        parts += ["still reading"] if snapshot.behind else []
        parts += ["read-only"] if self.context.read_only else []
        parts += [snapshot.error] if snapshot.error else []
        counted += f" run{'' if total == 1 else 's'} in "
        # The user knows the folders best, so they are shortened first.
        room = self.size.width - len(counted) - sum(len(part) + 2 for part in parts) - 2
        return "  ".join([counted + shortened(_folders(snapshot), max(12, room)), *parts])

    def _write_head(self, words: str) -> None:
        head = self.query_one("#head", Static)
        if words != head.content:
            head.update(words, layout=False)

    def _draw_detail(self) -> None:
        """Describe the run under the cursor, next to the table or below it."""
        self._is_stale = False
        row, preview = self.query_one(RunsTable).selected, self.query_one("#preview", TextPane)
        preview.show_title("" if row is None else row.name)
        words = [] if row is None else preview_lines(row)
        if self.has_class("-low"):
            # One line each, with the beginning and the end of a path.
            words = [shortened(line, max(1, self.size.width - 3)) for line in words]
        preview.show(lambda _width: words)
        self.draw_keys()

    @on(RunsTable.Highlighted)
    def describe(self) -> None:
        """Describe the run under the cursor, once the cursor is drawn: it may be on the next row by then."""
        if not self._is_stale:
            self._is_stale = True
            self.call_later(self._draw_detail)

    @on(Resize)
    def place_preview(self) -> None:
        """Show the run under the cursor next to the table if the screen is wide enough."""
        width, height = self.size
        self.set_class(is_low(width, height), "-low")
        self.set_class(width >= WIDE and not is_low(width, height), "-wide")
        self._draw_detail()

    @on(RunsTable.Chosen)
    def open_row(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        row = self.query_one(RunsTable).selected
        if row is not None:
            self.post_message(RunChosen(RunFolder(row.path)))

    def action_sort(self, place: int) -> None:
        self.query_one(RunsTable).sort_by_place(place)
        self.describe()

    # Marks.

    def action_mark(self) -> None:
        """Mark the run under the cursor with the first free style, or unmark it, and move to the next."""
        table = self.query_one(RunsTable)
        row = table.selected
        if row is None:
            return
        if self._marked.pop(row.path, None) is None:
            free = [slot for slot in range(len(SERIES)) if slot not in self._marked.values()]
            if not free:
                words = f"{len(SERIES)} runs are marked already; space on one of them unmarks it"
                self.notify(words, severity="warning", markup=False)
                return
            self._marked[row.path] = free[0]
        self._draw()
        table.action_cursor_to(1)

    def action_unmark(self) -> None:
        self._marked.clear()
        self._draw()

    def action_compare(self) -> None:
        from workbench.tui.screens.compare import CompareScreen

        chosen = {slot: RunFolder(path) for path, slot in self._marked.items()}
        self.app.push_screen(CompareScreen(self.context, chosen))

    # Keys that start, stop and resume.

    def target(self) -> Target | None:
        row = self.query_one(RunsTable).selected
        if row is None:
            return None
        return Target(RunFolder(row.path), row.state, row.alive, row.last_step)

    def action_stop(self) -> None:
        if (target := self.target()) is not None:
            ask_to_stop(self, target)

    def action_resume(self) -> None:
        if (target := self.target()) is not None:
            ask_to_resume(self, target)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("stop", "resume"):
            return (target := self.target()) is not None and target.can(action)
        if action in MARKS_NEEDED:
            return len(self._marked) >= MARKS_NEEDED[action]
        if action == "filter":
            return bool(self._rows)
        if action in ABOUT_RUN:
            # Enter in the line of a filter keeps the filter.
            is_typing = action == "open" and isinstance(self.focused, Input)
            return self.query_one(RunsTable).selected is not None and not is_typing
        return action != "clear_filter" or self.query_one(FilterLine).display

    # Tags and the note.

    def action_tags(self) -> None:
        if (row := self.query_one(RunsTable).selected) is not None:
            value, hint = " ".join(row.tags), "words, as in baseline good"
            field = Field(name="tags", label="tags", value=value, hint=hint)
            self._edit(row, field, lambda run, text: change_notes(run, tags=text.split()))

    def action_note(self) -> None:
        if (row := self.query_one(RunsTable).selected) is not None:
            field = Field(name="note", label="note", value=row.note, hint="one line of text")
            self._edit(row, field, lambda run, text: change_notes(run, note=text))

    def _edit(self, row: RunRow, field: Field, write: Callable[[RunFolder, str], object]) -> None:
        """Let the user edit a text of a run."""

        def send(values: Values) -> str:
            text = values[field.name]
            write(RunFolder(row.path), text)
            return f"{field.name} of {row.name}: {' '.join(text.split()) or 'none'}"

        def done(message: str | None) -> None:
            if message is not None:
                self.notify(message, markup=False)
                self.tick()

        self.app.push_screen(FormScreen(f"{field.name} of {row.name}", [field], send), done)

    # Filter.

    def action_filter(self) -> None:
        self.query_one(FilterLine).begin()

    def action_clear_filter(self) -> None:
        self.query_one(FilterLine).drop()
        self.query_one(RunsTable).focus()

    @on(Input.Changed)
    def filter_by(self, event: Input.Changed) -> None:
        names = {name for row in self._rows for name in row.settings}
        wrong = self.query_one("#wrong", Static)
        try:
            self._filter, self._pattern = parse_filter(event.value, names), event.value
        except BadInput as error:
            # Every run is shown until the filter can be understood.
            self._filter, self._pattern = Filter(), ""
            wrong.update(error.message)
        wrong.display = bool(event.value.strip()) and not self._pattern
        self._draw()

    @on(Input.Submitted)
    def keep_filter(self) -> None:
        self.query_one(FilterLine).leave()
        self.query_one(RunsTable).focus()


def empty_list_text(snapshot: RunsSnapshot, pattern: str) -> str:
    """Return the text for an empty list."""
    if not snapshot.rows:
        return NO_RUNS.format(folders=_folders(snapshot))
    return f"None of the {len(snapshot.rows)} runs matches {pattern!r}."


def _folders(snapshot: RunsSnapshot) -> str:
    return ", ".join(map(path_text, snapshot.folders))


def preview_lines(row: RunRow) -> list[str]:
    """Return what is known of a run: its folder, its progress, up to three alerts, its tags and note, the error of its
    log, its state in a sentence, failed checks, results."""
    lines = [path_text(row.path)]
    if row.total_steps is not None or row.last_step:
        total = "" if row.total_steps is None else f"/{row.total_steps}"
        words = [f"step {row.last_step}{total}"]
        words += [] if row.loss is None else [f"loss {format_value(row.loss)}"]
        words += [] if row.heldout is None else [f"held-out {format_value(row.heldout)}"]
        speed = row.tokens_per_second
        words += [] if speed is None else [f"{format_count(speed)} tok/s"]
        lines.append(", ".join(words))
    labels = " ".join([*(f"[{tag}]" for tag in row.tags), *filter(None, [row.note])])
    lines += [f"{severity}: {name}" for severity, name in row.alerts[:3]]
    return [*lines, *filter(None, [labels, row.error]), *row.words]
