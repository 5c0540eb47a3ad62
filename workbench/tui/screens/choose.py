"""A question with several answers, each on a key of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Static

from workbench.tui.printable import as_title

NO = "n"


class ChooseScreen(ModalScreen[str]):
    """Asks; the result is the key of an answer. Escape, q and enter are the careful answer, n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", f"answer('{NO}')", "no", tooltip="change nothing"),
    ]
    CSS = """
    ChooseScreen { align: center middle; }
    ChooseScreen > VerticalScroll {
        width: 72; max-width: 96%; height: auto; max-height: 96%; padding: 0 2;
        border: heavy $warning; background: $surface;
    }
    ChooseScreen #answers { margin-top: 1; text-style: bold; }
    """

    def __init__(self, title: str, question: str, answers: Sequence[tuple[str, str]]) -> None:
        """`answers` are keys with what each does; `n` is always one of them."""
        super().__init__()
        assert NO in dict(answers), answers
        self._title, self._question, self._answers = title, question, tuple(answers)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = as_title(self._title)
            yield Static(self._question, markup=False)
            words = "\n".join(f"{key}  {words}" for key, words in self._answers)
            yield Static(words, id="answers", markup=False)

    def on_key(self, event: Key) -> None:
        if event.character in dict(self._answers):
            event.stop()
            self.dismiss(event.character)

    def action_answer(self, answer: str) -> None:
        self.dismiss(answer)
