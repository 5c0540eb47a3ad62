"""A list, the details of the row under the cursor, and the output of a running command.

wide     from 100 x 18    list and details side by side
stacked  from 18 rows     details below the list
single   below 18 rows    one of the two; z switches between them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.widgets import OptionList, Static

from engine.errors import EngineError
from engine.log.text import one_line
from workbench.jobs import Job
from workbench.listing import Listing, Row, with_job
from workbench.paths import with_short_paths
from workbench.tui.context import Context
from workbench.tui.screens.polling import Polled, PollingScreen
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.row_list import RowList
from workbench.tui.widgets.text_pane import TextPane, WordsView

COMMON: tuple[Binding, ...] = (
    Binding("z", "zoom", "zoom", tooltip="the details alone, or the list again"),
    Binding("r", "refresh", "refresh", show=False, tooltip="refresh now"),
    Binding("question_mark", "app.help", "help", tooltip="this help"),
    Binding("escape", "back", "back", tooltip="back; whatever runs continues"),
    Binding(
        "q", "app.quit", "quit", show=False, tooltip="close the workbench; whatever runs continues"
    ),
)
"""Keys of every list, after its own."""
ABOUT_ROW = frozenset({"open", "zoom"})
"""The actions that need a row."""
JOB_LINES = 3
"""Number of lines of output that are shown of the newest command, below its state."""
SHARE = (30, 50)
"""Smallest and largest share of the width that a list gets next to its details, in percent."""


def shape_of(width: int, height: int) -> str:
    """Return the arrangement of list and details at a screen size."""
    if height < 18:
        return "single"
    return "wide" if width >= 100 else "stacked"


DETAILS_HELP = """\
# Details

All about the row under the cursor. Up, down, page up and page down scroll; `z` gives it the whole
screen.
"""


class Feed(Protocol):
    """A source of listings."""

    def poll(self) -> Listing:
        """Return the list as it is now; called in a thread. May raise EngineError or OSError."""


F = TypeVar("F", bound=Feed)


class BrowseScreen(PollingScreen, Generic[F]):
    """Draws the listings of a feed; a subclass adds its own keys."""

    AUTO_FOCUS = "RowList"
    NOTES: ClassVar[Sequence[str]] = ()
    """The notes in the help below the keys."""
    JOB: ClassVar[str] = ""
    """The name of the engine commands that keys start in the background, one at a time."""
    DEFAULT_CSS = """
    BrowseScreen {
        #head {
            height: auto; max-height: 2; padding: 0 1; background: $panel; text-style: bold;
        }
        #both { height: 1fr; }
        #empty { padding: 1 2; display: none; height: 1fr; }
        #job {
            display: none; height: auto; padding: 0 1; background: $panel;
            text-wrap: nowrap; text-overflow: ellipsis;
        }
        #details { border: round $foreground 40%; height: 1fr; padding: 0 1; }
        #details:focus { border: heavy $primary; }
    }
    BrowseScreen.-wide #both {
        layout: horizontal;
        #details { width: 1fr; }
    }
    BrowseScreen.-stacked #both {
        layout: vertical;
        RowList { height: auto; max-height: 45%; }
    }
    BrowseScreen.-single {
        #head { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
        #details { display: none; }
        &.-zoomed #details { display: block; }
        RowList, RowList:focus, #details, #details:focus { border: none; padding: 0; }
    }
    BrowseScreen.-zoomed RowList { display: none; }
    BrowseScreen.-working #job { display: block; }
    BrowseScreen.-empty {
        #both { display: none; }
        #empty { display: block; }
    }
    """

    def __init__(self, context: Context, feed: F) -> None:
        super().__init__(context)
        self._feed = feed
        self._zoomed = False
        self._detailed: str | None = None
        """The row that the details are of."""

    def compose(self) -> ComposeResult:
        yield Static(f"{self.title}: reading", id="head", markup=False)
        with Container(id="both"):
            yield RowList()
            yield TextPane("", id="details", help=DETAILS_HELP)
        yield WordsView(id="empty")
        yield Static(id="job", markup=False)
        yield KeyBar()

    # The list and its details.

    def poll(self) -> Polled:
        try:
            return Polled(with_job(self._feed.poll(), self.job))
        except (EngineError, OSError) as problem:
            text = str(problem)
            return Polled(Listing(head=f"{self.title}: {one_line(text)}", empty=text))

    @on(Polled)
    def show(self, message: Polled) -> None:
        """Pass the rows to the widgets."""
        listing: Listing = message.snapshot
        rows = self.query_one(RowList)
        with self.app.batch_update():
            self.query_one("#head", Static).update(listing.head)
            self.query_one("#empty", WordsView).lines = tuple(listing.empty.splitlines())
            self.set_class(not listing.rows, "-empty")
            rows.rows = listing.rows
            self._share_width()
            self.set_class(bool(listing.job), "-working")
            first, rest = listing.job[:1], listing.job[1:]
            words = "\n".join((*first, *rest[-JOB_LINES:]))
            self.query_one("#job", Static).update(words)
            self.draw_row()
        self.draw_keys()
        if listing.rows and self.focused is None:
            self.call_after_refresh(rows.focus)

    @on(OptionList.OptionHighlighted)
    def draw_row(self) -> None:
        """Show the details of the row under the cursor."""
        row, details = self.selected, self.query_one("#details", TextPane)
        lines = [] if row is None else [*map(with_short_paths, row.lines)]
        if (key := None if row is None else row.key) != self._detailed:
            self._detailed = key
            details.scroll_home(animate=False)
        details.show(lambda _width: lines)
        self.draw_keys()

    @property
    def selected(self) -> Row | None:
        """Return the row under the cursor."""
        return self.query_one(RowList).selected if self.is_mounted else None

    @on(Resize)
    def lay_out(self) -> None:
        """Arrange list and details for the size of the screen."""
        shape = shape_of(*self.size)
        for name in ("wide", "stacked", "single"):
            self.set_class(name == shape, f"-{name}")
        self._share_width()

    def _share_width(self) -> None:
        """Give the list the width that its rows need next to the details, within limits."""
        rows, width = self.query_one(RowList), self.size.width
        if shape_of(*self.size) == "wide":
            least, most = (width * share // 100 for share in SHARE)
            rows.styles.width = min(max(rows.wanted_width(), least), most)
        else:
            rows.styles.width = "1fr"

    # Keys.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            return self.job_runs
        return action not in ABOUT_ROW or self.selected is not None or self._zoomed

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_open()

    def action_open(self) -> None:
        """Enter, or a click on the row under the cursor."""
        self.action_zoom()

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self.set_class(self._zoomed, "-zoomed")
        self.query_one("#details" if self._zoomed else "RowList").focus()

    def action_back(self) -> None:
        if self._zoomed:
            self.action_zoom()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    # A command in the background.

    @property
    def job(self) -> Job | None:
        """Return the newest command; None before the first."""
        return self.context.jobs.of(self.JOB)

    @property
    def job_runs(self) -> bool:
        return self.job is not None and self.job.is_alive

    def start_job(self, arguments: Sequence[str]) -> None:
        """Start `engine ARGUMENTS`."""
        try:
            self.context.jobs.start(self.JOB, arguments)
        except EngineError as problem:
            self.notify(str(problem), severity="error", markup=False)
        self.tick()

    def action_stop(self) -> None:
        if self.job is not None:
            self.job.stop()
        self.tick()


def own_keys(*bindings: Binding) -> list[BindingType]:
    """Return the table of keys of a list: its own, then the common ones."""
    return [*bindings, *COMMON]
