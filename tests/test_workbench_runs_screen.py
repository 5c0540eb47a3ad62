"""The list of runs: each with its numbers, sorted and filtered, and what to do without any."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import completed, corrupt, killed, running
from screens import on_screen, press, text_of, texts_of, words_of
from textual.pilot import Pilot


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_list_shows_every_run_with_its_numbers(tmp_path: Path, size: tuple[int, int]) -> None:
    completed(tmp_path / "first")
    killed(tmp_path / "second")
    corrupt(tmp_path / "third")
    (text,) = texts_of(tmp_path, size)
    for words in ("3 runs", "first", "completed", "60/60", "2.6290", "4.1k"):
        assert words in text
    for words in ("second", "killed", "30/60", "third", "unreadable"):
        assert words in text


def test_an_empty_list_says_how_to_begin(tmp_path: Path) -> None:
    (text,) = texts_of(tmp_path, (80, 24))
    assert "No run in" in text
    assert "make demo" in text
    assert "engine distill SPEC.toml" in text


def test_a_run_that_begins_appears(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert "No run in" in words_of(pilot)
        scene = running(tmp_path / "new-one")
        await press(pilot, "r")
        assert "new-one" in words_of(pilot)
        assert "running" in words_of(pilot)
        scene.close()
        completed(tmp_path / "another")
        await press(pilot, "r", "1", "ctrl+home", "down", "enter")
        assert "new-one" in words_of(pilot), "the table has the focus since it is there"
        assert "VANISHED" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_enter_opens_a_run_and_escape_comes_back(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    seen = texts_of(tmp_path, (120, 40), "enter", "escape")
    assert "1 loss, nats per token" in seen[1]
    assert "COMPLETED" in seen[1]
    assert "1 run in" in seen[2]


def test_the_list_is_filtered_and_sorted(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    killed(tmp_path / "beta")

    async def script(pilot: Pilot[None]) -> None:
        def order() -> bool:
            text = text_of(pilot)
            return text.index("alpha") < text.index("beta")

        await press(pilot, "1")
        assert "name▲" in text_of(pilot)
        assert order()
        await press(pilot, "1")
        assert "name▼" in text_of(pilot)
        assert not order()
        await press(pilot, "1", "2")
        assert "name " in text_of(pilot)
        assert "state▲" in text_of(pilot)
        assert order(), "completed is before killed: the order is as it was"
        await press(pilot, "slash", *"kill", "enter")
        assert "1 of 2 runs" in words_of(pilot)
        assert "alpha" not in text_of(pilot)
        await press(pilot, "escape")
        assert "alpha" in text_of(pilot)
        await press(pilot, "slash", *"nobody", "enter")
        assert "None of the 2 runs has 'nobody'" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_the_cursor_stays_on_its_run_when_the_order_changes(tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        completed(tmp_path / name)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "1", "ctrl+home", "down")
        assert text_of(pilot).splitlines()[-2].strip().endswith("beta")
        killed(tmp_path / "aardvark")
        await press(pilot, "r")
        assert text_of(pilot).splitlines()[-2].strip().endswith("beta")

    on_screen([tmp_path], (80, 24), script)


def test_an_unreadable_run_in_the_list_tells_its_fault(tmp_path: Path) -> None:
    corrupt(tmp_path / "run")
    completed(tmp_path / "other")
    seen = texts_of(tmp_path, (120, 40), "2", "ctrl+end")
    assert "expected line number 20" in " ".join(seen)
