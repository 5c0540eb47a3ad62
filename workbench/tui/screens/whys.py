"""Five whys: the findings in the evidence folders, and a new one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.findings.changes import begin, slug_of
from workbench.findings import EVIDENCE, FindingsFeed
from workbench.listing import beside
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.finding import FindingScreen
from workbench.tui.screens.form import Field, FormScreen, Values

NOTES = (
    "A finding begins with an observation and asks why until no cheaper explanation is untested.",
    "It is kept in evidence/DATE-NAME/, with all its evidence, frozen by hash.",
)


class WhysScreen(BrowseScreen[FindingsFeed]):
    """The findings."""

    NOTES = NOTES
    ACTING = frozenset({"new"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("enter", "open", "open", tooltip="the tree of the finding under the cursor"),
        Binding("n", "new", "new", tooltip="begin a finding with what was seen"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context, "five whys", FindingsFeed(beside(context.folders, EVIDENCE)))

    def action_open(self) -> None:
        if self.selected is not None:
            self.app.push_screen(FindingScreen(self.context, Path(self.selected.key)))

    def action_new(self) -> None:
        folder = self._feed.folders[0]

        def send(values: Values) -> str:
            name = values["name"] or slug_of(values["claim"])
            return str(begin(folder, name, values["claim"]).path)

        def done(path: str | None) -> None:
            if path is not None:
                self.goto(path)

        fields = (
            Field(name="claim", label="what was seen", hint="no step in 90 minutes"),
            Field(name="name", label="name", hint="a-z, 0-9 and -; empty: from the words above"),
        )
        note = f"It is begun in {folder}/; evidence is linked next."
        self.app.push_screen(FormScreen("a new finding", fields, send, note=note), done)
