"""The part of the form for a new run that edits: settings, the line that is typed, what is wrong with it.

The form is `engine.spec`'s own table of settings. Each change is checked as it is typed, in the words
of the engine; what will be run is shown as the command that a shell would run.
"""

from __future__ import annotations

from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from engine.errors import EngineError
from workbench.drafts import OPTIONS, Draft, Setting, allowed_text, value_text
from workbench.tui.layout import is_low, is_tiny
from workbench.tui.names import shortened
from workbench.tui.screens.pick_spec import shown_path
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.settings_table import SettingsTable

LOW = 18
"""On fewer rows, what a setting means and the command make room for the settings."""


class DraftScreen(Screen[None]):
    """Draws and edits one draft; what is done with it is for the class that has the keys."""

    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    DraftScreen {
        #head { height: auto; max-height: 2; padding: 0 1; background: $panel; text-style: bold; }
        #line { display: none; height: 1; border: none; padding: 0 1; background: $primary 30%; }
        #about { height: auto; max-height: 5; padding: 0 1; }
        #wrong { height: auto; max-height: 5; padding: 0 1; color: $text-error; }
        #said { height: auto; max-height: 8; padding: 0 1; color: $text-accent; }
        #command { height: auto; max-height: 4; padding: 0 1; background: $panel; }
    }
    DraftScreen.-asking #line { display: block; }
    DraftScreen.-low.-asking { #command { display: none; } }
    DraftScreen.-low { #wrong { max-height: 2; } #about { max-height: 2; } #command { max-height: 1; } }
    DraftScreen.-tiny > * { display: none; }
    DraftScreen.-tiny #head { display: block; height: 1fr; max-height: 100%; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._draft: Draft | None = None
        self._before: Draft | None = None
        """What the draft was before the line that is typed now."""
        self._asked = ""
        self._only, self._pattern = False, ""
        self._settings: dict[str, Setting] = {}
        self._busy = ""

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
        """Less beside the settings on a low screen, nothing but the heading on a tiny one."""
        self.set_class(self.size.height < LOW, "-low")
        self.set_class(is_tiny(*self.size), "-tiny")
        self._draw()

    def _take(self, draft: Draft) -> None:
        self._draft = draft
        self._leave_line()
        self._say("")

    # One line for a value, a path or words

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
        """A value is checked, and words filter, as they are typed."""
        if self._asked in OPTIONS and self._before is not None:
            self._draft = self._before.edited(self._asked, event.value)
        elif self._asked == "filter":
            self._pattern = event.value
        self._draw()

    @on(Input.Submitted)
    def send(self, event: Input.Submitted) -> None:
        """Keep what was typed; a value that is wrong stays on the line."""
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

    # Settings

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
        # What is wrong is told before where the file lies.
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
        # What is typed now comes first; the others follow in the order of the file.
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
        """Go on to the next allowed value of the setting under the cursor."""
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

    # Keeping it

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
