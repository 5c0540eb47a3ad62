"""The workbench's screens as text, without a terminal."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from textual._compositor import Compositor
from textual.css import stylesheet
from textual.pilot import Pilot
from textual.screen import Screen
from textual.worker import WorkerCancelled

from workbench.tui.app import WorkbenchApp
from workbench.tui.screens.polling import PollingScreen

Script = Callable[[Pilot[None]], Awaitable[None]]
NEVER_S = 3600.0


def text_of(pilot: Pilot[None]) -> str:
    """Return what is on the screen, line by line."""
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


def words_of(pilot: Pilot[None]) -> str:
    """Return what is on the screen without borders and line breaks, so that a wrapped sentence is found."""
    kept = "".join(" " if char in "│┃╭╮╰╯┏┓┗┛─━┤" else char for char in text_of(pilot))
    return " ".join(kept.split())


async def until_still(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until the event loop only waits for a thread, a timer or a file.

    Textual's own function with these arguments polls CPU time every 20 ms instead, which is longer than most
    keys take, and not long enough when other work delays the process.
    """
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while loop._ready:
        await asyncio.sleep(0)


def _awaits_drawing(screen: Screen[Any]) -> bool:
    """Whether the next tick of a screen's update timer comes, and has something to do.

    A screen below notes after each of its drawings that it is to be drawn again, but asks for no tick.
    """
    return (screen is screen.app.screen or screen._update_timer._active.is_set()) and bool(
        screen._layout_required
        or screen._scroll_required
        or screen._repaint_required
        or screen._recompose_required
        or screen._dirty_widgets
        or screen._callbacks
    )


_render = Compositor.render_update


def undrawn(compositor: Compositor, **how: Any) -> None:
    """Leave what changed on the screen for `drawn`, which draws once after all that a key changes.

    The application draws after each of the changes. Without a terminal it drops every one of these drawings,
    and starting it makes a dozen.
    """


def _draw(screen: Screen[Any]) -> bool:
    """Draw what changed on the screen; whether anything did."""
    changed = bool(screen._compositor._dirty_regions)
    if changed:
        _render(screen._compositor, screen_stack=screen.app._background_screens)
    return changed


_rules: dict[tuple[Any, ...], list[Any]] = {}
_parse = stylesheet.parse


def parsed_once(
    scope: str, css: str, read_from: Any, *, variable_tokens: Any, **how: Any
) -> list[Any]:
    """Parse each piece of CSS once for all applications, which only read the rules."""
    variables = tuple((n, tuple(t.value for t in ts)) for n, ts in variable_tokens.items())
    key = (scope, css, read_from, variables, *sorted(how.items()))
    if key not in _rules:
        _rules[key] = list(_parse(scope, css, read_from, variable_tokens=variable_tokens, **how))
    return _rules[key]


async def drawn(pilot: Pilot[None]) -> None:
    """Wait until the results of workers are drawn."""
    app = pilot.app
    for worker in [*app.workers]:
        # A screen that is left cancels what it began.
        with suppress(WorkerCancelled):
            await worker.wait()
    await until_still()
    if app._resize_event is not None:
        # Otherwise it comes with the timer that collects the resize events of a window that is being dragged.
        app._check_resize()
    # A drawing may request another layout, and that another one: a scroll bar that appears takes a column.
    # Screens below have timers of their own.
    for _ in range(20):
        await until_still()
        late = [one for one in app.screen_stack if one.is_current and _awaits_drawing(one)]
        if not late and not _draw(app.screen):
            break
        for screen in late:
            screen._on_timer_update()


async def settle(pilot: Pilot[None]) -> None:
    """Wait until the results of running threads are drawn."""
    for thread in threading.enumerate():
        if thread.name.startswith("engine-"):
            thread.join(10.0)
    await drawn(pilot)


async def poll(pilot: Pilot[None]) -> None:
    """Poll the run again now."""
    screen = pilot.app.screen
    assert isinstance(screen, PollingScreen)
    screen.tick()
    await settle(pilot)


async def shows(pilot: Pilot[None], words: str) -> bool:
    """Whether words are on the screen, once running work is drawn."""
    for _ in range(2400):
        if words in words_of(pilot):
            return True
        await pilot.pause(0.05)
    return False


async def press(pilot: Pilot[None], *keys: str) -> None:
    for number, key in enumerate(keys):
        if number:
            await drawn(pilot)
        await pilot.press(key)
    await settle(pilot)


async def resize(pilot: Pilot[None], size: tuple[int, int]) -> None:
    await pilot.resize_terminal(*size)
    await settle(pilot)


CUT_WORD = re.compile(r"(\w[\w.-]*)…(?=[\s│┃]|$)")
"""A word of which only the beginning is shown."""


async def at_sizes(
    pilot: Pilot[None], sizes: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """Return the words on the screen at each size, and restore the original size."""
    seen: dict[tuple[int, int], str] = {}
    before = pilot.app.size
    for size in sizes:
        await resize(pilot, size)
        seen[size] = words_of(pilot)
    await resize(pilot, before)
    return seen


def on_screen(
    paths: list[Path],
    size: tuple[int, int],
    script: Script,
    *,
    read_only: bool = False,
    ascii_only: bool = False,
) -> None:
    """Run the app on `paths`; it polls once, and again when the script says so."""

    async def run() -> None:
        app = WorkbenchApp(paths, refresh_s=NEVER_S, read_only=read_only, ascii_only=ascii_only)
        async with app.run_test(size=size, notifications=True) as pilot:
            await settle(pilot)
            await script(pilot)

    with (
        patch("textual.app.wait_for_idle", until_still),
        patch("textual.pilot.wait_for_idle", until_still),
        patch.object(Compositor, "render_update", undrawn),
        patch.object(stylesheet, "parse", parsed_once),
    ):
        asyncio.run(run())


def texts_of(path: Path, size: tuple[int, int], *keys: str, **options: bool) -> list[str]:
    """Return the words on the screen at first and after each key."""
    seen: list[str] = []

    async def script(pilot: Pilot[None]) -> None:
        seen.append(words_of(pilot))
        for key in keys:
            await press(pilot, key)
            seen.append(words_of(pilot))

    on_screen([path], size, script, **options)
    return seen
