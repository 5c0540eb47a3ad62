"""The writer of a log, and the making of a run folder: nothing half-written, nobody shut out,
nothing lost."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.log.write as write_module
from engine.errors import BadInput, DiskFull, RunLogError
from engine.log.events import (
    FactsRead,
    LogOpened,
    Note,
    StepDone,
    Unrecognised,
    kind_of,
)
from engine.log.folder import create_run, is_run, open_run, write_whole
from engine.log.read import LogReader, decode_line, writer_is_alive
from engine.log.write import TAIL_BYTES, LogWriter, encode
from tests.support.paths import ROOT
from tests.support.run_events import JSON, KINDS, events_of, example_of, step

NOTE = Note(level="info", text="hello")


def strict_json(line: bytes) -> Any:
    """The line as any JSON parser reads it; the constants that JSON does not have are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that can import the engine; talk to it over its pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not wait long for a lock."""
    monkeypatch.setattr(write_module, "LOCK_PAUSE_S", 0.001)


# One line.


def comes_back(kind: type[Any], data: st.DataObject, t_s: float) -> None:
    event = data.draw(events_of(kind))
    line = encode(event, 7, t_s)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert strict_json(line)["kind"] == kind_of(event)
    expected = msgspec.structs.replace(event, seq=7, t_s=round(t_s, 6))
    # As text NaN equals NaN, and 0.0 is not -0.0.
    assert repr(decode_line(line, "here")) == repr(expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data(), t_s=st.floats(0, 1e9))
@settings(max_examples=15, deadline=None)
def test_every_kind_comes_back_as_it_was_written(
    kind: type[Any], data: st.DataObject, t_s: float
) -> None:
    comes_back(kind, data, t_s)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data(), t_s=st.floats(0, 1e9))
@settings(max_examples=150, deadline=None)
def test_many_of_every_kind_come_back_as_they_were_written(
    kind: type[Any], data: st.DataObject, t_s: float
) -> None:
    comes_back(kind, data, t_s)


def survives(facts: dict[str, Any]) -> None:
    line = encode(FactsRead(facts=facts), 0, 0.0)
    strict_json(line)
    event = decode_line(line, "here")
    assert isinstance(event, FactsRead)
    assert repr(event.facts) == repr(facts)


@given(facts=st.dictionaries(st.text(), JSON))
@settings(max_examples=60, deadline=None)
def test_non_finite_numbers_inside_a_field_survive(facts: dict[str, Any]) -> None:
    survives(facts)


@pytest.mark.soak
@given(facts=st.dictionaries(st.text(), JSON))
@settings(max_examples=1000, deadline=None)
def test_non_finite_numbers_inside_many_fields_survive(facts: dict[str, Any]) -> None:
    survives(facts)


def test_nan_and_missing_stay_distinct_in_the_line() -> None:
    line = strict_json(encode(step(1, loss=math.nan, kd=None, grad_norm=-math.inf), 0, 0.0))
    assert line["loss"] is None and line["kd"] is None and line["grad_norm"] is None
    assert line["nf"] == {"loss": "nan", "grad_norm": "-inf"}


def test_a_nested_name_with_a_slash_or_a_tilde_is_found_again() -> None:
    line = encode(FactsRead(facts={"a/b": {"c~1": [1.0, math.inf]}, "a": {"b": None}}), 0, 0.0)
    assert strict_json(line)["nf"] == {"facts/a~1b/c~01/1": "+inf"}
    event = decode_line(line, "here")
    assert isinstance(event, FactsRead)
    assert event.facts == {"a/b": {"c~1": [1.0, math.inf]}, "a": {"b": None}}


def test_a_file_name_that_is_not_utf8_does_not_stop_the_log() -> None:
    name = os.fsdecode(b"caf\xe9")
    event = decode_line(encode(Note(level="info", text=name), 0, 0.0), "here")
    assert isinstance(event, Note) and event.text == "caf\\udce9"


def test_a_float_of_another_library_is_written_as_a_number() -> None:
    class Float64(float):
        """What numpy.float64 is."""

    line = strict_json(encode(step(1, loss=Float64(1.5), kd=Float64("nan")), 0, 0.0))
    assert line["loss"] == 1.5 and line["nf"] == {"kd": "nan"}


def test_every_kind_has_its_own_name() -> None:
    names = [kind_of(example_of(kind)) for kind in KINDS]
    assert len(set(names)) == len(KINDS)
    assert kind_of(Unrecognised(kind="later")) == "later"


# One writer.


def test_a_log_opens_with_who_writes_it_and_when(tmp_path: Path) -> None:
    ticks = iter([100.0, 100.25, 103.5])
    path = tmp_path / "a.jsonl"
    with LogWriter(
        path, writer="trainer", monotonic=lambda: next(ticks), wall=lambda: 1.7e9
    ) as log:
        log.write(NOTE)
    first, second = LogReader(path).poll()
    assert isinstance(first, LogOpened)
    assert (first.writer, first.unix_s, first.pid) == ("trainer", 1.7e9, os.getpid())
    assert (first.seq, first.t_s, second.seq, second.t_s) == (0, 0.25, 1, 3.5)


@pytest.mark.usefixtures("impatient")
def test_the_times_of_lines_count_from_the_opening_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    begun_s = time.monotonic()
    with LogWriter(path, writer="trainer") as log:
        log.write(Note(level="info", text="a line"))
    opened, line = (json.loads(text)["t_s"] for text in path.read_text().splitlines())
    assert 0 <= opened <= line
    assert begun_s + line <= time.monotonic()


def test_a_second_writer_is_refused_with_words_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter(path, writer="first") as first:
        with pytest.raises(RunLogError, match="no other writer, found one that is alive") as caught:
            LogWriter(path, writer="second")
        assert str(path) in caught.value.message and "engine tail" in str(caught.value.hint)
        first.write(NOTE)
        assert writer_is_alive(path)
    assert not writer_is_alive(path)
    assert len(LogReader(path).poll()) == 2


HOLD = """
import sys
from pathlib import Path
from engine.log.write import LogWriter
log = LogWriter(Path(sys.argv[1]), writer="child")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("impatient")
def test_a_writer_that_is_killed_leaves_the_log_free(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with child(HOLD, path) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        assert writer_is_alive(path)
        with pytest.raises(RunLogError, match="alive"):
            LogWriter(path, writer="second")
        process.kill()
        process.wait()
    assert not writer_is_alive(path)
    with LogWriter(path, writer="second"):
        assert writer_is_alive(path)
    assert [event.seq for event in LogReader(path).poll()] == [0, 1]


FORK = """
import os, sys
from pathlib import Path
from engine.log.write import LogWriter
log = LogWriter(Path(sys.argv[1]), writer="parent")
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    print("still here", flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_child_does_not_keep_a_dead_writer_alive(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with child(FORK, path) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        assert writer_is_alive(path)
        process.kill()
        process.wait()
        assert not writer_is_alive(path)
        process.stdin.close()
        assert process.stdout.read() == "still here\n"


def test_a_writer_waits_out_a_reader_that_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    probe = os.open(path, os.O_RDONLY)
    fcntl.flock(probe, fcntl.LOCK_SH)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(probe)

    monkeypatch.setattr(time, "sleep", sleep)
    with LogWriter(path, writer="trainer"):
        assert len(pauses) == 3


@pytest.mark.usefixtures("impatient")
def test_probing_without_pause_does_not_keep_writers_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            writer_is_alive(path)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        for _ in range(100):
            LogWriter(path, writer="trainer").close()
    finally:
        done.set()
        thread.join()
    assert len(LogReader(path).poll()) == 100


def test_lines_of_many_threads_are_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter(path, writer="trainer") as log:

        def write() -> None:
            for _ in range(200):
                log.write(NOTE)

        threads = [threading.Thread(target=write) for _ in range(4)]
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval_s)
    assert [event.seq for event in LogReader(path).poll()] == list(range(801))


def test_a_log_is_closed_twice_and_written_no_more(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "a.jsonl", writer="trainer")
    log.sync()
    log.close()
    log.close()
    with pytest.raises(AssertionError, match="closed"):
        log.write(NOTE)


def test_a_synced_log_reaches_the_disk_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with LogWriter(tmp_path / "a.jsonl", writer="trainer") as log:
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
        log.sync()
        assert synced == [log.path.stat().st_ino, tmp_path.stat().st_ino]

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(RunLogError, match="expected to reach the disk, found Input/output"):
            log.sync()


def test_a_place_that_cannot_hold_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=r"missing/a\.jsonl — expected to open it for writing"):
        LogWriter(tmp_path / "missing" / "a.jsonl", writer="trainer")
    with pytest.raises(RunLogError, match="Is a directory"):
        LogWriter(tmp_path, writer="trainer")


# What a dead writer left.


@pytest.mark.parametrize(
    "tail", [b"x", b'{"v":1,"seq":2,"t_', b"\0" * 4096, b"y" * (3 * TAIL_BYTES + 17)]
)
def test_an_unfinished_last_line_is_cut_off_and_counted(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter(path, writer="first") as log:
        log.write(NOTE)
    with path.open("ab") as file:
        file.write(tail)
    with LogWriter(path, writer="second") as log:
        log.write(NOTE)
    events = LogReader(path).poll()
    assert [event.seq for event in events] == [0, 1, 2, 3]
    assert isinstance(events[2], LogOpened) and events[2].torn_bytes_dropped == len(tail)


def test_a_log_of_nothing_but_an_unfinished_line_starts_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"v":1,"se')
    LogWriter(path, writer="second").close()
    (event,) = LogReader(path).poll()
    assert isinstance(event, LogOpened) and (event.seq, event.torn_bytes_dropped) == (0, 10)


@pytest.mark.parametrize("length", [1, TAIL_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 1, 3 * TAIL_BYTES])
def test_the_next_number_is_found_behind_a_line_of_any_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter(path, writer="first") as log:
        log.write(Note(level="info", text="x" * length))
    LogWriter(path, writer="second").close()
    assert [event.seq for event in LogReader(path).poll()] == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [b"my shopping list\n", b"[1]\n", b"{}\n", b'{"seq":"3"}\n', b'{"seq":-2}\n', b"\xff\n", b"\n"],
)
def test_a_file_that_is_no_log_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content + b"torn")
    with pytest.raises(RunLogError, match="@0 — expected a record on the last line"):
        LogWriter(path, writer="trainer")
    assert path.read_bytes() == content + b"torn"
    assert not writer_is_alive(path)


# No room.

FILL = """
import resource, signal, sys
from pathlib import Path
from engine.errors import DiskFull
from engine.log.events import Note
from engine.log.write import LogWriter
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
written = 0
with LogWriter(path, writer="child") as log:
    try:
        for _ in range(100):
            log.write(Note(level="info", text="x" * 137))
            written += 1
    except DiskFull as error:
        print(error.message)
        print(error.hint)
    size = path.stat().st_size
    assert size < 2000 and path.read_bytes().endswith(b"\\n"), size
    try:
        log.write(Note(level="info", text="x" * 137))
    except DiskFull:
        print("still full")
    # Room was made: the same writer goes on.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    log.write(Note(level="info", text="room again"))
print(written)
"""


def test_a_full_disk_leaves_only_whole_lines_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with child(FILL, path) as process:
        out, _ = process.communicate()
    message, hint, still, written = out.splitlines()
    assert process.returncode == 0
    assert str(path) in message and "File too large" in message and "--resume" in hint
    assert still == "still full"
    with LogWriter(path, writer="next") as log:
        log.write(NOTE)
    events = LogReader(path).poll()
    # Opened, the notes that fitted, the one after room was made, and the next session.
    assert [event.seq for event in events] == list(range(int(written) + 4))
    assert isinstance(events[-2], LogOpened) and events[-2].torn_bytes_dropped == 0


WriteCall = Callable[[int, Any], int]


@pytest.fixture
def os_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Replace `os.write` as the writer sees it; the replacement gets the real one first."""
    real: WriteCall = os.write

    def replace(stand_in: Callable[..., int]) -> None:
        monkeypatch.setattr(os, "write", lambda fd, data: stand_in(real, fd, data))

    return replace


Replace = Callable[[Callable[..., int]], None]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EFBIG, DiskFull),
        (errno.EIO, RunLogError),
    ],
)
def test_a_line_that_fits_in_part_is_taken_back_and_the_reason_is_the_kernels(
    tmp_path: Path, os_write: Replace, code: int, kind: type[BadInput]
) -> None:
    path = tmp_path / "a.jsonl"
    calls: list[int] = []

    def partly(real: WriteCall, fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(fd, data[:10])
        raise OSError(code, os.strerror(code))

    with LogWriter(path, writer="trainer") as log:
        before = path.read_bytes()
        os_write(partly)
        with pytest.raises(kind, match=os.strerror(code)) as caught:
            log.write(NOTE)
        assert type(caught.value) is kind
        assert path.read_bytes() == before
        os_write(lambda real, fd, data: real(fd, data))
        log.write(NOTE)
    assert [event.seq for event in LogReader(path).poll()] == [0, 1]


def test_a_kernel_that_takes_nothing_is_a_full_disk_and_no_endless_loop(
    tmp_path: Path, os_write: Replace
) -> None:
    with LogWriter(tmp_path / "a.jsonl", writer="trainer") as log:
        os_write(lambda real, fd, data: 0)
        with pytest.raises(DiskFull):
            log.write(NOTE)


def test_a_line_that_is_taken_in_pieces_is_written_whole(tmp_path: Path, os_write: Replace) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter(path, writer="trainer") as log:
        os_write(lambda real, fd, data: real(fd, data[:7]))
        log.write(NOTE)
    assert [event.seq for event in LogReader(path).poll()] == [0, 1]


@pytest.mark.parametrize("taken", [0, 9, None])
def test_an_interrupt_within_a_write_neither_repeats_nor_skips_a_number(
    tmp_path: Path, os_write: Replace, taken: int | None
) -> None:
    path = tmp_path / "a.jsonl"

    def interrupted(real: WriteCall, fd: int, data: bytes) -> int:
        real(fd, data[:taken])
        raise KeyboardInterrupt

    with LogWriter(path, writer="trainer") as log:
        os_write(interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.write(NOTE)
        os_write(lambda real, fd, data: real(fd, data))
        log.write(Note(level="info", text="after"))
    events = LogReader(path).poll()
    # The interrupted line is there if the kernel had taken all of it.
    assert [event.seq for event in events] == list(range(3 if taken is None else 2))
    assert isinstance(events[-1], Note) and events[-1].text == "after"


def test_a_line_that_could_not_be_taken_back_is_cut_off_before_the_next(
    tmp_path: Path, os_write: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    calls: list[int] = []

    def partly(real: WriteCall, fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(fd, data[:10])
        raise OSError(errno.ENOSPC, "no room")

    def refuse(fd: int, length: int) -> None:
        raise OSError(errno.EIO, "no")

    with LogWriter(path, writer="trainer") as log:
        os_write(partly)
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(DiskFull):
                log.write(NOTE)
        os_write(lambda real, fd, data: real(fd, data))
        assert len(LogReader(path).poll()) == 1
        log.write(NOTE)
    assert [event.seq for event in LogReader(path).poll()] == [0, 1]


def test_what_json_cannot_hold_is_our_mistake_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter(path, writer="trainer") as log:
        with pytest.raises(TypeError):
            log.write(FactsRead(facts={"a": object()}))
        log.write(NOTE)
    assert [event.seq for event in LogReader(path).poll()] == [0, 1]


# The run folder.


def test_a_new_run_has_its_spec_and_its_effective_settings(tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs" / "one", "a = 1\n", {"b": 2.5})
    assert run.name == "one" and run.spec.read_text() == "a = 1\n"
    assert json.loads(run.effective.read_text()) == {"b": 2.5}
    assert sorted(path.name for path in run.path.iterdir()) == ["effective.json", "spec.toml"]
    assert open_run(run.path).path == run.path


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_run_is_never_made_over_something_that_exists(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "one"
    make(path)
    with pytest.raises(BadInput, match="expected a new folder, found one that exists"):
        create_run(path, "", {})
    assert path.exists() and not is_run(path)


def test_a_run_under_a_file_says_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(RunLogError, match="runs — expected to create it, found File exists"):
        create_run(tmp_path / "runs" / "one", "", {})
    with pytest.raises(RunLogError, match="expected to create it, found Not a directory"):
        create_run(tmp_path / "runs" / "more" / "one", "", {})


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "no room"), KeyboardInterrupt()])
def test_a_run_that_cannot_be_written_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, failure: BaseException
) -> None:
    calls: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        calls.append(fd)
        # Each file is synced, and its folder after it.
        if len(calls) == 2 * call - 1:
            raise failure
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskFull if isinstance(failure, OSError) else KeyboardInterrupt):
        create_run(tmp_path / "one", "", {})
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_no_json_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        create_run(tmp_path / "one", "", {"lr": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipt.json"
    write_whole(path, "old")
    write_whole(path, "né")
    assert path.read_bytes() == "né".encode()
    with pytest.raises(RunLogError, match="No such file"):
        write_whole(tmp_path / "missing" / "receipt.json", "x")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="expected to write 3 bytes, found No space left"):
        write_whole(path, "new")
    assert path.read_bytes() == "né".encode() and list(tmp_path.iterdir()) == [path]


def test_a_step_of_nothing_but_absent_numbers_is_a_line(tmp_path: Path) -> None:
    names = [f.name for f in msgspec.structs.fields(StepDone) if f.type == float | None]
    line = strict_json(encode(step(1, **dict.fromkeys(names)), 0, 0.0))
    assert all(line[name] is None for name in names) and "nf" not in line
