"""A choice between a few words, on one line: left, right and space change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static


class Choice(Static, can_focus=True):
    """Draws all words and marks the chosen one with brackets."""

    class Changed(Message):
        """Another word was chosen."""

        def __init__(self, choice: Choice, value: str) -> None:
            super().__init__()
            self.choice, self.value = choice, value

        @property
        def control(self) -> Choice:
            return self.choice

    HELP = """\
# Choice

One of the words of this line; the one in brackets is chosen.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "the word before", show=False),
        Binding("right,space", "move(1)", "the next word", show=False),
    ]
    DEFAULT_CSS = """
    Choice { height: 1; background: $surface; text-wrap: nowrap; text-overflow: ellipsis; }
    Choice:focus { background: $primary 30%; }
    """

    value: reactive[str] = reactive("", init=False)

    def __init__(self, options: Sequence[str], value: str = "", *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        assert options, "a choice of nothing"
        self.options = tuple(options)
        self.set_reactive(Choice.value, value if value in options else options[0])

    def on_mount(self) -> None:
        self._write()

    def on_resize(self) -> None:
        self._write()

    def watch_value(self) -> None:
        self._write()
        self.post_message(self.Changed(self, self.value))

    def _write(self) -> None:
        parts = [
            Content.styled(f"[{word}]", "bold") if word == self.value else Content(f" {word} ")
            for word in self.options
        ]
        width = sum(len(word) + 2 for word in self.options)
        # If not all fit, show the chosen one and its position.
        place = f" {self.options.index(self.value) + 1} of {len(self.options)}"
        narrow = Content.assemble((f"[{self.value}]", "bold"), place)
        self.update(Content("").join(parts) if width <= self.size.width else narrow)

    def action_move(self, by: int) -> None:
        index = self.options.index(self.value)
        self.value = self.options[(index + by) % len(self.options)]

    def on_click(self, event: Click) -> None:
        self.focus()
        self.action_move(1)
