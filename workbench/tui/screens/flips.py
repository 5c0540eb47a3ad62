"""Experiments: every flip with its verdict; opens one, or starts a new one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.log.folder import RunFolder
from workbench.finding_rows import of_flip
from workbench.flip_snapshots import FLIPS, FlipsFeed
from workbench.listing import beside
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.finding import ask_why, finding_form
from workbench.tui.screens.flip import FlipScreen

NOTES = (
    "+ decided   ? inconclusive   ! invalid, or the arms compute different things   ~ running",
    "",
    "measured     registered beforehand, both controls passed, flipped, equal and parity proved",
    "screen       anything less: enough to drop a hypothesis, not to quote a number",
    "exploratory  the plan was changed after the start",
)


class FlipsScreen(BrowseScreen[FlipsFeed]):
    """The flips in the folder of flips here, and beside the runs."""

    NOTES = NOTES
    ACTING = frozenset({"new", "keep"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("enter", "open", "open", tooltip="the flip under the cursor"),
        Binding(
            "n", "new", "new flip", tooltip="test a suspicion about the run that was on screen"
        ),
        Binding("ctrl+w", "keep", "why", tooltip="a five-whys finding with its change as a cause"),
    )

    def __init__(self, context: Context, run: RunFolder | None = None) -> None:
        super().__init__(
            context,
            "experiments",
            FlipsFeed(beside(context.folders, FLIPS), ascii_only=context.ascii_only),
        )
        self._run = run

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "new":
            return self._run is not None
        if action == "keep":
            return self.is_mounted and self.selected is not None
        return True

    def _push(self, run: RunFolder | None, folder: Path | None) -> None:
        self.app.push_screen(FlipScreen(self.context, run, folder=folder))

    def action_open(self) -> None:
        if self.selected is not None:
            self._push(None, Path(self.selected.key))

    def action_new(self) -> None:
        if self._run is not None:
            self._push(self._run, None)

    def action_keep(self) -> None:
        if self.selected is None:
            return
        folder = Path(self.selected.key)
        ask_why(self, lambda: finding_form(*of_flip(folder)))
