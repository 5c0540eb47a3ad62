"""The three logs are merged by time as they would be if they were read whole, however they are read."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.log import in_order
from engine.log.events import LogOpened
from engine.log.folder import RunFolder, create_run
from engine.log.in_order import InOrder, Line
from engine.log.read import BrokenLog, LogReader
from engine.log.view import SOURCES, Source
from tests.support.run_folders import completed
from tests.support.small_logs import long_logs


def whole(run: RunFolder) -> list[tuple[float, Source, int]]:
    """Every line, merged by its wall time after each log was read to its end."""

    def timed(source: Source) -> Iterator[tuple[float, Source, int]]:
        opened_s = 0.0
        for event in LogReader(getattr(run, source)).poll():
            opened_s = event.unix_s if isinstance(event, LogOpened) else opened_s
            yield opened_s + event.t_s, source, event.seq

    return list(heapq.merge(*map(timed, SOURCES), key=itemgetter(0)))


def merged(run: RunFolder) -> list[Line]:
    return list(InOrder(run))


def compare_with_whole(logs: dict[Source, bytes], block: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_order, "BLOCK_BYTES", block)
        run = create_run(Path(folder) / "run", "", {})
        for source, data in logs.items():
            getattr(run, source).write_bytes(data)
        found, expected = merged(run), whole(run)
        assert [(line.unix_s, line.source, line.event.seq) for line in found] == expected
        assert [line.order_s for line in found] == sorted(line.order_s for line in found)


drawn = given(long_logs(), st.sampled_from([100, 700, 5000]))


@settings(max_examples=40, deadline=None)
@drawn
def test_lines_come_in_order_of_time_however_they_are_read(
    logs: dict[Source, bytes], block: int
) -> None:
    """With clocks that are set back, and equal times in two logs."""
    compare_with_whole(logs, block)


@pytest.mark.soak
@settings(max_examples=150, deadline=None)
@drawn
def test_lines_of_many_logs_come_in_order_of_time(logs: dict[Source, bytes], block: int) -> None:
    compare_with_whole(logs, block)


def test_a_broken_log_ends_at_its_fault_and_the_others_go_on(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join([*lines[:30], b"garbage\n", *lines[31:]]))
    logs = InOrder(run)
    found = list(logs)
    ends = {line.source: line.event.seq for line in found}
    assert ends["events"] == 29
    assert ends["watch"] == run.watch.read_bytes().count(b"\n") - 1
    with pytest.raises(BrokenLog) as broken:
        LogReader(run.events).poll()
    assert str(logs.fault) == str(broken.value)
