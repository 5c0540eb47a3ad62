"""The bottom row: the keys of the screen that do something now, from the table that dispatches
them.

A screen with a key bar has a method `draw_keys`, which passes the keys that do something now to `KeyBar.draw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from textual.binding import Binding
from textual.content import Content
from textual.keys import key_to_character
from textual.screen import Screen
from textual.style import Style
from textual.widgets import Static

GAP = "  "
NAMES = {
    "escape": "esc",
    "question_mark": "?",
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "comma": ",",
    "full_stop": ".",
    "equals_sign": "=",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "less_than_sign": "<",
    "greater_than_sign": ">",
}
"""Keys whose Textual name differs from their label."""


def key_text(binding: Binding) -> str:
    """Return a key as it is written on a keyboard; all of them when there are several."""
    return " ".join(NAMES.get(key, key) for key in binding.key.split(","))


def character_of(key: str) -> str | None:
    """Return the character that a key types; None for a key such as escape."""
    label = NAMES.get(key, key)
    return label if len(label) == 1 else key_to_character(key)


def bindings_of(screen: Screen[Any]) -> list[Binding]:
    """Return the keys of a screen, in the order of its table."""
    return [binding for binding in screen.BINDINGS if isinstance(binding, Binding)]


def grouped(bindings: Sequence[Binding]) -> list[tuple[str, str, list[Binding]]]:
    """Return keys, short words and members of each binding, or of each group of them."""
    groups = []
    for group, members in groupby(bindings, key=lambda binding: binding.group or binding.key):
        first, *rest = members
        keys = f"{key_text(first)}-{key_text(rest[-1])}" if rest else key_text(first)
        words = group.description if isinstance(group, Binding.Group) else first.description
        groups.append((keys, words, [first, *rest]))
    return groups


MORE = "…"
"""Replaces keys that do not fit; help lists them all."""


class KeyBar(Static):
    """Draws as many keys as fit, help always among them; a click does what the key does. Bindings of one
    group are drawn as a range. While a text is typed, the keys that would be typed into it are left out."""

    DEFAULT_CSS = """
    KeyBar {
        height: 1; padding: 0 1; background: $panel; text-wrap: nowrap;
        link-style: none; link-style-hover: bold; link-background-hover: $primary;
    }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown: Sequence[Binding] = ()
        self._drawn: object = None
        """Drawn content and its width."""

    def on_mount(self) -> None:
        self.watch(self.screen, "focused", self._ask_again, init=False)

    def _ask_again(self) -> None:
        """Let the screen choose the keys again: another widget has the focus."""
        screen: Any = self.screen
        if screen.is_current:
            screen.draw_keys()

    def on_resize(self) -> None:
        self.draw(self._shown)

    def _is_typed(self, binding: Binding) -> bool:
        """Return whether the focused widget takes the keys of a binding as text."""
        focused = self.screen.focused
        return focused is not None and all(
            focused.check_consume_key(key, character_of(key)) for key in binding.key.split(",")
        )

    def draw(self, bindings: Sequence[Binding]) -> None:
        """Show these keys."""
        self._shown = bindings
        bindings = [binding for binding in bindings if not self._is_typed(binding)]
        if (bindings, self.size.width) == self._drawn:
            return
        self._drawn = (bindings, self.size.width)
        groups = grouped(bindings)
        # Help comes first: it lists the keys that do not fit.
        groups.sort(key=lambda group: group[2][0].action not in ("help", "app.help"))
        widths = [len(f"{keys} {words}") for keys, words, _ in groups]
        room, used, count = self.size.width, 0, 0
        for index, width in enumerate(widths):
            gap = len(GAP) if index else 0
            rest = 0 if index == len(widths) - 1 else len(GAP) + len(MORE)
            if index and room and used + gap + width + rest > room:
                break
            used, count = used + gap + width, index + 1
        parts = [self._part(*group) for group in groups[:count]]
        if count < len(groups):
            parts.append(Content(MORE))
        self.update(Content(GAP).join(parts), layout=False)

    @staticmethod
    def _part(keys: str, words: str, members: Sequence[Binding]) -> Content:
        part = Content.assemble((keys, "bold"), f" {words}")
        if len(members) > 1:
            return part
        return part.stylize(Style.from_meta({"@click": _qualified(members[0].action)}))


def _qualified(action: str) -> str:
    return action if action.startswith("app.") else f"screen.{action}"
