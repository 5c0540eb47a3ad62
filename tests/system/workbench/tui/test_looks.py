"""What one look at a run costs its screen, in counts: polls, layouts, and panes that are drawn again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

from tests.support.run_folders import completed, running
from tests.support.screens import on_screen, poll, settle
from workbench.tui.app import WorkbenchApp
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.log_pane import LogPane
from workbench.tui.widgets.loss_chart import LossChart
from workbench.tui.widgets.text_pane import TextPane

SIZES = [(160, 45), (80, 24)]


class Counts:
    """How often the screen was laid out, and how often each widget was drawn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.layouts, self.drawn = 0, Counter[str]()
        laid_out, set_dirty = Screen._refresh_layout, Widget._set_dirty

        def lay_out(screen: Screen[Any], *args: Any, **named: Any) -> None:
            self.layouts += 1
            laid_out(screen, *args, **named)

        def dirty(widget: Widget, *regions: Any) -> None:
            for part in widget.ancestors_with_self:
                if isinstance(part, TextPane | LossChart | LogPane):
                    self.drawn[str(part.id)] += 1
            set_dirty(widget, *regions)

        patch.setattr(Screen, "_refresh_layout", lay_out)
        patch.setattr(Widget, "_set_dirty", dirty)

    def clear(self) -> None:
        self.layouts = 0
        self.drawn.clear()


@pytest.mark.parametrize("size", SIZES)
def test_a_look_that_finds_new_steps_draws_only_what_they_change_and_lays_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    scene = running(tmp_path / "run", done=40, total=600)

    async def script(pilot: Pilot[None]) -> None:
        await poll(pilot)
        counts = Counts(monkeypatch)
        for number in range(41, 44):
            counts.clear()
            scene.steps(number, number)
            await poll(pilot)
            assert counts.layouts == 0
            assert counts.drawn["loss"] == 1
            assert counts.drawn.keys() <= {"loss", "log", "pace"}, counts.drawn

    on_screen([scene.run.path], size, script)
    scene.close()


def test_a_look_that_finds_nothing_new_draws_no_pane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await poll(pilot)
        counts = Counts(monkeypatch)
        await poll(pilot)
        assert counts.layouts == 0
        assert not counts.drawn

    on_screen([completed(tmp_path / "run").path], (160, 45), script)


def test_a_screen_looks_once_in_each_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that the base class has too must not start a second timer."""
    intervals: list[float] = []
    real = RunScreen.set_interval

    def noted(screen: RunScreen, interval: float, *args: Any, **named: Any) -> object:
        if not named.get("pause") and interval == 3600.0:
            intervals.append(interval)
        return real(screen, interval, *args, **named)

    async def run() -> None:
        app = WorkbenchApp([completed(tmp_path / "run").path], refresh_s=3600.0)
        async with app.run_test(size=(160, 45)) as pilot:
            await settle(pilot)

    monkeypatch.setattr(RunScreen, "set_interval", noted)
    asyncio.run(run())
    assert intervals == [3600.0]
