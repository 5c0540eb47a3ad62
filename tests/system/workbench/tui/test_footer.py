"""The bottom row: a key is on it while it can do something, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.interchange.importing import import_run
from tests.support.run_folders import completed, killed, running
from tests.support.screens import on_screen, press, text_of, texts_of, words_of

SIZE = (240, 40)


def footer(pilot: Pilot[None]) -> list[str]:
    """Return the keys of the bottom row with their words."""
    return text_of(pilot).splitlines()[-1].strip().split("  ")


def test_a_run_has_the_keys_of_its_state(tmp_path: Path) -> None:
    scene = running(tmp_path / "run")

    async def going_on(pilot: Pilot[None]) -> None:
        keys = footer(pilot)
        assert "x stop" in keys
        assert "R resume" not in keys

    on_screen([scene.run.path], SIZE, going_on)
    scene.close()

    async def ended(pilot: Pilot[None]) -> None:
        assert not {"x stop", "R resume"} & {*footer(pilot)}

    on_screen([completed(tmp_path / "done").path], SIZE, ended)


def test_an_imported_log_does_not_describe_its_data(tmp_path: Path) -> None:
    log = tmp_path / "history.csv"
    log.write_text("step,loss\n" + "".join(f"{n},{1 / n:.4f}\n" for n in range(1, 40)))
    run, _ = import_run("csv", log, tmp_path / "runs")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "d")
        assert "the imported log does not describe the data" in words_of(pilot)

    on_screen([run.path], SIZE, script)


def test_what_is_typed_into_a_filter_is_no_key(tmp_path: Path) -> None:
    killed(tmp_path / "runs" / "a")

    async def in_the_list(pilot: Pilot[None]) -> None:
        assert {"enter open", "q quit"} <= {*footer(pilot)}
        await press(pilot, "slash", "k")
        assert footer(pilot) == ["esc clear"]
        await press(pilot, "enter")
        assert {"enter open", "esc clear"} <= {*footer(pilot)}
        await press(pilot, "escape")
        assert "esc clear" not in footer(pilot)

    on_screen([tmp_path / "runs"], SIZE, in_the_list)

    async def in_a_log(pilot: Pilot[None]) -> None:
        await press(pilot, "slash")
        assert not {"q quit", "z zoom", "f follow"} & {*footer(pilot)}
        await press(pilot, "escape")
        assert {"q quit", "z zoom", "f follow"} <= {*footer(pilot)}

    on_screen([tmp_path / "runs" / "a"], SIZE, in_a_log)


def test_a_filter_without_a_match_leaves_no_run_to_act_on(tmp_path: Path) -> None:
    killed(tmp_path / "a")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"nobody", "enter")
        keys = {*footer(pilot)}
        assert {"/ filter", "esc clear"} <= keys
        assert not {"enter open", "space mark", "N again", "t tags", "e note"} & keys

    on_screen([tmp_path], SIZE, script)


def test_runs_are_compared_once_two_are_marked(tmp_path: Path) -> None:
    for name in "ab":
        killed(tmp_path / name)

    async def script(pilot: Pilot[None]) -> None:
        assert "c compare" not in footer(pilot)
        await press(pilot, "space", "c")
        assert "c compare" not in footer(pilot)
        assert len(pilot.app.screen_stack) == 2
        await press(pilot, "space")
        assert "c compare" in footer(pilot)
        await press(pilot, "u")
        assert "c compare" not in footer(pilot)

    on_screen([tmp_path], SIZE, script)


@pytest.mark.parametrize("key", ["E", "w"])
def test_an_empty_list_offers_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    killed(tmp_path / "runs" / "a")
    words = texts_of(tmp_path / "runs", SIZE, key)[-1]
    assert "esc back" in words
    assert "enter open" not in words
    assert "z zoom" not in words
