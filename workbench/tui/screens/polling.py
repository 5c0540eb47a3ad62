"""A screen fed by a polling thread, which runs engine commands in further threads."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from textual import on, work
from textual.events import Resize, ScreenResume
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Tooltip
from textual.widgets._toast import ToastRack
from textual.worker import Worker, get_current_worker

from engine.errors import EngineError
from engine.log.folder import RunFolder
from workbench.tui.context import Context
from workbench.tui.keys import is_offered
from workbench.tui.layout import is_tiny
from workbench.tui.widgets.key_bar import KeyBar, bindings_of


class RunChosen(Message):
    """A run was chosen, to be opened."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self.run = run


class Polled(Message):
    """The result of a poll: one frozen value. The log may have more to read."""

    def __init__(self, snapshot: Any) -> None:
        super().__init__()
        self.snapshot = snapshot
        self.behind: bool = getattr(snapshot, "behind", False)


Problem = EngineError | OSError


def run_command(
    node: Widget, name: str, call: Callable[[], str], done: Callable[[str, Problem | None], object]
) -> None:
    """Run an engine command in a thread; `done` is called with its message and None, or with the text of its
    refusal and the error."""

    def work() -> None:
        problem: Problem | None = None
        try:
            text = call()
        except (EngineError, OSError) as refusal:
            text, problem = str(refusal), refusal
        node.call_later(done, text, problem)

    # A daemon thread, not a worker: quitting must not wait for the engine.
    threading.Thread(target=work, name=f"engine-{name}", daemon=True).start()


class PollingScreen(Screen[None]):
    """Polls every `context.refresh_s`, one poll at a time, and posts the result to itself.

    A thread cannot be cancelled, and a feed belongs to one thread at a time: a tick during a poll
    does nothing.
    """

    POLLS_WHILE_COVERED: ClassVar[bool] = False
    """Whether it keeps polling while another screen covers it."""
    focused = reactive[Widget | None](None, repaint=False)
    """The widget with the focus. Textual would draw the whole screen again, where the two widgets that it concerns
    draw themselves."""
    ACTING: ClassVar[frozenset[str]] = frozenset()
    """The actions of this class that start, stop or change a run, a flip or evidence; read-only mode
    refuses them."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self._polling: Worker[None] | None = None

    @abstractmethod
    def poll(self) -> Polled:
        """Read what is new; called in a thread, so it touches no widget."""

    @on(Resize)
    def fit_terminal(self, event: Resize) -> None:
        """On a terminal too small for panes, show only the first line of the screen, wrapped over as many
        rows as it needs."""
        self.set_class(is_tiny(*self.size), "-tiny")
        # A screen that lays itself out posts its current size to itself. If the terminal's next size was
        # queued just before, Textual would take that later event for the newer one.
        if event.size != self.app.size:
            _resize(self, self.app.size)

    @property
    def own_widgets(self) -> list[Widget]:
        """The widgets that the screen was composed of; none before that, and none once it is taken down."""
        return [child for child in self.children if not isinstance(child, ToastRack | Tooltip)]

    def on_mount(self) -> None:
        own = self.own_widgets
        if not own:
            return  # the application ended before this was handled, and took the widgets down
        own[0].add_class("-first")
        self.set_interval(self.context.refresh_s, self.tick)
        self.draw_keys()
        self.tick()

    @on(ScreenResume)
    def poll_on_return(self) -> None:
        if not self.POLLS_WHILE_COVERED:
            self.tick()

    def tick(self) -> None:
        """Poll, unless a poll is running or the screen is not visible."""
        if not self.own_widgets:
            return
        if not (self.is_current or self.POLLS_WHILE_COVERED):
            return
        # Even if an event was lost, the screen on top is laid out for the size of its terminal.
        shown = self.app.screen
        if shown.outer_size and shown.outer_size != self.app.size:
            _resize(shown, self.app.size)
        if self._polling is None or self._polling.is_finished:
            self._polling = self._poll_in_thread()

    def action_refresh(self) -> None:
        self.tick()

    def draw_keys(self) -> None:
        """Show the keys that do something now."""
        bindings = [
            binding
            for binding in bindings_of(self)
            if binding.show and is_offered(self.app, self, binding.action)
        ]
        self.query_one(KeyBar).draw(bindings)

    def command(self, name: str, call: Callable[[], str]) -> None:
        """Run an engine command, and show its message or its refusal."""

        def done(text: str, problem: Problem | None) -> None:
            if problem is None:
                self.notify(text, markup=False)
            else:
                title = "the engine refused"
                self.notify(text, title=title, severity="error", timeout=15, markup=False)
            self.tick()

        self.notify(f"{name}: asking the engine", markup=False)
        run_command(self, name, call, done)

    @work(thread=True, exclusive=True, group="poll")
    def _poll_in_thread(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            message = self.poll()
            self.post_message(message)
            if not message.behind:
                return


def _resize(screen: Screen[Any], size: Size) -> None:
    """Lay a screen out again; requesting only a layout would reuse its old size."""
    screen.post_message(Resize(size, size))
