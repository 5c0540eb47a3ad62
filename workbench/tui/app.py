"""The application: the first screen, and what all screens share: themes, the alphabet, copying and saving, help,
the command palette, and read-only mode."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from textual import constants, on
from textual.actions import ActionParseResult
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.dom import DOMNode
from textual.drivers import linux_driver
from textual.filter import LineFilter

from engine.errors import EXIT_TERMINATED, EngineError
from engine.log.folder import RunFolder, is_run
from workbench.paths import path_text
from workbench.tui.captures import (
    FOLDER_VARIABLE,
    capture,
    captures_folder,
    pane_of,
    pane_text,
    save,
    save_copy,
)
from workbench.tui.context import Context
from workbench.tui.keys import is_refused
from workbench.tui.places import PLACES, place
from workbench.tui.printable import Printable, drawable
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import Polled, RunChosen
from workbench.tui.screens.runs import RunsScreen
from workbench.tui.themes import OWN, OWN_NAMES, THEME_VARIABLES
from workbench.tui.widgets.key_bar import bindings_of

CLIPBOARD_BYTES = 50_000
"""Terminals cut off or ignore an OSC 52 sequence longer than about 75 kB of base64."""


def _palette_commands() -> type[Provider]:
    # Imported when the palette is first opened: it is not needed for the first frame.
    from workbench.tui.palette import WorkbenchCommands

    return WorkbenchCommands


def _settle() -> None:
    # The screen of a run is imported when the list is there, not when the first run of it is opened.
    import_module("workbench.tui.screens.run")
    gc.collect()
    gc.freeze()


def refresh_seconds(environ: Mapping[str, str]) -> float:
    """Return the seconds between two polls: twice as long where each frame goes through ssh or tmux."""
    return 2.0 if environ.get("SSH_CONNECTION") or environ.get("TMUX") else 1.0


class EscapeSelector(selectors.SelectSelector):
    """Waits after input for the rest of an escape sequence alone, so that the escape key is seen once ESCDELAY is over;
    Textual's input thread checks only after 0.1 s without input."""

    _has_input = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._has_input and timeout is not None:
            timeout = min(timeout, constants.ESCAPE_DELAY)
        ready = super().select(timeout)
        self._has_input = bool(ready)
        return ready


# The thread makes its selector by this name.
vars(linux_driver)["selectors"] = SimpleNamespace(
    SelectSelector=EscapeSelector, EVENT_READ=selectors.EVENT_READ
)


class WorkbenchApp(App[None]):
    """Shows one run when exactly one run folder was named, otherwise the list of runs."""

    TITLE = "apr-workbench"
    CSS = """
    .pane { border-title-color: $text-muted; }
    PollingScreen.-tiny > * { display: none !important; }
    PollingScreen.-tiny > .-first { display: block !important; height: 1fr !important; max-height: 100% !important; }
    PollingScreen.-tiny > ToastRack { display: block !important; }
    """
    COMMANDS: ClassVar[set[Any]] = {_palette_commands}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+c",
            "quit",
            "quit",
            show=False,
            priority=True,
            tooltip="close the workbench; runs continue",
        ),
        Binding(
            "ctrl+p",
            "command_palette",
            "palette",
            show=False,
            priority=True,
            tooltip="find a command, a screen, a run or a theme by name",
        ),
        Binding("question_mark,f1", "help", "help", show=False, tooltip="this help"),
        Binding("y", "copy", "copy", show=False, tooltip="copy the pane as text"),
        Binding("S", "save", "save", show=False, tooltip="save pane and screen, text and SVG"),
        *(
            Binding(
                place.key, f"visit('{place.name}')", place.name, show=False, tooltip=place.tooltip
            )
            for place in PLACES
            if place.key
        ),
    ]

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        refresh_s: float = 1.0,
        read_only: bool = False,
        ascii_only: bool = False,
        theme: str = OWN_NAMES[0],
    ) -> None:
        super().__init__()
        self.read_only = read_only
        self._printable = Printable(ascii_only=ascii_only)
        for own in OWN:
            self.register_theme(own)
        self.theme = theme
        # A key changes the screen at once, because animation frames arrive late over ssh.
        self.animation_level = "none"
        self._is_kept = False
        self.context = Context(tuple(paths), refresh_s, read_only, ascii_only)

    def on_mount(self) -> None:
        folders = self.context.folders
        if len(folders) == 1 and is_run(folders[0]):
            self.open_folder(RunFolder(folders[0]))
        else:
            self.push_screen(RunsScreen(self.context))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "visit" and self.read_only:
            return not place(str(parameters[0])).acts
        return True

    def action_visit(self, name: str) -> None:
        """Open a place, unless it is on screen already."""
        screen = self.screen
        run = getattr(screen, "run", None)
        if isinstance(screen, RunsScreen) and (target := screen.target()) is not None:
            run = target.run
        built = place(name).build(self.context, run)
        if type(built) is not type(screen):
            self.push_screen(built)

    @on(RunChosen)
    def open_run(self, message: RunChosen) -> None:
        """Open the screen of a run over the list."""
        self.open_folder(message.run)

    def open_folder(self, run: RunFolder) -> None:
        """Open the screen of a run over the current one."""
        # Imported here: the first frame of the list does not need it.
        from workbench.tui.screens.run import RunScreen

        self.push_screen(RunScreen(self.context, run))

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._printable]

    @on(Polled)
    def keep_for_good(self, message: Polled) -> None:
        """Leave what the first screen consists of out of later garbage collections: it stays to the end, and walking
        all of it takes longer than several frames."""
        if not (message.behind or self._is_kept or self.is_headless):
            self._is_kept = True
            self.call_after_refresh(_settle)

    def on_load(self) -> None:
        # A terminated program must not leave its terminal in another mode.
        terminated = partial(self.exit, return_code=EXIT_TERMINATED)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated)

    # Read-only mode.

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Run an action, unless it acts and read-only mode refuses it."""
        node = self if default_namespace is None else default_namespace
        if isinstance(action, str) and is_refused(self, node, action):
            self.notify("read-only: nothing is started, stopped or changed", markup=False)
            return True
        return await super().run_action(action, node, namespaces)

    def action_command_palette(self) -> None:
        # An open question has to be answered first.
        if not self.screen.is_modal:
            super().action_command_palette()

    # Help and themes.

    def action_help(self) -> None:
        screen = self.screen
        title = screen.title or type(screen).__name__.removesuffix("Screen").lower()
        notes = getattr(screen, "NOTES", ())
        self.push_screen(HelpScreen(f"help: {title}", bindings_of(screen), notes))

    def choose_theme(self, name: str) -> None:
        """Switch the theme, and say how to keep it."""
        self.theme = name
        self.notify(f"theme {name}; {THEME_VARIABLES[0]}={name} keeps it", markup=False)

    def next_theme(self) -> None:
        """Switch to the next of the workbench's own themes."""
        place = OWN_NAMES.index(self.theme) if self.theme in OWN_NAMES else -1
        self.choose_theme(OWN_NAMES[(place + 1) % len(OWN_NAMES)])

    # Copying and saving.

    def action_copy(self, whole: bool = False) -> None:
        """Copy the selection, else the focused pane, else the screen."""
        screen = self.screen
        pane = None if whole else pane_of(screen)
        selected = None if whole else screen.get_selected_text()
        if selected:
            text, what = selected, "the selection"
        elif pane is not None:
            text, what = pane_text(screen, pane), "the pane"
        else:
            text, what = capture(screen).text, "the screen"
        text = "\n".join(drawable(line, ascii_only=False) for line in text.splitlines()) + "\n"
        count = text.count("\n")
        message = f"copied {what}, {count} line{'' if count == 1 else 's'}"
        if len(text.encode()) > CLIPBOARD_BYTES:
            message += "; too long for the clipboard of a terminal"
        else:
            self.copy_to_clipboard(text)
        try:
            message += f", and to {path_text(save_copy(self._folder(), text))}"
        except EngineError as problem:
            self._not_saved(problem)
        self.notify(message, markup=False)

    def action_save(self) -> None:
        """Save the screen and the focused pane."""
        screen = self.screen
        pane = pane_of(screen)
        captures = [capture(screen), *([] if pane is None else [capture(screen, pane)])]
        run = getattr(screen, "run", None)
        try:
            files = save(self._folder(), run.name if isinstance(run, RunFolder) else None, captures)
        except EngineError as problem:
            self._not_saved(problem)
            return
        names = "\n".join(f"  {path.name}" for path in files)
        note = "\nread-only: files of the viewer, not of the run" if self.read_only else ""
        self.notify(
            f"saved in {path_text(files[0].parent)}:\n{names}{note}", timeout=10, markup=False
        )

    def _folder(self) -> Path:
        return captures_folder(Path.cwd(), os.environ)

    def _not_saved(self, problem: EngineError) -> None:
        words = f"{problem}\n{FOLDER_VARIABLE} names another folder"
        self.notify(words, severity="error", timeout=15, markup=False)
