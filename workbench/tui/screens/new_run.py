"""A form to start a run: choose a spec, change settings, see what is wrong, start it.

The form is made from `engine.spec`'s table of settings. Each change is checked by the engine as it is typed;
the command that a shell would run is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Input, OptionList, Static

from engine.errors import EngineError
from engine.log.folder import RunFolder, is_run
from workbench.drafts import (
    OPTIONS,
    Draft,
    Setting,
    allowed_text,
    draft_like,
    find_specs,
    open_draft,
    value_text,
)
from workbench.engine_commands import check_run, start_run
from workbench.tui.context import Context
from workbench.tui.layout import is_low, is_tiny
from workbench.tui.names import shortened
from workbench.tui.screens.form import ChooseScreen
from workbench.tui.screens.polling import CommandEnded, run_command
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.cell_table import CellTable
from workbench.tui.widgets.key_bar import KeyBar, bindings_of

LOW = 18
"""With fewer rows, the description and the command shrink in favour of the settings."""
NARROW = 60


def shown_path(path: Path) -> str:
    """Return a path as it would be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class PickSpecScreen(ModalScreen[Path | None]):
    """Asks for a spec file; the result is its path, None when it was cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "leave", tooltip="choose none"),
        Binding("tab", "app.focus_next", "list or path", tooltip="from the list to the line"),
    ]
    CSS = """
    PickSpecScreen { align: center middle; }
    PickSpecScreen > Vertical {
        width: 96; max-width: 98%; height: auto; max-height: 90%; padding: 0 1;
        border: heavy $primary; background: $surface;
    }
    PickSpecScreen OptionList { height: auto; max-height: 16; border: none; padding: 0; }
    PickSpecScreen Input { height: 1; border: none; padding: 0; background: $panel; }
    PickSpecScreen Input:focus { background: $primary 30%; }
    PickSpecScreen .words { color: $text-muted; }
    """

    def __init__(self, specs: Sequence[Path]) -> None:
        super().__init__()
        self._specs = tuple(specs)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "choose a spec"
            yield OptionList(*(shown_path(path) for path in self._specs), markup=False)
            yield Input(placeholder="or press tab and type a path", compact=True)
            yield Static("enter selects   esc cancels", classes="words", markup=False)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        if self._specs:
            options.highlighted = 0
            options.focus()
        else:
            self.query_one(Input).focus()

    @on(OptionList.OptionSelected)
    def take(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._specs[event.option_index])

    @on(Input.Submitted)
    def take_typed(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(Path(event.value.strip()).expanduser())

    def action_leave(self) -> None:
        self.dismiss(None)


class SettingsTable(CellTable):
    """Draws settings. The sign before a key is `!` for a wrong value, `*` for a typed one, and
    `+` where file or environment differ from the default."""

    def __init__(self) -> None:
        super().__init__(show_header=False)
        self._settings: tuple[Setting, ...] = ()

    def on_resize(self) -> None:
        self.show(self._settings)

    def show(self, settings: Sequence[Setting]) -> None:
        """Draw settings."""
        self._settings = tuple(settings)
        width = self.size.width
        if width:
            texts = {setting.option.key: _texts(setting, width) for setting in settings}
            self.fill(("key", "value", "source"), [Text("")] * 3, texts, _cells)


def _texts(setting: Setting, width: int) -> list[str]:
    sign = "!" if setting.problems else "*" if setting.source == "typed" else " "
    if sign == " " and not setting.is_default:
        sign = "+"
    is_wide = width >= NARROW
    key = setting.option.key if is_wide else setting.option.key.split(".")[1]
    room = max(8, width - 26 - (14 if is_wide else 0))
    value = shortened(setting.value or "(empty)", room)
    return [f"{sign} {key}  ", value, f"  {setting.source}" if is_wide else ""]


def _cells(_: str, texts: Sequence[str]) -> list[Text]:
    style = "" if texts[0].startswith(" ") else "bold"
    return [Text(text, s, no_wrap=True) for text, s in zip(texts, (style, style, ""), strict=True)]


class NewRunScreen(Screen[None]):
    """Edits one draft, and starts it."""

    NOTES = (
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
        Binding("o", "open", "spec", tooltip="choose another spec file, or type its path"),
        Binding("enter", "edit", "edit", tooltip="type a value; checked as it is typed"),
        Binding("space", "cycle", "next value", tooltip="the next of the allowed values"),
        Binding("s", "start", "start", tooltip="start the run, after confirmation"),
        Binding("k", "check", "check", tooltip="engine distill --check-inputs: the inputs as well"),
        Binding("backspace,delete", "reset", "reset", tooltip="undo what was typed here"),
        Binding(
            "d", "only", "changed", tooltip="only settings that differ from the default, or all"
        ),
        Binding("slash", "filter", "filter", tooltip="settings by name"),
        Binding("a", "save", "save as", tooltip="write all settings as a new spec file"),
        Binding("Y", "copy_command", "copy command", tooltip="copy the command that is shown"),
        Binding("question_mark", "app.help", "help", tooltip="this help"),
    ]
    AUTO_FOCUS = ""
    CSS = """
    NewRunScreen {
        #head { height: auto; max-height: 2; padding: 0 1; background: $panel; text-style: bold; }
        #line { display: none; height: 1; border: none; padding: 0 1; background: $primary 30%; }
        #about { height: auto; max-height: 5; padding: 0 1; }
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
        self._only, self._pattern = False, ""
        self._settings: dict[str, Setting] = {}
        self._busy = ""
        self._started: RunFolder | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield SettingsTable()
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
        self._draw_keys()
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

    def _draw_keys(self) -> None:
        bindings = [
            binding
            for binding in bindings_of(self)
            if not (self._given.read_only and binding.action in self.ACTING)
        ]
        self.query_one(KeyBar).draw(bindings)

    # The spec file.

    def action_open(self) -> None:
        """Ask for a spec file; without one the form closes."""

        def answered(path: Path | None) -> None:
            if path is not None:
                self._open(path)
            elif self._draft is None:
                self.app.pop_screen()

        self.app.push_screen(PickSpecScreen(find_specs(self._given.folders)), answered)

    def _open(self, path: Path) -> None:
        try:
            draft = open_draft(path)
        except EngineError as problem:
            self._say(str(problem))
            return
        self._take(self._beside_the_others(draft))

    def _beside_the_others(self, draft: Draft) -> Draft:
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

    def _leave_line(self) -> None:
        self._asked = ""
        self.remove_class("-asking")
        self.query_one("#line", Input).disabled = True
        self._draw()
        self.query_one(SettingsTable).focus()

    @on(Input.Changed)
    def hear(self, event: Input.Changed) -> None:
        """Check a value, or filter the settings, as it is typed."""
        if self._asked in OPTIONS and self._before is not None:
            self._draft = self._before.edited(self._asked, event.value)
        elif self._asked == "filter":
            self._pattern = event.value
        self._draw()

    @on(Input.Submitted)
    def send(self, event: Input.Submitted) -> None:
        """Keep what was typed; a wrong value stays on the line."""
        asked, text = self._asked, event.value.strip()
        if asked == "save":
            self._save(Path(text).expanduser())
        elif asked == "filter" or not self._setting(asked).problems:
            self._leave_line()

    def action_back(self) -> None:
        if self._asked == "filter":
            self._pattern = ""
        if self._asked in OPTIONS:
            self._draft = self._before
        if self._asked:
            self._leave_line()
        else:
            self.app.pop_screen()

    # Settings.

    def _setting(self, key: str) -> Setting:
        return self._settings[key]

    def _draw(self) -> None:
        draft = self._draft
        if draft is None:
            self.query_one("#head", Static).update("a new run: o chooses a spec")
            return
        _, problems = draft.build()
        settings = draft.settings(problems)
        self._settings = {setting.option.key: setting for setting in settings}
        changed = sum(not setting.is_default for setting in settings)
        wrong = f", {len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else ""
        rest = f": {changed} settings are not the default{wrong}{self._busy}"
        if is_low(*self.size):
            rest = f": {changed} changed{wrong}{self._busy}"
        # Problems take precedence over the path of the file.
        room = max(12, self.size.width - 2 - len("a new run from ") - len(rest))
        file = shortened(shown_path(draft.file), room)
        self.query_one("#head", Static).update(f"a new run from {file}{rest}")
        words = self._pattern.casefold().split()
        self.query_one(SettingsTable).show(
            [
                setting
                for setting in settings
                if all(word in setting.option.key for word in words)
                and (not self._only or not setting.is_default or setting.problems)
            ]
        )
        self.query_one("#command", Static).update(draft.command)
        self._describe()
        # Problems of the value being typed come first; the others follow in the order of the file.
        first = self._settings[self._asked].problems if self._asked in OPTIONS else ()
        others = [problem for problem in problems if problem not in first]
        wrong_words = self.query_one("#wrong", Static)
        wrong_words.update("\n".join([*first, *others]))
        wrong_words.display = bool(problems)

    @on(DataTable.RowHighlighted)
    def _describe(self) -> None:
        key = self._asked if self._asked in OPTIONS else self.query_one(SettingsTable).key
        setting = self._settings.get(key or "")
        words = ""
        if setting is not None:
            option = setting.option
            default = value_text(option.default) or "(empty)"
            words = f"{option.key}: {allowed_text(option)}; default {default}; {setting.source}"
            words += f"\n{option.doc}"
        self.query_one("#about", Static).update(words)

    @on(DataTable.RowSelected)
    def action_edit(self) -> None:
        setting = self._settings.get(self.query_one(SettingsTable).key or "")
        if setting is not None:
            self._ask(setting.option.key, setting.value, allowed_text(setting.option))

    def action_cycle(self) -> None:
        """Switch to the next allowed value of the setting under the cursor."""
        setting = self._settings.get(self.query_one(SettingsTable).key or "")
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
        key = self.query_one(SettingsTable).key
        if key is not None and self._draft is not None:
            self._draft = self._draft.edited(key, None)
            self._draw()

    def action_only(self) -> None:
        self._only = not self._only
        self._draw()

    def action_filter(self) -> None:
        self._ask("filter", self._pattern, "words of a setting's name")

    # Saving and copying.

    def action_save(self) -> None:
        if self._draft is not None:
            self._ask("save", f"{self._draft.file.stem}-2.toml", "the path of the new file")

    def _save(self, path: Path) -> None:
        assert self._draft is not None
        try:
            saved = self._draft.save_as(path)
        except (EngineError, OSError) as problem:
            self._say(str(problem))
            return
        self._take(saved)
        self._say(f"saved as {path}")

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
        if draft is not None:
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
            self._started = start_run(draft.file, draft.sets, None)
            return ""

        def answered(answer: str | None) -> None:
            if answer == "y":
                self._engine("start", start)

        question = f"{draft.command}\n\nThe run continues when the workbench is closed."
        answers = [("y", "start it"), ("n", "not yet")]
        self.app.push_screen(ChooseScreen("start this run", question, answers), answered)

    def _engine(self, what: str, call: Callable[[], str]) -> None:
        if not self._busy:
            self._busy = f"; {what}: asking the engine"
            self._draw()
            run_command(self, what, call)

    @on(CommandEnded)
    def show_answer(self, message: CommandEnded) -> None:
        """Show the engine's message; once the run has started, its screen replaces the form."""
        self._busy = ""
        self._draw()
        refused = "the engine refused: " if message.problem is not None else ""
        self._say(refused + message.text)
        if self._started is not None:
            self.app.switch_screen(RunScreen(self._given, self._started))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While a value is typed, its letters are not commands.
        shut = self.ACTING | {"only", "filter", "copy_command"}
        return not (self._asked and action in shut)
