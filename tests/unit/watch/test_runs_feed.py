"""Rows of many runs: found wherever they were started, read once when they are over."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.notes import NAME, change_notes
from engine.watch import runs_feed
from engine.watch.runs_feed import RunRow, RunsFeed
from tests.support.judged import alert_end, alert_event
from tests.support.run_folders import (
    START_UNIX_S,
    Scene,
    completed,
    corrupt,
    killed,
    loss_at,
    running,
)

UNHURRIED_S = 60.0
"""Reads all there is on a busy machine too."""


def row_of(run: RunFolder) -> RunRow:
    (row,) = RunsFeed([run.path], budget_s=UNHURRIED_S).poll().rows
    return row


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
    snapshot = RunsFeed([tmp_path], budget_s=UNHURRIED_S).poll()
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
    assert rows["a"].began_unix_s == pytest.approx(START_UNIX_S)


def test_an_ended_run_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    completed(tmp_path / "ended")
    scene = running(tmp_path / "going", done=3)
    feed = RunsFeed([tmp_path], budget_s=UNHURRIED_S)
    feed.poll()
    reads.clear()
    feed.poll()
    scene.close()
    assert set(reads) == {"going"}


def test_an_ended_run_whose_log_grows_is_read_again(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    feed = RunsFeed([tmp_path], budget_s=UNHURRIED_S)
    assert feed.poll().rows[0].state == "killed"
    scene = Scene.__new__(Scene)
    scene.run, scene.now_s, scene.start_unix_s, scene.writers = run, 0.0, START_UNIX_S + 900, {}
    scene.open().begin(60, resumed_from=20).steps(21, 40)
    row = feed.poll().rows[0]
    scene.close()
    assert (row.state, row.last_step) == ("running", 40)


def test_a_run_that_is_not_accepted_has_no_row_and_is_not_read(
    tmp_path: Path, reads: list[str]
) -> None:
    completed(tmp_path / "a")
    completed(tmp_path / "b")
    feed = RunsFeed([tmp_path], budget_s=UNHURRIED_S, accepts=lambda path: path.name == "a")
    assert [row.name for row in feed.poll().rows] == ["a"]
    assert set(reads) == {"a"}


def test_a_run_named_twice_is_one_row(tmp_path: Path) -> None:
    run = completed(tmp_path / "runs" / "a")
    completed(tmp_path / "more" / "b")
    feed = RunsFeed([tmp_path / "runs", run.path, tmp_path / "more"], budget_s=UNHURRIED_S)
    assert [row.name for row in feed.poll().rows] == ["a", "b"]


def test_a_folder_that_does_not_exist_has_no_runs(tmp_path: Path) -> None:
    snapshot = RunsFeed([tmp_path / "nothing"], budget_s=UNHURRIED_S).poll()
    assert (snapshot.rows, snapshot.error) == ((), None)


def test_an_unreadable_run_is_a_row_with_its_reason(tmp_path: Path) -> None:
    row = row_of(corrupt(tmp_path / "run"))
    assert row.state == "unreadable"
    assert "line number 20" in (row.error or "")


def test_runs_that_the_time_does_not_reach_are_said_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        completed(tmp_path / name)
    clock = iter(float(n) for n in range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    feed = RunsFeed([tmp_path], budget_s=2.0)
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


def test_runs_one_level_below_are_found_with_their_folder(tmp_path: Path) -> None:
    completed(tmp_path / "direct")
    completed(tmp_path / "sweep" / "lr-1")
    completed(tmp_path / "sweep" / "deeper" / "lr-2")
    completed(tmp_path / ".hidden" / "lr-3")
    names = {row.name for row in RunsFeed([tmp_path], budget_s=UNHURRIED_S).poll().rows}
    assert names == {"direct", "sweep/lr-1"}


def test_a_run_inside_a_run_is_no_row(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    completed(run.path / "inner")
    assert [row.name for row in RunsFeed([tmp_path], budget_s=UNHURRIED_S).poll().rows] == ["run"]


def test_alerts_that_stand_are_in_the_row_worst_first(tmp_path: Path) -> None:
    scene = running(tmp_path / "run")
    for name, severity in (("data_wait", "warning"), ("not_finite", "error"), ("over", "error")):
        scene.watch(alert_event(id=name, level=severity, text=name))
    scene.watch(alert_end(id="over", active_s=1.0))
    row = row_of(scene.run)
    scene.close()
    assert row.alerts == (("error", "not_finite"), ("warning", "data_wait"))
    assert row.alive
    assert row.left_s == pytest.approx(15.0)


def test_an_ended_run_that_is_resumed_is_running_at_the_next_poll(tmp_path: Path) -> None:
    killed(tmp_path / "c")
    feed = RunsFeed([tmp_path], budget_s=UNHURRIED_S)
    feed.poll()
    scene = Scene.__new__(Scene)
    scene.run, scene.now_s, scene.start_unix_s = RunFolder(tmp_path / "c"), 0.0, START_UNIX_S + 900
    scene.writers = {}
    scene.open().begin(60, resumed_from=20).steps(21, 40)
    states = [row.state for row in feed.poll().rows]
    scene.close()
    assert states == ["running"]


def test_a_run_that_is_deleted_is_no_row_any_more(tmp_path: Path) -> None:
    for name in "ab":
        completed(tmp_path / name)
    feed = RunsFeed([tmp_path], budget_s=UNHURRIED_S)
    feed.poll()
    shutil.rmtree(tmp_path / "a")
    assert [row.name for row in feed.poll().rows] == ["b"]


def test_notes_of_an_ended_run_are_seen_at_the_next_poll_without_reading_it(
    tmp_path: Path, reads: list[str]
) -> None:
    run = completed(tmp_path / "run")
    feed = RunsFeed([tmp_path], budget_s=UNHURRIED_S)
    feed.poll()
    reads.clear()
    change_notes(run, add=["good"], note="keep")
    row = feed.poll().rows[0]
    assert (row.tags, row.note, reads) == (("good",), "keep", [])


def test_broken_notes_are_told_and_hide_no_run(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    (run.path / NAME).write_text("{")
    row = row_of(run)
    assert row.state == "completed"
    assert "expected JSON" in row.note


def test_a_curve_has_a_gap_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    curve = row_of(completed(tmp_path / "run", nan={60})).curve
    assert len(curve) == runs_feed.CURVE_POINTS
    assert [place for place, value in enumerate(curve) if value is None] == [len(curve) - 1]
    known = [value for value in curve if value is not None]
    assert known == sorted(known, reverse=True)


def test_a_run_says_why_it_ended(tmp_path: Path) -> None:
    assert "SIGKILL" in row_of(killed(tmp_path / "a")).verdict
    assert row_of(completed(tmp_path / "b")).level == "HEALTHY"
    assert row_of(corrupt(tmp_path / "c")).verdict.startswith("expected line number 20")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", ""),
        (None, ""),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("/models/big-q4_k_m.gguf", "big-q4_k_m"),
        ("/models/big/model.safetensors", "big"),
        ("runs/first/student", "first"),
        ("/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc", "Qwen2.5-0.5B"),
    ],
)
def test_a_model_is_named_without_its_folders(path: object, name: str) -> None:
    assert runs_feed.model_name(path) == name
