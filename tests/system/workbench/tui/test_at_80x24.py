"""A terminal of 80 x 24: help, forms and the plan of a flip are read to their ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from tests.support.run_folders import killed
from tests.support.screens import on_screen, press, text_of, words_of
from workbench.tui.screens.help import HelpScreen
from workbench.tui.widgets.flip_form import FlipPlan


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_help_is_wrapped_to_the_box_it_is_in(tmp_path: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "f1")
        assert isinstance(pilot.app.screen, HelpScreen)
        first = text_of(pilot)
        assert size[1] < 40 or "On top the student's losses on held-out text" in first
        seen = [first]
        while True:
            await press(pilot, "pagedown")
            if text_of(pilot) == seen[-1]:
                break
            seen.append(text_of(pilot))
        rows = [row.strip("┃ ▁▂▃▄▅▆▇█") for text in seen for row in text.splitlines()]
        # A row that was wrapped a second time leaves one word alone.
        assert not {"and", "the", "with", "all", "their"} & {*rows}
        assert any("does not affect the" in row for row in rows), "the last line"

    on_screen([killed(tmp_path / "run").path], size, script)


def test_help_takes_the_height_that_there_is(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "f1")
        assert "help: run" in text_of(pilot).splitlines()[0]
        assert "esc closes" in text_of(pilot).splitlines()[-1]

    on_screen([killed(tmp_path / "run").path], (80, 24), script)


def test_tab_reaches_every_field_of_a_flip_and_its_plan(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        reached = []
        for _ in range(5):
            await press(pilot, "tab")
            reached.append(pilot.app.focused)
            shown = pilot.app.focused
            assert shown is not None
            assert shown.region.height > 0
            assert pilot.app.screen.region.contains_region(shown.region), shown
        assert {"assignment", "hypothesis", "budget"} <= {
            widget.id for widget in reached if isinstance(widget, Input)
        }
        plan = pilot.app.screen.query_one(FlipPlan)
        assert plan in reached
        plan.show(lambda _width: [f"line {n}" for n in range(60)])
        plan.focus()
        await press(pilot)
        await press(pilot, "end")
        assert "line 59" in words_of(pilot)

    on_screen([killed(tmp_path / "run").path], (80, 24), script)


def test_frames_are_lines_where_only_ascii_can_be_drawn(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        text = text_of(pilot)
        assert "+=" in text
        assert not any(row.startswith("#") for row in text.splitlines())
        assert any(row.startswith("|") and row.endswith("|") for row in text.splitlines())

    on_screen([killed(tmp_path / "run").path], (80, 24), script, ascii_only=True)


def test_panes_after_the_ninth_have_a_letter_and_tabs_have_words(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        tabs = text_of(pilot).splitlines()[-2]
        assert tabs.strip().startswith("[1 loss] 2 step time 3 device 4 decisions 5 log 6 result")
        assert len(tabs) == 80
        assert all(f" {key}" in tabs for key in "23456789ds")
        await press(pilot, "d")
        assert "[d data]" in text_of(pilot)
        await press(pilot, "s")
        assert "[s samples]" in text_of(pilot)

    on_screen([killed(tmp_path / "run").path], (80, 24), script)
