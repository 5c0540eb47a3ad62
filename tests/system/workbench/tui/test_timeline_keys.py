"""Keys of the time line, on the screen of a run at the sizes people use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.folder import RunFolder
from engine.spec import load_spec
from tests.support.judged import alert_event
from tests.support.kit import Kit
from tests.support.run_folders import Scene, completed, corrupt, killed, resumed, torn
from tests.support.screens import on_screen, press, texts_of, words_of
from workbench.tui.screens.flip import FlipScreen
from workbench.tui.widgets.log_pane import LogView
from workbench.tui.widgets.loss_chart import LossChart

SIZES = [(40, 12), (80, 24), (120, 40), (160, 45)]
ALERT = alert_event(
    id="data_wait",
    level="suspicion",
    text="22% of a step waits for data",
    numbers=[("data_share", 0.22, "over 0.1")],
    first_step=10,
    step=20,
    meaning="the loader is slower than the step",
    flip="--set data.seq_len=64",
)


def alerted(path: Path) -> RunFolder:
    scene = Scene(path).open().begin(60).steps(1, 20)
    scene.watch(ALERT).steps(21, 60)
    return scene.close().run


def line_of(pilot: Pilot[None]) -> LossChart:
    return pilot.app.screen.query_one(LossChart)


def test_the_cursor_reads_out_a_step_and_moves_to_the_ends(tmp_path: Path) -> None:
    seen = texts_of(completed(tmp_path / "run").path, (160, 45), "left", "home", "right", "end")
    assert "step 59 at" not in seen[0]
    assert "step 59 at" in seen[1]
    assert "step 1 at" in seen[2] and "4.1k tok/s" in seen[2]
    assert "step 2 at" in seen[3]
    assert "step 60 at" in seen[4]


def test_zooming_shows_a_part_and_0_the_whole(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "plus")
        low, high = line_of(pilot).window.bounds(1.0, 60.0)
        assert (high - low, high) == (29.5, 60.0)
        assert "zoomed" in words_of(pilot)
        await press(pilot, "0")
        assert line_of(pilot).window.span is None

    on_screen([completed(tmp_path / "run").path], (120, 40), script)


def test_enter_on_an_alert_tells_it_and_f_opens_its_flip(kit: Kit, tmp_path: Path) -> None:
    run = alerted(tmp_path / "run")
    spec, text = load_spec(kit.spec(tmp_path), [])
    run.spec.write_text(text)
    run.effective.write_text(json.dumps({"spec": spec.to_dict(), "spec_sha256": spec.sha256}))

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "left_square_bracket")
        assert "ALERT data_wait" in words_of(pilot)
        await press(pilot, "enter")
        assert "means: the loader is slower" in words_of(pilot)
        assert "data_share 0.22" in words_of(pilot)
        await press(pilot, "F")
        assert isinstance(pilot.app.screen, FlipScreen)
        assert "data.seq_len=64" in words_of(pilot)

    on_screen([run.path], (120, 40), script)


def test_read_only_names_no_key_for_the_flip_of_an_alert(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "left_square_bracket", "enter")
        assert "means: the loader is slower" in words_of(pilot)
        assert "esc closes" in words_of(pilot) and "open the flip" not in words_of(pilot)

    on_screen([alerted(tmp_path / "run").path], (120, 40), script, read_only=True)


def test_an_alert_that_stands_has_a_pane_with_what_it_means(tmp_path: Path) -> None:
    going_on = Scene(tmp_path / "going").open().begin(60).steps(1, 20).watch(ALERT)
    (wide,) = texts_of(going_on.run.path, (160, 45))
    going_on.close()
    assert "9 alerts" in wide and "the loader is slower than the step" in wide
    path = alerted(tmp_path / "run").path
    (_, narrow) = texts_of(path, (80, 24), "9")
    assert "[9 alerts]" in narrow and "test it: --set data.seq_len=64" in narrow


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(make, size, marks=[] if SIZES.index(size) == number else pytest.mark.soak)
        for number, make in enumerate((torn, resumed, corrupt, killed))
        for size in SIZES
    ],
)
def test_edge_states_survive_every_key_of_the_time_line(
    tmp_path: Path, make: object, size: tuple[int, int]
) -> None:
    assert callable(make)
    keys = ["home", "plus", "plus", "right", "end", "left_square_bracket", "l"]
    texts_of(make(tmp_path / "run").path, size, "1", *keys, "escape", "escape")


def test_a_run_without_a_step_has_a_time_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run")
    texts_of(scene.run.path, (120, 40), "left", "home", "plus", "enter", "escape")


def test_the_oldest_line_of_a_long_log_is_a_key_away_and_a_filter_goes_through_it_all(
    tmp_path: Path,
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "5", "home")
        assert "opened its log" in words_of(pilot)
        await press(pilot, "f")
        assert "all steps done" in words_of(pilot)
        await press(pilot, "slash", *"step 17 ", "enter")
        view = pilot.app.screen.query_one(LogView)
        assert view.share_filtered == 1.0 and view.shown == 1
        assert "step 17 loss" in words_of(pilot)
        assert "1 of 4" in words_of(pilot)

    on_screen([completed(tmp_path / "run", total=4500).path], (120, 40), script)
