"""The rows of a step on screen: of the newest step, the one before, another by its number, the one at the cursor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.folder import RunFolder
from engine.log.rows import path_of
from tests.support.run_folders import completed
from tests.support.screens import on_screen, poll, press, shows, words_of
from workbench.step_rows import StepRowsFeed, listing_of
from workbench.tui.screens.lists import StepRowsScreen
from workbench.tui.screens.run import RunScreen


async def at_step(pilot: Pilot[None], step: int) -> None:
    await poll(pilot)
    assert await shows(pilot, f"step {step}, loss"), words_of(pilot)


@pytest.mark.parametrize("size", [(140, 40), pytest.param((80, 24), marks=pytest.mark.soak)])
def test_the_rows_of_steps_are_gone_through_by_keys(whole: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app.screen, RunScreen)
        await press(pilot, "b")
        assert isinstance(pilot.app.screen, StepRowsScreen)
        await at_step(pilot, 20)
        assert "each row is the one that was due" in words_of(pilot)
        assert "which was due" in words_of(pilot) and "⟦" in words_of(pilot)
        await press(pilot, "g")
        await press(pilot, *["backspace"] * 2, "x", "enter")
        assert await shows(pilot, "expected a number, found 'x'")
        await press(pilot, "backspace", "2", "enter")
        await at_step(pilot, 2)
        # Before the first step is none.
        await press(pilot, *["left"] * 2)
        await at_step(pilot, 1)
        await press(pilot, "g")
        await press(pilot, *["backspace"] * 2, *"21", "enter")
        await poll(pilot)
        assert await shows(pilot, "the rows of step 21, found those of steps up to 20")
        await press(pilot, "left")
        await at_step(pilot, 20)
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, RunScreen)
        await press(pilot, "1", "home", "b")
        await at_step(pilot, 1)

    on_screen([whole], size, script)


def test_a_run_without_rows_on_record_says_what_is_missing(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "b")
        await poll(pilot)
        assert isinstance(pilot.app.screen, StepRowsScreen)
        assert not await shows_rows(pilot)

    async def shows_rows(pilot: Pilot[None]) -> bool:
        return "which was due" in words_of(pilot)

    run = tmp_path / "run"
    completed(run)
    on_screen([run], (100, 30), script)


def test_a_row_out_of_turn_has_the_sign_of_what_is_wrong(whole: Path, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(whole, tmp_path / "run")))
    path = path_of(run, 0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    listing = StepRowsFeed(run.path, 20).poll()
    tones = [row.tone for row in listing.rows]
    assert tones.count("bad") == 1 and "does NOT agree" in listing.head
    (bad,) = [row for row in listing.rows if row.tone == "bad"]
    assert "differs from the recorded hash" in bad.lines[0]


def test_a_text_of_many_lines_stays_below_its_heading() -> None:
    row = {
        "says": "row 1, which was due",
        "labels": 3,
        "rank": 0,
        "in_turn": True,
        "pieces": [{"document": "a\x1b[2J.py", "says": "a\x1b[2J.py, tokens 5 to 7 of 9"}],
        "text": [["a\n", False], ["b\nc", True]],
    }
    (one,) = listing_of({"about": ["step 1", "each"], "rows": [row]}).rows
    assert one.lines[0] == "row 1, which was due" and "text" in one.lines
    at = one.lines.index("text")
    assert one.lines[at + 1 :] == ("  a", "  ⟦b", "  c⟧")
    assert one.lines[2] == "  a\\x1b[2J.py, tokens 5 to 7 of 9"
