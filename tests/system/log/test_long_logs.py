"""A long log gives the view that its lines give one by one."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.log.read as read_module
from engine.errors import RunLogError
from engine.log.events import Event, Known, StepDone
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import BrokenLog, LogReader, decode_line
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import encode
from tests.support.long_runs import write_long_run
from tests.support.perf import ratio_within
from tests.support.run_events import KINDS, example_of, fold_events, picture
from tests.support.small_logs import followed, long_log, long_logs, one_by_one, small_sizes

OF_THE_NEWEST = ("lines", "recent_steps")
"""What a view has of the newest lines alone; in drawn logs these are fewer than the newest steps."""


@pytest.fixture
def small() -> Iterator[None]:
    with small_sizes():
        yield


def drawn(view: RunView) -> dict[str, str]:
    return {name: text for name, text in picture(view).items() if name not in OF_THE_NEWEST}


def lines_of(events: list[Event]) -> bytes:
    return b"".join(encode(event, n, 1.0) for n, event in enumerate(events))


# The same view.


@settings(max_examples=25, deadline=None)
@given(logs=long_logs(), most=st.sampled_from([300, 2000, 1 << 20]))
def test_a_run_read_in_blocks_is_the_same_view(logs: dict[Source, bytes], most: int) -> None:
    wanted, found = RunView(), RunView()
    with tempfile.TemporaryDirectory() as folder, small_sizes():
        for source in SOURCES:
            path = Path(folder) / source
            path.write_bytes(logs[source])
            reader = LogReader(path)
            wanted = one_by_one(wanted, source, logs[source])
            found = followed(found, source, reader, most)
            # Each place is one from which the log can be read again.
            for point in reader.points:
                assert logs[source][: point.offset].count(b"\n") == point.number
                assert point.offset == 0 or logs[source][point.offset - 1 : point.offset] == b"\n"
    one, other = drawn(found), drawn(wanted)
    assert {n: (one[n], other[n]) for n in one if one[n] != other[n]} == {}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_decoded_among_others_as_it_is_decoded_alone(kind: type[Event]) -> None:
    lines = lines_of([example_of(kind) for _ in range(8)])
    slow = [decode_line(line, "") for line in lines.splitlines()]
    assert LogReader(Path())._decode_at_once(lines) == slow
    rows = LogReader(Path())._decode_at_once(lines, read_module._numbers)
    assert rows is not None
    for one, other in zip(rows, slow, strict=True):
        if type(other) is StepDone:
            assert all(getattr(one, n) == getattr(other, n) for n in one.__struct_fields__)
        else:
            assert one == other


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 3.0, "nf": {"loss": "nan"}},
        {"loss": None, "nf": {"loss": "huge"}},
        {"rows": None, "nf": {"rows": "nan"}},
        {"nf": {"phases/loss": "nan"}},
        {"step": "7"},
        {"position": 1.5},
    ],
)
def test_a_step_that_breaks_its_form_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "log"
    long_log(path, 40)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[7] = json.dumps(json.loads(lines[7]) | change).encode() + b"\n"
    assert LogReader(path)._decode_at_once(lines[7]) is None
    path.write_bytes(b"".join(lines))
    with pytest.raises(BrokenLog, match="breaks its form") as caught:
        LogReader(path).poll()
    assert [event.seq for event in caught.value.before] == list(range(7))
    with pytest.raises(RunLogError):
        decode_line(lines[7], "here")


def test_one_line_of_another_version_does_not_make_a_long_stretch_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    long_log(path, 3999)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2000] = lines[2000].replace(b'"kind":"step"', b'"kind":"dream"')
    path.write_bytes(b"".join(lines))
    looked: list[bytes] = []
    real = read_module.decode_line
    monkeypatch.setattr(
        read_module, "decode_line", lambda line, where: looked.append(line) or real(line, where)
    )
    most = 2 * read_module.PART_BYTES / min(map(len, lines[1:]))
    assert len(LogReader(path).poll()) == 4000
    assert 0 < len(looked) < most


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
    run = RunFolder(tmp_path)
    path.rename(run.events)
    follower = Follower(run)
    for _ in range(2):
        with pytest.raises(BrokenLog) as found:
            follower.read_all()
        assert found.value.message.replace("events.jsonl", "log") == wanted.value.message
        assert found.value.hole == wanted.value.hole
    assert drawn(follower.view) == drawn(fold_events(RunView(), "events", wanted.value.before))


def test_a_log_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, small: None) -> None:
    path = tmp_path / "log"
    long_log(path)
    reader = LogReader(path)
    reader.poll(2000)
    assert reader.poll(2000)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.replace(path)
    for _ in range(2):
        with pytest.raises(BrokenLog, match="cut or replaced"):
            reader.poll(2000)


def test_a_log_that_grows_while_it_is_read_is_read_to_its_end(tmp_path: Path, small: None) -> None:
    run = RunFolder(tmp_path)
    events = long_log(run.events, 400)
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join(lines[:200]) + lines[200][:50])
    follower = Follower(run)
    follower.poll()
    with run.events.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(lines[200][50:] + b"".join(lines[201:]))
    assert picture(follower.read_all()) == picture(fold_events(RunView(), "events", events))


# What it costs.


@pytest.mark.perf
def test_opening_costs_little_more_than_decoding_every_line(tmp_path: Path) -> None:
    """Against the library's own time for the same lines on the same machine, whatever else it does."""
    path = write_long_run(tmp_path / "run", steps=60_000, resume=False).events
    block, decoder = path.read_bytes(), msgspec.json.Decoder(Known)

    def read() -> None:
        assert followed(RunView(), "events", LogReader(path)).last_step == 60_000

    def timed(call: Any) -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    ratio_within(lambda: timed(read) / timed(lambda: decoder.decode_lines(block)), 2.7, tries=3)
