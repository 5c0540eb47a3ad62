"""Older lines of a long log, and the segments beside it, give the view that the lines give one by one; a segment is
believed only where the log still has these lines.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
from engine.log.columns import BatchReader
from engine.log.events import Event, Known, StepDone
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.read import BrokenLog, LogReader, decode_line
from engine.log.table import ABSENT
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import encode
from tests.support.faults import HERE, compiled, environment
from tests.support.long_runs import write_long_run
from tests.support.perf import ratio_within
from tests.support.run_events import KINDS, example_of, fold_events, opened, picture, started, step
from tests.support.small_logs import followed, long_log, long_logs, one_by_one, small_sizes

OF_THE_NEWEST = ("lines", "recent_phases", "host_s", "batch", "planned_steps")
"""What a view has of the newest lines alone; in drawn logs these are fewer than the newest steps."""


@pytest.fixture
def small() -> Iterator[None]:
    with small_sizes():
        yield


def drawn(view: RunView) -> dict[str, str]:
    return {name: text for name, text in picture(view).items() if name not in OF_THE_NEWEST}


def shown(
    path: Path, source: Source = "events", *, files: bool, keep: bool = False, of: Any = picture
) -> object:
    """All that is shown of a log, or what is wrong with it and what is shown in front of that."""
    batches, view = BatchReader(LogReader(path), files=files, keep=keep), RunView()
    try:
        while found := batches.poll():
            view = fold(view, source, found)
    except BrokenLog as broken:
        view = fold_events(view, source, broken.before)
        return broken.message, broken.hole, of(view)
    return of(view)


def kept(path: Path) -> list[Path]:
    """The segments of a log, written by a viewer."""
    shown(path, files=True, keep=True)
    found = segments(path)
    assert len(found) > 3, "the log is too short for this test"
    return found


def segments(path: Path) -> list[Path]:
    return sorted((path.parent / "columns").glob("*.segment"))


def decoded(path: Path, **how: bool) -> int:
    """Return how many bytes of a log are decoded when it is read."""
    sizes: list[int] = []
    patch = pytest.MonkeyPatch()
    real = LogReader.decode
    patch.setattr(
        LogReader,
        "decode",
        lambda self, lines, *d: sizes.append(len(lines)) or real(self, lines, *d),
    )
    with patch.context():
        shown(path, **how)
    patch.undo()
    return sum(sizes)


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
    one, other = drawn(found), drawn(wanted)
    assert {n: (one[n], other[n]) for n in one if one[n] != other[n]} == {}


def test_the_newest_lines_of_a_long_log_are_whole(tmp_path: Path, small: None) -> None:
    events = long_log(tmp_path / "log")
    reader = LogReader(tmp_path / "log")
    batches, rows, read, view = BatchReader(reader), 0, 0, RunView()
    while found := batches.poll(1 << 20):
        rows += sum(len(one.tables["step"]["t_s"]) for one in found if one.tables)
        read += sum(len(one.shown) for one in found)
        view = fold(view, "events", found)
    assert rows + 2 == len(events) == reader.lines_read
    # What opens the session, and the last 4000 bytes.
    assert 8 < read < 30
    assert picture(view) == picture(fold_events(RunView(), "events", events))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_and_absent_ones_are_themselves(
    tmp_path: Path, small: None, value: float
) -> None:
    path = tmp_path / "events.jsonl"
    steps = [step(n, loss=value, grad_norm=value, kd=None) for n in range(1, 90)]
    path.write_bytes(lines_of([opened(1.0), *steps]))
    kept(path)
    for batches in (BatchReader(LogReader(path)), BatchReader(LogReader(path), files=True)):
        _, batch, *_ = batches.poll(3001)
        columns = batch.tables["step"]
        for name in ("loss", "grad_norm"):
            assert columns[name].tobytes() == np.full(len(columns[name]), value).tobytes()
        assert columns["kd"].tobytes() == np.full(len(columns["kd"]), ABSENT).tobytes()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_decoded_among_others_as_it_is_decoded_alone(kind: type[Event]) -> None:
    lines = lines_of([example_of(kind) for _ in range(8)])
    slow = [decode_line(line, "") for line in lines.splitlines()]
    assert LogReader(Path())._decode_at_once(lines, read_module._known) == slow
    rows = LogReader(Path())._decode_at_once(lines, columns_module._decoder)
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
    assert LogReader(path)._decode_at_once(lines[7], columns_module._decoder) is None
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
    batches = BatchReader(reader)
    batches.poll(2000)
    assert batches.poll(2000)
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
            first = shown(path, source, files=True, keep=True, of=drawn)
            assert shown(path, source, files=True, of=drawn) == first
            wanted = one_by_one(RunView(), source, logs[source])
            assert first == drawn(wanted)
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
            now = shown(path, source, files=False, of=drawn)
            assert shown(path, source, files=True, of=drawn) == now
            # And when the files are written anew.
            assert shown(path, source, files=True, keep=True, of=drawn) == now
            assert shown(path, source, files=True, of=drawn) == now


def renumbered(data: bytes, first: int) -> bytes:
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    return b"".join(
        line.replace(b'"seq":%d,' % number, b'"seq":%d,' % (first + number), 1)
        for number, line in enumerate(lines)
    )


def test_most_of_a_log_comes_out_of_its_files(tmp_path: Path, small: None) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 400)
    kept(path)
    # The first chunk opens the session, and the newest lines are whole.
    assert decoded(path, files=True) < 1500 + 1000 + 4000 + 1500 + 1000
    assert decoded(path, files=False) == path.stat().st_size
    assert shown(path, files=True) == shown(path, files=False)


def test_what_opens_a_session_is_never_in_a_segment(tmp_path: Path, small: None) -> None:
    path = tmp_path / "events.jsonl"
    events = [step(n) for n in range(1, 60)]
    path.write_bytes(lines_of([opened(1.0), *events, opened(5.0), started(), *events]))
    assert all(b'"log_opened"' not in file.read_bytes() for file in kept(path))
    assert shown(path, files=True) == shown(path, files=False)


# What is not believed.


def in_its_place(path: Path, data: bytes) -> None:
    """Another file of the same name."""
    other = path.with_suffix(".new")
    other.write_bytes(data)
    other.replace(path)


def other_lines(path: Path, count: int) -> bytes:
    events: list[Event] = [opened(1.0), *(step(n, loss=5.0) for n in range(1, count))]
    return b"".join(encode(event, n, n / 7) for n, event in enumerate(events))


def in_the_middle(path: Path) -> int:
    """A digit of a loss in a segment, outside of what is compared."""
    data = path.read_bytes()
    return data.index(b'"loss":', 4500) + len(b'"loss":')


def flip_in_a_copy(path: Path, _: pytest.MonkeyPatch) -> None:
    data, at = bytearray(path.read_bytes()), in_the_middle(path)
    data[at] ^= 1
    in_its_place(path, bytes(data))


def zeros_after_a_restart(path: Path, patch: pytest.MonkeyPatch) -> None:
    overwrite(path, in_the_middle(path), bytes(40))
    patch.setattr(columns_module, "read_boot_id", lambda: "another boot")


def no_boot_id(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Columns that were made, and are looked at, where nobody knows whether the machine was restarted."""
    patch.setattr(columns_module, "read_boot_id", lambda: "unknown")
    shutil.rmtree(path.parent / "columns")
    shown(path, files=True, keep=True)
    overwrite(path, in_the_middle(path), b"9")


def cut_and_gone_on(path: Path, _: pytest.MonkeyPatch) -> None:
    cut(path, 0)
    overwrite(path, 0, other_lines(path, 300))


def changed_where_it_is_compared(path: Path, _: pytest.MonkeyPatch) -> None:
    for file in segments(path):
        begin = int(file.stem.partition("-")[2])
        overwrite(path, begin - 5, b"9")


LOGS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "cut": lambda path, _: cut(path, 2000),
    "cut and gone on": cut_and_gone_on,
    "changed where it is compared": changed_where_it_is_compared,
    "a shorter one in its place": lambda path, _: in_its_place(path, other_lines(path, 20)),
    "a longer one in its place": lambda path, _: in_its_place(path, other_lines(path, 600)),
    "a copy with another digit": flip_in_a_copy,
    "zeros after a restart": zeros_after_a_restart,
    "a machine without a boot id": no_boot_id,
    "gone": lambda path, _: path.unlink(),
}


@pytest.mark.parametrize("planted", LOGS)
def test_a_log_that_is_not_what_it_was_is_read_by_its_lines(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    kept(path)
    LOGS[planted](path, monkeypatch)
    assert shown(path, files=True, of=drawn) == shown(path, files=False, of=drawn)


def test_a_segment_of_another_user_is_not_read(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    kept(path)
    assert decoded(path, files=True) < path.stat().st_size
    real = Path.stat

    def stat(self: Path, **how: bool) -> os.stat_result:
        status = real(self, **how)
        if self.suffix != ".segment":
            return status
        fields = list(status)
        fields[4] = 54321
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)
    assert decoded(path, files=True) == path.stat().st_size


FILES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    **{
        f"torn at {share:.0%}": lambda file, _, share=share: cut(
            file, int(share * file.stat().st_size)
        )
        for share in (0.0, 0.001, 0.01, 0.5, 0.999)
    },
    "longer": lambda file, _: file.write_bytes(file.read_bytes() + b"x"),
    "another version": lambda file, patch: patch.setattr(columns_module, "VERSION", 9),
    "a folder": lambda file, _: (file.unlink(), file.mkdir()),
    "of another place": lambda file, _: shutil.copy(segments(file.parent.parent / "l")[1], file),
}


@pytest.mark.parametrize("planted", FILES)
def test_a_file_that_is_not_whole_or_not_of_this_layout_counts_for_nothing(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    file = kept(path)[3]
    wanted, before = shown(path, files=False), decoded(path, files=True)
    FILES[planted](file, monkeypatch)
    assert decoded(path, files=True) > before
    assert shown(path, files=True) == wanted
    if planted != "a folder":
        assert shown(path, files=True, keep=True) == wanted
        assert decoded(path, files=True) == before, "it is written anew"


def test_a_resumed_run_goes_on_behind_what_is_still_so(tmp_path: Path, small: None) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    begun = {file: file.stat().st_ino for file in kept(path)}
    end = path.read_bytes().index(b"\n", 6000) + 1
    cut(path, end)
    with path.open("ab") as file:
        file.write(renumbered(other_lines(path, 200), path.read_bytes().count(b"\n")))
    assert shown(path, files=True) == shown(path, files=False)
    kept(path)
    before_the_cut = {file for file in begun if int(file.stem.partition("-")[2]) < 4000}
    assert before_the_cut, "nothing still stands"
    assert all(file.stat().st_ino == begun[file] for file in before_the_cut), "it is written again"
    assert shown(path, files=True) == shown(path, files=False)


# Who writes them.


def test_viewers_may_keep_the_same_at_once(tmp_path: Path, small: None) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 1500)
    wanted = shown(path, files=False)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(shown(path, files=True, keep=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 3
    assert decoded(path, files=True) < 10_000
    assert shown(path, files=True) == wanted


def test_where_nothing_can_be_written_nothing_is_kept_and_all_is_shown(
    tmp_path: Path, small: None
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    wanted = shown(path, files=False)
    # Whoever may write everywhere is stopped by this, too.
    (tmp_path / "columns").write_text("no folder")
    assert shown(path, files=True, keep=True) == wanted
    assert (tmp_path / "columns").read_text() == "no folder"


def test_the_last_room_of_a_disk_is_left_to_the_run(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    monkeypatch.setattr(columns_module, "LEFT_BYTES", 1 << 60)
    shown(path, files=True, keep=True)
    assert not list((tmp_path / "columns").glob("*"))


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
    kept(run.events)
    overwrite(run.events, in_the_middle(run.events), b"9")
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
    assert answer["points"] >= 6


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


@pytest.mark.perf
def test_out_of_its_files_a_run_costs_a_fraction_of_its_lines(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=60_000).folder)
    Follower(run, files=True, save_columns=True).read_all()

    def timed(**how: bool) -> float:
        begin = time.process_time()
        assert Follower(run, **how).read_all().last_step == 60_000
        return time.process_time() - begin

    ratio_within(lambda: timed(files=True) / timed(), 0.5, tries=4)
