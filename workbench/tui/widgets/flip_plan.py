"""The plan of a flip as its form is typed: what would be registered, and a moment later, from the engine, what
it takes or why it cannot be run."""

from __future__ import annotations

import threading
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.timer import Timer

from engine.errors import EngineError
from engine.flips.amounts import parse_share, parse_time
from engine.log.folder import RunFolder
from workbench.flips import folder_for, plan_of, without_seed
from workbench.launch import check_flip
from workbench.tui.widgets.flip_form import Wanted
from workbench.tui.widgets.words_view import WordsView

CHECK_AFTER_S = 0.4
"""Without typing, until the engine is asked whether both arms can be run."""


class FlipPlan(VerticalScroll, can_focus=False):
    """Draws the plan for what a form says."""

    class Checked(Message):
        """What the engine says of the form."""

        def __init__(self, wanted: Wanted, lines: list[str], *, refused: bool) -> None:
            super().__init__()
            self.wanted, self.lines, self.refused = wanted, lines, refused

    DEFAULT_CSS = """
    FlipPlan { height: 1fr; padding: 0 1; border-top: solid $foreground 40%; }
    FlipPlan.-refused #plan { color: $text-error; }
    """

    def __init__(self, run: RunFolder | None, flips: Path) -> None:
        """`flips` is the folder that a flip would be made in."""
        super().__init__()
        self._run, self._flips = run, flips
        self._wanted: Wanted | None = None
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield WordsView(id="plan")

    def preview(self, wanted: Wanted) -> None:
        """Show the plan for another form, or what is wrong with it."""
        if self._timer is not None:
            self._timer.stop()
        self._wanted = wanted
        problem = wanted.problem()
        plan: list[str] | str = problem
        if not problem and self._run is not None:
            plan = plan_of(
                self._run.path,
                wanted.assignment,
                wanted.hypothesis,
                parse_time("budget", wanted.budget),
                margin=parse_share("margin", wanted.margin),
                steps=int(wanted.steps),
            )
        if isinstance(plan, str):
            self._say([plan], refused=bool(wanted.assignment))
            return
        self._say([*plan, "", "asking the engine what it takes"], refused=False)
        self._timer = self.set_timer(CHECK_AFTER_S, lambda: self._check(wanted))

    def _say(self, lines: list[str], *, refused: bool) -> None:
        self.query_one("#plan", WordsView).lines = tuple(lines)
        self.set_class(refused, "-refused")

    def _check(self, wanted: Wanted) -> None:
        """Ask the engine, in a thread, whether both arms can be run."""
        run = self._run
        if run is None:
            return

        def work() -> None:
            try:
                lines = check_flip(
                    run.path,
                    wanted.assignment,
                    folder_for(self._flips, wanted.assignment),
                    hypothesis=wanted.hypothesis,
                    budget=wanted.budget,
                    options=wanted.options,
                )
                self.post_message(self.Checked(wanted, without_seed(lines), refused=False))
            except (EngineError, OSError) as problem:
                self.post_message(self.Checked(wanted, str(problem).splitlines(), refused=True))

        threading.Thread(target=work, name="engine-plan", daemon=True).start()

    @on(Checked)
    def show_answer(self, message: Checked) -> None:
        """What the engine says, unless the form says something else by now."""
        message.stop()
        if message.wanted == self._wanted:
            self._say(message.lines, refused=message.refused)
