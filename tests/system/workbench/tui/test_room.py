"""Room: nothing is said twice, no word is cut, and a pane takes no more rows than it has lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.events import RunFinished, TrainerExited
from tests.support.run_folders import killed, running
from tests.support.screens import on_screen, press, resize, settle, words_of
from workbench.listing import Listing, Row
from workbench.panes import PANES
from workbench.tui.screens.browse import BrowseScreen
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.row_list import RowList, lines_of

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


@pytest.mark.parametrize("size", [(60, 14), *SIZES])
def test_a_pane_alone_takes_all_its_room(tmp_path: Path, size: tuple[int, int]) -> None:
    path = killed(tmp_path / "run").path

    async def script(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        for pane in PANES:
            # The first is chosen already, so that its key zooms; the others stay zoomed.
            await press(pilot, pane.key)
            column = screen.query_one(f"#{pane.id}")
            assert column.parent is not None
            assert column.outer_size.height == column.parent.size.height, pane.id  # type: ignore[attr-defined]

    on_screen([path], size, script)


def test_a_list_wraps_its_texts() -> None:
    rows = [
        Row(key=name, name=name, text="PASS  4d09h") for name in ("rotary_missing", "nan_masked")
    ]
    assert lines_of(rows, 60) == ["rotary_missing  PASS  4d09h", "nan_masked      PASS  4d09h"]
    tree = Row(key="n2", text="└─n2  refuted: the dense upload causes the OOM kill of the trainer")
    (text,) = lines_of([tree], 44)
    assert text.splitlines() == [
        "└─n2  refuted: the dense upload causes the",
        "      OOM kill of the trainer",
    ]


def test_a_list_is_as_wide_as_its_rows_and_as_high(tmp_path: Path) -> None:
    listed = tuple(Row(key=f"{n}", name=f"drill-{n}", text="PASS") for n in range(3))

    class Feed:
        def poll(self) -> Listing:
            return Listing(head="three", rows=listed)

    async def script(pilot: Pilot[None]) -> None:
        screen = BrowseScreen(pilot.app.screen.context, Feed())  # type: ignore[attr-defined]
        pilot.app.push_screen(screen)
        await settle(pilot)
        rows, details = screen.query_one(RowList), screen.query_one("#details")
        assert (rows.outer_size.width, details.outer_size.width) == (36, 84)
        await resize(pilot, (80, 24))
        assert (rows.outer_size.height, details.outer_size.height) == (5, 17)

    on_screen([tmp_path], (120, 40), script)


def test_an_empty_list_of_runs_offers_no_key_that_needs_a_run(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert words_of(pilot).endswith("? help q quit r refresh")

    on_screen([tmp_path], (80, 24), script)
