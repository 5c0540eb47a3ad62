"""The application: the first screen, and what all screens share: themes, the alphabet, copying and saving, help,
and read-only mode."""

from __future__ import annotations

import asyncio
import gc
import selectors
import signal
import time
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
from textual.content import Content
from textual.dom import DOMNode
from textual.drivers import linux_driver
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widget import Widget

from engine.errors import EXIT_TERMINATED
from engine.log.folder import RunFolder, is_run
from workbench.tui.context import Context
from workbench.tui.keys import is_refused
from workbench.tui.printable import Printable, drawable
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import Polled, RunChosen
from workbench.tui.screens.runs import RunsScreen
from workbench.tui.themes import OWN, OWN_NAMES
from workbench.tui.widgets.key_bar import bindings_of
from workbench.tui.widgets.text_pane import TextPane

CLIPBOARD_BYTES = 50_000
"""Longest text that is copied, in bytes: terminals cut off or ignore an OSC 52 sequence longer than about 75 kB of
base64."""


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


# Textual's input thread makes its selector from this name.
vars(linux_driver)["selectors"] = SimpleNamespace(
    SelectSelector=EscapeSelector, EVENT_READ=selectors.EVENT_READ
)


class WorkbenchApp(App[None]):
    """Shows one run when exactly one run folder was named, otherwise the list of runs."""

    TITLE = "apr-workbench"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    .pane { border-title-color: $text-muted; }
    PollingScreen.-tiny > * { display: none !important; }
    PollingScreen.-tiny > .-first { display: block !important; height: 1fr !important; max-height: 100% !important; }
    PollingScreen.-tiny > ToastRack { display: block !important; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+c",
            "quit",
            "quit",
            show=False,
            priority=True,
            tooltip="close the workbench; runs continue",
        ),
        Binding("question_mark,f1", "help", "help", show=False, tooltip="this help"),
        Binding("y", "copy", "copy", show=False, tooltip="copy the pane as text"),
        Binding("S", "save", "save", show=False, tooltip="save the screen as SVG"),
        Binding("E", "flips", "flips", show=False, tooltip="flips with their verdicts"),
        Binding("w", "whys", "whys", show=False, tooltip="findings and their evidence"),
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

    def action_flips(self) -> None:
        """Open the list of flips; a new flip started there is of the run on screen."""
        from workbench.tui.screens.lists import FlipsScreen

        screen = self.screen
        run = getattr(screen, "run", None)
        if isinstance(screen, RunsScreen) and (target := screen.target()) is not None:
            run = target.run
        if not isinstance(screen, FlipsScreen):
            self.push_screen(FlipsScreen(self.context, run))

    def action_whys(self) -> None:
        """Open the list of findings."""
        from workbench.tui.screens.lists import WhysScreen

        if not isinstance(self.screen, WhysScreen):
            self.push_screen(WhysScreen(self.context))

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
        """Run an action unless read-only mode refuses it."""
        node = self if default_namespace is None else default_namespace
        if isinstance(action, str) and is_refused(self, node, action):
            self.notify("read-only: nothing is started, stopped or changed", markup=False)
            return True
        return await super().run_action(action, node, namespaces)

    # Help.

    def action_help(self) -> None:
        screen = self.screen
        title = screen.title or type(screen).__name__.removesuffix("Screen").lower()
        notes = getattr(screen, "NOTES", ())
        self.push_screen(HelpScreen(f"help: {title}", bindings_of(screen), notes))

    # Copying and saving.

    def action_copy(self) -> None:
        """Copy the selection, else the focused pane."""
        screen = self.screen
        words = screen.get_selected_text() or pane_text(screen, pane_of(screen))
        lines = [drawable(line, ascii_only=False) for line in words.splitlines()]
        text = "\n".join([*lines, ""])
        count = f"{len(lines)} line{'' if len(lines) == 1 else 's'}"
        if len(text.encode()) > CLIPBOARD_BYTES:
            words = f"not copied: {count} are too long for the clipboard of a terminal"
            self.notify(words, severity="warning", markup=False)
            return
        self.copy_to_clipboard(text)
        self.notify(f"copied {count}", markup=False)

    def action_save(self) -> None:
        """Save the screen in the current folder."""
        try:
            name = time.strftime("apr-workbench-%Y%m%d-%H%M%S.svg")
            self.notify(f"saved {self.save_screenshot(name)}", timeout=10, markup=False)
        except OSError as problem:
            self.notify(f"not saved: {problem}", severity="error", markup=False)


def pane_of(screen: Screen[Any]) -> Widget:
    """Return the pane that has the focus: the closest ancestor of the focused widget with the class `pane`, else the
    focused widget; the screen when nothing has the focus."""
    if screen.focused is None:
        return screen
    ancestors = [node for node in screen.focused.ancestors_with_self if isinstance(node, Widget)]
    return next((node for node in ancestors if node.has_class("pane")), screen.focused)


def pane_text(screen: Screen[Any], widget: Widget) -> str:
    """Return the title of a pane and its text: all of a pane of text, else the rows that are visible."""
    if isinstance(widget, TextPane):
        lines = widget.whole_text().splitlines()
    else:
        shown = widget.content_region.intersection(screen.region)
        rows = screen._compositor.render_strips()[shown.y : shown.bottom]
        lines = [strip.crop(shown.x, shown.right).text.rstrip() for strip in rows]
    title = widget.border_title
    return "\n".join([*([Content.from_markup(title).plain] if title else []), *lines])
