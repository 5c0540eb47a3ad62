"""Palette and help: everything can be found by name, from the tables that dispatch keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import OptionList

from tests.support.run_folders import completed, killed
from tests.support.screens import on_screen, press, settle, texts_of
from workbench.tui.palette import commands_of
from workbench.tui.screens.lists import WhysScreen
from workbench.tui.widgets.key_bar import bindings_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(pilot: Pilot[None]) -> dict[str, str]:
    """Names and words of what the palette offers on the present screen."""
    return {title: words for title, words, *_ in commands_of(pilot.app, pilot.app.screen)}


@pytest.mark.parametrize("where", ["runs", "run"])
def test_every_key_that_does_something_is_in_the_palette(here: Path, where: str) -> None:
    killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        offered, screen = names(pilot), pilot.app.screen
        for binding in bindings_of(screen):
            if screen.check_action(binding.action.partition("(")[0], ()):
                assert any(name.endswith(binding.description) for name in offered), binding
        assert {"copy", "save", "help", "quit", "theme", "flips", "whys", "resume"} <= set(offered)
        assert offered["flips"] == "past flips with their verdicts (key E)"
        assert all(offered.values())

    on_screen([here / "runs" / ("kd" if where == "run" else "")], (120, 40), script)


def test_a_command_is_done_by_its_name(here: Path) -> None:
    completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "ctrl+p")
        assert isinstance(pilot.app.screen, CommandPalette)
        await pilot.press(*"whys")
        while not pilot.app.screen.query_one(OptionList).option_count:
            await pilot.pause()
        await settle(pilot)
        await press(pilot, "enter")
        await settle(pilot)
        assert isinstance(pilot.app.screen, WhysScreen)

    on_screen([here / "runs"], (120, 40), script)


def test_a_question_is_not_left_by_the_palette(here: Path) -> None:
    killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "R")
        before = pilot.app.screen
        assert before.is_modal
        await press(pilot, "ctrl+p")
        assert pilot.app.screen is before

    on_screen([here / "runs" / "kd"], (120, 40), script)


# Help.


def test_help_begins_with_the_pane_that_has_the_focus(here: Path) -> None:
    completed(here / "runs" / "kd")
    keys = ("5", "question_mark", "escape", "1", "question_mark")
    _, _, log, _, _, loss = texts_of(here / "runs" / "kd", (120, 60), *keys)
    assert log.index("Log") < log.index("On this screen") < log.index("Everywhere")
    assert loss[: loss.index("On this screen")] != log[: log.index("On this screen")]


def test_help_lists_each_key_what_works_everywhere_and_what_does_not_now(here: Path) -> None:
    completed(here / "runs" / "kd")
    _, words, after = texts_of(here / "runs" / "kd", (120, 90), "question_mark", "escape")
    assert "COMPLETED" in after
    assert "stop the run, after confirmation; not now" in words
    for expected in (
        *("1-f11", "stop the run", "continue a run", "logarithmic", "this help"),
        "copy the pane as text",
        "find a command",
        "past flips with their verdicts",
    ):
        assert expected in words


def test_read_only_help_names_no_key_that_acts(here: Path) -> None:
    killed(here / "runs" / "kd")
    _, words = texts_of(here / "runs" / "kd", (120, 90), "question_mark", read_only=True)
    assert "Read-only: no key starts, stops or changes a run" in words
    assert "stop the run" not in words
    assert "continue a run" not in words


def test_help_fits_a_small_screen(here: Path) -> None:
    completed(here / "runs" / "kd")
    _, words = texts_of(here / "runs" / "kd", (40, 12), "question_mark")
    assert "esc closes" in words
