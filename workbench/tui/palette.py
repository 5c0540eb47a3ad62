"""The command palette: every key that does something now, by name.

It is built from the key tables, so it can do nothing that a key could not do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from workbench.tui.keys import Keys, active_keys, resolved
from workbench.tui.widgets.key_bar import key_text

UNNAMED = (
    *("scroll", "cursor", "page", "first", "last", "focus", "select", "copy_text"),
    "command_palette",
)
"""Prefixes of the actions that only navigate."""


def commands_of(app: App[Any], screen: Screen[Any]) -> Iterator[SystemCommand]:
    """Yield each name once: a screen's own `quit` is more specific than the app's."""
    names: set[str] = set()
    for keys in active_keys(screen):
        for binding in keys.bindings:
            _, action, _ = resolved(app, keys.node, binding.action)
            name = _name(keys, binding)
            if action.startswith(UNNAMED) or name in names:
                continue
            names.add(name)
            words = f"{binding.tooltip or binding.description} (key {key_text(binding)})"
            run = partial(app.run_action, binding.action, keys.node)
            # The palette would read brackets as markup.
            yield SystemCommand(name, words.replace("[", "\\["), run)
    yield SystemCommand("theme", "choose the colours", app.action_change_theme)


def _name(keys: Keys, binding: Binding) -> str:
    """Return the name of a key's command: two keys with the same short description are listed by their tooltips."""
    if binding.group is not None:
        return f"{binding.group.description} {binding.description}"
    if sum(other.description == binding.description for other in keys.bindings) > 1:
        return binding.tooltip or binding.description
    return binding.description
