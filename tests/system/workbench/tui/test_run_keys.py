"""Keys of the screen of a run: reading its log, stopping and resuming it, nothing unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.errors import BadInput
from engine.log.folder import RunFolder
from tests.support.run_folders import completed, killed, running
from tests.support.screens import on_screen, poll, press, settle, text_of, texts_of, words_of
from workbench.log_pages import matches
from workbench.tui.screens import actions
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.log_pane import LogView


def test_the_log_is_filtered_as_it_is_typed(tmp_path: Path) -> None:
    seen = texts_of(completed(tmp_path / "run").path, (120, 40), "slash", *"disk", "enter")
    assert "warning: the disk is nearly full" in seen[-1]
    assert "1 of " in seen[-1]
    assert "completed at step 60: all steps done (exit 0)" not in seen[-1]


def test_an_exclamation_mark_hides_lines(tmp_path: Path) -> None:
    seen = texts_of(
        completed(tmp_path / "run").path, (120, 40), "slash", "exclamation_mark", *"step"
    )
    assert "step 59 loss" in seen[0]
    assert "step 59 loss" not in seen[-1]
    assert "the disk is nearly full" in seen[-1]


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [("", True), ("STEP", True), ("tea", False), ("!", True), ("!step", False), ("!tea", True)],
)
def test_filters(pattern: str, shown: bool) -> None:
    assert matches("Step 5 loss", pattern) == shown


def test_the_log_follows_its_end_until_someone_reads_back(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=40)

    async def script(pilot: Pilot[None]) -> None:
        view = pilot.app.screen.query_one(LogView)
        assert "step 40 loss" in words_of(pilot)
        await press(pilot, "5", "pageup")
        assert not view.follow
        assert "not following" in words_of(pilot)
        scene.steps(41, 45)
        await poll(pilot)
        assert "step 45 loss" not in words_of(pilot)
        await press(pilot, "f")
        assert "step 45 loss" in words_of(pilot)
        scene.close()

    on_screen([scene.run.path], (120, 40), script)


# Acting on the run.


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the engine, in place of asking it."""
    asked: list[str] = []

    def stop(run: RunFolder) -> str:
        asked.append(f"stop {run.name}")
        return "asked the run to stop"

    def resume(run: RunFolder, **options: object) -> RunFolder:
        asked.append(f"resume {run.name}")
        raise BadInput("checkpoint: damaged", hint="use an older one")

    monkeypatch.setattr(actions, "stop_run", stop)
    monkeypatch.setattr(actions, "resume_run", resume)
    return asked


@pytest.mark.parametrize(("key", "asked"), [("y", ["stop run"]), ("n", []), ("escape", [])])
def test_stopping_asks_first(
    tmp_path: Path, commands: list[str], key: str, asked: list[str]
) -> None:
    scene = running(tmp_path / "run")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "x")
        assert "engine stop" in words_of(pilot)
        assert commands == []
        await press(pilot, key)
        assert "RUNNING" in words_of(pilot)

    on_screen([scene.run.path], (80, 24), script)
    scene.close()
    assert commands == asked


def test_a_run_that_has_ended_is_not_stopped(tmp_path: Path, commands: list[str]) -> None:
    seen = texts_of(completed(tmp_path / "run").path, (80, 24), "x", "R")
    assert "engine stop" not in seen[1]
    assert commands == []
    assert "x stop" not in seen[0]


def test_a_refused_resume_is_told_in_the_engines_words(tmp_path: Path, commands: list[str]) -> None:
    seen = texts_of(killed(tmp_path / "run").path, (120, 40), "R", "y")
    assert "R resume" in seen[0]
    assert "engine distill --resume" in seen[1]
    assert commands == ["resume run"]
    assert "checkpoint: damaged" in seen[2]
    assert "use an older one" in seen[2]


def test_read_only_disables_both(tmp_path: Path, commands: list[str]) -> None:
    scene = running(tmp_path / "going")
    (first, after) = texts_of(scene.run.path, (120, 40), "x", read_only=True)
    scene.close()
    assert "read-only" in first
    assert "x stop" not in first
    assert "engine stop" not in after
    texts_of(killed(tmp_path / "killed").path, (120, 40), "R", read_only=True)
    assert commands == []


@pytest.mark.parametrize("size", [(120, 40), (50, 14)])
def test_the_help_stays_on_plain_ground_while_the_run_below_goes_on(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    scene = running(tmp_path / "run", done=10)

    async def script(pilot: Pilot[None]) -> None:
        below = pilot.app.screen
        assert "RUNNING" in words_of(pilot)
        await press(pilot, "question_mark")
        helped = text_of(pilot)
        scene.steps(11, 20)
        assert isinstance(below, RunScreen)
        below.tick()
        await settle(pilot)
        assert text_of(pilot) == helped and "RUNNING" not in helped
        await press(pilot, "escape")
        assert "RUNNING" in words_of(pilot) and "step 20" in words_of(pilot)

    on_screen([scene.run.path], size, script)
    scene.close()
