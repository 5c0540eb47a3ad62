"""The screens that can be reached from everywhere: one row each, from which the keys, the help and
the command palette are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from textual.screen import Screen

from engine.runlog.folder import RunFolder
from workbench.tui.context import Context


@dataclass(frozen=True, slots=True)
class Place:
    """A screen, the key that opens it, and what is there."""

    key: str
    name: str
    """One word; also the argument of the app's action `visit`."""
    tooltip: str
    build: Callable[[Context, RunFolder | None], Screen[Any]]
    """Makes the screen; the second argument is the run that is on screen now, if any."""


PLACES: tuple[Place, ...] = ()
"""In the order in which help and palette list them."""


def place(name: str) -> Place:
    """The place of that name."""
    return next(place for place in PLACES if place.name == name)
