"""A log gathered in packs, by one process or several, gives the view that its lines give one by one."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.log.shares as shares_module
from engine.log.events import Known
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.gather import Gatherer
from engine.log.pack import Pack, pack_lines
from engine.log.read import BrokenLog, LogReader
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import encode
from tests.support.long_runs import write_long_run
from tests.support.run_events import opened, picture, started, step
from tests.support.small_logs import gathered, long_log, long_logs, one_by_one, small_sizes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that logs of some lines are long ones."""
    with small_sizes():
        yield


@settings(max_examples=40, deadline=None)
@given(logs=long_logs(), most=st.sampled_from([300, 2000, 1 << 20]))
def test_a_gathered_run_is_the_same_view(logs: dict[Source, bytes], most: int) -> None:
    wanted, found = RunView(), RunView()
    with tempfile.TemporaryDirectory() as folder, small_sizes():
        for source in SOURCES:
            path = Path(folder) / source
            path.write_bytes(logs[source])
            reader = LogReader(path)
            wanted = one_by_one(wanted, source, logs[source])
            found = gathered(found, source, Gatherer(reader), most)
            # Each place is one from which the log can be read again.
            for point in reader.points:
                assert logs[source][: point.offset].count(b"\n") == point.number
                assert point.offset == 0 or logs[source][point.offset - 1 : point.offset] == b"\n"
    one, other = picture(found), picture(wanted)
    assert {n: (one[n], other[n]) for n in one if one[n] != other[n]} == {}


def test_most_of_a_long_log_comes_in_packs(tmp_path: Path, small: None) -> None:
    events = long_log(tmp_path / "log")
    gatherer, packed, read = Gatherer(LogReader(tmp_path / "log")), 0, 0
    while found := gatherer.read():
        packs = [one for one in found if isinstance(one, Pack)]
        packed += sum(one.lines for one in packs)
        read += len(found) - len(packs)
    assert packed + read == len(events)
    # The lines kept whole, a pack that they end in, and the one with what opens the session.
    assert 0 < read < 15


def test_what_opens_a_session_is_never_in_a_pack() -> None:
    lines = [encode(event, n, 1.0) for n, event in enumerate([step(1), opened(5.0), step(2)])]
    assert pack_lines([b"".join(lines)], 0) is None
    assert pack_lines([lines[0]], 0) is not None
    assert pack_lines([encode(started(), 0, 1.0)], 0) is None


DAMAGE = {
    "lost": lambda lines, at: [*lines[:at], *lines[at + 1 :]],
    "twice": lambda lines, at: [*lines[: at + 1], *lines[at:]],
    "garbage": lambda lines, at: [*lines[:at], b"hello\n", *lines[at + 1 :]],
    "blank": lambda lines, at: [*lines[:at], b"\n", *lines[at:]],
    "zeros": lambda lines, at: [*lines[:at], bytes(40) + b"\n", *lines[at:]],
    "type": lambda lines, at: [
        *lines[:at],
        lines[at].replace(b'"rows":4', b'"rows":"4"'),
        *lines[at + 1 :],
    ],
    "time": lambda lines, at: [
        *lines[:at],
        lines[at].replace(b'"t_s":', b'"t_s":-'),
        *lines[at + 1 :],
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("at", [60, 90, 197])
def test_a_fault_is_found_where_reading_each_line_finds_it(
    tmp_path: Path, damage: str, at: int, small: None
) -> None:
    path = tmp_path / "log"
    long_log(path)
    path.write_bytes(b"".join(DAMAGE[damage](path.read_bytes().splitlines(keepends=True), at)))
    with pytest.raises(BrokenLog) as wanted:
        LogReader(path).poll()
    gatherer, view = Gatherer(LogReader(path)), RunView()
    with pytest.raises(BrokenLog) as found:
        while events := gatherer.read():
            view = fold(view, "events", events)
    assert found.value.message == wanted.value.message
    assert found.value.hole == wanted.value.hole
    view = fold(view, "events", found.value.before)
    assert picture(view) == picture(fold(RunView(), "events", wanted.value.before))
    with pytest.raises(BrokenLog):
        gatherer.read()


def test_a_log_that_is_replaced_while_it_is_gathered_is_refused(
    tmp_path: Path, small: None
) -> None:
    path = tmp_path / "log"
    long_log(path)
    gatherer = Gatherer(LogReader(path))
    gatherer.read()
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.replace(path)
    with pytest.raises(BrokenLog, match="cut or replaced"):
        gathered(RunView(), "events", gatherer)


def test_a_log_that_grows_while_it_is_gathered_is_read_to_its_end(
    tmp_path: Path, small: None
) -> None:
    path = tmp_path / "log"
    events = long_log(path, 400)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:200]) + lines[200][:50])
    gatherer, view = Gatherer(LogReader(path)), RunView()
    view = fold(view, "events", gatherer.read())
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(lines[200][50:] + b"".join(lines[201:]))
    view = gathered(view, "events", gatherer)
    assert picture(view) == picture(fold(RunView(), "events", events))


def broken_helper(folder: Path, script: str) -> str:
    path = folder / "helper"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "script", ["", "exit 1", "head -c 16 >&2; echo hello, this is no answer", "head -c 16 >&2"]
)
def test_helpers_change_nothing_however_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, script: str
) -> None:
    path = tmp_path / "log"
    events = long_log(path, 1500)
    monkeypatch.setattr(
        sys, "executable", broken_helper(tmp_path, script) if script else sys.executable
    )
    view = gathered(RunView(), "events", Gatherer(LogReader(path), helpers=2))
    assert picture(view) == picture(fold(RunView(), "events", events))


def test_a_helper_does_its_share(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    events = long_log(path, 500)
    heard = []
    real = shares_module._heard
    monkeypatch.setattr(shares_module, "_heard", lambda stream: heard.append(1) or real(stream))
    shares = shares_module.Shares(path, 0, path.stat().st_size, helpers=1)
    with shares._changed:
        assert shares._changed.wait_for(lambda: len(shares._made) >= 2, timeout=30)
    packs = []
    while (taken := shares.take()) is not None:
        packs += taken.packs
    assert len(heard) >= 2
    assert sum(pack.lines for pack in packs) > len(events) - 10
    assert all(a.end <= b.begin for a, b in pairwise(packs))


# What it costs.


def test_a_long_run_is_not_opened_event_by_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 000 lines only the newest of a session, and what opens it, are looked at one by one."""
    written = write_long_run(tmp_path / "run", steps=50_000)
    read: dict[Path, int] = {}
    real = LogReader._read_lines

    def counted(self: LogReader, max_bytes: int) -> bytes:
        lines = real(self, max_bytes)
        read[self.path] = read.get(self.path, 0) + lines.count(b"\n")
        return lines

    monkeypatch.setattr(LogReader, "_read_lines", counted)
    view = Follower(RunFolder(tmp_path / "run")).read_all()
    assert len(view.steps) == view.last_step == 50_000 == written.steps
    assert sum(read.values()) < 0.18 * written.lines


def test_opening_costs_little_more_than_decoding_every_line(tmp_path: Path) -> None:
    """Against the library's own time for the same lines on the same machine, whatever else it does."""
    path = write_long_run(tmp_path / "run", steps=15_000).events
    block, decoder = path.read_bytes(), msgspec.json.Decoder(Known)

    def read() -> None:
        assert gathered(RunView(), "events", Gatherer(LogReader(path))).last_step == 15_000

    def timed(call: Any) -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    # The best of some tries: what else goes on can only make one slower.
    ratios = [timed(read) / timed(lambda: decoder.decode_lines(block)) for _ in range(3)]
    assert min(ratios) < 2.7
