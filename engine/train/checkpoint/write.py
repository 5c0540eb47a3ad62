"""Write and delete checkpoints so that each one is either complete or recognised as incomplete. No torch.

    <folder>/                          one directory, one filesystem, one writer
      step-00001000/                   published
        <data files>
        MANIFEST.json                  written last: `engine.train.checkpoint.manifest`
      step-00002000.partial-<pid>/     being written, or abandoned by a process that died
      step-00000500.trash-<pid>/       being deleted
      step-00001500.refused-<pid>/     did not verify and was set aside

Saving requires free space of 1.5 times the checkpoint's size. `save` then takes these steps: mkdir the partial
folder; create each file exclusively, write, fsync and close it; write the manifest last, in the same way; fsync the
partial folder; rename it; fsync the parent. When `save` returns, the checkpoint is on disk, and the caller may log
it. A crash before the rename leaves a partial folder, which nothing reads and which the next save removes. A crash
after the rename may leave a checkpoint that is published but not logged; a logged checkpoint is always published. A
published step is never written again.

The caller must ensure that there is one writer per folder, as the lock of the run's log does: `save` deletes the
partial folders of other processes.

Covered: death of the process or an I/O error at any operation, loss of bytes that were not fsynced, bit rot. Not
covered: a disk that reports an fsync as done when it is not.

All operating-system calls that change a checkpoint folder go through `FileCalls`, so a test can fail any
one of them, or cut the power after it.

Retention:

    published                 the newest `keep_last`, the explicitly kept steps, and the newest one that
                              verifies are kept
      -> .trash-<pid>         being deleted, and no longer published
      -> .refused-<pid>       did not verify: its files are kept, and its step can be saved again
    .partial-<pid>            being written, or abandoned by a process that died

A folder is renamed before any of its files is deleted, so a crash never leaves a published checkpoint incomplete.
Folders that earlier processes left half written or half deleted are removed by the next `save` or `prune`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.checkpoint_folders import FREE_SPACE_FACTOR, folder_name, published, refusal, step_of
from engine.errors import NO_ROOM, CheckpointError, DiskFull
from engine.train.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    manifest_bytes,
    verify,
)
from engine.units import format_bytes


class FileCalls:
    """The operating-system calls: each method is one call, and raises its OSError."""

    def free_bytes(self, folder: Path) -> int:
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o755)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def open_folder(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


OS_CALLS = FileCalls()


def sync_folder(path: Path, calls: FileCalls) -> None:
    """fsync a folder, so that the names in it are on disk. Without it, a crash can lose the name of a file that was
    fsynced.
    """
    descriptor = calls.open_folder(path)
    try:
        calls.sync(descriptor)
    finally:
        calls.close(descriptor)


_LEFTOVER = re.compile(r"step-[0-9]{8}\.(?:partial|trash)-[0-9]+")


# contract: checkpoint-protocol-v1
def prune(
    folder: Path,
    keep_last: int,
    keep: Collection[int] = (),
    *,
    good: Path | None = None,
    calls: FileCalls = OS_CALLS,
) -> tuple[int, ...]:
    """Delete all checkpoints except the newest `keep_last` and the steps in `keep`, and return the deleted steps.

    The newest checkpoint that verifies is never deleted, and if none verifies, nothing is deleted. `good` is a
    checkpoint that was verified already. Each folder is renamed to `.trash` first, so that a crash never leaves a
    published checkpoint incomplete. Call this only after a save has returned. Raises CheckpointError or DiskFull at
    the first I/O error.
    """
    paths = list(published(folder))
    candidates = [path for path in paths[keep_last:] if step_of(path) not in keep]
    if not candidates:
        return ()
    last_good = next((path for path in paths if path == good or _verifies(path)), None)
    if last_good is None:
        return ()
    try:
        sweep(folder, calls)
        removed = []
        for path in candidates:
            if path == last_good:
                continue
            trash = path.with_name(f"{path.name}.trash-{os.getpid()}")
            calls.rename(path, trash)
            sync_folder(folder, calls)
            _delete_tree(trash, calls)
            removed.append(step_of(path))
    except OSError as error:
        kind = DiskFull if error.errno in NO_ROOM else CheckpointError
        raise kind(
            f"checkpoint retention: {folder} — expected to delete old steps, found {error};"
            " the newest checkpoint is unchanged"
        ) from error
    return tuple(removed)


def set_aside(path: Path, *, calls: FileCalls = OS_CALLS) -> Path:
    """Rename a refused checkpoint, so that its step can be saved again and its files are kept. Return the new path."""
    target = path.with_name(f"{path.name}.refused-{os.getpid()}")
    try:
        calls.rename(path, target)
        sync_folder(path.parent, calls)
    except OSError as error:
        raise refusal(path, "to be set aside", str(error)) from error
    return target


def sweep(folder: Path, calls: FileCalls) -> None:
    """Delete the folders that this or an earlier process left half written or half deleted."""
    for entry in sorted(folder.iterdir()):
        if not _LEFTOVER.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
            continue
        _delete_tree(entry, calls)


def remove_partial(partial: Path, calls: FileCalls) -> None:
    """Delete the partial folder of a failed save. An I/O error here must not hide the error of the save."""
    with contextlib.suppress(OSError):
        _delete_tree(partial, calls)


def _delete_tree(path: Path, calls: FileCalls) -> None:
    """Delete a folder of plain files; it holds nothing else, because only `save` creates it."""
    for entry in sorted(path.iterdir()):
        calls.remove_file(entry)
    calls.remove_folder(path)


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


class Sink(Protocol):
    """An open binary file that is being written."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class Writer(Protocol):
    """File content that is written in chunks, so that it need not be in memory all at once."""

    @property
    def size_bytes(self) -> int:
        """Exact number of bytes that `write_to` writes; the free space is compared with it first."""
        ...

    def write_to(self, sink: Sink) -> None: ...


class SharedParts(Protocol):
    """Files that several processes write, including this one (`engine.train.checkpoint.keeper`)."""

    @property
    def size_bytes(self) -> int: ...

    def write_into(self, folder: Path, /) -> Mapping[str, FileRecord]:
        """Write the files of all processes into the partial folder; return their records once all are on disk."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is on disk in full."""

    path: Path
    bytes: int
    """Size of the data files and the manifest together."""
    seconds: float
    manifest_sha256: str


# contract: checkpoint-protocol-v1
def save(
    folder: Path,
    step: int,
    files: Mapping[str, bytes | Writer],
    *,
    parts: SharedParts | None = None,
    calls: FileCalls = OS_CALLS,
) -> Saved:
    """Write one checkpoint and return when it is safe on disk.

    `folder` is created if its parent exists. `parts` are files that other processes write to the
    checkpoint.

    Raises DiskFull when there is not enough space, before or during the write, and CheckpointError for
    any other I/O error or when the step is already published. After an error, the partial folder is deleted
    (if that fails too, the next save retries), and every earlier checkpoint is unchanged. An exception of a
    Writer propagates after the same clean-up.
    """
    began = time.monotonic()
    final = folder / folder_name(step)
    partial = folder / f"{final.name}.partial-{os.getpid()}"
    published = False
    try:
        if not folder.is_dir():
            calls.make_folder(folder)
            sync_folder(folder.parent, calls)
        if os.path.lexists(final):
            raise CheckpointError(
                f"checkpoint: {final} — expected a step that is not saved yet, found it published"
            )
        sweep(folder, calls)
        size = sum(map(_size_bytes, files.values()))
        _check_free_space(folder, size + (0 if parts is None else parts.size_bytes), calls)
        calls.make_folder(partial)
        try:
            records = dict(parts.write_into(partial)) if parts is not None else {}
            for name, content in files.items():
                records[name] = _write_file(partial / name, content, calls)
            manifest = manifest_bytes(step, records)
            manifest_record = _write_file(partial / MANIFEST, manifest, calls)
            sync_folder(partial, calls)
            # A published folder is never empty, so rename cannot replace one even if it appeared since
            # the check above.
            calls.rename(partial, final)
            published = True
        except BaseException:
            if not published:
                remove_partial(partial, calls)
            raise
        sync_folder(folder, calls)
    except OSError as error:
        raise _save_error(error, folder, final, published, files) from error
    return Saved(
        path=final,
        bytes=sum(record.size for record in records.values()) + len(manifest),
        seconds=time.monotonic() - began,
        manifest_sha256=manifest_record.sha256,
    )


def _write_file(path: Path, content: bytes | Writer, calls: FileCalls) -> FileRecord:
    descriptor = calls.create(path)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher:
            sink = _HashingSink(descriptor, calls, hasher)
            if isinstance(content, bytes):
                sink.write(content)
            else:
                content.write_to(sink)
        calls.sync(descriptor)
    finally:
        calls.close(descriptor)
    return FileRecord(sha256=sink.digest.hexdigest(), size=sink.size)


class _HashingSink:
    """Writes all bytes given to it, and hashes them in another thread at the same time."""

    def __init__(self, descriptor: int, calls: FileCalls, hasher: Executor) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._descriptor = descriptor
        self._calls = calls
        self._hasher = hasher

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        hashed = self._hasher.submit(self.digest.update, view)
        self.size += len(view)
        written = 0
        try:
            while written < len(view):  # a write call writes at most 2 GiB, and may write less
                written += self._calls.write(self._descriptor, view[written:])
        finally:
            # The caller may overwrite the data after `write` returns.
            hashed.result()
        return len(view)


def _size_bytes(content: bytes | Writer) -> int:
    return len(content) if isinstance(content, bytes) else content.size_bytes


def _check_free_space(folder: Path, size: int, calls: FileCalls) -> None:
    needed, free = int(size * FREE_SPACE_FACTOR), calls.free_bytes(folder)
    if free < needed:
        raise DiskFull(
            f"checkpoint: {folder} — expected {needed} bytes free ({FREE_SPACE_FACTOR} times"
            f" {format_bytes(size)}), found {free}",
            hint="free some space or keep fewer checkpoints",
        )


def _save_error(
    error: OSError,
    folder: Path,
    final: Path,
    published: bool,
    files: Mapping[str, bytes | Writer],
) -> CheckpointError | DiskFull:
    size = sum(map(_size_bytes, files.values()))
    if error.errno in NO_ROOM:
        return DiskFull(
            f"checkpoint: {folder} — expected space for {size} bytes, found {error};"
            " earlier checkpoints are unchanged",
            hint="free some space, or raise the quota, or keep fewer checkpoints",
        )
    state = (
        "it is published but may not survive a power loss" if published else "nothing was published"
    )
    return CheckpointError(
        f"checkpoint: {final} — expected to write {size} bytes, found {error}; {state},"
        " earlier checkpoints are unchanged"
    )
