"""Five whys: the findings in the evidence folders."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from workbench.finding_rows import EVIDENCE, FindingsFeed
from workbench.listing import beside
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.finding import FindingScreen

NOTES = (
    "A finding begins with what went wrong in a run (W on its screen), names changes that may end",
    "it, and tests them: runs as they were must show it, and runs with the change must not.",
    "It is kept in evidence/DATE-NAME/, with all that its tests were judged by, frozen by hash.",
)


class WhysScreen(BrowseScreen[FindingsFeed]):
    """The findings."""

    NOTES = NOTES
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("enter", "open", "open", tooltip="the finding under the cursor"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context, "five whys", FindingsFeed(beside(context.folders, EVIDENCE)))

    def action_open(self) -> None:
        if self.selected is not None:
            self.app.push_screen(FindingScreen(self.context, Path(self.selected.key)))
