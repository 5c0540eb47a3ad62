"""The logs of a run's further hosts: read beside the run's own, each with its own readings, and a host that is lost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.log.beats import Beat, waited_for
from engine.log.events import Event, GpuSample, HostSample, Note
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.gpus import gpu_lines, rank_lines
from engine.log.read import Liveness
from engine.log.text import line_text
from engine.log.view import RunView, Source
from engine.watch.hosts import Place
from engine.watch.verdict_line import verdict_of
from tests.support.run_events import (
    exited,
    finished,
    fold_events,
    numbered,
    opened,
    started,
    step,
    write_log,
)

NOBODY = Liveness(trainer=False, supervisor=False)
LOGS: dict[Source, list[Event]] = {
    "events": [
        opened(100.0, host="alder"),
        started(),
        step(1),
        finished("failed", "a peer is gone"),
    ],
    "device": [opened(99.0, host="alder"), HostSample(load1=1.0)],
    "watch": [opened(99.0, host="alder")],
    "rank 1": [opened(100.0, host="birch")],
    "device birch": [opened(99.0, host="birch"), HostSample(load1=7.0)],
    "watch birch": [opened(99.0, host="birch"), Note(level="info", text="a note")],
}


def orders() -> Iterator[tuple[Source, ...]]:
    return itertools.islice(itertools.permutations(LOGS), 0, None, 37)


@pytest.mark.parametrize("order", [*orders()])
def test_each_host_has_its_own_readings_in_whatever_order_the_logs_are_read(
    order: tuple[Source, ...],
) -> None:
    view = RunView()
    for source in order:
        view = fold_events(view, source, numbered(LOGS[source]))
    assert [*view.hosts_now] == ["birch"]
    assert view.host is not None and view.host.load1 == 1.0
    other = view.hosts_now["birch"].host
    assert other is not None and other.load1 == 7.0
    assert view.rank_hosts == {0: "alder", 1: "birch"}
    assert view.state(NOBODY) == "failed"
    (note,) = (line_text(line) for line in view.lines if isinstance(line.event, Note))
    assert note.endswith(" birch: info: a note")


@pytest.mark.parametrize("source", ["watch", "watch birch"])
def test_a_host_that_is_lost_is_how_the_run_ended_whichever_host_recorded_it(
    source: Source,
) -> None:
    logs = LOGS | {source: [*LOGS[source], exited("HOST_LOST")]}
    if source != "watch":
        # The first host is gone: neither its rank nor its supervisor has recorded an end.
        logs["events"] = logs["events"][:-1]
    view = RunView()
    for one, events in logs.items():
        view = fold_events(view, one, numbered(events))
    assert view.state(NOBODY) == "host_lost" and view.finished is None
    assert verdict_of(view, "host_lost").text == exited("HOST_LOST").cause


def test_a_host_that_was_lost_in_an_earlier_session_is_none_of_this_one() -> None:
    view = fold_events(
        RunView(), "watch birch", numbered([opened(90.0, host="birch"), exited("HOST_LOST")])
    )
    events = [opened(90.0), started(), step(1), opened(300.0), started(), step(1)]
    view = fold_events(view, "events", numbered(events))
    view = fold_events(view, "watch", numbered([opened(80.0), opened(299.0)]))
    assert view.hosts_now == {} and view.exit is None


def test_the_logs_of_further_hosts_are_found_by_their_names(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("watch-birch.jsonl", "device-birch.jsonl", "watch-.jsonl", "watch-a b.jsonl"):
        write_log(tmp_path / name, [opened(1.0, host="birch")])
    assert [*run.logs()] == ["events", "device", "watch", "device birch", "watch birch"]
    assert RunFolder(tmp_path, "birch").watch == run.logs()["watch birch"]
    assert [*Follower(run).read_all().hosts_now] == ["birch"]


def test_ranks_are_shown_with_their_hosts_and_the_slowest_first() -> None:
    view = RunView()
    for one, events in LOGS.items():
        view = fold_events(view, one, numbered(events))
    gpus = {"device": 0.0, "device birch": 90.0}
    for source, busy in gpus.items():
        sample = GpuSample(index=0, gpu_util_pct=busy)
        view = fold_events(view, source, numbered([*LOGS[source], sample]))
    beats = (Beat(rank=0, pid=1, step=5, entered=9), Beat(rank=1, pid=1, step=5, entered=8))
    view = dataclasses.replace(view, beats=beats)
    assert [line.split() for line in rank_lines(view)[1:]] == [
        ["1", "birch", "5", "1", "wait", "for", "it"],
        ["0", "alder", "5", "waits", "for", "rank", "1"],
    ]
    assert [line.split()[:2] for line in gpu_lines(view, 60)[1:3]] == [
        ["birch", "0"],
        ["alder", "0"],
    ]
    assert waited_for(beats, view.rank_hosts) == (
        "rank 1 (birch, process 1) has not done step 6; 1 of 2 wait for it"
    )
    many = tuple(Beat(rank=rank, pid=1, step=rank) for rank in range(40))
    lines = rank_lines(dataclasses.replace(view, beats=many))
    assert len(lines) == 18 and "24 more" in lines[-1] and lines[1].startswith("0 ")


def test_a_place_is_read_as_it_is_written_and_has_an_equal_share_of_the_ranks() -> None:
    place = Place.parse("1/2@node0:29400")
    assert str(place) == "1/2@node0:29400" and place.ranks(16) == range(8, 16)
    for wrong in ("2/2@node0:1", "1@node0:1", "0/2@node0", "0/2@"):
        with pytest.raises(UsageError):
            Place.parse(wrong)
    for world in (1, 3):
        with pytest.raises(UsageError):
            place.ranks(world)
