"""The columns of a log give the view that its lines give one by one; those beside it are believed only where the
log still has these lines.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.log.columns as columns_module
import engine.log.read as read_module
from engine.errors import RunLogError
from engine.log.columns import (
    BatchReader,
    Segment,
    SegmentFiles,
    SegmentWriter,
    Stretch,
    read_stretch,
    segment_of,
)
from engine.log.events import Event, Known, StepDone
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.read import BrokenLog, LogReader, decode_line
from engine.log.table import ABSENT
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import LogWriter, encode
from engine.spec import LossSection, RunSpec
from engine.spec.sections import StudentSection
from engine.watch.observe import RunObserver
from engine.watch.supervisor import _Supervisor
from tests.support.faults import HERE, compiled, environment
from tests.support.long_runs import write_long_run
from tests.support.perf import ratio_within
from tests.support.run_events import KINDS, example_of, fold_events, opened, picture, started, step
from tests.support.small_logs import followed, long_log, long_logs, one_by_one, small_sizes


@pytest.fixture
def small() -> Iterator[None]:
    with small_sizes():
        yield


def shown(path: Path, source: Source = "events", *, files: bool, keep: bool = False) -> object:
    """All that is shown of a log, or what is wrong with it and what is shown in front of that."""
    batches, view = BatchReader(LogReader(path), files=files, keep=keep), RunView()
    try:
        while found := batches.poll():
            view = fold(view, source, found)
    except BrokenLog as broken:
        view = fold_events(view, source, broken.before)
        return broken.message, broken.hole, picture(view)
    return picture(view)


def kept(path: Path) -> SegmentFiles:
    """The segments of a log in their files."""
    shown(path, files=False, keep=True)
    files = SegmentFiles(path)
    assert believed(files), "the log is too short for this test"
    return files


def numbers(files: SegmentFiles) -> set[int]:
    """The chunks of which there are files, believed or not."""
    return {int(path.stem.partition("-")[2]) for path in files.folder.glob("*.columns")}


def believed(files: SegmentFiles) -> set[int]:
    return {number for number in numbers(files) if files.load(number) is not None}


def chunks(path: Path) -> set[int]:
    """Those that have a segment: the first opens the session, and the last is not whole."""
    return set(range(1, path.stat().st_size // columns_module.CHUNK_BYTES))


def segment_at(files: SegmentFiles, number: int) -> Segment:
    found = files.load(number)
    assert found is not None
    return found


def lines_of(events: list[Event]) -> bytes:
    return b"".join(encode(event, n, 1.0) for n, event in enumerate(events))


def overwrite(path: Path, at: int, data: bytes) -> None:
    """In place: the same file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def cut(path: Path, end: int) -> None:
    os.truncate(path, end)


# The same view.


@settings(max_examples=25, deadline=None)
@given(logs=long_logs(), most=st.sampled_from([300, 2000, 1 << 20]))
def test_a_run_read_as_columns_is_the_same_view(logs: dict[Source, bytes], most: int) -> None:
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
    one, other = picture(found), picture(wanted)
    assert {n: (one[n], other[n]) for n in one if one[n] != other[n]} == {}


def test_most_of_a_long_log_comes_as_columns_and_the_newest_lines_whole(
    tmp_path: Path, small: None
) -> None:
    events = long_log(tmp_path / "log")
    reader = LogReader(tmp_path / "log")
    batches, rows, read = BatchReader(reader), 0, 0
    while found := batches.poll(1 << 20):
        rows += sum(len(one.tables["step"]["t_s"]) for one in found if one.tables)
        # Of a segment the lines that are rows are not shown.
        read += sum(len(one.shown) for one in found)
    assert rows + 2 == len(events) == reader.lines_read
    # The first chunk, which opens the session, the last whole one, and what is behind it.
    assert 0 < read < 30


def test_what_opens_a_session_is_never_in_a_segment() -> None:
    def of(*events: Event) -> Segment | None:
        return segment_of(Stretch((0, 0), 0, lines_of(list(events))))

    assert of(step(1), opened(5.0), step(2)) is None
    assert of(started()) is None
    assert of(step(1)) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_and_absent_ones_are_themselves(value: float) -> None:
    events: list[Event] = [step(n, loss=value, grad_norm=value, kd=None) for n in range(1, 9)]
    segment = segment_of(Stretch((0, 0), 0, lines_of(events)))
    assert segment is not None
    columns = segment.batch.tables["step"]
    for name in ("loss", "grad_norm"):
        assert columns[name].tobytes() == np.full(8, value).tobytes()
    assert columns["kd"].tobytes() == np.full(8, ABSENT).tobytes()
    steps = fold(RunView(), "events", [segment.batch]).steps
    assert (repr(steps.values("loss")), steps.values("kd")) == (repr([value] * 8), [None] * 8)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_decoded_among_others_as_it_is_decoded_alone(kind: type[Event]) -> None:
    lines = lines_of([example_of(kind) for _ in range(8)])
    slow = [decode_line(line, "") for line in lines.splitlines()]
    assert LogReader(Path())._decode_at_once(lines) == slow
    rows = LogReader(Path(), decoder=columns_module._decoder)._decode_at_once(lines)
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
def test_a_step_that_breaks_its_form_is_in_no_segment_and_is_named(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "log"
    long_log(path, 40)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[7] = json.dumps(json.loads(lines[7]) | change).encode() + b"\n"
    assert segment_of(Stretch((0, 0), 0, b"".join(lines[2:]))) is None
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
    for module in (read_module, columns_module):
        monkeypatch.setattr(
            module, "decode_line", lambda line, where: looked.append(line) or real(line, where)
        )
    most = 2 * read_module.PART_BYTES / min(map(len, lines[1:]))
    assert len(LogReader(path).poll()) == 4000
    assert 0 < len(looked) < most
    looked.clear()
    segment = segment_of(Stretch((0, 0), 0, b"".join(lines[2:])))
    assert segment is not None and segment.lines == 3998
    assert sum(len(columns["t_s"]) for columns in segment.batch.tables.values()) == 3997
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
    assert picture(follower.view) == picture(fold_events(RunView(), "events", wanted.value.before))


def test_a_log_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, small: None) -> None:
    path = tmp_path / "log"
    long_log(path)
    reader = LogReader(path)
    batches = BatchReader(reader)
    batches.poll(2000)
    assert batches.poll(2000) and batches._ahead
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.replace(path)
    for _ in range(2):
        with pytest.raises(BrokenLog, match="cut or replaced"):
            batches.poll(2000)


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


# The same view, whatever the log went through.


def line_ends(data: bytes) -> list[int]:
    return [at + 1 for at, byte in enumerate(data) if byte == 10]


@settings(max_examples=12, deadline=None)
@given(logs=long_logs(), later=long_logs(), data=st.data())
def test_with_the_files_and_without_them_the_same_is_shown(
    logs: dict[Source, bytes], later: dict[Source, bytes], data: st.DataObject
) -> None:
    """Of a log with NaN, resumes, set clocks and a torn end; of one that went on; of one that was cut at any
    line and went on otherwise, in the same file or in another; of one with a byte changed in a copy."""
    with tempfile.TemporaryDirectory() as folder, small_sizes():
        for source in SOURCES:
            path = Path(folder) / f"{source}.jsonl"
            path.write_bytes(logs[source])
            first = shown(path, source, files=False, keep=True)
            assert shown(path, source, files=True) == first
            wanted = one_by_one(RunView(), source, logs[source])
            assert first == picture(wanted)
            ends = [0, *line_ends(logs[source])]
            change = data.draw(st.sampled_from(["goes on", "cut", "replaced", "flipped"]))
            if change == "flipped" and logs[source]:
                at = data.draw(st.integers(0, len(logs[source]) - 1))
                flipped = bytes([logs[source][at] ^ 1])
                other = path.with_suffix(".new")
                other.write_bytes(logs[source][:at] + flipped + logs[source][at + 1 :])
                other.replace(path)
            else:
                end = ends[-1] if change == "goes on" else data.draw(st.sampled_from(ends))
                more = renumbered(later[source], logs[source][:end].count(b"\n"))
                if change == "replaced":
                    other = path.with_suffix(".new")
                    other.write_bytes(logs[source][:end] + more)
                    other.replace(path)
                else:
                    cut(path, end)
                    with path.open("ab") as file:
                        file.write(more)
            now = shown(path, source, files=False)
            assert shown(path, source, files=True) == now
            # And when the files are written anew.
            assert shown(path, source, files=True, keep=True) == now
            assert shown(path, source, files=True) == now


def renumbered(data: bytes, first: int) -> bytes:
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    return b"".join(
        line.replace(b'"seq":%d,' % number, b'"seq":%d,' % (first + number), 1)
        for number, line in enumerate(lines)
    )


def test_most_of_a_log_comes_out_of_its_files(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 400)
    files = kept(path)
    assert believed(files) == numbers(files) == chunks(path)
    made: list[int] = []
    real = columns_module.read_stretch
    monkeypatch.setattr(
        columns_module,
        "read_stretch",
        lambda path, number: made.append(number) or real(path, number),
    )
    shown(path, files=True)
    # The first opens the session, the last is not whole.
    assert made == [0, path.stat().st_size // 1500]
    shown(path, files=False)
    assert len(made) > len(numbers(files))


# What is not believed.


def in_its_place(path: Path, data: bytes) -> None:
    """Another file of the same name."""
    other = path.with_suffix(".new")
    other.write_bytes(data)
    other.replace(path)


def other_lines(path: Path, count: int) -> bytes:
    events: list[Event] = [opened(1.0), *(step(n, loss=5.0) for n in range(1, count))]
    return b"".join(encode(event, n, n / 7) for n, event in enumerate(events))


Planted = Callable[[Path, SegmentFiles, pytest.MonkeyPatch], None]


def middle(files: SegmentFiles, number: int = 3) -> int:
    """A digit in the middle of a segment, outside of what is compared in the same file."""
    segment = segment_at(files, number)
    data = files.log.read_bytes()
    at = data.index(b'"loss":', segment.begin) + len(b'"loss":')
    assert at < segment.end - 64 and chr(data[at]).isdigit()
    return at


def flip_in_a_copy(path: Path, files: SegmentFiles, _: pytest.MonkeyPatch) -> None:
    data, at = bytearray(path.read_bytes()), middle(files)
    data[at] ^= 1
    in_its_place(path, bytes(data))


def zeros_after_a_restart(path: Path, files: SegmentFiles, patch: pytest.MonkeyPatch) -> None:
    overwrite(path, middle(files), bytes(40))
    patch.setattr(columns_module, "read_boot_id", lambda: "another boot")


def no_boot_id(path: Path, files: SegmentFiles, patch: pytest.MonkeyPatch) -> None:
    """Columns that were made, and are looked at, where nobody knows whether the machine was restarted."""
    patch.setattr(columns_module, "read_boot_id", lambda: columns_module.UNKNOWN)
    shutil.rmtree(files.folder)
    overwrite(path, middle(kept(path)), b"9")


def cut_and_gone_on(path: Path, files: SegmentFiles, _: pytest.MonkeyPatch) -> None:
    cut(path, 0)
    overwrite(path, 0, other_lines(path, 300))


def changed_where_it_is_compared(path: Path, files: SegmentFiles, _: pytest.MonkeyPatch) -> None:
    overwrite(path, segment_at(files, 3).end - 20, b"9")


LOGS: dict[str, Planted] = {
    "cut": lambda path, files, _: cut(path, 2000),
    "cut and gone on": cut_and_gone_on,
    "changed where it is compared": changed_where_it_is_compared,
    "a shorter one in its place": lambda path, files, _: in_its_place(path, other_lines(path, 20)),
    "a longer one in its place": lambda path, files, _: in_its_place(path, other_lines(path, 600)),
    "a copy with another digit": flip_in_a_copy,
    "zeros after a restart": zeros_after_a_restart,
    "a machine without a boot id": no_boot_id,
    "gone": lambda path, files, _: path.unlink(),
}


@pytest.mark.parametrize("planted", LOGS)
def test_a_log_that_is_not_what_it_was_is_read_by_its_lines(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    files = kept(path)
    assert 3 in believed(files)
    LOGS[planted](path, files, monkeypatch)
    assert 3 not in believed(SegmentFiles(path))
    assert shown(path, files=True) == shown(path, files=False)


def another_version(file: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(columns_module, "VERSION", columns_module.VERSION + 1)


def another_field(file: Path, patch: pytest.MonkeyPatch) -> None:
    """As one has been written by a version that kept less."""
    real = columns_module.fields_of
    patch.setattr(columns_module, "fields_of", lambda table: [*real(table), "new"])


FILES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    **{
        f"torn at {share:.0%}": lambda file, _, share=share: cut(
            file, int(share * file.stat().st_size)
        )
        for share in (0.0, 0.001, 0.01, 0.5, 0.999)
    },
    "longer": lambda file, _: file.write_bytes(file.read_bytes() + b"x"),
    "another byte": lambda file, _: overwrite(file, file.stat().st_size // 2, b"\x7f\x80"),
    "zeros": lambda file, _: overwrite(file, 300, bytes(64)),
    "another magic": lambda file, _: overwrite(file, 0, b"X"),
    "another version": another_version,
    "another field": another_field,
    "a folder": lambda file, _: (file.unlink(), file.mkdir()),
    "of another chunk": lambda file, _: shutil.copy(file.with_name("events-000002.columns"), file),
}


@pytest.mark.parametrize("planted", FILES)
def test_a_file_that_is_not_whole_or_not_of_this_layout_counts_for_nothing(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    file = kept(path).path(3)
    wanted = shown(path, files=False)
    FILES[planted](file, monkeypatch)
    if planted != "of another chunk":  # which is true, and not what is looked for
        assert SegmentFiles(path).load(3) is None
    assert shown(path, files=True) == wanted
    if planted != "a folder":
        assert shown(path, files=True, keep=True) == wanted
        chunk = SegmentFiles(path).load(3)
        assert chunk is not None or planted in ("of another chunk", "another field")


def test_an_unchanged_log_is_believed_after_few_bytes_and_a_copy_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=20_000).folder)
    keep_all(run)
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or real(fd, size, at))
    size = run.events.stat().st_size
    # That in the middle has what opened the second session.
    assert len(believed(SegmentFiles(run.events))) == len(chunks(run.events)) - 1
    assert 0 < sum(read) < 0.003 * size
    copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "copy")))
    read.clear()
    assert believed(SegmentFiles(copy.events)) == believed(SegmentFiles(run.events))
    assert sum(read) > 0.4 * size


def test_a_segment_that_somebody_else_forged_is_not_shown(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=20_000).folder)
    keep_all(run)
    files = SegmentFiles(run.events)
    number = min(believed(files))
    sound = segment_at(files, number)
    lines = read_stretch(run.events, number)
    assert lines is not None

    def with_tables(tables: Any) -> Segment:
        return replace(sound, batch=replace(sound.batch, tables=tables))

    def with_number(name: str, value: float, table: str = "step") -> Segment:
        columns = dict(sound.batch.tables[table])
        columns[name] = columns[name].copy()
        columns[name][1] = value
        return with_tables({**sound.batch.tables, table: columns})

    def with_line(event: Event) -> Segment:
        return replace(sound, rest=[*sound.rest, encode(event, 0, 0.0)[:-1]])

    steps = sound.batch.tables["step"]
    few = {name: column for name, column in steps.items() if name != "kd"}
    places = {name: column[::-1] for name, column in sound.places.items()}
    forged = {
        "nothing": sound,
        "a time": with_number("t_s", 1e300),
        "a time that is none": with_number("t_s", math.nan),
        "a step that is none": with_number("step", math.nan),
        "a step that is absent": with_number("step", ABSENT),
        "a loss": with_number("loss", 1e200),
        "a column that is lacking": with_tables({"step": few}),
        "a line": replace(sound, rest=[b"no record"]),
        "a session": with_line(opened(1.0)),
        "a start": with_line(started()),
        "a GPU": with_tables({"gpu300": steps}),
        "a table": with_tables({"other": steps}),
        "places": replace(sound, places=places),
        "a place": replace(sound, places={n: c[:1] for n, c in sound.places.items()}),
    }
    files._boot_id = "of another machine"
    for what, one in forged.items():
        assert files.save(number, one, lines.lines), what
        found = SegmentFiles(run.events).load(number)
        assert (found is None) == (what != "nothing"), what
    assert files.save(number, sound, lines.lines)
    path = files.path(number)
    header = json.loads(split_file(path.read_bytes())[0])
    shape = header["tables"]["step"]
    for change in (
        {},
        {"version": 2},
        {"dtype": "<f4"},
        {"end": header["end"] - 1},
        {"lines": header["lines"] + 1},
        {"crc": 1},
        {"begin": -1},
        {"end": 1 << 60},
        {"tables": {}},
        {"tables": {**header["tables"], "step": {**shape, "rows": 1 << 40}}},
        {"tables": {**header["tables"], "step": {**shape, "rows": shape["rows"] + 1}}},
        {"tables": {**header["tables"], "step": {**shape, "columns": []}}},
        {"tables": {**header["tables"], "step": {**shape, "columns": ["t_s"] * 10_000}}},
        {"tables": 3},
    ):
        write_file(path, {**header, **change})
        assert (SegmentFiles(run.events).load(number) is None) == bool(change), change


def split_file(data: bytes) -> tuple[bytes, bytes]:
    """The header of a segment, and what follows it."""
    begin = columns_module._HEAD.size
    end = begin + columns_module._HEAD.unpack_from(data)[2]
    return data[begin:end], data[end:]


def write_file(path: Path, header: dict[str, Any]) -> None:
    """The same segment with another header."""
    body = split_file(path.read_bytes())[1]
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    rest = len(head).to_bytes(4, "little") + head + body
    path.write_bytes(columns_module._MAGIC + zlib.crc32(rest).to_bytes(4, "little") + rest)


# Who writes them.


def keep_all(run: RunFolder) -> SegmentWriter:
    """All that the supervisor keeps of a run that has been written."""
    now = [0.0]
    writer = SegmentWriter(run, monotonic=lambda: now[0])
    for _ in range(2 * run.events.stat().st_size // columns_module.CHUNK_BYTES + 20):
        now[0] += 1e6
        writer.tick()
    return writer


def test_what_the_supervisor_keeps_is_what_a_viewer_keeps(tmp_path: Path, small: None) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    keep_all(run)
    before = {path.name: path.read_bytes() for path in (run.path / "columns").iterdir()}
    assert len(before) == len(chunks(run.events))
    shutil.rmtree(run.path / "columns")
    kept(run.events)
    assert {path.name: path.read_bytes() for path in (run.path / "columns").iterdir()} == before


def test_a_chunk_is_kept_only_when_its_last_line_is_whole(tmp_path: Path, small: None) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    data = run.events.read_bytes()
    for end in range(4450, 4900, 7):
        run.events.write_bytes(data[:end])
        keep_all(run)
        found = numbers(SegmentFiles(run.events))
        assert found == ({1, 2} if b"\n" in data[4499:end] else {1}), end
        shutil.rmtree(run.path / "columns")


def test_a_resumed_run_goes_on_behind_what_is_still_so(tmp_path: Path, small: None) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    keep_all(run)
    begun = {path: path.stat().st_ino for path in (run.path / "columns").iterdir()}
    end = run.events.read_bytes().index(b"\n", 6000) + 1
    cut(run.events, end)
    with run.events.open("ab") as file:
        file.write(renumbered(other_lines(run.events, 200), run.events.read_bytes().count(b"\n")))
    stale = SegmentFiles(run.events).path(9)
    assert SegmentFiles(run.events).load(9) is None and stale in begun
    left = stale.with_name(f"{stale.name}.partial-1-1")
    left.write_bytes(b"of one who died")
    keep_all(run)
    now = SegmentFiles(run.events)
    # One has what opened the second session.
    assert believed(now) == chunks(run.events) - {end // 1500} and not left.exists()
    same = {path for path, inode in begun.items() if path.stat().st_ino == inode}
    # The stale file of that chunk is believed by nobody.
    assert same == {now.path(n) for n in range(1, 5)}, "what still stands is not written again"
    assert shown(run.events, files=True) == shown(run.events, files=False)


def test_the_supervisor_pays_no_more_than_its_share_however_fast_a_log_grows(
    tmp_path: Path, small: None
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 2000)
    now, used = [0.0], [0.0]
    real = columns_module.segment_of

    def costly(stretch: Stretch) -> Segment | None:
        used[0] += 0.043
        return real(stretch)

    patch = pytest.MonkeyPatch()
    patch.setattr(columns_module, "segment_of", costly)
    with patch.context():
        writer = SegmentWriter(run, monotonic=lambda: now[0], processor=lambda: used[0])
        for _ in range(600):
            now[0] += 1.0
            writer.tick()
    patch.undo()
    assert used[0] / now[0] <= columns_module.SHARE + 0.043 / now[0]
    assert len(numbers(SegmentFiles(run.events))) >= 0.9 * 600 * columns_module.SHARE / 0.043


def test_two_viewers_and_a_supervisor_may_keep_the_same_at_once(
    tmp_path: Path, small: None
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 1500)
    wanted = shown(run.events, files=False)
    found: list[object] = []
    work: list[Callable[[], object]] = [
        lambda: found.append(shown(run.events, files=True, keep=True)),
        lambda: found.append(shown(run.events, files=True, keep=True)),
        lambda: keep_all(run),
    ]
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted, wanted]
    files = SegmentFiles(run.events)
    assert believed(files) == numbers(files) == chunks(run.events)
    assert not list(files.folder.glob("*partial*"))


def test_a_helper_keeps_what_its_reader_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=25_000, resume=False).folder)
    monkeypatch.setattr(columns_module, "HELP_FROM_BYTES", 1)
    wanted = picture(Follower(run).read_all())
    batches = BatchReader(LogReader(run.events), files=True, keep=True)
    last, until_s = max(chunks(run.events)), time.monotonic() + 60
    batches._start_helpers(range(last + 1))
    # The first of those that are lacking is its reader's, and has what opens the session.
    while believed(SegmentFiles(run.events)) != chunks(run.events):
        assert time.monotonic() < until_s, "nobody helps"
        time.sleep(0.05)
    monkeypatch.setattr(subprocess, "Popen", None)
    batches._start_helpers(range(1, last + 1))  # nothing is lacking
    assert picture(Follower(run, files=True).read_all()) == wanted
    shutil.rmtree(run.path / "columns")
    parents = iter([7, 7, 1, 1, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    columns_module.build_segments(run.events, 0, last, -1)
    assert believed(SegmentFiles(run.events)) == {last}, "it ends with its reader"


@pytest.mark.parametrize("script", ["exit 1", "echo hello", "sleep 100", None])
def test_helpers_change_nothing_however_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, script: str | None
) -> None:
    path = tmp_path / "events.jsonl"
    events = long_log(path, 1500)
    helper = tmp_path / "helper"
    if script is not None:
        helper.write_text(f"#!/bin/sh\n{script}\n")
        helper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(helper))
    monkeypatch.setattr(columns_module, "HELP_FROM_BYTES", 1)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def noted(*arguments: Any, **how: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    view = followed(RunView(), "events", LogReader(path), keep=True)
    assert picture(view) == picture(fold_events(RunView(), "events", events))
    assert bool(started) == (script is not None and len(os.sched_getaffinity(0)) > 1)
    for one in started:
        one.kill()
        one.wait()


def test_where_nothing_can_be_written_nothing_is_kept_and_all_is_shown(
    tmp_path: Path, small: None
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    wanted = shown(run.events, files=False)
    # Whoever may write everywhere is stopped by this, too.
    (run.path / "columns").write_text("no folder")
    assert shown(run.events, files=True, keep=True) == wanted
    keep_all(run)
    assert (run.path / "columns").read_text() == "no folder"


def test_the_last_room_of_a_disk_is_left_to_the_run(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    monkeypatch.setattr(columns_module, "LEFT_BYTES", 1 << 60)
    shown(path, files=True, keep=True)
    assert not numbers(SegmentFiles(path)) and not list(SegmentFiles(path).folder.glob("*"))


def test_who_only_looks_writes_nothing(tmp_path: Path, small: None) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    shown(path, files=True)
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]


def test_what_proves_something_reads_the_lines(tmp_path: Path, small: None) -> None:
    """A Follower takes columns only where it is asked to."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    at = middle(kept(run.events))
    overwrite(run.events, at, b"9")
    by_lines, by_files = Follower(run), Follower(run, files=True)
    assert picture(by_lines.read_all()) != picture(by_files.read_all())
    assert picture(by_lines.view) == shown(run.events, files=False)


# Every operation fails, and the power goes.


@pytest.mark.parametrize(
    "mode",
    [
        "KILL",
        pytest.param("EIO", marks=pytest.mark.soak),
        pytest.param("ENOSPC", marks=pytest.mark.soak),
        pytest.param("EROFS", marks=pytest.mark.soak),
    ],
)
def test_every_operation_of_the_writer_may_fail_and_the_run_knows_nothing_of_it(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, mode: str
) -> None:
    library = compiled(tmp_path_factory.mktemp("faults"))
    done = subprocess.run(
        [sys.executable, str(HERE / "column_faults.py"), str(tmp_path), mode],
        capture_output=True,
        text=True,
        env=environment(library),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert not answer["problems"], "\n".join(answer["problems"][:5])
    assert answer["points"] >= 12


# What it costs.


def test_a_long_run_is_not_opened_event_by_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 000 lines only the newest of a session, and those near what opens it, are looked at one by one."""
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
    assert sum(read.values()) < 0.3 * written.lines


@pytest.mark.perf
def test_opening_costs_little_more_than_decoding_every_line(tmp_path: Path) -> None:
    """Against the library's own time for the same lines on the same machine, whatever else it does."""
    path = write_long_run(tmp_path / "run", steps=30_000, resume=False).events
    block, decoder = path.read_bytes(), msgspec.json.Decoder(Known)

    def read() -> None:
        assert followed(RunView(), "events", LogReader(path)).last_step == 30_000

    def timed(call: Any) -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    ratio_within(lambda: timed(read) / timed(lambda: decoder.decode_lines(block)), 2.7, tries=3)


@pytest.mark.perf
def test_out_of_its_files_a_run_costs_a_fraction_of_its_lines(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=30_000).folder)
    keep_all(run)

    def timed(**how: bool) -> float:
        begin = time.process_time()
        assert Follower(run, **how).read_all().last_step == 30_000
        return time.process_time() - begin

    ratio_within(lambda: timed(files=True) / timed(), 0.7, tries=4)


def test_the_supervisor_keeps_the_columns_of_its_run(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=14_000, resume=False).folder)
    spec = RunSpec(student=StudentSection(config="student.json"), loss=LossSection(alpha=1.0))
    run.effective.write_text(json.dumps({"spec": spec.to_dict()}))
    trainer = subprocess.Popen(["sleep", "0.1"])
    with (
        LogWriter(run.watch, writer="supervisor") as watch,
        LogWriter(run.device, writer="sampler") as device,
    ):
        supervisor = _Supervisor(run, watch, device, None)
        exit_fd = os.pidfd_open(trainer.pid)
        supervisor.selector.register(exit_fd, selectors.EVENT_READ, "trainer")
        supervisor.observer = RunObserver(
            run, trainer.pid, watch, device, sample_seconds=1.0, stop=lambda *_: None
        )
        supervisor._watch_until_exit(trainer, exit_fd)
    assert trainer.wait() == 0
    os.close(exit_fd)
    assert {1} <= believed(SegmentFiles(run.events)) <= chunks(run.events)
