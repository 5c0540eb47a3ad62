"""A flip: choose what to test, see the plan, and follow its pairs to the verdict.

Before it starts, a list of what the run itself suggests (its alerts first) fills a form that can be
edited; below it is the plan that would be registered, with the time, memory and GPUs that it needs, from
`engine flip --dry-run`. Enter starts it. After that the screen shows the flip's folder; a verdict
folds the details, and z unfolds them. The flip has its
own process: leaving the screen, ctrl+c and closing the workbench do not end it, and F or the list of flips
finds it again; ctrl+x ends one that this screen started, and keeps its measurements.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from engine.errors import EngineError
from engine.flips.proposals import Proposal, proposals
from engine.log.folder import RunFolder, settings_of
from workbench.feed import RunFeed, command_of
from workbench.flip_snapshots import (
    FLIPS,
    FlipFeed,
    FlipSnapshot,
    flip_details,
    running_flip,
    verdict_of,
)
from workbench.jobs import Job
from workbench.tui.context import Context
from workbench.tui.screens.polling import Polled, PollingScreen
from workbench.tui.widgets.flip_form import FlipForm, FlipPlan
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.text_pane import TextPane, WordsView

SHORT = 18
"""Number of rows below which nothing has a border."""


class FlipScreen(PollingScreen):
    """Form and progress of a flip of one run; with `folder`, an existing flip."""

    NOTES = (
        "A flip runs this spec in pairs, A as it is and B with one setting changed, until the",
        "interval of B/A lies on one side of the margin or inside it, or the budget is used up. The",
        "plan is registered first.",
        "",
        "The verdict is one sentence and the next action; z shows the statistics that it rests on.",
        "B_FASTER, B_SLOWER, EQUIVALENT are decided; INCONCLUSIVE says what would decide it;",
        "`measured` needs controls of the last day (`engine flip --controls run`), else it is a `screen`.",
        "",
        "Leaving this screen, ctrl+c or closing the workbench does not end a flip: it continues, and E",
        "lists it. ctrl+x ends a flip that this screen started, and keeps its measurements.",
    )

    AUTO_FOCUS = ""
    POLLS_WHILE_COVERED = True
    ACTING = frozenset({"start", "stop", "keep"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "start", "start", tooltip="register the plan and run it"),
        Binding("tab", "edit", "edit", tooltip="go through the fields"),
        Binding("z", "details", "details", tooltip="the statistics, controls, plan and pairs"),
        Binding("ctrl+x", "stop", "stop", tooltip="end the flip and keep its measurements"),
        Binding("ctrl+w", "keep", "why", tooltip="a five-whys finding with its change as a cause"),
        Binding("escape", "back", "back", tooltip="back; a running flip continues"),
        Binding("f1", "app.help", "help", tooltip="this help"),
    ]
    CSS = """
    FlipScreen {
        #head {
            height: auto; max-height: 2; padding: 0 1; background: $panel; text-style: bold;
        }
        #before { height: 1fr; }
        FlipForm { height: auto; max-height: 70%; }
        #flip { display: none; height: 1fr; padding: 0 1; }
        #verdict { height: auto; margin-bottom: 1; }
        #details { height: 1fr; }
    }
    FlipScreen.-short {
        OptionList, OptionList:focus { border: none; max-height: 3; }
        FlipPlan { border-top: none; }
        #verdict { margin-bottom: 0; }
    }
    FlipScreen.-begun #before { display: none; }
    FlipScreen.-begun #flip { display: block; }
    """

    def __init__(
        self,
        context: Context,
        run: RunFolder | None,
        suggestions: tuple[Proposal, ...] | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        """`suggestions` are the run's suggestions; None reads them from the run."""
        super().__init__(context)
        assert run is not None or folder is not None, "a run to flip, or a flip"
        self._run, self._suggestions, self._flips = run, suggestions, Path(FLIPS)
        self._feed: FlipFeed | None = None if folder is None else FlipFeed(folder)
        self._started: Job | None = None
        self._snapshot: FlipSnapshot | None = None
        self._folded = True
        self._has_searched = folder is not None
        self._subject = run.name if run is not None else folder.name if folder is not None else ""

    def compose(self) -> ComposeResult:
        yield Static(f"flip {self._subject}: what to test?", id="head", markup=False)
        with Vertical(id="before"):
            yield FlipForm(watched=self._run is not None and command_of(self._run) is not None)
            yield FlipPlan(self._run, self._flips)
        with Vertical(id="flip"):
            yield WordsView(id="verdict")
            yield TextPane("", id="details")
        yield KeyBar()

    def on_mount(self) -> None:
        # Textual calls the handlers of every class, including PollingScreen's own.
        if self._feed is None and self._suggestions is not None:
            self._suggest(self._suggestions)

    def on_resize(self) -> None:
        self.set_class(self.size.height < SHORT, "-short")

    def poll(self) -> Polled:
        if not self._has_searched and self._run is not None:
            self._has_searched = True
            folder = running_flip(self._flips, self._run.path)
            if folder is not None:
                self._feed = FlipFeed(folder)
            elif self._suggestions is None:
                view = RunFeed(self._run).read_all().view
                suggestions = proposals(view, settings_of(self._run), command_of(self._run))
                self.call_later(self._suggest, suggestions)
        return Polled(None if self._feed is None else self._feed.poll())

    # Before the flip starts.

    def _suggest(self, suggestions: tuple[Proposal, ...]) -> None:
        self.query_one(FlipForm).suggestions = suggestions

    @on(FlipForm.Changed)
    def preview(self, message: FlipForm.Changed) -> None:
        """Show the plan, or what is wrong with the form, as it is typed."""
        self.query_one(FlipPlan).preview(message.wanted)

    @on(FlipForm.Sent)
    async def start_by_enter(self) -> None:
        # Through `run_action`, so that read-only mode can refuse it.
        await self.run_action("start")

    def action_start(self) -> None:
        """Start the flip of the form."""
        if self._feed is not None or self._run is None:
            return
        wanted = self.query_one(FlipForm).wanted
        folder = wanted.folder(self._flips)
        problem = wanted.problem()
        try:
            if not problem:
                self._started = wanted.start(self._run.path, folder)
        except EngineError as error:
            problem = str(error)
        if problem:
            self.notify(problem, severity="error", timeout=15, markup=False)
            return
        self._feed = FlipFeed(folder, self._started)
        self.tick()

    # After the flip has started.

    @on(Polled)
    def show(self, message: Polled) -> None:
        """Draw the flip as it is now."""
        snapshot: FlipSnapshot | None = message.snapshot
        self._snapshot = snapshot
        self.draw_keys()
        if snapshot is None:
            return
        if not self.has_class("-begun"):
            self.set_class(True, "-begun")
            self.call_after_refresh(self.query_one("#details").focus)
        self.query_one("#head", Static).update(f"flip {self._subject}: {snapshot.state}")
        self._draw_lines(snapshot)

    def _draw_lines(self, snapshot: FlipSnapshot) -> None:
        self.query_one("#verdict", WordsView).lines = tuple(verdict_of(snapshot))
        lines = flip_details(snapshot)
        if self._folded and snapshot.has_ended:
            lines = ["z: the statistics, controls, plan and pairs"]
        self.query_one("#details", TextPane).show(lambda _width: lines)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        snapshot = self._snapshot
        if action in ("start", "edit"):
            return self._feed is None
        if action == "stop":
            return self._started is not None and self._started.is_alive
        if action in ("keep", "details"):
            return snapshot is not None and snapshot.has_ended
        return True

    def action_edit(self) -> None:
        self.focus_next()

    def action_stop(self) -> None:
        if self._started is not None:
            self._started.stop()

    def action_details(self) -> None:
        if self._snapshot is not None:
            self._folded = not self._folded
            self._draw_lines(self._snapshot)

    def action_keep(self) -> None:
        # Imported here: the first frame does not need it.
        from workbench.finding_rows import of_flip
        from workbench.tui.screens.finding import ask_why, finding_form

        if self._snapshot is not None and self._snapshot.has_ended:
            folder = self._snapshot.folder
            ask_why(self, lambda: finding_form(*of_flip(folder)))

    def action_back(self) -> None:
        if self._snapshot is not None and self._snapshot.going_on:
            self.app.notify("the flip continues; E lists it", markup=False)
        self.app.pop_screen()
