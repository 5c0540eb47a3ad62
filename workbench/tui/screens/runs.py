"""All runs of the folders that were named, newest first, whoever started them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import ScreenResume
from textual.message import Message
from textual.widgets import DataTable, Input, Static

from engine.log.folder import RunFolder
from workbench.runs_feed import RunsFeed, RunsSnapshot
from workbench.tui.context import Context
from workbench.tui.layout import is_low
from workbench.tui.messages import RunsPolled
from workbench.tui.names import shortened
from workbench.tui.runs_words import heading, nothing, told
from workbench.tui.screens.acting import RESUME, STOP, ActingScreen, Target
from workbench.tui.screens.help import HelpScreen
from workbench.tui.series import SERIES
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.runs_table import COLUMNS, RunsTable, matching

SORT_KEYS = Binding.Group("sort")
NOTES = (
    "Runs are found in the folders that were named and one level below, whoever started them.",
    "A filter is words of a name, a state or an alert: `killed`, `error`, `sweep nan`.",
    "Marks stay with their runs until they are taken back: the letter and the colour are those of",
    "the run in the comparison, too.",
)


class RunsScreen(ActingScreen):
    """Draws the snapshots of one RunsFeed."""

    class Opened(Message):
        """A run was chosen."""

        def __init__(self, run: RunFolder) -> None:
            super().__init__()
            self.run = run

    AUTO_FOCUS = "RunsTable"
    ACTING = ActingScreen.ACTING | {"start", "again"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", tooltip="this help"),
        Binding("q", "app.quit", "quit", tooltip="close the workbench; runs go on"),
        Binding("enter", "open", "open", tooltip="open the run under the cursor"),
        Binding("slash", "filter", "filter", tooltip="filter by name, state or alert"),
        Binding("space", "mark", "mark", tooltip="mark the run for a comparison, or unmark it"),
        Binding("c", "compare", "compare", tooltip="the 2 to 6 marked runs over each other"),
        Binding("u", "unmark", "unmark all", show=False, tooltip="take all marks back"),
        Binding("n", "start", "new", tooltip="start a run from a spec"),
        STOP,
        RESUME,
        Binding("N", "again", "again", tooltip="start another run like the one under the cursor"),
        Binding("escape", "clear_filter", "clear filter", show=False),
        *(
            Binding(
                str(digit),
                f"sort({digit - 1})",
                column.name,
                group=SORT_KEYS,
                tooltip="sort by that column; once more: the other way round",
            )
            for digit, column in enumerate(COLUMNS, start=1)
        ),
        Binding("r", "refresh", "refresh", tooltip="look again now"),
    ]
    CSS = """
    RunsScreen {
        #head {
            height: 1; padding: 0 1; background: $panel; text-style: bold;
            text-wrap: nowrap; text-overflow: ellipsis;
        }
        Input { display: none; height: 1; border: none; padding: 0 1; }
        #empty { padding: 1 2; display: none; height: 1fr; }
        #detail { height: auto; max-height: 6; padding: 0 1; background: $panel; }
    }
    RunsScreen.-filtering Input { display: block; }
    RunsScreen.-empty {
        #empty { display: block; }
        RunsTable, #detail { display: none; }
    }
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context.refresh_s)
        self.context = context
        self._feed = RunsFeed(context.folders)
        self._snapshot: RunsSnapshot | None = None
        self._pattern = ""
        self._marked: dict[Path, int] = {}

    def compose(self) -> ComposeResult:
        yield Static("reading runs", id="head", markup=False)
        # Disabled until a filter is typed, so that no other key can end up in it.
        yield Input(placeholder="words of a name, a state, an alert", compact=True, disabled=True)
        yield RunsTable(ascii_only=self.context.ascii_only)
        yield Static(id="empty", markup=False)
        yield Static(id="detail", markup=False)
        yield KeyBar()

    def poll(self) -> RunsPolled:
        return RunsPolled(self._feed.poll())

    def tick(self) -> None:
        # Hidden behind a run, the list is not read: the screen of that run reads it already.
        if self.is_current:
            super().tick()

    @on(ScreenResume)
    def look_again(self) -> None:
        self.tick()

    @on(RunsPolled)
    def show(self, message: RunsPolled) -> None:
        """Hand the rows down."""
        self._snapshot = message.snapshot
        there = {row.path for row in message.snapshot.rows}
        if not there.issuperset(self._marked):
            self._marked = {path: slot for path, slot in self._marked.items() if path in there}
        self._draw()

    def _draw(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        rows = matching(snapshot.rows, self._pattern)
        with self.app.batch_update():
            self.query_one("#head", Static).update(self._heading(len(rows)))
            self.set_class(not rows, "-empty")
            self.query_one("#empty", Static).update(nothing(snapshot, self._pattern))
            table = self.query_one(RunsTable)
            table.marked, table.rows_shown = dict(self._marked), tuple(rows)
            self._draw_detail()
        if rows and self.focused is None:
            # A table that was hidden could not have the focus; it can as soon as it is drawn.
            self.call_after_refresh(self.query_one(RunsTable).focus)

    def _heading(self, count: int) -> str:
        assert self._snapshot is not None
        return heading(
            self._snapshot,
            self.size.width,
            shown=count if self._pattern else None,
            marked=self._marked.values(),
            read_only=self.context.read_only,
        )

    def _draw_detail(self) -> None:
        row = self.query_one(RunsTable).selected
        lines = [] if row is None else told(row)
        if is_low(*self.size):
            # The keys keep their row: a line each, the beginning and the end of a path.
            lines = [shortened(line, max(1, self.size.width - 2)) for line in lines[:2]]
        self.query_one("#detail", Static).update("\n".join(lines))
        self.draw_keys()

    @on(DataTable.RowHighlighted)
    def describe(self) -> None:
        """Tell the run under the cursor in full."""
        self._draw_detail()

    @on(DataTable.HeaderSelected)
    def sort_by_header(self, event: DataTable.HeaderSelected) -> None:
        names = [column.name for column in COLUMNS]
        self.action_sort(names.index(str(event.column_key.value)))

    @on(DataTable.RowSelected)
    def open_row(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        row = self.query_one(RunsTable).selected
        if row is not None:
            self.post_message(self.Opened(RunFolder(row.path)))

    def action_sort(self, index: int) -> None:
        self.query_one(RunsTable).sort_by(index)

    def action_refresh(self) -> None:
        self.tick()

    # Marks

    def action_mark(self) -> None:
        """Mark the run under the cursor with the first style that is free, and go on to the next."""
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
        table.action_cursor_down()

    def action_unmark(self) -> None:
        self._marked.clear()
        self._draw()

    def action_compare(self) -> None:
        from workbench.tui.screens.compare import CompareScreen

        if len(self._marked) < 2:
            words = f"{len(self._marked)} of 2 to {len(SERIES)} runs are marked; space marks one"
            self.notify(words, severity="warning", markup=False)
            return
        chosen = {slot: RunFolder(path) for path, slot in self._marked.items()}
        self.app.push_screen(CompareScreen(self.context, chosen))

    # Keys that start, stop and resume

    def target(self) -> Target | None:
        row = self.query_one(RunsTable).selected
        if row is None:
            return None
        return Target(RunFolder(row.path), row.state, row.alive, row.last_step)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("stop", "resume"):
            return self.may_act(action)
        return action != "clear_filter" or self.has_class("-filtering")

    def action_start(self) -> None:
        from workbench.tui.screens.new_run import NewRunScreen

        self.app.push_screen(NewRunScreen(self.context))

    def action_again(self) -> None:
        from workbench.tui.screens.new_run import NewRunScreen

        row = self.query_one(RunsTable).selected
        if row is not None:
            self.app.push_screen(NewRunScreen(self.context, like=RunFolder(row.path)))

    # Filter

    def action_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one(Input).disabled = False
        self.query_one(Input).focus()

    def action_clear_filter(self) -> None:
        self.query_one(Input).value = ""
        self._leave_filter(kept=False)

    @on(Input.Changed)
    def filter_by(self, event: Input.Changed) -> None:
        self._pattern = event.value
        self._draw()

    @on(Input.Submitted)
    def keep_filter(self, event: Input.Submitted) -> None:
        self._leave_filter(kept=bool(event.value))

    def _leave_filter(self, *, kept: bool) -> None:
        self.set_class(kept, "-filtering")
        self.query_one(Input).disabled = True
        self.query_one(RunsTable).focus()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen("help: runs", bindings_of(self), NOTES))
