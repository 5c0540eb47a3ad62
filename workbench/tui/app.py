"""The application: which screen is first, how often it looks, and which characters it may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from engine.log.folder import RunFolder, is_run
from workbench.feed import RunFeed
from workbench.tui.context import Context
from workbench.tui.places import PLACES, place
from workbench.tui.screens.run import RunScreen
from workbench.tui.screens.runs import RunsScreen
from workbench.tui.shell import Shell
from workbench.tui.themes import OWN_NAMES


def refresh_seconds(environ: Mapping[str, str]) -> float:
    """Seconds between two looks: twice as long where each frame goes through ssh or tmux."""
    return 2.0 if environ.get("SSH_CONNECTION") or environ.get("TMUX") else 1.0


class WorkbenchApp(Shell):
    """Shows one run when exactly one run folder was named, else the list of runs."""

    TITLE = "apr-workbench"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(place.key, f"visit('{place.name}')", place.name, show=False, tooltip=place.tooltip)
        for place in PLACES
        if place.key
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
        super().__init__(theme=theme, read_only=read_only, ascii_only=ascii_only)
        # A key is answered by one picture and not by a dozen on the way, which over ssh come late.
        self.animation_level = "none"
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
        """Open a place; the one that is on screen already stays as it is."""
        screen = self.screen
        run = screen.run if isinstance(screen, RunScreen) else None
        if isinstance(screen, RunsScreen) and (target := screen.target()) is not None:
            run = target.run
        built = place(name).build(self.context, run)
        if type(built) is not type(screen):
            self.push_screen(built)

    @on(RunsScreen.Opened)
    def open_run(self, message: RunsScreen.Opened) -> None:
        """Put the screen of a run over the list."""
        self.open_folder(message.run)

    def open_folder(self, run: RunFolder) -> None:
        """Put the screen of a run over what is shown."""
        self.push_screen(
            RunScreen(
                RunFeed(run, keep=not self.context.read_only),
                refresh_s=self.context.refresh_s,
                read_only=self.context.read_only,
                ascii_only=self.context.ascii_only,
            )
        )
