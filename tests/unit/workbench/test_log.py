"""Any line of a long log, filtered or not, without holding it: the same lines as reading all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.log.read as read_module
from engine.log.events import Note, StepDone
from engine.log.folder import RunFolder
from engine.log.text import line_text, step_text
from engine.log.view import LogLine
from tests.support.judged import alert_event
from tests.support.run_events import events_of, opened, started, step, write_log
from tests.support.run_folders import Scene, completed, resumed, running
from workbench.feed import RunFeed
from workbench.log_pages import Log, matches, step_rule


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short logs have many parts."""
    monkeypatch.setattr(read_module, "PART_BYTES", 900)


def log_of(run: RunFolder) -> Log:
    return RunFeed(run).read_all().log


def texts(lines: list[LogLine]) -> list[str]:
    return [line_text(line) for line in lines]


def noted(path: Path) -> RunFolder:
    """A run whose supervisor speaks between the steps."""
    scene = Scene(path).open().begin(60)
    for number in range(1, 61):
        scene.steps(number, number)
        if number % 7 == 0:
            scene.watch(Note(level="info", text=f"watched {number}"))
    return scene.close().run


def test_every_line_is_there_once_in_the_order_of_time(tmp_path: Path) -> None:
    run = noted(tmp_path / "run")
    log = log_of(run)
    lines = log.lines(0, len(log))
    assert len(lines) == len(log)
    times = [line.unix_s for line in lines]
    assert times == sorted(times)
    assert [x.event.seq for x in lines if x.source == "events"] == list(range(log.count))
    words = "\n".join(texts(lines))
    assert words.count("watched 14") == 1
    assert words.index("step 14 ") < words.index("watched 14") < words.index("step 15 ")
    kept = RunFeed(run).read_all().view.lines
    assert sorted(texts(list(kept))) == sorted(texts(lines))


@pytest.mark.parametrize("make", [noted, completed, resumed])
def test_pages_are_cuts_of_the_whole(tmp_path: Path, make: object) -> None:
    assert callable(make)
    log = log_of(make(tmp_path / "run"))
    whole = log.lines(0, len(log))
    for start in range(0, len(log) + 3):
        assert log.lines(start, start + 9) == whole[start : start + 9]


def test_a_page_is_read_and_not_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = completed(tmp_path / "run", total=3000)
    log = log_of(run)
    import workbench.log_pages as log_module

    looked = []
    real = log_module.decode_line
    monkeypatch.setattr(
        log_module, "decode_line", lambda line, where: looked.append(1) or real(line, where)
    )
    log.lines(1500, 1540)
    assert 40 <= len(looked) < 60


def test_a_clock_that_was_set_back_does_not_move_lines_of_one_log(tmp_path: Path) -> None:
    run = Scene(tmp_path / "run").run
    write_log(
        run.events, [opened(1000.0), *(step(n) for n in range(1, 9)), opened(500.0), started()]
    )
    log = log_of(run)
    assert [line.event.seq for line in log.lines(0, 99)] == list(range(11))


@pytest.mark.parametrize(
    "pattern", ["step 1", "!step", "watched", "!watched", "2.9", "disk", "|g|"]
)
def test_a_filter_finds_what_looking_at_every_text_finds(tmp_path: Path, pattern: str) -> None:
    log = log_of(noted(tmp_path / "run"))
    shown = [row for row, x in enumerate(log.lines(0, len(log))) if matches(line_text(x), pattern)]
    assert log.matching(0, len(log), pattern) == shown
    middle = len(log) // 2
    both = log.matching(0, middle, pattern) + log.matching(middle, len(log), pattern)
    assert both == shown


@given(events_of(StepDone), st.text("steplo caknmµ:.5!|e", max_size=6))
def test_what_a_filter_takes_for_granted_of_steps_is_so(event: StepDone, pattern: str) -> None:
    text = f"12:03:04 {step_text(event)}"
    rule = step_rule(pattern)
    assert rule is None or matches(text, pattern) == rule


def test_steps_are_not_decoded_for_words_that_no_step_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import workbench.log_pages as log_module

    log = log_of(completed(tmp_path / "run", total=500))
    seen: list[str] = []
    real = log_module.line_text
    monkeypatch.setattr(log_module, "line_text", lambda line: seen.append(real(line)) or seen[-1])
    (row,) = log.matching(0, len(log), "nearly full")
    assert "the disk is nearly full" in texts(log.lines(row, row + 1))[0]
    assert 0 < len(seen) < 30


def test_a_log_that_is_gone_says_so_in_its_lines(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    log = log_of(run)
    run.events.unlink()
    (text,) = texts(log.lines(20, 21))
    assert "cannot be read any more" in text


def test_the_log_grows_at_its_end(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=10)
    feed = RunFeed(scene.run)
    first = feed.poll().log
    assert feed.poll().log is first
    scene.watch(alert_event(id="data_wait", level="suspicion", text="waits"))
    scene.steps(11, 12)
    second = feed.poll().log
    scene.close()
    assert second.lines(0, len(first)) == first.lines(0, len(first))
    tail = texts(second.lines(len(first), len(second)))
    assert ["ALERT" in tail[0], "step 11" in tail[1], "step 12" in tail[2]] == [True] * 3
