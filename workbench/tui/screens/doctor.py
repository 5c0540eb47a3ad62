"""Doctor: what this machine can do, and what cannot be measured on it."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from workbench.doctor_rows import DoctorFeed
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.widgets.row_list import RowList

NOTES = (
    "The report of `engine doctor`, made once when this opens; R runs it again.",
    "PASS: everything that a run reads can be read. UNKNOWN: something cannot; the row says what",
    "that rules out. FAIL: something is broken.",
)


class DoctorScreen(BrowseScreen[DoctorFeed]):
    """One examination of this machine."""

    NOTES = NOTES
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("R", "ask_again", "run again", tooltip="examine the machine again"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context, "doctor", DoctorFeed())

    def action_ask_again(self) -> None:
        self._feed.forget()
        self.query_one("#head").update("doctor: running again")  # type: ignore[attr-defined]
        self.query_one(RowList).focus()
        self.tick()
