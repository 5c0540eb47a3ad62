"""Feeds: every state of a run, every fault as words, and no log read twice for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.watch.runs_feed import RunRow, RunsFeed
from tests.support.judged import alert_event
from tests.support.perf import many, within
from tests.support.run_folders import (
    START_UNIX_S,
    Unknown,
    completed,
    corrupt,
    empty,
    killed,
    resumed,
    running,
    torn,
    vanished,
)
from workbench import feed as feed_module
from workbench.feed import RunFeed
from workbench.panes import alert_words

NOW_UNIX_S = START_UNIX_S + 3600.0
UNHURRIED_S = 60.0
"""Reads all there is on a busy machine too."""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test of a process imports what reading needs, which takes longer than a first look may."""
    monkeypatch.setattr(feed_module, "FIRST_BUDGET_S", UNHURRIED_S)


def feed_of(run: RunFolder, **changes: object) -> RunFeed:
    given: dict[str, Any] = {"budget_s": UNHURRIED_S, **changes}
    return RunFeed(run, wall=lambda: NOW_UNIX_S, **given)


def row_of(run: RunFolder) -> RunRow:
    (row,) = RunsFeed([run.path], budget_s=UNHURRIED_S).poll().rows
    return row


STATES: list[tuple[Callable[[Path], RunFolder], str, int, bool]] = [
    (completed, "completed", 60, True),
    (killed, "killed", 30, True),
    (vanished, "vanished", 30, True),
    (torn, "vanished", 30, True),
    (resumed, "completed", 60, True),
    (empty, "not started", 0, False),
]


@pytest.mark.parametrize(("make", "state", "last_step", "ended"), STATES)
def test_a_run_is_told_as_it_is(
    tmp_path: Path,
    make: Callable[[Path], RunFolder],
    state: str,
    last_step: int,
    ended: bool,
) -> None:
    run = make(tmp_path / "run")
    snapshot = feed_of(run).poll()
    assert (snapshot.state, snapshot.error, snapshot.behind) == (state, None, False)
    assert (snapshot.view.last_step, snapshot.has_ended) == (last_step, ended)
    assert snapshot.status.startswith(state.upper())
    row = row_of(run)
    assert (row.name, row.state, row.last_step) == ("run", state, last_step)


def test_a_run_with_living_writers_is_running_and_grows(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=10)
    feed = feed_of(scene.run)
    first = feed.poll()
    scene.steps(11, 12)
    second = feed.poll()
    scene.close()
    assert (first.state, first.view.last_step) == ("running", 10)
    assert (second.state, second.view.last_step) == ("running", 12)
    assert feed.poll().state == "vanished"
    assert first.view.last_step == 10, "a snapshot never changes"


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    snapshot = feed_of(resumed(tmp_path / "run")).poll()
    assert snapshot.view.steps.values("step") == list(range(1, 61))
    assert snapshot.view.sessions == 2


def test_a_corrupt_log_is_told_in_words_beside_what_was_read(tmp_path: Path) -> None:
    snapshot = feed_of(corrupt(tmp_path / "run")).poll()
    assert snapshot.state == "unreadable"
    assert snapshot.status.startswith("UNREADABLE")
    assert snapshot.error is not None
    assert "expected line number 20, found 21" in snapshot.error
    assert snapshot.view.last_step > 0
    assert snapshot.has_ended


def test_bytes_that_are_no_record_are_an_error_and_no_crash(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    run.events.write_bytes(b"\x00\xffnot a log\n")
    error = feed_of(run).poll().error
    assert error is not None
    assert "expected a record" in error
    assert "expected a record" in (row_of(run).error or "")


def test_an_event_of_another_version_is_kept_and_shown(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=3).events(Unknown(cups=2)).steps(4, 4)
    snapshot = feed_of(scene.run).poll()
    scene.close()
    assert (snapshot.state, snapshot.view.last_step) == ("running", 4)
    assert any("sampled_tea" in str(line.event) for line in snapshot.view.lines)


def test_a_folder_that_goes_away_is_an_error_and_no_crash(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    feed = feed_of(run)
    assert feed.poll().error is None
    run.path.rename(tmp_path / "moved")
    gone = feed.poll()
    assert gone.state == "unreadable"
    assert "moved or deleted" in (gone.error or "")
    assert gone.view.last_step == 60, "what was read stays"


def test_a_long_log_is_read_in_pieces_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = completed(tmp_path / "run")
    real = Follower.poll
    monkeypatch.setattr(Follower, "poll", lambda self: real(self, 4096))
    feed = feed_of(run, budget_s=0.0)
    first = feed.poll()
    assert first.behind
    assert (first.state, first.has_ended) == ("reading", False)
    assert first.status.startswith("READING")
    assert first.view.last_step < 60
    assert feed.read_all().view.last_step == 60
    assert not feed.poll().behind


def test_a_broken_log_does_not_keep_the_others_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = completed(tmp_path / "run")
    run.device.write_bytes(b"broken\n")
    real = Follower.poll
    monkeypatch.setattr(Follower, "poll", lambda self: real(self, 4096))
    snapshot = feed_of(run).poll()
    assert snapshot.state == "unreadable"
    assert snapshot.view.last_step == 60


@pytest.mark.perf
def test_50_000_alerts_are_read_once_each_and_a_pane_shows_the_newest(tmp_path: Path) -> None:
    scene, count = running(tmp_path / "many"), many(50_000, 5_000)
    alerts = (alert_event(id=f"rule_{i}", level="suspicion", text="t") for i in range(count))
    scene.watch(*alerts).close()
    feed = RunFeed(scene.run)
    began_s = time.process_time()
    while (snapshot := feed.poll()).behind:
        pass
    # A copy of all alerts for each of them took 18 s.
    within(time.process_time() - began_s, 8)
    assert len(snapshot.view.alerts) == count
    lines = alert_words(snapshot)
    assert lines[0] == f"and {count - 100:,} earlier alerts, in the log"
    assert any(f"rule_{count - 1}" in line for line in lines[-8:])
    assert len(lines) < 500
