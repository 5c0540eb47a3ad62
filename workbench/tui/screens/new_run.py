"""A form to start a run: begin from a template, a past run or nothing, change settings, start it.

It shows the essentials, and what differs from the defaults; a search finds every other setting by its name or its
description. The form is made from the table of settings in `engine.spec`. Each change is checked by the engine as it is
typed; the command that a shell would run is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static

from engine.errors import EngineError
from engine.log.folder import RunFolder, is_run
from workbench.drafts import (
    ESSENTIALS,
    OPTIONS,
    Beginning,
    Draft,
    Setting,
    allowed_text,
    begin_from,
    beginnings,
    draft_like,
    matching,
    shown_first,
    value_text,
)
from workbench.engine_commands import check_run, start_run
from workbench.paths import path_text
from workbench.tui.context import Context
from workbench.tui.keys import is_offered
from workbench.tui.layout import is_low, is_tiny
from workbench.tui.names import shortened, wrapped
from workbench.tui.screens.form import ChooseScreen
from workbench.tui.screens.polling import Problem, run_command
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.keyed_list import KeyedList

LOW = 18
"""Number of rows below which the description and the command shrink in favour of the settings."""
NARROW = 60
KEY_CELLS = 20


class BeginScreen(ModalScreen[Beginning | None]):
    """Asks what to begin from; the result is None when it was cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "leave", tooltip="choose none"),
        Binding("tab", "app.focus_next", "list or path", tooltip="from the list to the line"),
    ]
    CSS = """
    BeginScreen { align: center middle; }
    BeginScreen > Vertical {
        width: 96; max-width: 98%; height: auto; max-height: 90%; padding: 0 1;
        border: heavy $primary; background: $surface;
    }
    BeginScreen OptionList { height: auto; max-height: 16; border: none; padding: 0; }
    BeginScreen Input { height: 1; border: none; padding: 0; background: $panel; }
    BeginScreen Input:focus { background: $primary 30%; }
    BeginScreen .words { color: $text-muted; }
    """

    def __init__(self, beginnings: Sequence[Beginning]) -> None:
        super().__init__()
        self._beginnings = tuple(beginnings)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "begin from"
            lines = [f"{begin.kind:<8}  {begin.name}" for begin in self._beginnings]
            yield OptionList(*lines, markup=False)
            yield Input(
                placeholder="or press tab and type the path of a spec or a run", compact=True
            )
            yield Static("enter or a click selects   esc cancels", classes="words", markup=False)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.highlighted = 0
        options.focus()

    @on(OptionList.OptionSelected)
    def take(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._beginnings[event.option_index])

    @on(Input.Submitted)
    def take_typed(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(begin_from(Path(event.value.strip()).expanduser()))

    def action_leave(self) -> None:
        self.dismiss(None)


MORE = "more"
"""The row after the essentials, which opens the search."""


class SettingsList(KeyedList):
    """Draws settings. The sign before a key is `!` for a wrong value, `*` for a typed one, and `+` where file or
    environment differ from the default. What is wrong with a value is below it."""

    DEFAULT_CSS = """
    SettingsList, SettingsList:focus { height: 1fr; border: none; padding: 0; background: $background; }
    SettingsList > .option-list--option { padding: 0 1; }
    SettingsList { scrollbar-size-vertical: 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[tuple[Setting, ...], bool, str] = ((), False, "")

    def on_resize(self) -> None:
        settings, described, more = self._shown
        self.show(settings, described=described, more=more)

    def show(self, settings: Sequence[Setting], *, described: bool, more: str) -> None:
        """Draw settings, with their descriptions if `described`, and after the essentials a row with `more`."""
        self._shown = (tuple(settings), described, more)
        width = self.size.width - 3
        if width <= 0:
            return
        rows = {}
        for place, setting in enumerate(settings):
            if more and place == len(ESSENTIALS):
                rows[MORE] = Content.styled(more, "$text-muted")
            rows[setting.option.key] = _prompt(setting, width, described=described)
        if more:
            rows.setdefault(MORE, Content.styled(more, "$text-muted"))
        self.draw(rows)
        # What is wrong with a value makes its row higher.
        self.call_after_refresh(self.scroll_to_highlight)


def _prompt(setting: Setting, width: int, *, described: bool) -> Content:
    """Return a setting as it is drawn: its line, what is wrong with it, and its description."""
    sign = "!" if setting.problems else "*" if setting.source == "typed" else " "
    if sign == " " and not setting.is_default:
        sign = "+"
    is_wide = width >= NARROW
    key, source = setting.option.key, f"  {setting.source}" if is_wide else ""
    name = f"{sign} {key:<{KEY_CELLS if is_wide else 0}}  "
    value = shortened(setting.value or "(empty)", max(8, width - len(name) - len(source)))
    parts = [Content.styled(f"{name}{value}{source}", "" if sign == " " else "bold")]
    for text, style in (
        *((problem, "$text-error") for problem in setting.problems),
        *([(setting.option.doc, "$text-muted")] if described else []),
    ):
        parts += [Content.styled(row, style) for row in wrapped(f"    {text}", width)]
    return Content("\n").join(parts)


class NewRunScreen(Screen[None]):
    """Edits one draft, and starts it."""

    NOTES = (
        "The form shows the essentials, then every other setting that differs from the default. / searches",
        "all: type words of a name or a description, enter goes to the matches, enter sets a value.",
        "",
        "Sign before a setting: `!` wrong value, `*` typed here, `+` the file or the environment",
        "changes the default. No sign: the default.",
        "",
        "Starting runs `engine distill SPEC --set ... --detach`, as shown; the run continues in the background.",
        "k has the engine check the inputs as well: weights, tokenizers, disk space.",
    )

    ACTING: ClassVar[frozenset[str]] = frozenset(
        {"open", "edit", "cycle", "reset", "check", "start", "save"}
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back", tooltip="cancel the field, or close the form"),
        Binding("slash", "search", "search", tooltip="all settings, by name and description"),
        Binding("o", "open", "begin from", tooltip="a template, a past run, or nothing"),
        Binding("enter", "edit", "edit", tooltip="type a value; checked as it is typed"),
        Binding("space", "cycle", "next value", tooltip="the next of the allowed values"),
        Binding("s", "start", "start", tooltip="start the run, after confirmation"),
        Binding("k", "check", "check", tooltip="engine distill --check-inputs: the inputs as well"),
        Binding("backspace,delete", "reset", "reset", tooltip="undo what was typed here"),
        Binding("a", "save", "save as", tooltip="write all settings as a new spec file"),
        Binding("Y", "copy_command", "copy command", tooltip="copy the command that is shown"),
        Binding("question_mark", "app.help", "help", tooltip="this help"),
    ]
    AUTO_FOCUS = ""
    CSS = """
    NewRunScreen {
        #head { height: auto; max-height: 2; padding: 0 1; background: $panel; text-style: bold; }
        #line { display: none; height: 1; border: none; padding: 0 1; background: $primary 30%; }
        #about { height: auto; padding: 0 1; }
        #wrong { height: auto; max-height: 5; padding: 0 1; color: $text-error; }
        #said { height: auto; max-height: 8; padding: 0 1; color: $text-accent; }
        #command { height: auto; max-height: 4; padding: 0 1; background: $panel; }
    }
    NewRunScreen.-asking #line { display: block; }
    NewRunScreen.-low.-asking { #command { display: none; } }
    NewRunScreen.-low { #wrong { max-height: 2; } #about { max-height: 2; } #command { max-height: 1; } }
    NewRunScreen.-tiny > * { display: none; }
    NewRunScreen.-tiny #head { display: block; height: 1fr; max-height: 100%; }
    """

    def __init__(self, context: Context, *, like: RunFolder | None = None) -> None:
        super().__init__()
        self._given, self._like = context, like
        self.title = "a new run"
        self._draft: Draft | None = None
        self._before: Draft | None = None
        """The draft before the value being typed."""
        self._asked = ""
        self._pattern = ""
        self._settings: dict[str, Setting] = {}
        self._busy = ""
        self._started: RunFolder | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield SettingsList()
        yield Input(id="line", compact=True, disabled=True)
        yield Static(id="about", markup=False)
        yield Static(id="wrong", markup=False)
        yield Static(id="said", markup=False)
        yield Static(id="command", markup=False)
        yield KeyBar()

    @on(Resize)
    def lay_out(self) -> None:
        """Shrink the rest on a low screen; show only the heading on a tiny one."""
        self.set_class(self.size.height < LOW, "-low")
        self.set_class(is_tiny(*self.size), "-tiny")
        self._draw()

    def _take(self, draft: Draft) -> None:
        self._draft = draft
        self._leave_line()
        self._say("")

    def on_mount(self) -> None:
        if self._given.read_only:
            words = (
                "read-only: no run is started from here; start apr-workbench without --read-only"
            )
            self.query_one("#head", Static).update(words)
            return
        if self._like is None:
            self.action_open()
            return
        try:
            self._take(draft_like(self._like))
        except EngineError as problem:
            self._say(str(problem))
            self.action_open()

    def draw_keys(self) -> None:
        bindings = [
            binding for binding in bindings_of(self) if is_offered(self.app, self, binding.action)
        ]
        self.query_one(KeyBar).draw(bindings)

    # What it begins from.

    def action_open(self) -> None:
        """Ask what to begin from; without an answer the form closes."""

        def answered(beginning: Beginning | None) -> None:
            if beginning is not None:
                self._begin(beginning)
            elif self._draft is None:
                self.app.pop_screen()

        self.app.push_screen(BeginScreen(beginnings(self._given.folders)), answered)

    def _begin(self, beginning: Beginning) -> None:
        try:
            draft = beginning.make()
        except EngineError as problem:
            self._say(str(problem))
            return
        self._pattern = ""
        self._take(draft if beginning.kind == "run" else self._in_watched_folder(draft))
        self.query_one(SettingsList).highlighted = 0

    def _in_watched_folder(self, draft: Draft) -> Draft:
        """Return the draft with `run.out` set to the folder being watched, unless the file sets it or it is the
        default."""
        folders = self._given.folders
        if not folders or "out" in draft.tree.get("run", {}):
            return draft
        folder = folders[0].parent if is_run(folders[0]) else folders[0]
        default = Path(value_text(OPTIONS["run.out"].default))
        if folder.resolve() == default.resolve():
            return draft
        return draft.edited("run.out", str(folder))

    # The input line: a value, a path or a filter.

    def _ask(self, what: str, value: str, hint: str) -> None:
        line = self.query_one("#line", Input)
        self._asked, self._before = what, self._draft
        line.disabled, line.value, line.placeholder = False, value, hint
        line.cursor_position = len(value)
        self.add_class("-asking")
        line.focus()
        self._draw()

    def _leave_line(self) -> None:
        self._asked = ""
        self.remove_class("-asking")
        self.query_one("#line", Input).disabled = True
        self._draw()
        self.query_one(SettingsList).focus()

    @on(Input.Changed)
    def hear(self, event: Input.Changed) -> None:
        """Check a value, or filter the settings, as it is typed."""
        if self._asked in OPTIONS and self._before is not None:
            self._draft = self._before.edited(self._asked, event.value)
        elif self._asked == "search":
            self._pattern = event.value
        self._draw()

    @on(Input.Submitted)
    def send(self, event: Input.Submitted) -> None:
        """Keep what was typed; a wrong value stays on the line."""
        asked, text = self._asked, event.value.strip()
        if not asked:
            return  # a second enter, pressed before the line was left
        if asked == "save":
            self._save(Path(text).expanduser())
        elif asked == "search" or not self._setting(asked).problems:
            self._leave_line()

    def action_back(self) -> None:
        if self._asked in OPTIONS:
            self._draft = self._before
            self._leave_line()
        elif self._asked or self._pattern:
            # From the search, back to the essentials.
            self._pattern = "" if self._asked in ("", "search") else self._pattern
            self._leave_line()
        else:
            self.app.pop_screen()

    # Settings.

    def _setting(self, key: str) -> Setting:
        return self._settings[key]

    def _draw(self) -> None:
        self.draw_keys()
        draft = self._draft
        if draft is None:
            self.query_one("#head", Static).update("a new run: o chooses what to begin from")
            return
        _, problems = draft.build()
        settings = draft.settings(problems)
        self._settings = {setting.option.key: setting for setting in settings}
        changed = sum(not setting.is_default for setting in settings)
        wrong = f", {len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else ""
        are = "setting is" if changed == 1 else "settings are"
        rest = f": {changed} {are} not the default{wrong}{self._busy}"
        if is_low(*self.size):
            rest = f": {changed} changed{wrong}{self._busy}"
        # Problems take precedence over the path of the file.
        room = max(12, self.size.width - 2 - len("a new run from ") - len(rest))
        file = shortened(path_text(draft.file), room)
        self.query_one("#head", Static).update(f"a new run from {file}{rest}")
        searching = self._asked == "search" or bool(self._pattern)
        shown = matching(settings, self._pattern) if searching else shown_first(settings)
        more = f"/ {len(settings) - len(shown)} more settings: search by name or description"
        if searching:
            more = "" if shown else "no setting has all of these words"
        described = searching or is_low(*self.size)
        self.query_one(SettingsList).show(shown, described=described, more=more)
        command = self.query_one("#command", Static)
        written = "" if draft.written else f"{draft.file} is written first: "
        command.update(f"{written}{draft.command}")
        self._describe()
        # Problems of a setting that is shown are below it; the others are here.
        shown_problems = {problem for setting in shown for problem in setting.problems}
        others = [problem for problem in problems if problem not in shown_problems]
        wrong_words = self.query_one("#wrong", Static)
        wrong_words.update("\n".join(others))
        wrong_words.display = bool(others)

    @on(OptionList.OptionHighlighted)
    def _describe(self) -> None:
        key = self._asked if self._asked in OPTIONS else self.query_one(SettingsList).key
        setting = self._settings.get(key or "")
        words = ""
        if setting is not None:
            option = setting.option
            default = value_text(option.default) or "(empty)"
            words = f"{option.key}: {allowed_text(option)}; default {default}; {setting.source}"
            if not (self._pattern or self._asked == "search" or is_low(*self.size)):
                words += f"\n{option.doc}"
        about = self.query_one("#about", Static)
        about.update(words)
        about.display = bool(words)

    @on(OptionList.OptionSelected)
    def action_edit(self) -> None:
        if self.query_one(SettingsList).key == MORE:
            self.action_search()
            return
        setting = self._settings.get(self.query_one(SettingsList).key or "")
        if setting is not None:
            self._ask(setting.option.key, setting.value, allowed_text(setting.option))

    def action_cycle(self) -> None:
        """Switch to the next allowed value of the setting under the cursor."""
        setting = self._settings.get(self.query_one(SettingsList).key or "")
        if setting is None or self._draft is None:
            return
        option = setting.option
        values = option.allowed or (("false", "true") if option.type_name == "bool" else ())
        if not values:
            self.action_edit()
            return
        place = values.index(setting.value) if setting.value in values else -1
        self._draft = self._draft.edited(option.key, values[(place + 1) % len(values)])
        self._draw()

    def action_reset(self) -> None:
        key = self.query_one(SettingsList).key
        if key is not None and self._draft is not None:
            self._draft = self._draft.edited(key, None)
            self._draw()

    def action_search(self) -> None:
        self._ask("search", self._pattern, "words of a setting's name or description")

    # Saving and copying.

    def action_save(self) -> None:
        if self._draft is not None:
            name = (
                f"{self._draft.file.stem}-2.toml" if self._draft.written else self._draft.file.name
            )
            self._ask("save", name, "the path of the new file")

    def _save(self, path: Path) -> bool:
        assert self._draft is not None
        try:
            saved = self._draft.save_as(path)
        except (EngineError, OSError) as problem:
            self._say(str(problem))
            return False
        self._take(saved)
        self._say(f"saved as {path}")
        return True

    def action_copy_command(self) -> None:
        if self._draft is not None:
            self.app.copy_to_clipboard(self._draft.command)
            self.notify("copied the command", markup=False)

    def _say(self, words: str) -> None:
        said = self.query_one("#said", Static)
        said.update(words)
        said.display = bool(words)

    # Engine commands.

    def action_check(self) -> None:
        draft = self._draft
        if draft is not None and not draft.written:
            self._say(f"the engine checks a file: a writes {draft.file}")
        elif draft is not None:
            self._engine("check", lambda: check_run(draft.file, draft.sets))

    def action_start(self) -> None:
        draft = self._draft
        if draft is None:
            return
        _, problems = draft.build()
        if problems:
            self._say("not started: " + problems[0])
            return

        def start() -> str:
            sets = draft.sets if draft.written else []
            self._started = start_run(draft.file, sets, None)
            return ""

        def answered(answer: str | None) -> None:
            if answer == "y" and (draft.written or self._save(draft.file)):
                self._engine("start", start)

        written = "" if draft.written else f"{draft.file} is written first.\n"
        question = f"{written}{draft.command}\n\nThe run continues when the workbench is closed."
        answers = [("y", "start it"), ("n", "not yet")]
        self.app.push_screen(ChooseScreen("start this run", question, answers), answered)

    def _engine(self, what: str, call: Callable[[], str]) -> None:
        if not self._busy:
            self._busy = f"; {what}: asking the engine"
            self._draw()
            run_command(self, what, call, self._show_answer)

    def _show_answer(self, text: str, problem: Problem | None) -> None:
        """Show the engine's message; once the run has started, its screen replaces the form."""
        self._busy = ""
        self._draw()
        self._say(text if problem is None else f"the engine refused: {text}")
        if self._started is not None:
            self.app.switch_screen(RunScreen(self._given, self._started))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action not in self.ACTING | {"search", "copy_command"}:
            return True
        # While a value is typed, its letters are not commands.
        return not self._asked and (self._draft is not None or action == "open")
