"""All keys of the screen below, from the same table that dispatches them, and what its signs
mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from workbench.tui.widgets.key_bar import grouped


def key_lines(bindings: Sequence[Binding]) -> list[str]:
    """One line for each key, or range of keys."""
    return [
        f"  {keys:<7} {members[0].tooltip or words}" for keys, words, members in grouped(bindings)
    ]


class HelpScreen(ModalScreen[None]):
    """Shows help until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "dismiss", "close"),
    ]
    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 76; max-width: 96%; height: auto; max-height: 90%; padding: 0 2;
        border: heavy $primary; background: $surface;
    }
    """

    def __init__(self, title: str, bindings: Sequence[Binding], notes: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._lines = ["Keys", *key_lines(bindings), "", *notes]

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = self._title
            box.border_subtitle = "esc closes"
            yield Static("\n".join(self._lines), markup=False)

    async def action_dismiss(self, result: None = None) -> None:
        self.dismiss(result)
