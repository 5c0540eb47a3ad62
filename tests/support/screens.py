"""The workbench's screens as text, without a terminal."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot

from workbench.tui.app import WorkbenchApp
from workbench.tui.screens.polling import PollingScreen

Script = Callable[[Pilot[None]], Awaitable[None]]
NEVER_S = 3600.0


def text_of(pilot: Pilot[None]) -> str:
    """What is on the screen, line by line."""
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


def words_of(pilot: Pilot[None]) -> str:
    """What is on the screen without borders and line breaks: a wrapped sentence is found."""
    kept = "".join(" " if char in "│┃╭╮╰╯┏┓┗┛─━┤" else char for char in text_of(pilot))
    return " ".join(kept.split())


async def settle(pilot: Pilot[None]) -> None:
    """Wait until what goes on in threads is drawn."""
    for thread in threading.enumerate():
        if thread.name.startswith("engine-"):
            thread.join(10.0)
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    await pilot.pause()


async def poll(pilot: Pilot[None]) -> None:
    """Look at the run again now."""
    screen = pilot.app.screen
    assert isinstance(screen, PollingScreen)
    screen.tick()
    await settle(pilot)


async def shows(pilot: Pilot[None], words: str) -> bool:
    """Whether words are on the screen, as soon as what is going on is drawn."""
    for _ in range(2400):
        if words in words_of(pilot):
            return True
        await pilot.pause(0.05)
    return False


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settle(pilot)


def on_screen(
    paths: list[Path],
    size: tuple[int, int],
    script: Script,
    *,
    read_only: bool = False,
    ascii_only: bool = False,
) -> None:
    """Run the app on `paths`; it looks once, and again when the script says so."""

    async def run() -> None:
        app = WorkbenchApp(paths, refresh_s=NEVER_S, read_only=read_only, ascii_only=ascii_only)
        async with app.run_test(size=size, notifications=True) as pilot:
            await settle(pilot)
            await script(pilot)

    asyncio.run(run())


def texts_of(path: Path, size: tuple[int, int], *keys: str, **options: bool) -> list[str]:
    """The words on the screen at first and after each key."""
    seen: list[str] = []

    async def script(pilot: Pilot[None]) -> None:
        seen.append(words_of(pilot))
        for key in keys:
            await press(pilot, key)
            seen.append(words_of(pilot))

    on_screen([path], size, script, **options)
    return seen
