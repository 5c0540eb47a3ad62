"""What a flip will test: suggestions of the run, and the lines of the plan that they fill in."""

from __future__ import annotations

from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from engine.errors import UsageError
from engine.flips.amounts import parse_share, parse_time
from engine.log.text import one_line
from workbench.suspicions import Suspicion
from workbench.tui.widgets.choice import Choice

CONTROLS = ("auto", "run", "skip")
LINES = (
    ("assignment", "B differs in", "", "teacher.backend=quantized"),
    ("hypothesis", "hypothesis", "", "what you expect, in a sentence"),
    ("margin", "margin", "5%", "what is too small to matter"),
    ("budget", "budget", "5m", "of all pairs, as 90s or 5m"),
    ("steps", "steps", "12", "of each run"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the form says."""

    assignment: str
    hypothesis: str
    margin: str
    budget: str
    steps: str
    controls: str

    def problem(self) -> str:
        """What is wrong before anything is read; empty when nothing is."""
        if not self.assignment:
            return "name one setting and its other value; `engine spec` lists them"
        try:
            parse_time("budget", self.budget)
            parse_share("margin", self.margin)
        except UsageError as problem:
            return str(problem)
        if not self.steps.isdecimal():
            return f"steps: expected a number, found {self.steps!r}"
        return ""

    @property
    def options(self) -> list[str]:
        """The options of `engine flip` beside setting, hypothesis and budget."""
        said = ["--margin", self.margin, "--steps", self.steps]
        return [*said, "--controls", self.controls]


class FlipForm(VerticalScroll, can_focus=False):
    """Lets a person say what to test; posts `Changed` as it is typed."""

    class Changed(Message):
        """The form says something else."""

        def __init__(self, wanted: Wanted) -> None:
            super().__init__()
            self.wanted = wanted

    class Sent(Message):
        """Enter: start what the form says."""

    HELP = """\
# What is to be tested

The list has what the run itself suggests, its alerts first; the line under the cursor fills the form.
What cannot be tested on this run is at its end, with the reason, and cannot be chosen.

Enter starts; tab goes through the lines; the plan below is the one that will be registered.
"""
    DEFAULT_CSS = """
    FlipForm {
        height: 1fr; padding: 0 1; scrollbar-size-vertical: 1;
        .line { height: 1; }
        .label { width: 14; color: $text-muted; }
        .line Input, .line Choice { width: 1fr; }
        Input { height: 1; border: none; padding: 0; background: $surface; }
        Input:focus { background: $primary 30%; }
        OptionList {
            height: auto; min-height: 3; max-height: 9; border: round $foreground 40%; padding: 0;
            text-wrap: nowrap; text-overflow: ellipsis; background: $background;
        }
        OptionList:focus { border: heavy $primary; }
    }
    """

    found: reactive[tuple[Suspicion, ...] | None] = reactive(None, init=False)
    """What the run suggests; None while that is not known."""

    def __init__(self, *, about: str = "") -> None:
        super().__init__(id="form")
        self._about = about

    def compose(self) -> ComposeResult:
        yield OptionList(markup=False)
        for name, label, value, hint in LINES:
            with Horizontal(classes="line"):
                yield Static(label, classes="label", markup=False)
                yield Input(value, id=name, placeholder=hint, compact=True)
        with Horizontal(classes="line"):
            yield Static("controls", classes="label", markup=False)
            yield Choice(CONTROLS, id="controls")

    def on_mount(self) -> None:
        self.query_one(OptionList).display = False

    def watch_found(self, found: tuple[Suspicion, ...] | None) -> None:
        options = self.query_one(OptionList)
        options.set_options([_option(suspicion) for suspicion in found or ()])
        options.display = bool(found)
        possible = [i for i, one in enumerate(found or ()) if not one.impossible]
        if not possible:
            self.query_one("#assignment", Input).focus()
            return
        about = [i for i in possible if found is not None and self._is_about(found[i])]
        options.highlighted = (about or possible)[0]
        options.focus()

    def _is_about(self, suspicion: Suspicion) -> bool:
        return bool(self._about) and (
            suspicion.knob == self._about or suspicion.source.startswith(f"alert {self._about}:")
        )

    @property
    def wanted(self) -> Wanted:
        """What the form says now."""
        values = {name: self.query_one(f"#{name}", Input).value.strip() for name, *_ in LINES}
        return Wanted(**values, controls=self.query_one("#controls", Choice).value)

    @on(OptionList.OptionHighlighted)
    def fill(self, event: OptionList.OptionHighlighted) -> None:
        """The form says what the line under the cursor suggests."""
        event.stop()
        if self.found is None or event.option_index >= len(self.found):
            return
        suspicion = self.found[event.option_index]
        if not suspicion.impossible:
            self.query_one("#assignment", Input).value = suspicion.assignment
            self.query_one("#hypothesis", Input).value = suspicion.hypothesis

    @on(Input.Changed)
    @on(Choice.Changed)
    def tell(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Changed(self.wanted))

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def send(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Sent())


def _option(suspicion: Suspicion) -> Option:
    if suspicion.impossible:
        text = f"/ {suspicion.assignment}   not here: {one_line(suspicion.impossible)}"
        return Option(Content.styled(text, "$text-muted"), disabled=True)
    return Option(f"  {suspicion.assignment}   {one_line(suspicion.source)}")
