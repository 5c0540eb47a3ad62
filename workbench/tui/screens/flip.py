"""A flip: choose what to test, see the plan, and follow its pairs to the verdict.

Before it starts, a list of what the run itself suggests (its alerts first) fills a form that can be
changed; the plan below is the one that would be registered. Enter starts it. From then on the screen
shows the flip's folder, and leaving it ends nothing: F finds a flip of this run that goes on again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from engine.errors import EngineError, UsageError
from engine.experiments.amounts import parse_time
from engine.experiments.text import ASCII, UNICODE, verdict_lines
from engine.runlog.folder import RunFolder
from workbench.flips import FlipFeed, FlipSnapshot, going_on, plan_of
from workbench.launch import StartedFlip, keep_flip, start_flip
from workbench.suspicions import Suspicion
from workbench.tui.messages import CommandEnded, FlipPolled
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.widgets.key_bar import KeyBar, bindings_of

FLIPS = Path("flips")
NOTES = (
    "A flip runs this spec twice in turn, A as it is and B with one setting changed, until the",
    "interval of B/A lies on one side of the margin, or inside it. The plan is registered first.",
    "",
    "B_FASTER, B_SLOWER, EQUIVALENT are decided; INCONCLUSIVE says how many pairs it would take;",
    "`measured` needs controls of the last day (engine flip --controls run), else it is a `screen`.",
)


class FlipScreen(PollingScreen):
    """Form and progress of a flip of one run."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "start", "start", tooltip="register the plan and run it"),
        Binding("tab", "app.focus_next", "edit", tooltip="go through the fields"),
        Binding("ctrl+x", "stop", "stop", tooltip="end the flip with what was measured"),
        Binding("ctrl+w", "keep", "to a finding", tooltip="begin a five-whys finding with it"),
        Binding("escape", "back", "back", tooltip="back to the run; a flip goes on"),
        Binding("f1", "help", "help", tooltip="this help"),
    ]
    CSS = """
    FlipScreen {
        #head { height: auto; padding: 0 1; background: $panel; text-style: bold; }
        #form { height: 1fr; padding: 0 1; }
        #form Input { height: 1; border: none; padding: 0; background: $surface; }
        #form Input:focus { background: $primary 30%; }
        #form .label { height: 1; color: $text-muted; }
        OptionList { height: auto; max-height: 40%; border: round $foreground 40%; }
        OptionList:focus { border: heavy $primary; }
        #plan { height: auto; margin-top: 1; }
        #flip { display: none; height: 1fr; padding: 0 1; }
    }
    FlipScreen.-begun #form { display: none; }
    FlipScreen.-begun #flip { display: block; }
    """

    def __init__(
        self,
        run: RunFolder,
        found: Sequence[Suspicion],
        *,
        refresh_s: float,
        ascii_only: bool,
        flips: Path = FLIPS,
    ) -> None:
        super().__init__(refresh_s)
        self._run, self._found, self._flips = run, tuple(found), flips
        self._ascii_only = ascii_only
        self._feed: FlipFeed | None = None
        self._started: StartedFlip | None = None
        self._snapshot: FlipSnapshot | None = None
        self._looked = False

    def compose(self) -> ComposeResult:
        yield Static(f"flip {self._run.name}: what is to be tested?", id="head", markup=False)
        with Vertical(id="form"):
            options = [Option(f"{s.assignment}   {s.source}") for s in self._found]
            yield OptionList(*options, markup=False)
            yield Static("B differs in (knob=value)", classes="label")
            yield Input(id="assignment", compact=True, placeholder="teacher.backend=quantized")
            yield Static("hypothesis", classes="label")
            yield Input(id="hypothesis", compact=True)
            yield Static("budget of all pairs", classes="label")
            yield Input("5m", id="budget", compact=True)
            yield Static(id="plan", markup=False)
        with VerticalScroll(id="flip"):
            yield Static(id="progress", markup=False)
        yield KeyBar()

    def on_mount(self) -> None:
        super().on_mount()
        options = self.query_one(OptionList)
        options.display = bool(self._found)
        if self._found:
            options.highlighted = 0
            options.focus()
        else:
            self.query_one("#assignment", Input).focus()

    def poll(self) -> FlipPolled:
        if not self._looked:
            self._looked = True
            folder = going_on(self._flips, self._run.path)
            if folder is not None:
                self._feed = FlipFeed(folder)
        return FlipPolled(None if self._feed is None else self._feed.poll())

    # Before it starts

    def _value(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()

    @on(OptionList.OptionHighlighted)
    def fill(self, event: OptionList.OptionHighlighted) -> None:
        """The form says what the line under the cursor suggests."""
        suspicion = self._found[event.option_index]
        self.query_one("#assignment", Input).value = suspicion.assignment
        self.query_one("#hypothesis", Input).value = suspicion.hypothesis

    @on(Input.Changed)
    def preview(self) -> None:
        """The plan, or what is wrong with it, as it is typed."""
        self.query_one("#plan", Static).update("\n".join(self._plan_words()))

    def _plan_words(self) -> list[str]:
        if not self._value("assignment"):
            return ["name one setting and its other value; `engine spec` lists them"]
        try:
            budget_s = parse_time("budget", self._value("budget"))
        except UsageError as problem:
            return [str(problem)]
        plan = plan_of(
            self._run.path, self._value("assignment"), self._value("hypothesis"), budget_s
        )
        return [plan] if isinstance(plan, str) else plan

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def action_start(self) -> None:
        """Start what the form says."""
        if self._feed is not None:
            return
        knob = self._value("assignment").partition("=")[0].replace(".", "-") or "flip"
        folder = self._flips / f"{time.strftime('%Y%m%d-%H%M%S')}-{knob}"
        try:
            parse_time("budget", self._value("budget"))
            self._started = start_flip(
                self._run.path,
                self._value("assignment"),
                folder.absolute(),
                hypothesis=self._value("hypothesis"),
                budget=self._value("budget"),
            )
        except EngineError as problem:
            self.notify(str(problem), severity="error", timeout=15, markup=False)
            return
        self._feed = FlipFeed(folder.absolute(), self._started)
        self.tick()

    # From then on

    @on(FlipPolled)
    def show(self, message: FlipPolled) -> None:
        """Draw the flip as it is now."""
        snapshot = self._snapshot = message.snapshot
        self.draw_keys()
        if snapshot is None:
            return
        self.set_class(True, "-begun")
        if self.focused is not None:
            self.set_focus(None)
        self.query_one("#head", Static).update(f"flip of {self._run.name}: {self._state(snapshot)}")
        lines = snapshot.lines()
        if snapshot.verdict is not None:
            drawn = ASCII if self._ascii_only else UNICODE
            lines += ["", *verdict_lines(snapshot.verdict, characters=drawn)]
        if snapshot.error:
            lines += ["", snapshot.error]
        lines += ["", f"folder: {snapshot.folder}"]
        self.query_one("#progress", Static).update("\n".join(lines))

    @staticmethod
    def _state(snapshot: FlipSnapshot) -> str:
        if snapshot.verdict is not None and not snapshot.going_on:
            return f"{snapshot.verdict['verdict']} ({snapshot.verdict['class']})"
        if snapshot.going_on:
            return snapshot.arm
        return "it ended without a verdict" if snapshot.plan else "refused"

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        snapshot = self._snapshot
        if action in ("start", "app.focus_next"):
            return self._feed is None
        if action == "stop":
            return self._started is not None and self._started.is_alive
        if action == "keep":
            return snapshot is not None and snapshot.verdict is not None and not snapshot.going_on
        return True

    def action_stop(self) -> None:
        if self._started is not None:
            self._started.stop()

    def action_keep(self) -> None:
        snapshot = self._snapshot
        if snapshot is None or snapshot.plan is None:
            return
        hypothesis, folder = snapshot.plan.hypothesis, snapshot.folder
        self._command("keep", lambda: keep_flip(folder, hypothesis) or "kept in ./evidence")

    def action_back(self) -> None:
        self.app.pop_screen()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen("help: flip", bindings_of(self), NOTES))

    def _command(self, name: str, call: Callable[[], str]) -> None:
        def work() -> None:
            try:
                message = CommandEnded(call(), failed=False)
            except EngineError as error:
                message = CommandEnded(str(error), failed=True)
            self.post_message(message)

        threading.Thread(target=work, name=f"engine-{name}", daemon=True).start()

    @on(CommandEnded)
    def say(self, message: CommandEnded) -> None:
        """What the engine answered."""
        self.notify(
            message.text,
            severity="error" if message.failed else "information",
            timeout=10,
            markup=False,
        )
