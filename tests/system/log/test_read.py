"""Following logs, run folders and whole runs: every line once, in order, and every fault by its
byte."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import engine.log.read as read_module
from engine.errors import RunLogError
from engine.log.events import (
    AnyEvent,
    Event,
    Note,
    Phase,
    StepDone,
    TrainerStarted,
    Unrecognised,
    kind_of,
)
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run, find_runs, open_run
from engine.log.read import BrokenLog, LogReader, decode_line, writer_is_alive
from engine.log.view import RunView
from engine.log.write import LogWriter, encode
from tests.support.paths import ROOT
from tests.support.run_events import (
    KINDS,
    example_of,
    exited,
    finished,
    fold_events,
    numbered,
    opened,
    picture,
    required_fields,
    started,
    step,
    write_log,
)


def note(seq: int, text: str = "x", t_s: float = 1.0) -> bytes:
    return encode(Note(level="info", text=text), seq, t_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


# Records.


def test_an_unknown_kind_is_kept_with_its_fields() -> None:
    line = (
        b'{"v":3,"seq":4,"t_s":5.5,"kind":"dream","depth":null,"who":["a"],"nf":{"depth":"+inf"}}'
    )
    assert decode_line(line, "here") == Unrecognised(
        kind="dream", v=3, seq=4, t_s=5.5, fields={"depth": math.inf, "who": ["a"]}
    )


def test_a_field_of_a_later_version_is_left_out_even_when_it_is_nan() -> None:
    line = json.loads(note(3)) | {"colour": None, "nf": {"colour": "nan"}}
    assert decode_line(json.dumps(line).encode(), "here") == Note(
        seq=3, t_s=1.0, level="info", text="x"
    )


@pytest.mark.parametrize(
    "line",
    [b"", b"hello", b"[]", b"3", b'{"seq":1}', b'{"kind":1}', b"\xff\xfe", b"[" * 100_000, b"{"],
)
def test_what_is_no_record_is_refused_with_its_place(line: bytes) -> None:
    with pytest.raises(RunLogError, match=r"a\.jsonl @12 — expected a record, found"):
        decode_line(line, "a.jsonl @12")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_known_kind_without_one_of_its_fields_is_refused(kind: type[Any]) -> None:
    record = json.loads(encode(example_of(kind), 0, 0.0))
    assert decode_line(json.dumps(record).encode(), "here")
    for field in required_fields(kind):
        broken = {name: value for name, value in record.items() if name != field.name}
        with pytest.raises(RunLogError, match=f"expected a '{record['kind']}' record"):
            decode_line(json.dumps(broken).encode(), "here")


@pytest.mark.parametrize(
    "change",
    [
        {"text": 3},
        {"text": None},
        {"seq": "0"},
        {"seq": 1.5},
        {"t_s": "soon"},
        {"t_s": None},
        {"nf": {"text": "nan"}},
        {"nf": {"missing": "nan"}},
        {"nf": {"text/0": "nan"}},
        {"nf": ["text"]},
        {"text": None, "nf": {"text": "nan"}},
        {"t_s": None, "nf": {"t_s": "huge"}},
    ],
)
def test_a_known_kind_with_a_broken_field_is_refused(change: dict[str, Any]) -> None:
    line = json.dumps(json.loads(note(0)) | change).encode()
    with pytest.raises(RunLogError, match="expected a 'note' record, found one that breaks"):
        decode_line(line, "here")


def test_an_unknown_kind_with_a_broken_envelope_is_refused() -> None:
    with pytest.raises(RunLogError, match="'dream' record"):
        decode_line(b'{"kind":"dream","seq":0,"t_s":"soon"}', "here")


# Following one file.


def test_a_log_that_does_not_exist_yet_is_empty_until_it_does(path: Path) -> None:
    reader = LogReader(path)
    assert reader.poll() == []
    path.touch()
    assert reader.poll() == []
    path.write_bytes(note(0))
    assert [event.seq for event in reader.poll()] == [0]
    assert reader.poll() == []


@pytest.mark.parametrize("max_bytes", [1, 100, 333, 1 << 20])
def test_reads_of_any_size_give_the_same_events(path: Path, max_bytes: int) -> None:
    events = write_log(path, [opened(1.0), *(step(n, loss=math.nan) for n in range(1, 30))])
    reader = LogReader(path)
    batches = []
    while batch := reader.poll(max_bytes):
        ahead = [encode(cast(Event, event), event.seq, event.t_s) for event in batch[:-1]]
        assert len(b"".join(ahead)) < max_bytes
        batches += batch
    assert repr(batches) == repr(events)


def test_a_line_is_returned_once_it_is_whole(path: Path) -> None:
    line = note(1)
    path.write_bytes(note(0) + line[:-1])
    reader = LogReader(path)
    assert len(reader.poll()) == 1
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(line[-1:] + note(2))
    assert [event.seq for event in reader.poll()] == [1, 2]


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_a_reader_of_a_torn_line_goes_on_when_the_next_writer_has_cut_it(
    path: Path, max_bytes: int
) -> None:
    with LogWriter(path, writer="first"):
        pass
    with path.open("ab") as file:
        file.write(b'{"v":1,"seq":1,"t_s":9.9,"kind":"note","level":"a torn line of some length')
    reader = LogReader(path)
    assert len(reader.poll(max_bytes)) == 1
    assert reader.poll(max_bytes) == []
    with LogWriter(path, writer="second") as log:
        log.write(Note(level="info", text="on"))
        read: list[AnyEvent] = []
        while batch := reader.poll(max_bytes):
            read += batch
    assert [kind_of(event) for event in read] == ["log_opened", "note"]
    assert [event.seq for event in read] == [1, 2]


def test_unknown_kinds_count_as_lines(path: Path) -> None:
    path.write_bytes(note(0) + b'{"v":1,"seq":1,"t_s":1.0,"kind":"dream"}\n' + note(2))
    assert [kind_of(event) for event in LogReader(path).poll()] == ["note", "dream", "note"]


LINES = [note(0, "a"), note(1, "bb"), note(2, "ccc"), note(3, "dddd"), note(4, "e")]


@pytest.mark.parametrize(
    ("name", "lines", "sound", "says"),
    [
        ("gap", [*LINES[:2], *LINES[3:]], 2, "expected line number 2, found 3"),
        ("repeat", [*LINES[:3], *LINES[2:]], 3, "expected line number 3, found 2"),
        ("start", LINES[1:], 0, "expected line number 0, found 1"),
        ("garbage", [*LINES[:3], b"\0" * 20 + b"\n", *LINES[3:]], 3, "expected a record"),
        ("blank", [*LINES[:3], b"\n", *LINES[3:]], 3, "expected a record"),
        ("two in one", [*LINES[:2], LINES[2][:-1] + LINES[3]], 2, "expected a record"),
        ("cut line", [*LINES[:2], LINES[2][:20] + b"\n", *LINES[3:]], 2, "expected a record"),
        (
            "field",
            [*LINES[:2], LINES[2].replace(b'"ccc"', b"333"), *LINES[3:]],
            2,
            "breaks its form",
        ),
        ("no time", [*LINES[:2], LINES[2].replace(b"t_s", b"T_s"), *LINES[3:]], 2, "a time"),
        ("no number", [*LINES[:2], LINES[2].replace(b"seq", b"SEQ"), *LINES[3:]], 2, "found -1"),
    ],
)
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_a_fault_raises_with_its_byte_and_hides_nothing_before_it(
    path: Path, name: str, lines: list[bytes], sound: int, says: str, max_bytes: int
) -> None:
    path.write_bytes(b"".join(lines))
    reader = LogReader(path)
    read: list[AnyEvent] = []
    with pytest.raises(BrokenLog, match=says) as caught:
        while batch := reader.poll(max_bytes):
            read += batch
    read += caught.value.before
    assert [event.seq for event in read] == list(range(sound))
    offset = sum(len(line) for line in lines[:sound])
    assert f"{path} @{offset} — " in caught.value.message
    # Asked again it says the same, and nothing twice.
    with pytest.raises(BrokenLog, match=says) as again:
        reader.poll()
    assert again.value.before == () and f"@{offset} " in again.value.message


@pytest.mark.parametrize("cut", ["inside", "at a line", "empty", "and grown again"])
def test_a_log_that_is_cut_while_it_is_read_raises(path: Path, cut: str) -> None:
    path.write_bytes(b"".join(LINES[:3]))
    reader = LogReader(path)
    reader.poll()
    length = {"at a line": len(LINES[0]), "empty": 0}.get(cut, 30)
    os.truncate(path, length)
    if cut == "and grown again":
        with path.open("ab") as file:
            file.write(b"z" * 1000)
    with pytest.raises(BrokenLog, match=r"bytes read so far, found .* it was cut or replaced"):
        reader.poll()


def test_a_log_that_is_replaced_while_it_is_read_raises(path: Path) -> None:
    path.write_bytes(b"".join(LINES[:3]))
    reader = LogReader(path)
    reader.poll()
    other = path.with_name("other")
    # The same bytes and more: only the file itself is another.
    other.write_bytes(b"".join(LINES))
    other.rename(path)
    with pytest.raises(BrokenLog, match="cut or replaced"):
        reader.poll()


def test_a_log_that_is_removed_while_it_is_read_raises(path: Path) -> None:
    path.write_bytes(LINES[0])
    reader = LogReader(path)
    reader.poll()
    path.unlink()
    with pytest.raises(BrokenLog, match="found no file: it was removed"):
        reader.poll()


def test_a_log_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    with pytest.raises(BrokenLog, match="expected a regular file, found a folder"):
        LogReader(tmp_path).poll()
    (tmp_path / "file").touch()
    with pytest.raises(BrokenLog, match="Not a directory"):
        LogReader(tmp_path / "file" / "events.jsonl").poll()
    with pytest.raises(RunLogError, match="Not a directory"):
        writer_is_alive(tmp_path / "file" / "events.jsonl")


def test_a_line_without_an_end_is_refused_and_not_held_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "LONGEST_LINE_BYTES", 1000)
    path.write_bytes(LINES[0] + b"z" * 999)
    reader = LogReader(path)
    assert len(reader.poll(10)) == 1
    assert reader.poll(10) == []  # it may still end
    with path.open("ab") as file:
        file.write(b"z" * 100)
    with pytest.raises(BrokenLog, match=f"@{len(LINES[0])} — expected lines under 1000 bytes"):
        reader.poll(10)


# Run folders.


def make_run(path: Path, made_s: float | None = None) -> RunFolder:
    run = create_run(path, "", {})
    if made_s is not None:
        os.utime(run.effective, (made_s, made_s))
    return run


def test_runs_are_found_newest_first_and_by_name_when_made_together(tmp_path: Path) -> None:
    make_run(tmp_path / "b", 100.0)
    make_run(tmp_path / "c", 300.0)
    make_run(tmp_path / "a", 200.0)
    make_run(tmp_path / "e", 200.0)
    make_run(tmp_path / "d", 200.0)
    (tmp_path / "not a run").mkdir()
    (tmp_path / "file").touch()
    assert [run.name for run in find_runs(tmp_path)] == ["c", "e", "d", "a", "b"]
    assert [run.path for run in find_runs(tmp_path / "a")] == [tmp_path / "a"]
    assert find_runs(tmp_path / "file") == find_runs(tmp_path / "missing") == []


def test_what_is_no_run_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="expected a run, found nothing there") as caught:
        open_run(tmp_path / "missing")
    assert "engine runs" in str(caught.value.hint)
    with pytest.raises(RunLogError, match=r"expected effective\.json in it, found none"):
        open_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RunLogError, match="expected a folder, found something else"):
        open_run(tmp_path / "file")
    run = make_run(tmp_path / "one")
    assert open_run(tmp_path / "one") == run


def test_the_name_of_a_run_is_that_of_its_folder_however_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "one")
    assert open_run(Path(".")).name == "one"


def test_a_receipt_is_read_or_absent_or_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    assert run.read_receipt() is None
    run.receipt.write_text('{"loss": 1.5}')
    assert run.read_receipt() == {"loss": 1.5}
    for bad, says in (
        (b'{"loss"', "expected JSON"),
        (b"\xff", "expected JSON"),
        (b"[1]", "expected a JSON object, found"),
    ):
        run.receipt.write_bytes(bad)
        with pytest.raises(RunLogError, match=says):
            run.read_receipt()
    run.receipt.unlink()
    run.receipt.mkdir()
    with pytest.raises(RunLogError, match="expected a regular file, found a folder"):
        run.read_receipt()


def test_liveness_is_that_of_the_two_logs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    assert not run.liveness().trainer and not run.liveness().supervisor
    with LogWriter(run.watch, writer="supervisor"):
        assert not run.liveness().trainer and run.liveness().supervisor
        with LogWriter(run.events, writer="trainer"):
            assert run.liveness().trainer and run.liveness().supervisor


# Whole runs.


def test_a_run_is_followed_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    follower = Follower(run)
    assert not follower.poll() and follower.state == "not started"
    with LogWriter(run.watch, writer="supervisor") as watch:
        assert follower.poll() and follower.state == "starting"
        with LogWriter(run.events, writer="trainer") as log:
            log.write(started(2))
            log.write(Phase(name="train"))
            follower.poll()
            assert follower.state == "starting"
            log.write(step(1))
            assert follower.poll() and follower.state == "running"
            assert not follower.poll()
            log.write(step(2))
            log.write(finished("completed"))
        follower.poll()
        assert follower.state == "completed" and follower.alive.supervisor
        watch.write(exited("COMPLETED"))
    assert follower.read_all().last_step == 2 and follower.state == "completed"


def test_a_killed_run_is_vanished_until_its_parent_says_how(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    with LogWriter(run.events, writer="trainer") as log:
        log.write(step(1))
    follower = Follower(run)
    follower.read_all()
    assert follower.state == "vanished"
    with LogWriter(run.watch, writer="supervisor") as watch:
        watch.write(exited("KILLED_EXTERNAL"))
        follower.read_all()
    assert follower.state == "killed_external"


def test_a_broken_log_does_not_hide_what_can_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_log(run.events, [opened(1.0), *(step(n) for n in range(1, 200))])
    write_log(run.watch, [opened(0.0), TrainerStarted(trainer_pid=7, supervisor_pid=6)])
    with run.events.open("ab") as file:
        file.write(b"rubbish\n")
    follower = Follower(run)
    with pytest.raises(BrokenLog, match="rubbish"):
        follower.read_all()
    assert follower.view.last_step == 199 and follower.view.trainer_pid == 7
    with pytest.raises(BrokenLog, match="rubbish"):
        follower.poll()
    assert len(follower.view.steps) == 199


def test_following_in_small_reads_gives_the_view_of_one_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    events = [opened(1.0), started(300), *(step(n, kd=math.nan) for n in range(1, 300))]
    write_log(run.events, events)
    write_log(run.watch, [opened(0.0), Note(level="info", text="x"), exited("CRASHED")])
    once = fold_events(RunView(), "events", numbered(events))
    small = Follower(run)
    while small.poll(max_bytes=500):
        pass
    assert picture(small.view) == picture(Follower(run).read_all())
    assert picture(small.view)["steps"] == picture(once)["steps"]


def test_a_log_is_read_again_from_each_of_its_points(tmp_path: Path) -> None:
    path = tmp_path / "log"
    events = [opened(100.0), started(), *(step(n) for n in range(1, 2500))]
    events += [opened(50.0), started(), *(step(n) for n in range(1, 2500))]
    written = write_log(path, events)
    reader = LogReader(path)
    while reader.poll(1 << 19):
        pass
    assert len(reader.points) > 8
    latest = -math.inf
    begins = {0: 100.0, 2501: 50.0}
    for point in reader.points[1:-1]:
        found = LogReader(path, at=point).poll(4096)
        assert repr(found) == repr(written[point.number : point.number + len(found)])
        opened_s = begins[max(n for n in begins if n < point.number)]
        assert point.opened_unix_s == opened_s
        before = [
            begins[max(b for b in begins if b <= e.seq)] + e.t_s for e in written[: point.number]
        ]
        latest = max(before)
        assert point.unix_s == pytest.approx(latest)


def test_reading_a_run_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, engine.log.fold, engine.log.text\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_diverged_run_keeps_every_non_finite_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    events = [opened(1.0), *(step(n, loss=math.nan, grad_norm=math.inf) for n in range(1, 2000))]
    write_log(run.events, events)
    view = Follower(run).read_all()
    losses = view.steps.values("loss")
    assert len(losses) == 1999 and all(x is not None and math.isnan(x) for x in losses)
    assert set(view.steps.values("grad_norm")) == {math.inf}
    assert all(isinstance(line.event, StepDone) for line in view.lines[1:])


def test_more_lines_are_kept_than_a_screen_shows() -> None:
    assert read_module.LINES_KEPT >= 1000
