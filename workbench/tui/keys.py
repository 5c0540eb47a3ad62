"""The keys that are active now, computed from the tables that dispatch keys, for the key bar and the help.

A screen lists in `ACTING` the names of its actions that start, stop or change a run, a flip or evidence. In
read-only mode they are not offered, and the application refuses to run them (`WorkbenchApp.run_action`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textual.actions import parse
from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widget import Widget


def acts(node: object, name: str) -> bool:
    """Return whether an action of a screen or widget changes more than the display; a class adds its own actions to
    those of its bases."""
    return any(name in vars(kind).get("ACTING", ()) for kind in type(node).__mro__)


def resolved(app: App[Any], node: DOMNode, action: str) -> tuple[DOMNode, str, tuple[object, ...]]:
    """Return the owner of the action that a binding of `node` names, the action's name and its parameters."""
    destination, name, parameters = parse(action)
    screen = node.screen if isinstance(node, Widget) else app.screen
    return {"app": app, "screen": screen}.get(destination, node), name, parameters


def is_refused(app: App[Any], node: DOMNode, action: str) -> bool:
    """Return whether read-only mode refuses an action, as a binding of `node` names it."""
    target, name, _ = resolved(app, node, action)
    return bool(getattr(app, "read_only", False)) and acts(target, name)


def is_offered(app: App[Any], node: DOMNode, action: str) -> bool:
    """Return whether an action, as a binding of `node` names it, would do something now."""
    target, name, parameters = resolved(app, node, action)
    return not is_refused(app, node, action) and bool(target.check_action(name, parameters))


def active_keys(screen: Screen[Any]) -> dict[DOMNode, tuple[Binding, ...]]:
    """Return the keys that do something now, by owner: first the focused widget, last the app.

    Keys of one action are one binding. Bindings without a description are internal and left out.
    """
    by_owner: dict[DOMNode, list[Binding]] = {}
    for active in screen.active_bindings.values():
        binding = active.binding
        if not binding.description or not is_offered(screen.app, active.node, binding.action):
            continue
        by_owner.setdefault(active.node, []).append(binding)
    return {node: _joined(by_owner[node]) for node in _chain(screen) if node in by_owner}


def _chain(screen: Screen[Any]) -> list[DOMNode]:
    inner: list[DOMNode] = [] if screen.focused is None else [*screen.focused.ancestors_with_self]
    return [*(node for node in inner if node not in (screen, screen.app)), screen, screen.app]


def _joined(bindings: Sequence[Binding]) -> tuple[Binding, ...]:
    by_action: dict[str, Binding] = {}
    for binding in bindings:
        known = by_action.get(binding.action)
        keys = binding.key if known is None else f"{known.key},{binding.key}"
        by_action[binding.action] = replace(known or binding, key=keys)
    return tuple(by_action.values())
