"""Checkpoints that are complete or refused by name: the layout, and how one is written. No torch.

    <folder>/                          one directory, one filesystem, one writer
      step-00001000/                   published
        <data files>
        MANIFEST.json                  written last: `engine.train.checkpoint.manifest`
      step-00002000.partial-<pid>/     being written, or abandoned by a process that died
      step-00000500.trash-<pid>/       being deleted: `engine.train.checkpoint.retention`
      step-00001500.refused-<pid>/     did not verify and was set aside

Saving: free space at least 1.5 times the size; mkdir the partial folder; each file created
exclusively, written, fsynced, closed; the manifest last, in the same way; fsync the partial folder;
one rename; fsync the parent. When `save` returns, all of it is on disk, and the caller may
acknowledge it. A crash before the rename leaves a partial folder that nothing reads and the next
save removes. A crash after it leaves a checkpoint that is published but was never acknowledged,
which is allowed; the reverse cannot happen. A published step is never written again.

One writer per folder is the caller's promise: partial folders of this process or of dead ones are
swept. Covered: death or an I/O error at any operation, loss of bytes that were not fsynced, bit
rot. Not covered: a disk that lies about fsync.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import NO_ROOM, CheckpointError, DiskFull
from engine.train.checkpoint.file_calls import OS_CALLS, FileCalls, sync_folder
from engine.train.checkpoint.manifest import MANIFEST, FileRecord, is_file_name, manifest_bytes
from engine.train.checkpoint.retention import remove_partial, sweep
from engine.units import format_bytes

FREE_SPACE_FACTOR = 1.5


class Sink(Protocol):
    """An open binary file that is being written."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class Writer(Protocol):
    """Content that is written piece by piece, so that it need not be in memory as a whole."""

    @property
    def size_bytes(self) -> int:
        """Exactly how much `write_to` will write: the free space is checked against it before
        anything is created.
        """
        ...

    def write_to(self, sink: Sink) -> None: ...


class SharedParts(Protocol):
    """Files that several processes write, this one among them (`engine.train.checkpoint.parts`)."""

    @property
    def size_bytes(self) -> int: ...

    def write_into(self, folder: Path, /) -> Mapping[str, FileRecord]:
        """Have them written into the partial folder; what each holds once all are on disk."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is on disk in full."""

    path: Path
    bytes: int
    """Data files and manifest together."""
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
    """Write one checkpoint and return when it is safe on disk. `folder` is made if its parent
    exists. `parts` are files that other processes write to it too.

    Raises DiskFull when there is no room, before or during the write, and CheckpointError for any
    other I/O error or when the step is already published. After either, no partial folder is left
    (unless the disk refuses that too; the next save sweeps it) and every earlier checkpoint is as
    it was. An exception of a Writer passes through, after the same cleaning up.
    """
    began = time.monotonic()
    final = folder / _folder_name(step)
    for name in files:
        if not is_file_name(name):
            raise ValueError(
                f"checkpoint file name: expected letters, digits and ._-, found {name!r}"
            )
    partial = folder / f"{final.name}.partial-{os.getpid()}"
    published = False
    try:
        if not folder.is_dir():
            calls.make_folder(folder)
            sync_folder(folder.parent, calls)
        if os.path.lexists(final):
            raise CheckpointError(
                f"checkpoint: {final} — expected a step that is not saved yet, found one published"
            )
        sweep(folder, calls)
        size = sum(map(_size_bytes, files.values()))
        _check_room(folder, size + (0 if parts is None else parts.size_bytes), calls)
        calls.make_folder(partial)
        try:
            records = dict(parts.write_into(partial)) if parts is not None else {}
            for name, content in files.items():
                records[name] = _write_file(partial / name, content, calls)
            manifest = manifest_bytes(step, records)
            manifest_record = _write_file(partial / MANIFEST, manifest, calls)
            sync_folder(partial, calls)
            # A published folder is never empty, so rename cannot replace one even if it appeared
            # since the check above.
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
        sink = _HashingSink(descriptor, calls)
        if isinstance(content, bytes):
            sink.write(content)
        else:
            content.write_to(sink)
        if sink.size != _size_bytes(content):
            raise ValueError(
                f"{path.name}: its writer promised {_size_bytes(content)} bytes"
                f" and wrote {sink.size}"
            )
        calls.sync(descriptor)
    finally:
        calls.close(descriptor)
    return FileRecord(sha256=sink.digest.hexdigest(), size=sink.size)


class _HashingSink:
    """Writes in full, and keeps the digest and size of what was handed to the disk."""

    def __init__(self, descriptor: int, calls: FileCalls) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._descriptor = descriptor
        self._calls = calls

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += len(view)
        written = 0
        while written < len(view):  # one write call takes at most 2 GiB, and may take less
            written += self._calls.write(self._descriptor, view[written:])
        return len(view)


def _size_bytes(content: bytes | Writer) -> int:
    return len(content) if isinstance(content, bytes) else content.size_bytes


def _check_room(folder: Path, size: int, calls: FileCalls) -> None:
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
            f"checkpoint: {folder} — expected room for {size} bytes, found {error};"
            " earlier checkpoints are as they were",
            hint="free some space, or raise the quota, or keep fewer checkpoints",
        )
    state = (
        "it is published but may not survive a power loss" if published else "nothing was published"
    )
    return CheckpointError(
        f"checkpoint: {final} — expected to write {size} bytes, found {error}; {state},"
        " earlier checkpoints are as they were"
    )


def _folder_name(step: int) -> str:
    if not 0 <= step <= 99_999_999:
        raise ValueError(f"checkpoint step: expected 0 to 99999999, found {step}")
    return f"step-{step:08d}"
