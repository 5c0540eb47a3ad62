"""A list, the details of the row under the cursor, and the words of a command that goes on.

wide     from 100 x 18    list and details side by side
stacked  from 18 rows     details below the list
single   below 18 rows    one of both; z changes between them
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize, ScreenResume
from textual.widgets import OptionList, Static

from engine.errors import EngineError
from engine.log.text import one_line
from workbench.listing import Listing, Row
from workbench.tui.context import Context
from workbench.tui.messages import CommandEnded, ListPolled
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.widgets.details_pane import DetailsPane
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.row_list import RowList

COMMON: tuple[Binding, ...] = (
    Binding("z", "zoom", "zoom", tooltip="the details alone, or the list again"),
    Binding("r", "refresh", "refresh", show=False, tooltip="look again now"),
    Binding("question_mark", "help", "help", tooltip="this help"),
    Binding("escape", "back", "back", tooltip="back to where you were; what goes on goes on"),
    Binding(
        "q", "app.quit", "quit", show=False, tooltip="close the workbench; what goes on goes on"
    ),
)
"""Keys of every list, after its own."""
JOB_LINES = 7


def shape_of(width: int, height: int) -> str:
    """How list and details lie on a screen of a size."""
    if height < 18:
        return "single"
    return "wide" if width >= 100 else "stacked"


class BrowseScreen(PollingScreen):
    """Draws listings; a subclass reads them and has keys of its own."""

    AUTO_FOCUS = "RowList"
    NOTES: ClassVar[Sequence[str]] = ()
    """What help says below the keys."""
    DEFAULT_CSS = """
    BrowseScreen {
        #head {
            height: 1; padding: 0 1; background: $panel; text-style: bold;
            text-wrap: nowrap; text-overflow: ellipsis;
        }
        #both { height: 1fr; }
        #empty { padding: 1 2; display: none; height: 1fr; }
        #job {
            display: none; height: auto; padding: 0 1; background: $panel;
            text-wrap: nowrap; text-overflow: ellipsis;
        }
        DetailsPane { height: 1fr; }
    }
    BrowseScreen.-wide #both {
        layout: horizontal;
        RowList { width: 2fr; }
        DetailsPane { width: 3fr; }
    }
    BrowseScreen.-stacked #both {
        layout: vertical;
        RowList { height: 2fr; }
        DetailsPane { height: 3fr; }
    }
    BrowseScreen.-single {
        DetailsPane { display: none; }
        &.-zoomed DetailsPane { display: block; }
        RowList, RowList:focus, DetailsPane, DetailsPane:focus { border: none; padding: 0; }
    }
    BrowseScreen.-zoomed RowList { display: none; }
    BrowseScreen.-working #job { display: block; }
    BrowseScreen.-empty {
        #both { display: none; }
        #empty { display: block; }
    }
    """

    def __init__(self, context: Context, title: str) -> None:
        super().__init__(context.refresh_s)
        self.context = context
        self._title = title
        self._zoomed = False
        self._goto = ""

    def compose(self) -> ComposeResult:
        yield Static(f"{self._title}: reading", id="head", markup=False)
        with Container(id="both"):
            yield RowList()
            yield DetailsPane(ascii_only=self.context.ascii_only)
        yield Static(id="empty", markup=False)
        yield Static(id="job", markup=False)
        yield KeyBar()

    # What it shows

    @abstractmethod
    def read(self) -> Listing:
        """The list as it is now; called in a thread. May raise EngineError or OSError."""

    def poll(self) -> ListPolled:
        try:
            return ListPolled(self.read())
        except (EngineError, OSError) as problem:
            text = str(problem)
            return ListPolled(Listing(head=f"{self._title}: {one_line(text)}", empty=text))

    def tick(self) -> None:
        # Hidden behind another screen, a list is not read.
        if self.is_current:
            super().tick()

    @on(ScreenResume)
    def look_again(self) -> None:
        self.tick()

    @on(ListPolled)
    def show(self, message: ListPolled) -> None:
        """Hand the rows down."""
        listing = message.listing
        rows = self.query_one(RowList)
        with self.app.batch_update():
            self.query_one("#head", Static).update(listing.head)
            self.query_one("#empty", Static).update(listing.empty)
            self.set_class(not listing.rows, "-empty")
            rows.rows = listing.rows
            if self._goto and rows.select(self._goto):
                self._goto = ""
            self.set_class(bool(listing.job), "-working")
            first, rest = listing.job[:1], listing.job[1:]
            words = "\n".join((*first, *rest[-self._job_lines() :]))
            self.query_one("#job", Static).update(words)
            self.draw_row()
        self.draw_keys()
        if listing.rows and self.focused is None:
            self.call_after_refresh(rows.focus)

    def _job_lines(self) -> int:
        return JOB_LINES if self.size.height >= 30 else 3 if self.size.height >= 18 else 1

    @on(OptionList.OptionHighlighted)
    def draw_row(self) -> None:
        """Tell the row under the cursor in full."""
        self.query_one(DetailsPane).row = self.selected
        self.draw_keys()

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self.query_one(RowList).selected

    def goto(self, key: str) -> None:
        """Put the cursor on a row as soon as there is one of that key."""
        self._goto = key
        self.tick()

    @on(Resize)
    def lay_out(self) -> None:
        """Place list and details as they suit a screen of this size."""
        shape = shape_of(*self.size)
        for name in ("wide", "stacked", "single"):
            self.set_class(name == shape, f"-{name}")

    # Keys

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
        self.query_one(DetailsPane if self._zoomed else RowList).focus()

    def action_refresh(self) -> None:
        self.tick()

    def action_back(self) -> None:
        if self._zoomed:
            self.action_zoom()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_help(self) -> None:
        title = f"help: {self._title}"
        self.app.push_screen(HelpScreen(title, bindings_of(self), self.NOTES))

    # Commands

    def command(self, name: str, call: Callable[[], str]) -> None:
        """Do something that takes a while in a thread, and say what came of it."""

        def work() -> None:
            try:
                message = CommandEnded(call(), failed=False)
            except (EngineError, OSError) as error:
                message = CommandEnded(str(error), failed=True)
            self.post_message(message)

        threading.Thread(target=work, name=f"engine-{name}", daemon=True).start()

    @on(CommandEnded)
    def say(self, message: CommandEnded) -> None:
        """What came of it."""
        self.notify(
            message.text,
            severity="error" if message.failed else "information",
            timeout=12 if message.failed else 5,
            markup=False,
        )
        self.tick()


def own_keys(*bindings: Binding) -> list[BindingType]:
    """The table of keys of a list: its own, then the common ones."""
    return [*bindings, *COMMON]
