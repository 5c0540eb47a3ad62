"""A replay shows what a view of the lines up to that time shows, at any time, after reading little."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench.past_views as replay_module
from engine.log import in_order
from engine.log.events import AnyEvent, Event, LogOpened
from engine.log.folder import RunFolder, create_run
from engine.log.table import batches_of
from engine.log.text import line_text
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import encode
from tests.support.run_events import fold_events, picture, runs
from tests.support.run_folders import START_UNIX_S, completed, killed, resumed
from workbench.feed import RunFeed
from workbench.past_views import ReplayFeed
from workbench.tui.screens.replay import clock


def read(run: RunFolder) -> ReplayFeed:
    feed = ReplayFeed(run)
    while not feed.read():
        pass
    return feed


def plain(logs: dict[Source, list[AnyEvent]], unix_s: float) -> RunView:
    """The view of every line that is not later than a time, read in the plain way."""
    view = RunView()
    for source in SOURCES:
        opened_s, latest_s, kept = 0.0, float("-inf"), []
        for event in logs[source]:
            opened_s = event.unix_s if isinstance(event, LogOpened) else opened_s
            latest_s = max(latest_s, opened_s + event.t_s)
            if latest_s <= unix_s:
                kept.append(event)
        view = fold_events(view, source, kept)
    return view


@settings(max_examples=60, deadline=None)
@given(runs(), st.lists(st.floats(-5.0, 40_000.0), min_size=1, max_size=6), st.integers(1, 5))
def test_any_time_is_the_view_of_the_lines_up_to_it(
    logs: dict[Source, list[AnyEvent]], times: list[float], stride: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "STRIDE", stride)
        patch.setattr(in_order, "BLOCK_BYTES", 700)
        patch.setattr(replay_module, "PAGE_BYTES", 90)
        run = create_run(Path(folder) / "run", "", {})
        for source in SOURCES:
            lines = [encode(cast(Event, e), e.seq, e.t_s) for e in logs[source]]
            getattr(run, source).write_bytes(b"".join(lines))
        feed = read(run)
        of_lines = [e.t_s for events in logs.values() for e in events]
        for unix_s in [*times, 10_000.0 + max(of_lines, default=0.0), 10_005.5]:
            expected = replace(plain(logs, unix_s), lines=())
            assert picture(replace(feed.at(unix_s).view, lines=())) == picture(expected)


def test_the_end_of_a_replay_is_the_run(tmp_path: Path) -> None:
    run = resumed(tmp_path / "run")
    feed, live = read(run), RunFeed(run).read_all()
    last = feed.at(feed.last_unix_s)
    assert (last.state, last.view.last_step) == (live.state, 60)
    assert picture(replace(last.view, lines=())) == picture(replace(live.view, lines=()))
    assert len(last.log) == len(live.log)


def test_what_came_later_is_not_known(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    feed = read(run)
    early = feed.at(START_UNIX_S + 5.2)
    assert (early.view.last_step, early.state, early.view.exit) == (10, "running", None)
    assert early.view.checkpoints == ()
    assert early.status.startswith("RUNNING")
    assert "step 10 " in line_text(early.log.lines(0, 99)[-1])
    assert feed.at(START_UNIX_S - 1).view.clocks == {}


def test_a_scrub_reads_thousands_of_lines_of_a_long_log_and_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = read(completed(tmp_path / "run", total=20_000))
    folded: list[int] = []
    real = batches_of
    monkeypatch.setattr(
        replay_module, "batches_of", lambda events: folded.append(len(events)) or real(events)
    )
    for share in (0.2, 0.5, 0.9):
        folded.clear()
        span_s = feed.last_unix_s - feed.first_unix_s
        snapshot = feed.at(feed.first_unix_s + share * span_s)
        assert abs(snapshot.view.last_step - share * 20_000) < 10
        assert sum(folded) <= replay_module.STRIDE


def test_a_broken_log_is_replayed_up_to_its_fault(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join([*lines[:30], b"garbage\n", *lines[31:]]))
    feed = read(run)
    assert 0 < feed.at(feed.last_unix_s).view.last_step < 60


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00:00"), (4323.4, "1:12:03"), (-2.0, "0:00:00")]
)
def test_times_of_a_replay_are_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text
