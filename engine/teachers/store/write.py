"""Adding rows to a store of teacher outputs: a shard is there whole, or not at all.

Rows are gathered in memory until a shard is full. Then, in this order: the shard under a partial name,
written and fsynced; renamed; its .json the same way; the folder fsynced. The .json comes last and makes
the shard: a process that is killed anywhere before it leaves a file that nobody reads and the next
writer replaces. So what is lost is at most one shard of rows, and what is found was finished.

The same rows in the same order give the same bytes, headers included, and a shard that is missing
between others is filled first: a store that was interrupted and continued is equal, file by file, to
one that was not.

One writer per store, held by `flock` on `lock`; readers need no lock, because a finished shard is
never written again. Loads no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import NO_ROOM, DiskFull
from engine.formats.safetensors import fsync_folder
from engine.signals import partial_output
from engine.teachers.store.folder import VERSION, row_digest, shard_path
from engine.teachers.store.rows import CacheError, Field, Identity

SHARD_BYTES = 256 * 2**20
"""About a second of a 7B teacher on one GPU: what a kill can cost."""
LOCK = "lock"
_PARTIAL = ".partial"


def rows_per_shard(identity: Identity, shard_bytes: int = SHARD_BYTES) -> int:
    return max(1, shard_bytes // identity.row_bytes)


def disk_bytes(identity: Identity, rows: int, each: int) -> int:
    """Exactly what `rows` more rows take on the disk, in shards of `each` rows."""
    full, rest = divmod(rows, each)
    return full * _shard_bytes(identity, each) + (_shard_bytes(identity, rest) if rest else 0)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes the folder where there is none, and holds it. Raises CacheError where another process
    does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheError.expected(
                "teacher outputs",
                folder,
                "no other writer",
                "one that is alive",
                hint="`engine prepare` is already filling this store; wait for it",
            ) from None
        for left in folder.glob(f"*{_PARTIAL}"):  # nobody else is here: its writer is dead
            left.unlink()
        yield
    finally:
        os.close(descriptor)


class ShardWriter:
    """Rows into shards of `each` rows; `taken` are the numbers of shards that are there.

    Only within `only_writer`. Raises DiskFull or CacheError, with every finished shard as it was.
    """

    def __init__(self, folder: Path, identity: Identity, each: int, taken: Iterable[int]) -> None:
        self.folder, self.identity, self.each = folder, identity, each
        self.rows = 0
        """Finished."""
        self.bytes = 0
        self._taken = set(taken)
        self._waiting: list[tuple[bytes, bytes, list[bytes]]] = []

    def add(self, key: bytes, parts: Sequence[Any]) -> None:
        """One row: a buffer for each field, copied."""
        held = [bytes(part) for part in parts]
        for field, part in zip(self.identity.fields, held, strict=True):
            assert len(part) == field.bytes, (field, len(part))
        self._waiting.append((key, row_digest(key, held), held))
        if len(self._waiting) == self.each:
            self.finish()

    def finish(self) -> None:
        """Writes what is gathered as a shard, however few rows it is."""
        if not self._waiting:
            return
        number = next(n for n in range(len(self._taken) + 1) if n not in self._taken)
        path, rows = shard_path(self.folder, number), len(self._waiting)
        pieces = [_header(self.identity.fields, rows)]
        for index in range(len(self.identity.fields)):
            pieces += [parts[index] for _, _, parts in self._waiting]
        sidecar = _sidecar(
            sum(map(len, pieces)), [(key, digest) for key, digest, _ in self._waiting]
        )
        _publish(path, pieces)
        _publish(path.with_suffix(".json"), [sidecar])
        self._taken.add(number)
        self._waiting.clear()
        self.rows += rows
        self.bytes += sum(map(len, pieces)) + len(sidecar)


def remove_shard(path: Path) -> None:
    """Takes a shard out of its store: first what makes it one."""
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    fsync_folder(path.parent)


def _header(fields: Sequence[Field], rows: int) -> bytes:
    """Length and JSON of a safetensors header. Fields lie in their order: all have the same width, so
    each starts at a multiple of it.
    """
    entries, end = {}, 0
    for field in fields:
        begin, end = end, end + rows * field.bytes
        entries[field.name] = {
            "dtype": field.dtype,
            "shape": [rows, *field.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sidecar(file_bytes: int, rows: Sequence[tuple[bytes, bytes]]) -> bytes:
    listed = [[key.hex(), digest.hex()] for key, digest in rows]
    return json.dumps({"version": VERSION, "bytes": file_bytes, "rows": listed}).encode() + b"\n"


def _shard_bytes(identity: Identity, rows: int) -> int:
    file_bytes = len(_header(identity.fields, rows)) + rows * identity.row_bytes
    return file_bytes + len(_sidecar(file_bytes, [(bytes(32), bytes(32))] * rows))


def _publish(path: Path, pieces: Sequence[bytes]) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with partial_output(partial):
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            fsync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CacheError | DiskFull:
    reason = str(error.strerror)
    if error.errno in NO_ROOM:
        hint = "make room and give the same command again: finished shards are kept"
        return DiskFull.expected("teacher outputs", path, "room for them", reason, hint=hint)
    return CacheError.expected("teacher outputs", path, "a path that can be written", reason)
