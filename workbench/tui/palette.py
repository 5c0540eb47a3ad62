"""The command palette: every place, every key that does something now, runs and themes, by name.

It is built from the key tables, so it can do nothing that a key could not do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from engine.log.folder import RunFolder, find_runs, is_run
from workbench.tui.context import Context
from workbench.tui.keys import Keys, active_keys, resolved
from workbench.tui.places import PLACES
from workbench.tui.themes import theme_names
from workbench.tui.widgets.key_bar import key_text

UNNAMED = (
    *("scroll", "cursor", "page", "first", "last", "focus", "select", "copy_text"),
    "command_palette",
)
"""Prefixes of the actions that only navigate, or that the palette lists under another name."""
ALSO = {
    "stop": "end kill cancel abort",
    "resume": "continue restart go on",
    "flip": "experiment A/B try suspicion",
    "compare": "overlay side by side",
    "replay": "scrub past history rewind",
    "why": "five whys finding cause",
    "verify": "repeat reproduce replay bit record",
    "copy": "clipboard yank",
    "save": "screenshot export svg text",
    "help": "keys",
    "quit": "exit leave",
    "filter": "search find grep",
    "whys": "findings evidence root cause",
    "flips": "experiments verdicts",
    "doctor": "machine GPU diagnose health",
}
"""Synonyms of an action or a place, by its name: what a user may type to find it."""
ELSEWHERE = (
    ("stop", "nothing is running here: x on an active run, in the list or on its screen"),
    ("resume", "nothing here can be resumed: R on a run that ended early"),
    ("compare", "on the list of runs: space marks 2 to 6 of them, c compares"),
    ("replay", "on the screen of a run: p shows it as it was"),
    ("verify", "on the screen of a run that has ended: T trains it again and compares the record"),
    ("flip", "on the screen of a run: F tests a suspicion about it"),
    ("filter", "on the list of runs, and in the log of a run: /"),
    ("new", "in a shell: `engine init` writes a first spec, `engine distill SPEC` starts a run"),
)
"""Commands that cannot be used here, with the place where they can."""
STARTING = frozenset({"stop", "resume", "verify", "flip", "new"})
"""The commands of `ELSEWHERE` that read-only mode refuses everywhere."""
READ_ONLY = "read-only: no key starts, stops or changes a run"


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the palette."""

    name: str
    words: str
    run: Callable[[], object]
    also: str = ""
    """Synonyms that find it."""


def runs_to_open(context: Context) -> list[RunFolder]:
    """Return the runs of the folders that were named; for a run that was named, also its neighbours."""
    by_path: dict[str, RunFolder] = {}
    for folder in context.folders:
        for run in find_runs(folder.absolute().parent if is_run(folder) else folder):
            by_path.setdefault(str(run.path.absolute()), run)
    return list(by_path.values())


class OpensRuns(Protocol):
    """The methods of the application that the palette needs in addition to those of every Textual application."""

    context: Context

    def open_folder(self, run: RunFolder) -> None: ...

    def choose_theme(self, name: str) -> None: ...

    def next_theme(self) -> None: ...


class WorkbenchCommands(Provider):
    """Provides every command of the screen below."""

    _runs: Sequence[RunFolder] = ()

    @property
    def workbench(self) -> OpensRuns:
        return cast(OpensRuns, self.app)

    async def startup(self) -> None:
        # Folders of runs may be on a slow disk; the screen stays responsive meanwhile.
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
        commands = list(self._commands())
        for command in (*commands, *self._elsewhere({command.name for command in commands})):
            line = f"{command.name} {command.words}"
            # A match in the description counts less than one in the name.
            score = max(
                matcher.match(command.name),
                matcher.match(command.also) * 0.8,
                matcher.match(line) * 0.6,
            )
            if score > 0:
                shown = matcher.highlight(command.name)
                yield Hit(score, shown, command.run, command.name, _help(command.words))

    def _commands(self) -> Iterator[Command]:
        """Yield each name once: the screen's own `quit` is more specific than the app's."""
        names: set[str] = set()
        for command in self._all_commands():
            # Two runs with the same name in different folders are both listed.
            if command.name not in names or command.name.startswith("run "):
                names.add(command.name)
                yield command

    def _all_commands(self) -> Iterator[Command]:
        """Yield the most used commands first; keys of the focused widget, and digits, come last."""
        app, workbench = self.app, self.workbench
        nodes = active_keys(self.screen)
        later: list[Command] = []
        for keys in reversed(nodes):
            for binding in keys.bindings:
                if keys.node is app or (command := self._of_key(keys, binding)) is None:
                    continue
                if keys.node is not self.screen or binding.group is not None:
                    later.append(command)
                else:
                    yield command
        for place in PLACES:
            if not place.key and app.check_action("visit", (place.name,)):
                visit = partial(app.run_action, f"visit('{place.name}')")
                yield Command(place.name, place.tooltip, visit, ALSO.get(place.name, ""))
        for keys in nodes:
            if keys.node is app:
                commands = (self._of_key(keys, binding) for binding in keys.bindings)
                yield from (command for command in commands if command is not None)
        words = "the whole screen as text"
        yield Command("copy the screen", words, partial(app.run_action, "copy(True)"))
        yield Command(
            "next theme", "dark, light, and both for the colour-blind", workbench.next_theme
        )
        yield from later
        for run_folder in self._runs:
            words = f"open the run {run_folder.path}"
            yield Command(
                f"run {run_folder.name}", words, partial(workbench.open_folder, run_folder)
            )
        for theme in theme_names():
            words = "the present theme" if theme == app.theme else "show this theme"
            yield Command(f"theme {theme}", words, partial(workbench.choose_theme, theme))

    def _of_key(self, keys: Keys, binding: Binding) -> Command | None:
        """Return the command of a key; None for one that only navigates."""
        app = self.app
        _, action, arguments = resolved(app, keys.node, binding.action)
        if action.startswith(UNNAMED):
            return None
        name, words = binding.description, binding.tooltip or binding.description
        if binding.group is not None:
            name = f"{binding.group.description} {name}"
        elif sum(other.description == name for other in keys.bindings) > 1:
            # Two keys with the same short description are listed by their tooltips.
            name = words
        run = partial(app.run_action, binding.action, keys.node)
        topic = str(arguments[0]) if action == "visit" and arguments else action
        return Command(name, f"{words} (key {key_text(binding)})", run, ALSO.get(topic, ""))

    def _elsewhere(self, offered: set[str]) -> Iterator[Command]:
        """Yield commands that cannot be used here; choosing one says where they can."""
        for name, where in ELSEWHERE:
            if self.workbench.context.read_only and name in STARTING:
                where = READ_ONLY
            if name not in offered:
                notify = partial(self.app.notify, where, title=f"{name}: not here", markup=False)
                yield Command(f"{name} (not here)", where, notify, ALSO.get(name, ""))


def _help(words: str) -> str:
    """Escape a text for the palette, which would read brackets as markup."""
    return words.replace("[", "\\[")
