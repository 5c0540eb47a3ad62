"""A run that is to be started: choose a spec, change settings, see what is wrong, start it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static

from engine.errors import EngineError
from engine.log.folder import RunFolder, is_run
from workbench.drafts import (
    OPTIONS,
    Draft,
    draft_like,
    find_specs,
    open_draft,
    value_text,
)
from workbench.feed import RunFeed
from workbench.launch import check_run, start_run
from workbench.tui.context import Context
from workbench.tui.screens.choose import ChooseScreen
from workbench.tui.screens.drafting import DraftScreen
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.pick_spec import PickSpecScreen
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.key_bar import KeyBar, bindings_of

NOTES = (
    "Before a setting: `!` its value is wrong, `*` it was typed here, `+` the file or the environment",
    "sets it otherwise than by default. Nothing before it: the default.",
    "",
    "Starting runs `engine distill SPEC --set ... --detach`, as it is shown; the run goes on by itself.",
    "k asks the engine to look at the inputs, too: weights, tokenizers, room on the disk.",
)


class NewRunScreen(DraftScreen):
    """Edits one draft."""

    class Done(Message):
        """The engine has answered; `problem` when it refused."""

        def __init__(self, what: str, said: str, run: RunFolder | None = None) -> None:
            super().__init__()
            self.what, self.said, self.run = what, said, run

    ACTING: ClassVar[frozenset[str]] = frozenset(
        {"open", "edit", "cycle", "reset", "check", "start", "save"}
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back", tooltip="leave the line, or the form"),
        Binding("o", "open", "spec", tooltip="choose another spec file, or type its path"),
        Binding("enter", "edit", "edit", tooltip="type a value; checked as it is typed"),
        Binding("space", "cycle", "next value", tooltip="the next of the allowed values"),
        Binding("s", "start", "start", tooltip="start the run, after a question"),
        Binding("k", "check", "check", tooltip="engine distill --check: the inputs, too"),
        Binding("backspace,delete", "reset", "reset", tooltip="take back what was typed here"),
        Binding("d", "only", "changed", tooltip="only settings that are not the default, or all"),
        Binding("slash", "filter", "filter", tooltip="settings by name"),
        Binding("a", "save", "save as", tooltip="write all settings as a new spec file"),
        Binding("Y", "copy_command", "copy command", tooltip="copy the command that is shown"),
        Binding("question_mark", "help", "help", tooltip="this help"),
    ]

    def __init__(self, context: Context, *, like: RunFolder | None = None) -> None:
        super().__init__()
        self._given, self._like = context, like

    def on_mount(self) -> None:
        self._draw_keys()
        if self._given.read_only:
            words = "read-only: no run is started from here; apr-workbench without --read-only does"
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

    # The spec file

    def action_open(self) -> None:
        """Ask for a spec file; without any there is no form."""

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
        """Where the runs are that are looked at, when the file does not say and the default differs."""
        folders = self._given.folders
        if not folders or "out" in draft.tree.get("run", {}):
            return draft
        folder = folders[0].parent if is_run(folders[0]) else folders[0]
        default = Path(value_text(OPTIONS["run.out"].default))
        if folder.resolve() == default.resolve():
            return draft
        return draft.edited("run.out", str(folder))

    # What the engine does

    def action_check(self) -> None:
        draft = self._draft
        if draft is not None:
            self._engine("check", lambda: (check_run(draft.file, draft.sets), None))

    def action_start(self) -> None:
        draft = self._draft
        if draft is None:
            return
        _, problems = draft.build()
        if problems:
            self._say("not started: " + problems[0])
            return

        def answered(answer: str | None) -> None:
            if answer == "y":
                self._engine("start", lambda: ("", start_run(draft.file, draft.sets, None)))

        question = f"{draft.command}\n\nThe run goes on when the workbench is closed."
        answers = [("y", "start it"), ("n", "not yet")]
        self.app.push_screen(ChooseScreen("start this run", question, answers), answered)

    def _engine(self, what: str, call: Callable[[], tuple[str, RunFolder | None]]) -> None:
        if self._busy:
            return
        self._busy = f"; {what}: asking the engine"
        self._draw()

        def work() -> None:
            try:
                said, run = call()
            except EngineError as problem:
                said, run = f"the engine refused: {problem}", None
            self.post_message(self.Done(what, said, run))

        # A daemon: quitting must not wait for the engine, and the engine does not need us.
        threading.Thread(target=work, name=f"engine-{what}", daemon=True).start()

    @on(Done)
    def show_answer(self, message: Done) -> None:
        """What the engine said; the screen of the run in the place of the form once there is one."""
        self._busy = ""
        self._draw()
        self._say(message.said)
        if message.run is not None:
            given = self._given
            feed = RunFeed(message.run)
            self.app.switch_screen(
                RunScreen(
                    feed,
                    refresh_s=given.refresh_s,
                    read_only=given.read_only,
                    ascii_only=given.ascii_only,
                )
            )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While a line is typed, its letters are no commands.
        shut = self.ACTING | {"only", "filter", "copy_command", "help"}
        return not (self._asked and action in shut)

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen("help: a new run", bindings_of(self), NOTES))
