"""The screens that can be opened from everywhere: one row each, from which the keys, the help and the command
palette are built.

A screen is imported when it is opened: the first paint needs none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from textual.screen import Screen

from engine.log.folder import RunFolder
from workbench.tui.context import Context


@dataclass(frozen=True, slots=True)
class Place:
    """A screen, the key that opens it, and its description."""

    key: str
    """Empty for a place that only the palette opens from everywhere."""
    name: str
    """One word; also the argument of the app's action `visit`."""
    tooltip: str
    screen: str
    """`module.Class` in `workbench.tui.screens`."""
    takes: str = ""
    """The parameter that receives the run on screen now, if the screen has one."""
    acts: bool = False
    """Whether its purpose is to start something: read-only mode does not open it."""

    def build(self, context: Context, run: RunFolder | None) -> Screen[Any]:
        """Build the screen; `run` is the run on screen now, if any."""
        # A flip needs a run. Without one, the list of flips is opened instead.
        screen_of = FLIPS if self.name == "flip" and run is None else self.screen
        module, _, name = screen_of.partition(".")
        screen_class = getattr(import_module(f"workbench.tui.screens.{module}"), name)
        screen: Screen[Any] = screen_class(context, **({self.takes: run} if self.takes else {}))
        return screen


FLIPS = "lists.FlipsScreen"
PLACES: tuple[Place, ...] = (
    Place("", "flip", "test a suspicion about the run on screen", "flip.FlipScreen", "run", True),
    Place("E", "flips", "experiments: past flips with their verdicts", FLIPS, "run"),
    Place("w", "whys", "five whys: the findings and their evidence", "lists.WhysScreen"),
    Place("I", "doctor", "what this machine is, and what it cannot measure", "lists.DoctorScreen"),
)
"""Screens in the order in which help and palette list them."""


def place(name: str) -> Place:
    """Return the place of that name."""
    return next(place for place in PLACES if place.name == name)
