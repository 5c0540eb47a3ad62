"""Help: every key is listed, from the tables that dispatch keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_folders import completed, killed
from tests.support.screens import texts_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        "flips with their verdicts",
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
