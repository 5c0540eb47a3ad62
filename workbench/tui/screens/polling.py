"""A screen that is fed by a poll in a thread."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from textual import on, work
from textual.events import Resize
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Tooltip
from textual.widgets._toast import ToastRack
from textual.worker import Worker, get_current_worker

from workbench.tui.keys import is_offered
from workbench.tui.layout import is_tiny
from workbench.tui.messages import ComparePolled, FlipPolled, ListPolled, RunPolled, RunsPolled
from workbench.tui.widgets.key_bar import KeyBar, bindings_of


class PollingScreen(Screen[None]):
    """Polls every `refresh_s`, one poll at a time, and posts what it found to itself.

    A thread cannot be cancelled, and a feed belongs to one thread at a time: a tick that finds a
    poll going on does nothing.
    """

    ACTING: ClassVar[frozenset[str]] = frozenset()
    """The actions of this class that start, stop or change a run, a flip or evidence: read-only mode
    has none of them."""

    def __init__(self, refresh_s: float) -> None:
        super().__init__()
        self._refresh_s = refresh_s
        self._polling: Worker[None] | None = None

    @abstractmethod
    def poll(self) -> ComparePolled | RunPolled | RunsPolled | FlipPolled | ListPolled:
        """Read what is new; called in a thread, so it touches no widget."""

    @on(Resize)
    def fit_terminal(self, event: Resize) -> None:
        """On a terminal too small for panes, show the first line of the screen alone, however many
        rows it takes."""
        self.set_class(is_tiny(*self.size), "-tiny")
        # A screen that lays itself out sends itself the size that it had then. Where the next size of
        # the terminal waits just before that, Textual takes the later event for the newer one.
        if event.size != self.app.size:
            _resize(self, self.app.size)

    def on_mount(self) -> None:
        own = [child for child in self.children if not isinstance(child, ToastRack | Tooltip)]
        own[0].add_class("-first")
        self.set_interval(self._refresh_s, self.tick)
        self.draw_keys()
        self.tick()

    def tick(self) -> None:
        """Poll, unless a poll is going on."""
        # Whatever became of an event, and whichever screen is on top: it is laid out for its terminal.
        shown = self.app.screen
        if shown.outer_size and shown.outer_size != self.app.size:
            _resize(shown, self.app.size)
        if self._polling is None or self._polling.is_finished:
            self._polling = self._poll_in_thread()

    def draw_keys(self) -> None:
        """Show the keys that do something now."""
        bindings = [
            binding
            for binding in bindings_of(self)
            if binding.show and is_offered(self.app, self, binding.action)
        ]
        self.query_one(KeyBar).draw(bindings)

    @work(thread=True, exclusive=True, group="poll")
    def _poll_in_thread(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            message = self.poll()
            self.post_message(message)
            if not message.behind:
                return


def _resize(screen: Screen[Any], size: Size) -> None:
    """Have a screen laid out anew: asking for a layout alone repeats it in the size that it had."""
    screen.post_message(Resize(size, size))
