"""All runs of the folders that were named, newest first."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import ScreenResume
from textual.message import Message
from textual.widgets import DataTable, Input, Static

from engine.runlog.folder import RunFolder
from workbench.feed import RunsFeed, RunsSnapshot
from workbench.tui.messages import RunsPolled
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.runs_table import COLUMNS, RunsTable, matching

SORT_KEYS = Binding.Group("sort")
NO_RUNS = """\
No run in {folders} yet.

Start one from another terminal:

  make demo                  the example run, with this screen on it
  apr-workbench demo         the same
  engine distill SPEC.toml   a run of your own

It appears here as soon as it has begun."""


class RunsScreen(PollingScreen):
    """Draws the snapshots of one RunsFeed."""

    class Opened(Message):
        """A run was chosen."""

        def __init__(self, run: RunFolder) -> None:
            super().__init__()
            self.run = run

    AUTO_FOCUS = "RunsTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", tooltip="this help"),
        Binding("q", "app.quit", "quit", tooltip="close the workbench; runs go on"),
        Binding("enter", "open", "open", tooltip="open the run under the cursor"),
        Binding("slash", "filter", "filter", tooltip="filter by name or state"),
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

    def __init__(self, feed: RunsFeed, *, refresh_s: float) -> None:
        super().__init__(refresh_s)
        self._feed = feed
        self._snapshot: RunsSnapshot | None = None
        self._pattern = ""

    def compose(self) -> ComposeResult:
        yield Static("reading runs", id="head", markup=False)
        # Disabled until a filter is typed, so that no other key can end up in it.
        yield Input(placeholder="words of a name or a state", compact=True, disabled=True)
        yield RunsTable()
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
        self._draw()

    def _draw(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        rows = matching(snapshot.rows, self._pattern)
        folders = ", ".join(str(folder) for folder in snapshot.folders)
        if not snapshot.rows:
            empty = NO_RUNS.format(folders=folders)
        else:
            empty = (
                f"None of the {len(snapshot.rows)} runs has {self._pattern!r} in its name or state."
            )
        count = f"{len(rows)} of {len(snapshot.rows)}" if self._pattern else f"{len(rows)}"
        reading = "  still reading" if snapshot.behind else ""
        problem = f"  {snapshot.error}" if snapshot.error else ""
        self.query_one("#head", Static).update(
            f"{count} run{'' if len(snapshot.rows) == 1 else 's'} in {folders}{reading}{problem}"
        )
        with self.app.batch_update():
            self.set_class(not rows, "-empty")
            self.query_one("#empty", Static).update(empty)
            self.query_one(RunsTable).rows_shown = tuple(rows)
            self._draw_detail()
        if rows and self.focused is None:
            # A table that was hidden could not have the focus; it can as soon as it is drawn.
            self.call_after_refresh(self.query_one(RunsTable).focus)

    def _draw_detail(self) -> None:
        row = self.query_one(RunsTable).selected
        text = "" if row is None else f"{row.path}"
        if row is not None and row.error is not None:
            text += f"\n{row.error}"
        self.query_one("#detail", Static).update(text)

    @on(DataTable.RowHighlighted)
    def describe(self) -> None:
        """Tell the run under the cursor in full."""
        self._draw_detail()

    @on(DataTable.HeaderSelected)
    def sort_by_header(self, event: DataTable.HeaderSelected) -> None:
        self.action_sort(event.column_index)

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

    def action_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one(Input).disabled = False
        self.query_one(Input).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "clear_filter" or self.has_class("-filtering")

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
        self.app.push_screen(HelpScreen("help: runs", bindings_of(self), ()))
