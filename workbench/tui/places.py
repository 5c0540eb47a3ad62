"""The screens that can be opened from everywhere: one row each, from which the keys, the help and the
command palette are made.

A screen is imported when it is built: the first paint needs none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    build: Callable[[Context, RunFolder | None], Screen[Any]]
    """Makes the screen; the second argument is the run that is on screen now, if any."""
    acts: bool = False
    """Whether it exists to start something: read-only mode does not open it."""


def _flips(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.flips import FlipsScreen

    return FlipsScreen(context, run)


def _flip(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.flip import FlipScreen
    from workbench.tui.screens.flips import FlipsScreen

    if run is None:
        return FlipsScreen(context)
    return FlipScreen(context, run)


def _whys(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.whys import WhysScreen

    return WhysScreen(context)


def _contracts(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.contracts import ContractsScreen

    return ContractsScreen(context)


def _drills(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.drills import DrillsScreen

    return DrillsScreen(context)


def _doctor(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.doctor import DoctorScreen

    return DoctorScreen(context)


def _new_run(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.new_run import NewRunScreen

    return NewRunScreen(context)


def _again(context: Context, run: RunFolder | None) -> Screen[Any]:
    from workbench.tui.screens.new_run import NewRunScreen

    return NewRunScreen(context, like=run)


PLACES: tuple[Place, ...] = (
    Place("", "new run", "start a run from a spec", _new_run, acts=True),
    Place("", "another run", "start another run with the settings of this one", _again, acts=True),
    Place("", "flip", "test a suspicion about the run on screen", _flip, acts=True),
    Place("E", "flips", "experiments: past flips with their verdicts", _flips),
    Place("w", "whys", "five whys: the findings and their evidence", _whys),
    Place("C", "contracts", "what the code promises, and its receipts", _contracts),
    Place("D", "drills", "known defects, planted on purpose", _drills),
    Place("I", "doctor", "what this machine is, and what it cannot measure", _doctor),
)
"""In the order in which help and palette list them."""


def place(name: str) -> Place:
    """The place of that name."""
    return next(place for place in PLACES if place.name == name)
