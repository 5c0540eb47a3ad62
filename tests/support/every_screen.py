"""Open every screen of the workbench as a user would: by keys, from the list of runs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from textual.pilot import Pilot

from engine.spec import load_spec
from tests.support.run_folders import completed, corrupt, killed, resumed, vanished
from tests.support.screens import on_screen, press, settle
from workbench.cli import demo_spec
from workbench.tui.screens.run import RunScreen

Visit = Callable[[Pilot[None], str], Awaitable[None]]

A_RUN = ("slash", *"sm", "enter", "enter")
ROUTES: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("runs", (), 0),
    ("run", A_RUN, 1),
    ("compare", ("space", "down", "space", "c"), 1),
    ("flip", (*A_RUN, "F"), 2),
    ("flips", (*A_RUN, "E"), 2),
    ("whys", (*A_RUN, "w"), 2),
)
"""A name for each screen, the keys that lead there, and how many screens it is above the list of runs."""
ACTING = ("flip",)
"""The screens whose purpose is to start something: read-only mode does not open them."""


def some_runs(folder: Path) -> Path:
    """Make a run in each state that a dead run can have; returns their folder."""
    completed(folder / "kd-small", nan=(40,))
    killed(folder / "kd-killed")
    vanished(folder / "kd-vanished")
    corrupt(folder / "kd-corrupt")
    resumed(folder / "kd-resumed")
    spec, _ = load_spec(demo_spec(), [])
    for run in folder.iterdir():
        effective = json.loads((run / "effective.json").read_text())
        (run / "effective.json").write_text(
            json.dumps({**effective, "spec": asdict(spec)}, default=str)
        )
    return folder


async def back(pilot: Pilot[None], height: int) -> None:
    """Leave every screen that is more than `height` screens above the list of runs."""
    while len(pilot.app.screen_stack) > 2 + height:
        pilot.app.pop_screen()
        await settle(pilot)
    assert pilot.app.is_running, "it has broken"


def on_every_screen(
    folder: Path, size: tuple[int, int], visit: Visit, *, looks: bool = False, **options: bool
) -> None:
    """Call `visit` with each screen of ROUTES and its name. In read-only mode a screen that only acts does not
    open, and is left out.

    A visit with `looks` does not change the screen of a run, which then stays open below the screens that it
    leads to.
    """

    async def script(pilot: Pilot[None]) -> None:
        for name, keys, height in ROUTES:
            above = keys[len(A_RUN) :] if keys[: len(A_RUN)] == A_RUN else ()
            stack = pilot.app.screen_stack
            if looks and above and len(stack) > 2 and isinstance(stack[2], RunScreen):
                await back(pilot, 1)
                await press(pilot, *above)
            else:
                await back(pilot, 0)
                await press(pilot, "escape", "u", "home", *keys)
            opened = len(pilot.app.screen_stack) >= 2 + height
            if opened:
                await visit(pilot, name)
            else:
                assert options.get("read_only") and name in ACTING, f"{name}: opened nothing"

    on_screen([folder], size, script, **options)
