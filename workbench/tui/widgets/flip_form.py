"""The form of a flip: the run's suggestions, the fields that they fill in, and the plan that would be
registered; a moment later, from the engine, its cost or why it cannot run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.reactive import reactive
from textual.timer import Timer
from textual.widgets import Input, OptionList

from engine.errors import EngineError
from engine.flips.proposals import Proposal
from engine.log.folder import RunFolder
from engine.log.text import one_line
from workbench.flip_snapshots import Wanted
from workbench.listing import Row
from workbench.tui.widgets.fields import Field, field_lines, values_in
from workbench.tui.widgets.row_list import RowList
from workbench.tui.widgets.text_pane import TextPane

START = (
    Field(name="assignment", label="B differs in", hint="teacher.backend=quantized"),
    Field(name="hypothesis", label="hypothesis", hint="what you expect, in one sentence"),
    Field(name="budget", label="budget", value="5m", hint="of all pairs, as 90s or 5m"),
)
WATCHED_HINTS = {
    "assignment": "loader.workers=4, NAME=VALUE of its environment, or --option value",
    "budget": "what 8 pairs of this run need",
}
"""The hints of fields that are empty at first for a watched run: the engine chooses what its steps need."""
CHECK_AFTER_S = 0.4
"""Pause in typing, in seconds, after which the engine checks whether both arms can run."""


class FlipForm(VerticalScroll, can_focus=False):
    """The fields of a flip; posts `Changed` as they are typed."""

    class Changed(Message):
        """The form has changed."""

        def __init__(self, wanted: Wanted) -> None:
            super().__init__()
            self.wanted = wanted

    class Sent(Message):
        """Enter: start the flip of the form."""

    HELP = """\
# What to test

The list has the suggestions of the run, its alerts first; the line under the cursor fills the form.
What cannot be tested on this run is at the end after a `/`, with the reason, and cannot be chosen.

Enter starts; tab moves through the fields; the plan below is the one that will be registered.
"""
    DEFAULT_CSS = """
    FlipForm {
        height: 1fr; padding: 0 1; scrollbar-size-vertical: 1;
        .line { height: 1; }
        .label { width: 14; color: $text-muted; }
        .line Input { width: 1fr; }
        Input { height: 1; border: none; padding: 0; background: $surface; }
        Input:focus { background: $primary 30%; }
        OptionList {
            height: auto; min-height: 3; max-height: 9; border: round $foreground 40%; padding: 0;
            background: $background;
        }
        OptionList:focus { border: heavy $primary; }
    }
    """

    suggestions: reactive[tuple[Proposal, ...] | None] = reactive(None, init=False)
    """The run's suggestions; None while they are not known."""

    def __init__(self, *, watched: bool = False) -> None:
        """Make the form; `watched` is whether the run is a watched script."""
        super().__init__(id="form")
        self._fields = tuple(
            replace(field, value="", hint=WATCHED_HINTS[field.name])
            if watched and field.name in WATCHED_HINTS
            else field
            for field in START
        )

    def compose(self) -> ComposeResult:
        yield RowList()
        yield from field_lines(self._fields)

    def on_mount(self) -> None:
        self.query_one(RowList).display = False

    def watch_suggestions(self, suggestions: tuple[Proposal, ...] | None) -> None:
        options = self.query_one(RowList)
        options.rows = tuple(_row(*item) for item in enumerate(suggestions or ()))
        options.display = bool(suggestions)
        possible = [i for i, proposal in enumerate(suggestions or ()) if not proposal.impossible]
        for place in range(len(suggestions or ())):
            if place not in possible:
                options.disable_option_at_index(place)
        if not possible or not (suggestions and suggestions[possible[0]].seen):
            options.highlighted = None
            self._input("assignment").focus()
            return
        options.highlighted = possible[0]
        options.focus()

    def _input(self, name: str) -> Input:
        return self.query_one(f"#{name}", Input)

    @property
    def wanted(self) -> Wanted:
        """Return the flip that the form describes. With the change of a proposal that names a problem, the flip tests
        whether that problem ends, and measures nothing."""
        values = values_in(self, self._fields)
        ends = {proposal.assignment: proposal.ends for proposal in self.suggestions or ()}
        return Wanted(**values, ends=ends.get(values["assignment"], ""))

    @on(OptionList.OptionHighlighted)
    def fill(self, event: OptionList.OptionHighlighted) -> None:
        """Fill the form with the suggestion under the cursor."""
        event.stop()
        if self.suggestions is None or event.option_index >= len(self.suggestions):
            return
        proposal = self.suggestions[event.option_index]
        if not proposal.impossible:
            self._input("assignment").value = proposal.assignment
            self._input("hypothesis").value = proposal.hypothesis

    @on(Input.Changed)
    def post_change(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Changed(self.wanted))

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def send(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Sent())


def _row(place: int, proposal: Proposal) -> Row:
    """Return a suggestion as a row."""
    key, source = f"{place} {proposal.assignment}", one_line(proposal.source)
    if proposal.impossible:
        text = f"{proposal.assignment}   cannot be tested: {one_line(proposal.impossible)}"
        return Row(key=key, text=text, tone="quiet", sign="/")
    asked = f"{proposal.hypothesis}: " if proposal.ends else ""
    return Row(key=key, text=f"{asked}{proposal.assignment}   {source}")


class FlipPlan(TextPane):
    """Draws the plan for a form; tab reaches it, so that keys scroll it."""

    HELP = """\
# The plan

It is registered when the flip starts. Up, down, page up and page down scroll it.
"""
    DEFAULT_CSS = """
    FlipPlan { height: 1fr; padding: 0 1; border-top: solid $foreground 40%; }
    FlipPlan:focus { border-top: heavy $primary; }
    FlipPlan.-refused { color: $text-error; }
    """

    def __init__(self, run: RunFolder | None, flips: Path) -> None:
        """`flips` is the folder that a flip would be made in."""
        super().__init__("", id="plan")
        self._run, self._flips = run, flips
        self._wanted: Wanted | None = None
        self._timer: Timer | None = None

    def preview(self, wanted: Wanted) -> None:
        """Show the plan for a changed form, or what is wrong with it."""
        if self._timer is not None:
            self._timer.stop()
        self._wanted = wanted
        if problem := wanted.problem():
            self._say([problem], refused=bool(wanted.assignment))
            return
        self._say(["asking the engine for the plan and its cost"], refused=False)
        self._timer = self.set_timer(CHECK_AFTER_S, lambda: self._check(wanted))

    def _say(self, lines: list[str], *, refused: bool) -> None:
        self.show(lambda _width: lines)
        self.set_class(refused, "-refused")

    def _check(self, wanted: Wanted) -> None:
        """Let the engine check, in a thread, whether both arms can run."""
        run = self._run
        if run is None:
            return

        def work() -> None:
            try:
                lines, refused = wanted.check(run.path, self._flips), False
            except (EngineError, OSError) as problem:
                lines, refused = str(problem).splitlines(), True
            # The form may have changed meanwhile.
            if wanted == self._wanted:
                self.call_later(self._say, lines, refused=refused)

        threading.Thread(target=work, name="engine-plan", daemon=True).start()
