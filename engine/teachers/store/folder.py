"""A folder of stored teacher outputs. Every row is verified when it is read, and only complete shards
are used.

    STORE/
      manifest.json               what the rows are and which teacher made them (`manifest.py`)
      shard-000000.safetensors    some rows: one tensor (rows, T, ...) for each field (`keys.py`)
      shard-000000.json           {"version": 1, "bytes": N, "rows": [[key, digest], ...]}
      lock, prepare.jsonl         lock and log of the process that writes

A shard without its .json was never finished and is ignored. When a store is opened, each shard's
size and header are checked against its .json and the manifest, which reads a few kilobytes per
shard. The data of a row are verified whenever the row is read, in the buffer that it is then used
from:

    digest = SHA-256( key | the row's bytes in each field )

Why a digest per row: to verify a digest of a whole shard, all of its quarter of a gigabyte must be
read at the first access to any row, and with rows in random order that is all shards at the start.
Digests of rows spread the hashing evenly, and verify each row again in every epoch. Hashing runs in
the reader's threads, without the interpreter's lock, at one to two gigabytes per second and thread.
The digest covers the key, so that swapped rows are found too.

Rows are read with `pread`, not mapped: if a mapped file is truncated, the process dies with SIGBUS,
whereas a short read is an error that can be reported.

If a row fails verification, its whole shard is refused for the lifetime of this process, with a
reason that names the shard: all rows of the shard are misses from then on.

Rows are collected in memory until a shard is full. Then, in this order: the shard is written and
fsynced under a partial name and renamed; its .json the same way; the folder is fsynced. The .json
comes last and completes the shard: a process that is killed earlier leaves a file that is never
read and that the next writer replaces. So a kill loses at most the rows of one shard, and every shard
with a .json is complete.

The same rows in the same order give the same bytes, headers included, and a new shard takes the
first free number. So an interrupted and continued store equals, file by file, one written in one go.

There is one writer per store, which holds `flock` on `lock`. Readers need no lock, because a
finished shard is never written again. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import NO_ROOM, DiskFull, EngineError
from engine.files import read_json
from engine.formats.safetensors import header_bytes, read_header
from engine.formats.writing import fsync_folder
from engine.signals import partial_output
from engine.teachers.store.keys import CacheError, Field, Identity
from engine.teachers.store.manifest import Manifest, read_manifest

VERSION = 1
SHARD_BYTES = 256 * 2**20
"""Size of a shard in bytes: about a second of work of a 7B teacher on one GPU, which a kill may lose."""
LOCK = "lock"
_PARTIAL = ".partial"
_SHARD = re.compile(r"shard-([0-9]{6})\.json")


class ShardDamaged(CacheError):
    """A shard's size, header or row digests do not match its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    number: int
    path: Path
    """Path of the safetensors file."""
    starts: tuple[int, ...]
    """Offset in the file of each field's data."""
    rows: tuple[tuple[bytes, bytes], ...]
    """Key and digest of each row."""


class Store:
    """The readable rows of a store. Reading is thread-safe."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.identity: Identity = manifest.identity
        self.refusals: list[str] = []
        """A message for each refused shard, with its name and the reason."""
        self.unreadable: list[Path] = []
        """Paths of the shards that were refused when the store was opened."""
        self._guard = threading.Lock()
        self._places: dict[bytes, tuple[Shard, int]] = {}
        self.shards: dict[int, Shard] = {}
        for number in shard_numbers(path):
            try:
                self._add(_open_shard(path, number, self.identity))
            except ShardDamaged as error:
                self.refusals.append(error.message)
                self.unreadable.append(shard_path(path, number))

    def _add(self, shard: Shard) -> None:
        self.shards[shard.number] = shard
        for row, (key, _) in enumerate(shard.rows):
            self._places.setdefault(key, (shard, row))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def read(self, key: bytes, into: Sequence[memoryview]) -> None:
        """Read the row under `key` into one byte buffer per field.

        Raises KeyError if the store has no such row. Raises ShardDamaged, naming the shard, if the row
        does not match its digest: all rows of the shard are then dropped from this store, and the
        content of the buffers is undefined.
        """
        shard, row = self._places[key]
        try:
            _read_row(shard, row, self.identity.fields, into)
        except ShardDamaged as error:
            self._refuse(shard, error.message)
            raise

    def _refuse(self, shard: Shard, reason: str) -> None:
        with self._guard:
            if self.shards.pop(shard.number, None) is None:
                return  # another thread has refused it already
            self.refusals.append(reason)
            # A new dict, because other threads may be looking rows up in the old one.
            self._places = {k: p for k, p in self._places.items() if p[0] is not shard}

    def verify(self) -> Iterator[Shard]:
        """Read every row of every shard. Refuse and yield each shard with a row that does not match its
        digest.
        """
        buffers = [memoryview(bytearray(field.bytes)) for field in self.identity.fields]
        for shard in list(self.shards.values()):
            try:
                for row in range(len(shard.rows)):
                    _read_row(shard, row, self.identity.fields, buffers)
            except ShardDamaged as error:
                self._refuse(shard, error.message)
                yield shard


def open_store(path: str | Path) -> Store:
    """Open the store in `path`. Shards that fail verification are listed in its `refusals`. Raises
    CacheError.
    """
    return Store(Path(path), read_manifest(Path(path)))


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.safetensors"


def shard_numbers(folder: Path) -> list[int]:
    """Return the numbers of all finished shards, in order."""
    try:
        matches = [_SHARD.fullmatch(name) for name in os.listdir(folder)]
    except OSError as error:
        raise CacheError.expected(
            "teacher.cache", folder, "a readable folder", str(error.strerror)
        ) from error
    return sorted(int(match[1]) for match in matches if match)


def row_digest(key: bytes, parts: Sequence[Any]) -> bytes:
    """Return the digest of a row; `parts` are the buffers of its fields."""
    digest = hashlib.sha256(key)
    for part in parts:
        digest.update(part)
    return digest.digest()


def damaged(where: object, expected: str, found: str) -> ShardDamaged:
    return ShardDamaged.expected("teacher outputs", where, expected, found)


def _open_shard(folder: Path, number: int, identity: Identity) -> Shard:
    path = shard_path(folder, number)
    sidecar = path.with_suffix(".json")
    file_bytes, rows = _read_sidecar(sidecar)
    try:
        header = read_header(path)
    except EngineError as error:
        raise ShardDamaged(error.message) from error
    if header.file_bytes != file_bytes:
        raise damaged(path, f"{file_bytes} bytes", str(header.file_bytes))
    expected = {field.name: (field.dtype, (len(rows), *field.shape)) for field in identity.fields}
    present = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
    if present != expected:
        raise damaged(path, f"tensors {expected}", str(present))
    starts = tuple(header.tensors[field.name].start for field in identity.fields)
    return Shard(number=number, path=path, starts=starts, rows=rows)


def _read_sidecar(path: Path) -> tuple[int, tuple[tuple[bytes, bytes], ...]]:
    sidecar = read_json(path, "teacher.cache", limits.STORE_ROWS, error=ShardDamaged)
    try:
        version, file_bytes, listed = sidecar["version"], sidecar["bytes"], sidecar["rows"]
        rows = tuple((bytes.fromhex(key), bytes.fromhex(digest)) for key, digest in listed)
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(path, "version, bytes and rows", f"{error}") from error
    if version != VERSION or not isinstance(file_bytes, int):
        raise damaged(path, f"version {VERSION}", f"{version!r:.40}")
    if not rows or any(len(part) != 32 for row in rows for part in row):
        raise damaged(path, "rows of two SHA-256 digests", "others")
    return file_bytes, rows


def _read_row(shard: Shard, row: int, fields: Sequence[Field], into: Sequence[memoryview]) -> None:
    key, expected = shard.rows[row]
    where = f"{shard.path}, row {row}"
    try:
        descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for field, start, buffer in zip(fields, shard.starts, into, strict=True):
                assert buffer.nbytes == field.bytes, where
                done = 0
                while done < field.bytes:
                    at = start + row * field.bytes + done
                    count = os.preadv(descriptor, [buffer[done:]], at)
                    if not count:
                        raise damaged(where, f"{field.bytes} bytes at {at - done}", f"{done}")
                    done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise damaged(where, "a readable file", str(error.strerror)) from error
    found = row_digest(key, into)
    if found != expected:
        raise damaged(where, f"sha256 {expected.hex()}", found.hex())


def rows_per_shard(identity: Identity, shard_bytes: int = SHARD_BYTES) -> int:
    return max(1, shard_bytes // identity.row_bytes)


def disk_bytes(identity: Identity, rows: int, shard_rows: int) -> int:
    """Return the exact size on disk of `rows` more rows, in shards of `shard_rows` rows."""
    full, rest = divmod(rows, shard_rows)
    return full * _shard_bytes(identity, shard_rows) + (_shard_bytes(identity, rest) if rest else 0)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create the folder if needed and lock it for writing. Raises CacheError if another process
    holds the lock.
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
                "a live process that holds the lock",
                hint="`engine prepare` is already filling this store; wait for it",
            ) from None
        # This process holds the lock, so the process that wrote a partial file has ended.
        for partial in folder.glob(f"*{_PARTIAL}"):
            partial.unlink()
        yield
    finally:
        os.close(descriptor)


class ShardWriter:
    """Writes rows into shards of `shard_rows` rows; `taken` are the numbers of existing shards.

    Use it only within `only_writer`. Raises DiskFull or CacheError; finished shards stay unchanged.
    """

    def __init__(
        self, folder: Path, identity: Identity, shard_rows: int, taken: Iterable[int]
    ) -> None:
        self.folder, self.identity, self.shard_rows = folder, identity, shard_rows
        self.rows = 0
        """Number of rows in finished shards."""
        self.bytes = 0
        self._taken = set(taken)
        self._waiting: list[tuple[bytes, bytes, list[bytes]]] = []

    def add(self, key: bytes, parts: Sequence[Any]) -> None:
        """Add one row, given as one buffer per field. The buffers are copied."""
        copies = [bytes(part) for part in parts]
        for field, part in zip(self.identity.fields, copies, strict=True):
            assert len(part) == field.bytes, (field, len(part))
        self._waiting.append((key, row_digest(key, copies), copies))
        if len(self._waiting) == self.shard_rows:
            self.finish()

    def finish(self) -> None:
        """Write the collected rows as a shard, even if it is not full."""
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
    """Remove a shard from its store: first its .json, without which the shard does not count."""
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    fsync_folder(path.parent)


def _header(fields: Sequence[Field], rows: int) -> bytes:
    """Return the header of a shard. The fields follow each other without padding: all have elements of
    the same size, so each field starts aligned.
    """
    return header_bytes((field.name, field.dtype, (rows, *field.shape)) for field in fields)


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
        hint = "free disk space and repeat the command: finished shards are kept"
        return DiskFull.expected("teacher outputs", path, "free disk space", reason, hint=hint)
    return CacheError.expected("teacher outputs", path, "a writable path", reason)
