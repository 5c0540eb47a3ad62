"""The rows that one step of a run trained on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.errors import UsageError
from workbench.step_rows import StepRowsFeed
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.form import Field, FormScreen, Values
from workbench.tui.widgets.row_list import RowList

NOTES = (
    "What `engine data RUN --step N` says: each row of the step with its documents and its text, looked up",
    "in the corpus by the hash on record. What is to be predicted stands between ⟦ and ⟧.",
    "A row that it was not the turn of is said to be so, and which it is.",
)


class StepRowsScreen(BrowseScreen[StepRowsFeed]):
    """Of a step of a run of ours."""

    NOTES = NOTES
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("left", "go(-1)", "step before", tooltip="the rows of the step before"),
        Binding("right", "go(1)", "step after", tooltip="the rows of the step after"),
        Binding("g", "ask", "go to", tooltip="the rows of another step, by its number"),
    )

    def __init__(self, context: Context, run: Path, step: int) -> None:
        super().__init__(context, "rows of a step", StepRowsFeed(run, step))

    def action_go(self, steps: int) -> None:
        self._look_at(self._feed.step + steps)

    def action_ask(self) -> None:
        def send(values: Values) -> str:
            if not values["step"].isdecimal():
                raise UsageError(f"step — expected a number, found {values['step']!r}")
            return values["step"]

        def done(step: str | None) -> None:
            if step is not None:
                self._look_at(int(step))

        fields = (Field(name="step", label="step", value=str(self._feed.step)),)
        self.app.push_screen(FormScreen("Rows of a step", fields, send), done)

    def _look_at(self, step: int) -> None:
        self._feed.step = max(step, 1)
        self.query_one("#head").update(f"reading the rows of step {self._feed.step:,}")  # type: ignore[attr-defined]
        self.query_one(RowList).focus()
        self.tick()
