"""A question that is answered with y or n."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class ConfirmScreen(ModalScreen[bool]):
    """Asks; the answer is the result of the screen. Anything but y is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q,enter", "answer(False)", "no"),
    ]
    CSS = """
    ConfirmScreen { align: center middle; }
    ConfirmScreen > Vertical {
        width: 64; max-width: 90%; height: auto; padding: 1 2;
        border: heavy $warning; background: $surface;
    }
    ConfirmScreen #keys { margin-top: 1; text-style: bold; }
    """

    def __init__(self, title: str, question: str, yes: str, no: str) -> None:
        super().__init__()
        self._title, self._question = title, question
        self._keys = f"y  {yes}\nn  {no}"

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            yield Static(self._question, markup=False)
            yield Static(self._keys, id="keys", markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
