"""Checkpoints under failure: every operation failed or killed, power lost, every bit flipped. The
earlier one must always load.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, DiskFull
from engine.train.checkpoint.manifest import MANIFEST, newest, verify
from engine.train.checkpoint.write import FileCalls, Sink, prune, save, set_aside
from tests.support.paths import ROOT
from tests.support.watched_calls import Halves, WatchedCalls, files

DEAD_PID = 2**22 + 1  # above the kernel's largest pid


def failing(nth: int, code: int, persistent: bool) -> WatchedCalls:
    def before(count: int, name: str) -> None:
        if count == nth or (persistent and count > nth):
            raise OSError(code, os.strerror(code), name)

    return WatchedCalls(before)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def abandon(folder: Path) -> None:
    """Leave what a killed save and a killed deletion leave behind."""
    for kind in ("partial", "trash"):
        leftover = folder / f"step-00000009.{kind}-{DEAD_PID}"
        leftover.mkdir()
        (leftover / "model.bin").write_bytes(b"half")


def flip(path: Path, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(raw)


def test_a_saved_checkpoint_verifies_and_says_what_it_holds(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", 1000, files(3))
    assert saved.path == tmp_path / "checkpoints" / "step-00001000"
    assert names(saved.path) == [MANIFEST, "model.bin", "optimizer.bin", "state.json"]
    assert saved.bytes == sum(path.stat().st_size for path in saved.path.iterdir())
    assert saved.seconds >= 0
    found = newest(tmp_path / "checkpoints")
    assert found is not None and found == verify(saved.path)
    assert found.step == 1000 and found.refused == ()
    assert found.manifest_sha256 == saved.manifest_sha256
    assert found.files["state.json"].size == len(b'{"step": 3}')
    manifest = json.loads((saved.path / MANIFEST).read_text())
    assert manifest.keys() == {"schema", "step", "files"} and manifest["step"] == 1000
    assert (saved.path / "model.bin").stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_every_operation_may_fail_and_the_earlier_checkpoint_still_loads(
    tmp_path: Path, code: int, persistent: bool
) -> None:
    for nth in itertools.count(1):
        folder = tmp_path / str(nth)
        folder.mkdir()
        save(folder, 1, files(1))
        abandon(folder)
        calls = failing(nth, code, persistent)
        try:
            save(folder, 2, files(2), calls=calls)
        except (CheckpointError, DiskFull) as error:
            assert isinstance(error, DiskFull) == (code in (errno.ENOSPC, errno.EDQUOT))
            assert os.strerror(code) in error.message
        else:
            assert calls.count < nth, f"operation {nth} failed and save returned"
            break
        found = newest(
            folder
        )  # never corrupt: a published step verifies, and nothing is passed over
        assert found is not None and found.step in (1, 2)
        ours = [name for name in names(folder) if name.endswith(f".partial-{os.getpid()}")]
        assert not ours or persistent
        # the next save works and sweeps whatever is left
        save(folder, 3, files(3))
        assert names(folder) == [
            f"step-{step:08d}" for step in range(1, 4) if step != 2 or found.step == 2
        ]
    assert nth > 24


CHILDREN = """
import os, signal, sys
from pathlib import Path
from tests.support.watched_calls import WatchedCalls, files
from engine.train.checkpoint.write import save

def write(folder, last):
    def before(count, name):
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    save(Path(folder), 2, files(2), calls=WatchedCalls(before))
    os._exit(0)

# One start of Python for all of them.
for line in sys.stdin:
    folder, last = line.split()
    pid = os.fork() or write(folder, int(last))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_process_killed_at_any_operation_leaves_the_earlier_checkpoint_loadable(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILDREN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as children:
        assert children.stdin is not None and children.stdout is not None
        for nth in itertools.count(1):
            folder = tmp_path / str(nth)
            folder.mkdir()
            save(folder, 1, files(1))
            abandon(folder)
            print(folder, nth, file=children.stdin, flush=True)
            code = int(children.stdout.readline())
            found = newest(folder)
            assert found is not None
            if code == 0:
                assert found.step == 2
                break
            assert code == -signal.SIGKILL
            assert found.step in (1, 2)
            save(folder, 3, files(3))
            assert all("." not in name for name in names(folder))
    assert nth > 24


MID_WRITE_CHILD = """
import sys
from pathlib import Path
from engine.train.checkpoint.write import save

class Stuck:
    size_bytes = 2_000_000
    def write_to(self, sink):
        sink.write(bytes(1_000_000))
        print("half", flush=True)
        sys.stdin.read()

save(Path(sys.argv[1]), 2, {"model.bin": Stuck()})
"""


def test_a_writer_killed_from_outside_in_the_middle_of_a_file_is_never_read(tmp_path: Path) -> None:
    save(tmp_path, 1, files(1))
    child = subprocess.Popen(
        [sys.executable, "-c", MID_WRITE_CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == "half\n"
        assert f"step-00000002.partial-{child.pid}" in names(tmp_path)
        found = newest(tmp_path)  # while it is being written
        assert found is not None and found.step == 1
        child.kill()
    save(tmp_path, 4, files(4))
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


class DurableDisk(FileCalls):
    """Notes every operation, so that the folder can be rebuilt as a power loss after any of them
    could leave it.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._open: dict[int, Path] = {}

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.log.append(("make_folder", path))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._open[descriptor] = path
        self.log.append(("create", path))
        return descriptor

    def open_folder(self, path: Path) -> int:
        descriptor = super().open_folder(path)
        self._open[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self.log.append(("write", self._open[descriptor], bytes(data)))
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.log.append(("sync", self._open[descriptor]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", source, target))


def after_power_loss(log: list[tuple[Any, ...]], folder: Path, eager_rename: bool) -> None:
    """Rebuild step 2 in `folder` with only what is sure to be on disk: synced bytes under synced
    names.

    `eager_rename` puts the rename on disk at once, ahead of everything not synced; otherwise it
    waits for the parent's sync.
    """
    written: dict[Path, bytes] = {}
    durable: dict[Path, bytes] = {}
    listed: set[Path] = set()
    renamed = settled = None
    for operation, path, *rest in log:
        match operation:
            case "create":
                written[path] = durable[path] = b""
            case "write":
                written[path] += rest[0]
            case "sync" if path in written:
                durable[path] = written[path]
            case "sync":
                listed |= {name for name in written if name.parent == path}
                settled = renamed if renamed and path == renamed[1].parent else settled
            case "rename":
                renamed = (path, rest[0])
    placed = renamed if eager_rename else settled
    if placed is None:
        return
    (folder / placed[1].name).mkdir()
    for path in listed:
        (folder / placed[1].name / path.name).write_bytes(durable[path])


@pytest.mark.parametrize("eager_rename", [False, True])
def test_a_power_loss_after_any_operation_leaves_a_checkpoint_that_verifies(
    tmp_path: Path, eager_rename: bool
) -> None:
    live = tmp_path / "live"
    save(live, 1, files(1))
    disk = DurableDisk()
    save(live, 2, files(2), calls=disk)
    for length in range(len(disk.log) + 1):
        folder = tmp_path / f"after-{length}"
        folder.mkdir()
        shutil.copytree(live / "step-00000001", folder / "step-00000001")
        after_power_loss(disk.log[:length], folder, eager_rename)
        found = newest(folder)
        assert found is not None
        if length == len(disk.log):
            assert found.step == 2, "acknowledged and lost"


def test_every_flipped_bit_of_every_file_is_refused_by_name(tmp_path: Path) -> None:
    saved = save(tmp_path, 7, {"model.bin": bytes(range(20)), "state.json": b'{"step": 7}'})
    for path in saved.path.iterdir():
        raw = path.read_bytes()
        for bit in range(8 * len(raw)):
            flip(path, bit)
            with pytest.raises(CheckpointError) as caught:
                verify(saved.path)
            assert str(saved.path) in caught.value.message
            if path.name != MANIFEST:
                assert path.name in caught.value.message
                assert "expected sha256" in caught.value.message
            path.write_bytes(raw)
    verify(saved.path)


def test_refusal_names_the_file_and_both_digests(tmp_path: Path) -> None:
    saved = save(tmp_path, 7, files(1))
    expected = verify(saved.path).files["model.bin"].sha256
    flip(saved.path / "model.bin")
    with pytest.raises(
        CheckpointError, match=f"model.bin — expected sha256 {expected}, found [0-9a-f]{{64}}$"
    ):
        verify(saved.path)


def _truncate(path: Path) -> None:
    (path / "model.bin").write_bytes((path / "model.bin").read_bytes()[:-1])


def _remove_file(path: Path) -> None:
    (path / "model.bin").unlink()


def _add_file(path: Path) -> None:
    (path / "extra.bin").write_bytes(b"")


def _link_file(path: Path) -> None:
    (path / "model.bin").rename(path.parent / "elsewhere")
    (path / "model.bin").symlink_to(path.parent / "elsewhere")


def _remove_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def _empty_manifest(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"")


def _deep_manifest(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"[" * 100_000)


def _escaping_name(path: Path) -> None:
    raw = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(raw.replace(b"model.bin", b"../model.bin"))


def _other_step(path: Path) -> None:
    raw = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(raw.replace(b'"step": 7', b'"step": 8'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.bin — expected 40 bytes, found 39"),
        (_remove_file, "model.bin — expected the file in the manifest, found no such file"),
        (_add_file, "extra.bin — expected only files in the manifest, found an extra file"),
        (_link_file, "model.bin — expected a plain file"),
        (_remove_manifest, "found none: not a checkpoint"),
        (_empty_manifest, "MANIFEST.json — expected JSON"),
        (_deep_manifest, "MANIFEST.json — expected JSON"),
        (_escaping_name, r"expected plain file names, found '\.\./model.bin'"),
        (_other_step, "expected step 7, as the folder is named, found 8"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    saved = save(tmp_path, 7, files(1))
    damage(saved.path)
    with pytest.raises(CheckpointError, match=message):
        verify(saved.path)


def test_falling_back_needs_leave_and_says_what_was_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, files(step))
    flip(tmp_path / "step-00000003" / "model.bin")
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"step-00000003/model\.bin") as caught:
        newest(tmp_path)
    assert caught.value.hint is not None
    found = newest(tmp_path, allow_fallback=True)
    assert found is not None and found.step == 1
    assert [path.name for path, _ in found.refused] == ["step-00000003", "step-00000002"]
    assert "model.bin" in found.refused[0][1] and "not a checkpoint" in found.refused[1][1]


def test_when_no_checkpoint_verifies_there_is_no_silent_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 1, files(1))
    flip(tmp_path / "step-00000001" / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        newest(tmp_path, allow_fallback=True)


def test_an_empty_or_absent_folder_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_foreign_names_and_abandoned_folders_are_not_read(tmp_path: Path) -> None:
    save(tmp_path, 5, files(5))
    abandon(tmp_path)
    for name in (
        "step-12",
        "step-000000099",
        "step-0000000x",
        "step-٠٠٠٠٠٠٩٩",
        "best",
        "notes.txt",
    ):
        (tmp_path / name).mkdir()
    found = newest(tmp_path)
    assert found is not None and found.step == 5
    with pytest.raises(
        CheckpointError, match="expected a folder named step-NNNNNNNN, found step-12"
    ):
        verify(tmp_path / "step-12")


def test_a_plain_file_named_like_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder"):
        newest(tmp_path)


def test_a_published_step_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1, files(1))
    before = verify(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="found it published"):
        save(tmp_path, 1, files(2))
    assert verify(tmp_path / "step-00000001") == before
    assert names(tmp_path) == ["step-00000001"]


def test_a_refused_step_can_be_set_aside_and_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, files(1))
    saved = save(tmp_path, 2, files(2))
    flip(saved.path / "model.bin")
    aside = set_aside(saved.path)
    assert (aside / "model.bin").exists()
    save(tmp_path, 2, files(2))
    found = newest(tmp_path)
    assert found is not None and found.step == 2 and aside.exists()


def test_too_little_free_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path, 1, files(1))

    class Small(FileCalls):
        def free_bytes(self, folder: Path) -> int:
            return 149

    content: dict[str, Any] = {"model.bin": Halves(bytes(60)), "state.json": bytes(40)}
    with pytest.raises(DiskFull, match=r"expected 150 bytes free .* found 149"):
        save(tmp_path, 2, content, calls=Small())
    assert names(tmp_path) == ["step-00000001"]


def test_an_error_of_a_writer_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    class Broken:
        size_bytes = 4

        def write_to(self, sink: Sink) -> None:
            sink.write(b"ab")
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        save(tmp_path, 1, {"model.bin": Broken()})
    assert names(tmp_path) == []


def test_short_writes_are_completed(tmp_path: Path) -> None:
    class Sparing(FileCalls):
        def write(self, descriptor: int, data: memoryview) -> int:
            return super().write(descriptor, data[:3])

    saved = save(tmp_path, 1, files(1), calls=Sparing())
    assert (saved.path / "model.bin").read_bytes() == bytes(range(1, 41))
    verify(saved.path)


def test_prune_keeps_the_newest_and_the_named_steps(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, files(step))
    assert prune(tmp_path, 2, {2}) == (4, 3, 1)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert prune(tmp_path, 2, {2}) == ()


def test_prune_never_deletes_the_last_checkpoint_that_verifies(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, files(step))
    for step in (3, 4):
        flip(tmp_path / f"step-{step:08d}" / "model.bin")
    assert prune(tmp_path, 1) == (3, 1)
    found = newest(tmp_path, allow_fallback=True)
    assert found is not None and found.step == 2
    flip(tmp_path / "step-00000002" / "model.bin")
    assert prune(tmp_path, 1) == ()  # none verifies, so nothing may go
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_prune_that_fails_at_any_operation_leaves_the_newest_and_whole_folders_only(
    tmp_path: Path,
) -> None:
    for nth in itertools.count(1):
        folder = tmp_path / str(nth)
        folder.mkdir()
        for step in (1, 2, 3):
            save(folder, step, files(step))
        abandon(folder)
        calls = failing(nth, errno.EIO, persistent=True)
        try:
            prune(folder, 1, calls=calls)
        except CheckpointError as error:
            assert "expected to delete old steps" in error.message
        else:
            assert calls.count < nth
            break
        for name in names(folder):
            if "." not in name:
                verify(folder / name)
        assert verify(folder / "step-00000003").step == 3
        prune(folder, 1)
        save(folder, 4, files(4))
        assert names(folder) == ["step-00000003", "step-00000004"]
    assert nth > 10
