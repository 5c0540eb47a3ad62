"""Provide what the callbacks of all frameworks share: isolation of exceptions, and recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import apr_watch

_VALUE = 200
"""Maximum length of a logged setting, in characters."""


class Guard:
    """Calls functions of a callback. The first exception is logged and disables the callback; it does not reach the
    script, whose steps are still recorded."""

    def __init__(self, name: str) -> None:
        self._name, self._on = name, True

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not self._on:
            return
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001
            self._on = False
            text = f"{self._name} removed itself, the run goes on: {type(error).__name__}: {error}"
            apr_watch.note(text, "warning")


def logged(values: Mapping[str, Any], held_out: str) -> None:
    """Record values that a framework logs. The value with the name `held_out` is the held-out loss."""
    renamed = {"held_out" if name == held_out else name: value for name, value in values.items()}
    if renamed:
        apr_watch.log(**renamed)


def settings(owner: str, values: Mapping[str, Any]) -> None:
    """Record settings of a framework in one line of the log."""
    if not values:
        return
    words = ", ".join(f"{name}={str(value)[:_VALUE]}" for name, value in values.items())
    apr_watch.note(f"settings of {owner}: {words}")
