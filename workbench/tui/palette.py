"""The command palette: every place, every key that does something now, runs and themes, by name.

It offers what the tables of keys offer, so it can do nothing that a key could not do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from engine.runlog.folder import RunFolder, find_runs, is_run
from workbench.tui.context import Context
from workbench.tui.keys import active_keys, resolved
from workbench.tui.places import PLACES
from workbench.tui.themes import theme_names
from workbench.tui.widgets.key_bar import key_text

if TYPE_CHECKING:
    from workbench.tui.app import WorkbenchApp

UNNAMED = ("scroll", "cursor", "page", "first", "last", "focus", "copy_text", "command_palette")
"""Beginnings of the actions that only move about, or that the palette says in other words."""


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the palette."""

    name: str
    words: str
    run: Callable[[], object]


def runs_to_open(context: Context) -> list[RunFolder]:
    """The runs of the folders that were named; beside a run that was named, its neighbours."""
    found: dict[str, RunFolder] = {}
    for folder in context.folders:
        for run in find_runs(folder.absolute().parent if is_run(folder) else folder):
            found.setdefault(str(run.path.absolute()), run)
    return list(found.values())


class WorkbenchCommands(Provider):
    """Everything that can be done on the screen below."""

    _runs: Sequence[RunFolder] = ()

    @property
    def workbench(self) -> WorkbenchApp:
        """The application, which knows the places and opens runs."""
        return cast("WorkbenchApp", self.app)

    async def startup(self) -> None:
        # Folders of runs may lie on a slow disk; the screen goes on being drawn meanwhile.
        self._runs = await asyncio.to_thread(runs_to_open, self.workbench.context)

    async def discover(self) -> Hits:
        for command in self._commands():
            # A list of all runs and themes would bury the rest; typing finds them.
            if not command.name.startswith(("run ", "theme ")):
                yield DiscoveryHit(
                    Content(command.name), command.run, command.name, _help(command.words)
                )

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self._commands():
            line = f"{command.name} {command.words}"
            # What the words say finds a command, too, but after those whose name says it.
            score = max(matcher.match(command.name), matcher.match(line) * 0.6)
            if score > 0:
                shown = matcher.highlight(command.name)
                yield Hit(score, shown, command.run, command.name, _help(command.words))

    def _commands(self) -> Iterator[Command]:
        app = self.workbench
        for keys in active_keys(self.screen):
            for binding in keys.bindings:
                if resolved(app, keys.node, binding.action)[1].startswith(UNNAMED):
                    continue
                words = f"{binding.tooltip or binding.description} (key {key_text(binding)})"
                group = f"{binding.group.description} " if binding.group else ""
                run = partial(app.run_action, binding.action, keys.node)
                yield Command(f"{group}{binding.description}", words, run)
        for place in PLACES:
            if not place.key and app.check_action("visit", (place.name,)):
                visit = partial(app.run_action, f"visit('{place.name}')")
                yield Command(place.name, place.tooltip, visit)
        yield Command(
            "copy the screen", "all that is seen, as text", partial(app.run_action, "copy(True)")
        )
        for run_folder in self._runs:
            words = f"open the run {run_folder.path}"
            yield Command(f"run {run_folder.name}", words, partial(app.open_folder, run_folder))
        for theme in theme_names():
            words = "the present theme" if theme == app.theme else "show this theme"
            yield Command(f"theme {theme}", words, partial(app.choose_theme, theme))


def _help(words: str) -> str:
    """Words as the palette wants them: it would read what is in brackets as markup."""
    return words.replace("[", "\\[")
