"""Feeds: every state of a run, every fault as words, and no log read twice for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import (
    START_UNIX_S,
    Scene,
    Unknown,
    completed,
    corrupt,
    empty,
    killed,
    loss_at,
    resumed,
    running,
    torn,
    vanished,
)

from engine.runlog.folder import RunFolder
from engine.runlog.follow import Follower
from workbench.feed import RunFeed, RunRow, RunsFeed

NOW_UNIX_S = START_UNIX_S + 3600.0


def feed_of(run: RunFolder, **changes: object) -> RunFeed:
    return RunFeed(run, wall=lambda: NOW_UNIX_S, **changes)  # type: ignore[arg-type]


def row_of(run: RunFolder) -> RunRow:
    (row,) = RunsFeed([run.path], wall=lambda: NOW_UNIX_S).poll().rows
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


def test_traces_hold_the_numbers_of_the_steps(tmp_path: Path) -> None:
    traces = feed_of(completed(tmp_path / "run", nan={7})).poll().traces
    losses = traces["loss"].buckets
    assert losses[0].low == pytest.approx(loss_at(1))
    assert [bucket.x_first for bucket in losses if bucket.non_finite] == [7.0]
    assert traces["loss"].last == pytest.approx(loss_at(60))
    assert traces["tokens_per_s"].last == pytest.approx(4096.0)
    assert traces["kd"].last == pytest.approx(loss_at(60) - 0.5)


def test_traces_stay_the_same_object_when_nothing_is_new(tmp_path: Path) -> None:
    feed = feed_of(completed(tmp_path / "run"))
    assert feed.poll().traces is feed.poll().traces


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    snapshot = feed_of(resumed(tmp_path / "run")).poll()
    assert [bucket.x_first for bucket in snapshot.traces["loss"].buckets] == list(range(1, 61))
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


# Many runs.


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs whose logs were asked for."""
    names: list[str] = []
    real = Follower.poll

    def spy(self: Follower) -> bool:
        names.append(self.run.name)
        return real(self)

    monkeypatch.setattr(Follower, "poll", spy)
    return names


def test_all_runs_of_a_folder_are_rows(tmp_path: Path) -> None:
    completed(tmp_path / "a")
    killed(tmp_path / "b")
    scene = running(tmp_path / "c", done=10)
    (tmp_path / "not-a-run").mkdir()
    snapshot = RunsFeed([tmp_path], wall=lambda: NOW_UNIX_S).poll()
    scene.close()
    rows = {row.name: row for row in snapshot.rows}
    assert {name: row.state for name, row in rows.items()} == {
        "a": "completed",
        "b": "killed",
        "c": "running",
    }
    assert rows["a"].heldout == 2.6290
    assert rows["a"].loss == pytest.approx(loss_at(60))
    assert rows["c"].tokens_per_second == pytest.approx(4096.0)
    assert (rows["c"].last_step, rows["c"].total_steps) == (10, 60)
    assert rows["a"].age_s == pytest.approx(3600.0)


def test_an_ended_run_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    completed(tmp_path / "ended")
    scene = running(tmp_path / "going", done=3)
    feed = RunsFeed([tmp_path])
    feed.poll()
    reads.clear()
    feed.poll()
    scene.close()
    assert set(reads) == {"going"}


def test_an_ended_run_whose_log_grows_is_read_again(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    feed = RunsFeed([tmp_path])
    assert feed.poll().rows[0].state == "killed"
    scene = Scene.__new__(Scene)
    scene.run, scene.now_s, scene.start_unix_s, scene.writers = run, 0.0, START_UNIX_S + 900, {}
    scene.open().begin(60, resumed_from=20).steps(21, 40)
    row = feed.poll().rows[0]
    scene.close()
    assert (row.state, row.last_step) == ("running", 40)


def test_age_goes_on_without_reading(tmp_path: Path) -> None:
    completed(tmp_path / "run")
    now = [NOW_UNIX_S]
    feed = RunsFeed([tmp_path], wall=lambda: now[0])
    feed.poll()
    now[0] += 60
    assert feed.poll().rows[0].age_s == pytest.approx(3660.0)


def test_a_run_named_twice_is_one_row(tmp_path: Path) -> None:
    run = completed(tmp_path / "runs" / "a")
    completed(tmp_path / "more" / "b")
    feed = RunsFeed([tmp_path / "runs", run.path, tmp_path / "more"])
    assert [row.name for row in feed.poll().rows] == ["a", "b"]


def test_a_folder_that_does_not_exist_has_no_runs(tmp_path: Path) -> None:
    snapshot = RunsFeed([tmp_path / "nothing"]).poll()
    assert (snapshot.rows, snapshot.error) == ((), None)


def test_an_unreadable_run_is_a_row_with_its_reason(tmp_path: Path) -> None:
    row = row_of(corrupt(tmp_path / "run"))
    assert row.state == "unreadable"
    assert "line number 20" in (row.error or "")


def test_runs_that_the_time_does_not_reach_are_said_to_be_read(tmp_path: Path) -> None:
    for name in "abc":
        completed(tmp_path / name)
    clock = iter(float(n) for n in range(1000))
    feed = RunsFeed([tmp_path], monotonic=lambda: next(clock), budget_s=2.0)
    first = feed.poll()
    assert first.behind
    assert {row.state for row in first.rows} >= {"reading"}
    for _ in range(10):
        last = feed.poll()
    assert [row.state for row in last.rows] == ["completed"] * 3


def test_a_loss_that_is_nan_is_nan_in_the_row(tmp_path: Path) -> None:
    loss = row_of(completed(tmp_path / "run", nan={60})).loss
    assert loss is not None
    assert math.isnan(loss)
