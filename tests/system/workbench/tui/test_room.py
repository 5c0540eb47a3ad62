"""Room: nothing is said twice, no word is cut, and a pane takes no more rows than it has lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.events import RunFinished, TrainerExited
from tests.support.run_folders import killed, running
from tests.support.screens import on_screen, press, words_of
from workbench.tui.screens.run import RunScreen

SIZES = ((80, 24), (120, 40), (200, 60))
REASON = "the teacher's logits of row 7 are NaN at layer 12, after 30 steps"


def failed(path: Path) -> Path:
    """Make a run that failed by itself, with the reason that it gave."""
    scene = running(path)
    scene.events(RunFinished(state="failed", reason=REASON, exit_code=1, step=30))
    scene.watch(
        TrainerExited(
            trainer_pid=4242,
            returncode=1,
            state="failed",
            signal=None,
            cause="own",
            certainty="proved",
            sentence=f"The run failed: {REASON}",
        )
    )
    return scene.close().run.path


def without_log(pilot: Pilot[None]) -> str:
    """The words on the screen, without those of the log."""
    log = pilot.app.screen.query_one("#log")
    log.styles.visibility = "hidden"
    pilot.app.screen._compositor.reflow(pilot.app.screen, pilot.app.screen.size)
    return words_of(pilot)


@pytest.mark.parametrize("size", SIZES)
def test_how_a_run_ended_is_said_once_outside_the_log(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    runs = {
        failed(tmp_path / "failed"): REASON,
        killed(tmp_path / "killed").path: "killed by SIGKILL",
    }
    for path, sentence in runs.items():

        async def script(pilot: Pilot[None], sentence: str = sentence) -> None:
            await press(pilot, "6")
            text = without_log(pilot)
            assert text.count(sentence) == 1, text
            assert "6 result" in text

        on_screen([path], size, script)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_pane_takes_no_more_rows_than_it_has_lines(tmp_path: Path, size: tuple[int, int]) -> None:
    path = killed(tmp_path / "run").path

    async def script(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        shown = [pane for pane in screen.query("TextPane") if pane.display]
        # One pane takes what the others of its column leave.
        spare = {
            str(pane.id): pane.size.height - pane.virtual_size.height
            for pane in shown
            if pane.id != "decisions"
        }
        lines = {str(pane.id): pane.query_one("Static").size.height for pane in shown}
        assert {name for name, rows in lines.items() if rows == 0} == set()
        assert all(rows <= 0 for rows in spare.values()), spare

    on_screen([path], size, script)
