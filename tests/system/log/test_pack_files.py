"""Packs beside a log are believed only where the log still has their lines, and change nothing that is shown."""

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
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import engine.log.keeper as keeper_module
import engine.log.pack_files as files_module
import engine.log.shares as shares_module
from engine.log.events import Event, Note
from engine.log.extremes import Range
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.gather import Gatherer
from engine.log.keeper import Keeper
from engine.log.pack import RANGED, Pack
from engine.log.pack_files import Chunk, PackFiles
from engine.log.read import BrokenLog, LogReader
from engine.log.view import SOURCES, RunView, Source
from engine.log.write import LogWriter, encode
from engine.spec import LossSection, RunSpec
from engine.spec.sections import StudentSection
from engine.watch.supervisor import _Supervisor
from engine.watch.watcher import Watcher
from tests.support.faults import HERE, compiled, environment
from tests.support.long_runs import write_long_run
from tests.support.run_events import opened, picture, step
from tests.support.small_logs import gathered, long_log, long_logs, one_by_one, small_sizes


@pytest.fixture
def small() -> Iterator[None]:
    with small_sizes():
        yield


def shown(path: Path, source: Source = "events", *, files: bool, keep: bool = False) -> object:
    """All that is shown of a log, or what is wrong with it and what is shown in front of that."""
    view = RunView()
    gatherer = Gatherer(LogReader(path), files=files, keep=keep)
    try:
        view = gathered(view, source, gatherer)
    except BrokenLog as broken:
        return broken.message, broken.hole, len(broken.before)
    return told(view)


def told(view: RunView) -> tuple[dict[str, str], dict[str, list[Range]]]:
    """A view, and what is lowest and highest in rows of the columns for which packs know it."""
    steps, places = view.steps, range(0, len(view.steps) + 1, max(1, len(view.steps) // 12))
    pairs = [(a, b) for a in places for b in places if a <= b]
    return picture(view), {name: [steps.range(name, a, b) for a, b in pairs] for name in RANGED}


def kept(path: Path) -> PackFiles:
    """The packs of a log in their files."""
    shown(path, files=False, keep=True)
    files = PackFiles(path)
    assert files.numbers(), "the log is too short for this test"
    return files


def believed(files: PackFiles) -> set[int]:
    return {number for number in files.numbers() if files.load(number) is not None}


def overwrite(path: Path, at: int, data: bytes) -> None:
    """In place: the same file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def cut(path: Path, end: int) -> None:
    os.truncate(path, end)


# The same view, whatever the log went through.


def line_ends(data: bytes) -> list[int]:
    return [at + 1 for at, byte in enumerate(data) if byte == 10]


@settings(max_examples=20, deadline=None)
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
            assert first == told(wanted)
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
    assert believed(files) == files.numbers() == set(range(path.stat().st_size // 1500))
    made: list[int] = []
    real = shares_module.pack_chunk
    monkeypatch.setattr(
        shares_module, "pack_chunk", lambda path, a, b: made.append(a) or real(path, a, b)
    )
    shown(path, files=True)
    assert made == [1500 * len(files.numbers())]  # the last, which is not whole
    shown(path, files=False)
    assert len(made) > len(files.numbers())


# What is not believed.


def in_its_place(path: Path, data: bytes) -> None:
    """Another file of the same name."""
    other = path.with_suffix(".new")
    other.write_bytes(data)
    other.replace(path)


def other_lines(path: Path, count: int) -> bytes:
    events: list[Event] = [opened(1.0), *(step(n, loss=5.0) for n in range(1, count))]
    return b"".join(encode(event, n, n / 7) for n, event in enumerate(events))


Planted = Callable[[Path, PackFiles, pytest.MonkeyPatch], None]


def middle(files: PackFiles, number: int = 3) -> int:
    """A digit in the middle of a pack, outside of what is compared in the same file."""
    chunk = files.load(number)
    assert chunk is not None
    pack = chunk.packs[0]
    data = files.log.read_bytes()
    at = data.index(b'"loss":', pack.begin) + len(b'"loss":')
    assert at < pack.end - 64 and chr(data[at]).isdigit()
    return at


def flip_in_a_copy(path: Path, files: PackFiles, _: pytest.MonkeyPatch) -> None:
    data, at = bytearray(path.read_bytes()), middle(files)
    data[at] ^= 1
    in_its_place(path, bytes(data))


def zeros_after_a_restart(path: Path, files: PackFiles, patch: pytest.MonkeyPatch) -> None:
    overwrite(path, middle(files), bytes(40))
    patch.setattr(files_module, "read_boot_id", lambda: "another boot")


def no_boot_id(path: Path, files: PackFiles, patch: pytest.MonkeyPatch) -> None:
    """Packs that were made, and are looked at, where nobody knows whether the machine was restarted."""
    patch.setattr(files_module, "read_boot_id", lambda: files_module.UNKNOWN)
    shutil.rmtree(files.folder)
    overwrite(path, middle(kept(path)), b"9")


def cut_and_gone_on(path: Path, files: PackFiles, _: pytest.MonkeyPatch) -> None:
    cut(path, 0)
    overwrite(path, 0, other_lines(path, 300))


def changed_where_it_is_compared(path: Path, files: PackFiles, _: pytest.MonkeyPatch) -> None:
    chunk = files.load(3)
    assert chunk is not None
    overwrite(path, chunk.packs[-1].end - 20, b"9")


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
def test_a_log_that_is_not_what_was_packed_is_read_by_its_lines(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    files = kept(path)
    assert 3 in believed(files)
    LOGS[planted](path, files, monkeypatch)
    assert 3 not in believed(PackFiles(path))
    assert shown(path, files=True) == shown(path, files=False)


def another_version(file: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files_module, "VERSION", files_module.VERSION + 1)


def another_field(file: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files_module, "PACKED_STEPS", (*files_module.PACKED_STEPS, "new"))


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
    "of another chunk": lambda file, _: shutil.copy(file.with_name("events-000002.pack"), file),
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
        assert PackFiles(path).load(3) is None
    assert shown(path, files=True) == wanted
    if planted != "a folder":
        assert shown(path, files=True, keep=True) == wanted
        chunk = PackFiles(path).load(3)
        assert chunk is not None or planted == "of another chunk"


def test_an_unchanged_log_is_believed_after_few_bytes_and_a_copy_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=20_000).folder)
    keep_all(run)
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or real(fd, size, at))
    size = run.events.stat().st_size
    assert believed(PackFiles(run.events)) == set(range(size // files_module.CHUNK_BYTES))
    assert 0 < sum(read) < 0.003 * size
    copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "copy")))
    read.clear()
    assert believed(PackFiles(copy.events)) == believed(PackFiles(run.events))
    assert sum(read) > 0.6 * size


def test_a_pack_that_somebody_else_forged_is_not_shown(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=20_000).folder)
    keep_all(run)
    files = PackFiles(run.events)
    number = min(believed(files))
    chunk = files.load(number)
    assert chunk is not None
    pack = chunk.packs[-1]
    steps = pack.steps
    assert steps is not None

    def with_number(place: int, value: float) -> Pack:
        numbers = array("d", bytes(steps.numbers))
        numbers[place * steps.rows + 1] = value
        return replace(pack, steps=replace(steps, numbers=memoryview(numbers).cast("B")))

    forged = {
        "nothing": pack,
        "a time": with_number(0, 1e300),
        "a time that is none": with_number(0, math.nan),
        "a step that is none": with_number(1, math.nan),
        "a loss": with_number(2, 1e200),
        "too few numbers": replace(pack, steps=replace(steps, numbers=steps.numbers[:-8])),
        "rows": replace(pack, steps=replace(steps, rows=1 << 40)),
        "absent": replace(pack, steps=replace(steps, absent={0: bytes(3)})),
        "absent steps": replace(pack, steps=replace(steps, absent={1: b"\1" * steps.rows})),
        "ranges": replace(pack, steps=replace(steps, ranges={2: (b"", b"", b"")})),
        "a line": replace(pack, others=[b"no record"]),
        "a reading": replace(pack, readings=[encode(Note(level="info", text="x"), 0, 0.0)[:-1]]),
        "a GPU": replace(pack, gpus={1 << 20: steps}),
        "a clock": replace(pack, last_s=1e300),
        "places": replace(pack, places=[(1, 1 << 50, 0.0)]),
    }
    files._boot_id = "of another machine"
    for what, one in forged.items():
        assert files.save(number, Chunk(chunk.file_id, [*chunk.packs[:-1], one])), what
        found = PackFiles(run.events).load(number)
        assert (found is None) == (what != "nothing"), what


# Who writes them.


def keep_all(run: RunFolder) -> Keeper:
    """All that the supervisor keeps of a run that has been written."""
    now = [0.0]
    keeper = Keeper(run, monotonic=lambda: now[0])
    for _ in range(2 * run.events.stat().st_size // files_module.CHUNK_BYTES + 20):
        now[0] += 1e6
        keeper.tick()
    return keeper


def test_what_the_supervisor_keeps_is_what_a_viewer_keeps(tmp_path: Path, small: None) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    keep_all(run)
    before = {path.name: path.read_bytes() for path in (run.path / "columns").iterdir()}
    assert len(before) == run.events.stat().st_size // 1500
    shutil.rmtree(run.path / "columns")
    kept(run.events)
    assert {path.name: path.read_bytes() for path in (run.path / "columns").iterdir()} == before


def test_a_chunk_is_kept_only_when_its_last_line_is_whole(tmp_path: Path, small: None) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    data = run.events.read_bytes()
    for end in range(2950, 3400, 7):
        run.events.write_bytes(data[:end])
        keep_all(run)
        numbers = PackFiles(run.events).numbers()
        assert numbers == ({0, 1} if b"\n" in data[2999:end] else {0}), end
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
    stale = PackFiles(run.events).path(9)
    assert PackFiles(run.events).load(9) is None and stale in begun
    left = stale.with_name(f"{stale.name}.partial-1-1")
    left.write_bytes(b"of one who died")
    keep_all(run)
    now = PackFiles(run.events)
    assert believed(now) == set(range(run.events.stat().st_size // 1500)) and not left.exists()
    same = {path for path, inode in begun.items() if path.stat().st_ino == inode}
    assert same == {now.path(n) for n in range(4)}, "what still stands is not written again"
    assert shown(run.events, files=True) == shown(run.events, files=False)


def test_the_supervisor_pays_no_more_than_its_share_however_fast_a_log_grows(
    tmp_path: Path, small: None
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 2000)
    now, used = [0.0], [0.0]
    real = keeper_module.make_chunk

    def costly(*arguments: object) -> object:
        used[0] += 0.043
        return real(*arguments)  # type: ignore[arg-type]

    patch = pytest.MonkeyPatch()
    patch.setattr(keeper_module, "make_chunk", costly)
    with patch.context():
        keeper = Keeper(run, monotonic=lambda: now[0], processor=lambda: used[0])
        for _ in range(600):
            now[0] += 1.0
            keeper.tick()
    patch.undo()
    assert used[0] / now[0] <= keeper_module.SHARE + 0.043 / now[0]
    assert len(PackFiles(run.events).numbers()) >= 0.9 * 600 * keeper_module.SHARE / 0.043


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
    files = PackFiles(run.events)
    assert believed(files) == files.numbers() == set(range(run.events.stat().st_size // 1500))
    assert not list(files.folder.glob("*partial*"))


def test_a_helper_keeps_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=25_000).folder)
    monkeypatch.setattr(shares_module, "HELP_FROM_BYTES", 1)
    wanted = picture(Follower(run).read_all())
    shares = shares_module.Shares(
        run.events, 0, run.events.stat().st_size, helpers=1, files=PackFiles(run.events), keep=True
    )
    with shares._changed:
        assert shares._changed.wait_for(lambda: len(shares._made) >= 2, timeout=60)
    assert len(believed(PackFiles(run.events))) >= 2
    while shares.take() is not None:
        pass
    size = run.events.stat().st_size
    assert believed(PackFiles(run.events)) == set(range(size // files_module.CHUNK_BYTES))
    assert picture(Follower(run, files=True).read_all()) == wanted


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
    monkeypatch.setattr(files_module, "LEFT_BYTES", 1 << 60)
    shown(path, files=True, keep=True)
    assert not PackFiles(path).numbers() and not list(PackFiles(path).folder.glob("*"))


def test_who_only_looks_writes_nothing(tmp_path: Path, small: None) -> None:
    path = tmp_path / "events.jsonl"
    long_log(path, 200)
    shown(path, files=True)
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]


def test_what_proves_something_reads_the_lines(tmp_path: Path, small: None) -> None:
    """A Follower takes packs only where it is asked to."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    long_log(run.events, 200)
    at = middle(kept(run.events))
    overwrite(run.events, at, b"9")
    by_lines, by_files = Follower(run), Follower(run, files=True)
    assert picture(by_lines.read_all()) != picture(by_files.read_all())
    assert told(by_lines.view) == shown(run.events, files=False)


# Every operation fails, and the power goes.


@pytest.mark.parametrize(
    "mode",
    [
        "KILL",
        "EIO",
        pytest.param("ENOSPC", marks=pytest.mark.soak),
        pytest.param("EROFS", marks=pytest.mark.soak),
    ],
)
def test_every_operation_of_the_keeper_may_fail_and_the_run_knows_nothing_of_it(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, mode: str
) -> None:
    library = compiled(tmp_path_factory.mktemp("faults"))
    done = subprocess.run(
        [sys.executable, str(HERE / "pack_file_faults.py"), str(tmp_path), mode],
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


def test_out_of_its_files_a_run_costs_a_fraction_of_its_lines(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=30_000).folder)
    keep_all(run)

    def timed(**how: bool) -> float:
        begin = time.process_time()
        assert Follower(run, **how).read_all().last_step == 30_000
        return time.process_time() - begin

    # The best of some tries: what else goes on can only make one slower.
    steps = Follower(run, files=True).read_all().steps
    known = steps._known["loss"]
    assert sum(rows for _, rows, _ in known) > 0.7 * len(steps)
    assert all(a[0] + a[1] <= b[0] for a, b in pairwise(known))
    ratios = [timed(files=True) / timed() for _ in range(4)]
    assert min(ratios) < 0.7


def test_the_supervisor_keeps_the_packs_of_its_run(tmp_path: Path) -> None:
    run = RunFolder(write_long_run(tmp_path / "run", steps=7000, resume=False).folder)
    spec = RunSpec(student=StudentSection(config="student.json"), loss=LossSection(alpha=1.0))
    run.effective.write_text(json.dumps({"spec": spec.to_dict()}))
    trainer = subprocess.Popen(["sleep", "0.1"])
    with (
        LogWriter(run.watch, writer="supervisor") as watch,
        LogWriter(run.device, writer="sampler") as device,
    ):
        supervisor = _Supervisor(run, watch, device)
        exit_fd = os.pidfd_open(trainer.pid)
        supervisor.selector.register(exit_fd, selectors.EVENT_READ, "trainer")
        watcher = Watcher(run, trainer.pid, watch.write, lambda *_: None)
        supervisor._watch_until_exit(trainer, watcher, exit_fd)
    assert trainer.wait() == 0
    os.close(exit_fd)
    assert believed(PackFiles(run.events)) == {0}
