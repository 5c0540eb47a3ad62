"""Palette and help: everything can be found by name, from the tables that dispatch keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import OptionList

from tests.support.run_folders import completed, killed
from tests.support.screens import on_screen, press, settle, texts_of, words_of
from workbench.tui.palette import WorkbenchCommands, runs_to_open
from workbench.tui.places import PLACES
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.key_bar import bindings_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def names(pilot: Pilot[None]) -> dict[str, str]:
    """Names and words of what the palette offers on the present screen."""
    provider = WorkbenchCommands(pilot.app.screen)
    await provider.startup()
    return {command.name: command.words for command in provider._commands()}


async def found(pilot: Pilot[None], query: str) -> list[str]:
    """What the palette finds, best first."""
    provider = WorkbenchCommands(pilot.app.screen)
    await provider.startup()
    hits = [hit async for hit in provider.search(query)]
    return [str(hit.text) for hit in sorted(hits, key=lambda hit: -hit.score)]


def test_every_place_key_run_and_theme_is_in_the_palette(here: Path) -> None:
    completed(here / "runs" / "kd")
    killed(here / "runs" / "other")

    async def script(pilot: Pilot[None]) -> None:
        offered = await names(pilot)
        assert {place.name for place in PLACES} <= set(offered)
        screen = pilot.app.screen
        own = {binding.description for binding in bindings_of(screen)}
        for place in PLACES:
            key = f" (key {place.key})" if place.key else ""
            assert place.name in own or offered[place.name] == place.tooltip + key
        for binding in bindings_of(screen):
            if screen.check_action(binding.action.partition("(")[0], ()):
                assert any(name.endswith(binding.description) for name in offered), binding
        assert {"run kd", "run other", "theme colourblind-dark", "theme textual-light"} <= set(
            offered
        )
        assert {"copy", "save", "copy the screen", "help", "quit"} <= set(offered)

    on_screen([here / "runs" / "kd"], (120, 40), script)


def test_a_run_is_opened_by_its_name(here: Path) -> None:
    for name in ("alpha", "beta"):
        completed(here / "runs" / name)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "ctrl+p")
        assert isinstance(pilot.app.screen, CommandPalette)
        await pilot.press(*"run beta")
        while not pilot.app.screen.query_one(OptionList).option_count:
            await pilot.pause()
        await settle(pilot)
        await press(pilot, "enter")
        await settle(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        assert screen.run.name == "beta"

    on_screen([here / "runs"], (120, 40), script)


def test_the_best_match_comes_first(here: Path) -> None:
    completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        assert (await found(pilot, "zoom"))[0] == "zoom"
        assert (await found(pilot, "colourblind-l"))[0] == "theme colourblind-light"

    on_screen([here / "runs" / "kd"], (120, 40), script)


ESSENTIALS = {
    "flip": "flip",
    "experiment": "flip",
    "stop": "stop",
    "kill": "stop",
    "resume": "resume",
    "continue": "resume",
    "compare": "compare",
    "help": "help",
    "theme": "next theme",
    "save": "save",
    "screenshot": "save",
    "copy": "copy",
    "doctor": "doctor",
    "whys": "whys",
    "root cause": "whys",
    "replay": "replay",
    "filter": "filter",
    "exit": "quit",
}
"""What a person would type, and what is meant."""


@pytest.mark.parametrize("where", ["runs", "run"])
def test_whatever_somebody_types_finds_what_is_meant_and_it_is_described(
    here: Path, where: str
) -> None:
    killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        provider = WorkbenchCommands(pilot.app.screen)
        await provider.startup()
        for typed, meant in ESSENTIALS.items():
            hits = [hit async for hit in provider.search(typed)]
            best = sorted(hits, key=lambda hit: -hit.score)[:3]
            assert any(str(hit.text).startswith(meant) for hit in best), (typed, best)
            assert all(hit.help for hit in hits)

    on_screen([here / "runs" / ("kd" if where == "run" else "")], (120, 40), script)


def test_what_cannot_be_done_here_is_found_and_says_where_it_can(here: Path) -> None:
    completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        provider = WorkbenchCommands(pilot.app.screen)
        await provider.startup()
        hits = {str(hit.text): hit async for hit in provider.search("compare")}
        hits["compare (not here)"].command()
        await settle(pilot)
        assert "compare: not here" in words_of(pilot)
        assert "stop (not here)" not in await names(pilot), "only for who types it"

    on_screen([here / "runs" / "kd"], (120, 40), script)


def test_read_only_sends_nobody_to_a_key_that_it_refuses(here: Path) -> None:
    completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        provider = WorkbenchCommands(pilot.app.screen)
        await provider.startup()
        hits = {str(hit.text): hit.help async for hit in provider.search("stop")}
        assert str(hits["stop (not here)"]).startswith("read-only: no key")

    on_screen([here / "runs" / "kd"], (120, 40), script, read_only=True)


@pytest.mark.parametrize("where", ["runs", "run"])
def test_the_palette_begins_with_what_is_done_most(here: Path, where: str) -> None:
    completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        offered = list(await names(pilot))
        assert len(offered) == len(set(offered))
        first = offered[: offered.index("copy")]
        wanted = {"help", "filter", "flip", "flips", "whys", "doctor"}
        assert wanted <= set(offered[:25]), offered
        assert "select" not in {name.casefold() for name in offered}
        assert not any("cursor" in name for name in first)

    on_screen([here / "runs" / ("kd" if where == "run" else "")], (120, 40), script)


def test_beside_a_run_that_was_named_its_neighbours_can_be_opened(here: Path) -> None:
    for name in ("alpha", "beta"):
        completed(here / "runs" / name)

    async def script(pilot: Pilot[None]) -> None:
        context = pilot.app.context  # type: ignore[attr-defined]
        assert sorted(run.name for run in runs_to_open(context)) == ["alpha", "beta"]

    on_screen([here / "runs" / "alpha"], (120, 40), script)


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
        *(p.tooltip for p in PLACES if p.key),
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
