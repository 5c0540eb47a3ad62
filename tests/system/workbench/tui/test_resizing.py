"""A screen is laid out for the size that its terminal has, whatever came between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.events import Resize
from textual.geometry import Size
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

from tests.support.run_folders import completed
from tests.support.screens import on_screen, settle, text_of
from workbench.tui.app import WorkbenchApp
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.screens.run import RunScreen

SMALL, LARGE = Size(39, 8), Size(80, 24)


async def resized(pilot: Pilot[None], size: Size) -> None:
    """Have the terminal change, and wait until the app has told its screen."""
    pilot.app.post_message(Resize(size, size))
    while pilot.app.size != size or pilot.app._resize_event is not None:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("first", "last"), [(LARGE, SMALL), (SMALL, LARGE)])
def test_a_size_that_comes_while_a_screen_is_laid_out_for_another_is_not_lost(
    tmp_path: Path, first: Size, last: Size
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        busy, free = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            busy.set()
            await free.wait()

        screen.call_later(hold)
        await busy.wait()
        await resized(pilot, first)
        screen.call_later(lambda: None)  # What stands between two events keeps them two.
        await resized(pilot, last)
        free.set()
        # The pilot waits by sending messages, which would stand between them too.
        for _ in range(100):
            await asyncio.sleep(0)
        await settle(pilot)
        assert_laid_out(screen, last)
        assert ("quit" in text_of(pilot)) == (last == LARGE)

    on_screen([completed(tmp_path / "kd-small").path], (100, 30), script)


@pytest.mark.parametrize("key", [None, "question_mark"])
def test_a_look_lays_out_anew_what_was_laid_out_for_another_size(
    tmp_path: Path, key: str | None
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        below = pilot.app.screen
        assert isinstance(below, PollingScreen)
        if key is not None:
            await pilot.press(key)
        screen = pilot.app.screen
        assert (screen is below) == (key is None)
        await settle(pilot)
        with screen.prevent(Resize):  # Laid out for another size, and told of no other.
            screen._refresh_layout(LARGE)
        await settle(pilot)
        assert_laid_out(screen, LARGE)
        below.tick()
        await settle(pilot)
        assert_laid_out(screen, Size(100, 30))

    on_screen([completed(tmp_path / "kd-small").path], (100, 30), script)


def assert_laid_out(screen: Screen[object], size: Size) -> None:
    assert (screen.outer_size, screen._compositor.size) == (size, size)


class _TakenDown(RunScreen):
    """A screen whose widgets are gone before its events are handled, as at SIGTERM under load."""

    @property
    def own_widgets(self) -> list[Widget]:
        return []


def test_events_after_the_widgets_are_taken_down_do_nothing(tmp_path: Path) -> None:
    run = completed(tmp_path / "kd")
    app = WorkbenchApp([run.path])

    async def script() -> None:
        async with app.run_test():
            screen = _TakenDown(app.context, run)
            PollingScreen.on_mount(screen)
            screen.lay_out()
            screen.tick()
            screen.show(screen.poll())

    asyncio.run(script())
