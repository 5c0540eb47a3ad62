"""The lists: one class each, which names its title, its feed, its keys, and what enter opens.

five whys     the findings in the evidence folders
experiments   every flip with its verdict; opens one, or starts a new one
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.log.folder import RunFolder
from workbench import finding_rows
from workbench.finding_rows import FindingsFeed
from workbench.flip_snapshots import FLIPS, FlipsFeed
from workbench.listing import beside
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.finding import FindingScreen
from workbench.tui.screens.flip import FlipScreen


class WhysScreen(BrowseScreen[FindingsFeed]):
    """The findings."""

    TITLE = "five whys"
    NOTES = (
        "A finding begins with what went wrong in a run (W on its screen), names changes that may end",
        "it, and tests them: the unchanged runs must show it, and the changed runs must not.",
        "It is kept in evidence/DATE-NAME/, with all that its tests were judged by, frozen by hash.",
        "",
        "+ confirmed   ? open   - closed without a confirmed cause   ! damaged",
    )
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("enter", "open", "open", tooltip="the finding under the cursor"),
    )

    def __init__(self, context: Context) -> None:
        folders = beside(context.folders, finding_rows.EVIDENCE)
        super().__init__(context, FindingsFeed(folders))

    def action_open(self) -> None:
        if self.selected is not None:
            self.app.push_screen(FindingScreen(self.context, Path(self.selected.key)))


class FlipsScreen(BrowseScreen[FlipsFeed]):
    """The flips in `flips/` of the current folder, of each given folder, and of its parent."""

    TITLE = "experiments"
    NOTES = (
        "+ decided   ? inconclusive   ! invalid, unreadable, or the arms compute different things   ~ running",
        "",
        "measured     registered beforehand, and every control and proof that its verdict needs passed: A against A,",
        "             A made slower, the setting was flipped, nothing else differs, and the losses agree",
        "screen       anything less: enough to drop a hypothesis, not to quote a number",
        "exploratory  the plan was changed after the start, or the flip was continued on another machine, device",
        "             or engine",
    )
    ACTING = frozenset({"new"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("enter", "open", "open", tooltip="the flip under the cursor"),
        Binding(
            "n", "new", "new flip", tooltip="test a suspicion about the run that was on screen"
        ),
    )

    def __init__(self, context: Context, run: RunFolder | None = None) -> None:
        folders = beside(context.folders, FLIPS)
        super().__init__(context, FlipsFeed(folders))
        self._run = run

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "new":
            return self._run is not None
        return super().check_action(action, parameters)

    def action_open(self) -> None:
        if self.selected is not None:
            folder = Path(self.selected.key)
            self.app.push_screen(FlipScreen(self.context, None, folder=folder))

    def action_new(self) -> None:
        self.app.push_screen(FlipScreen(self.context, self._run))
