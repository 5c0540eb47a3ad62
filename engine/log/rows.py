"""Store content hashes of the rows that each step trained on: small records for each row, in a file for each rank.

    <run>/rows/RANK.bin    "aprrows2", the number of ranks, 0 (u32 each); then for each row the step (u64) and the row's
                           hash (8 bytes), little-endian, in the order in which the rank trained on them. A row of
                           several documents is followed by a record for each of them: the step with its highest
                           bit set, and the hash of the document.

`engine.data.row_hashes` defines the hashed content.

A resume at a step cuts off the records of later steps, so that a file has exactly the rows that led to the weights.
The unfinished record of a killed writer is also cut off, and readers ignore it.

With each step, the log has a running digest of the hashes of the rows that the first rank has trained on. If two runs
have the same digest at a step, their first ranks have trained on the same rows in the same order up to that step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.errors import RunLogError, write_error
from engine.log.folder import RunFolder, write_whole
from engine.log.write import sync_folder, write_fully

MAGIC = b"aprrows2"
HASH_BYTES = 8
_DOCUMENT_BIT = 1 << 63
"""Highest bit of a record's step: set if the record is one document of the preceding row."""
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct(f"<Q{HASH_BYTES}s")
_AT_ONCE = 1 << 16
"""Number of records that are read at a time."""
NO_ROWS = bytes(HASH_BYTES)
"""The running digest before the first step."""


class TrainedRow(NamedTuple):
    step: int
    hash: bytes
    documents: tuple[bytes, ...] = ()
    """Hashes of the documents in the row, if it has several."""


def extended(digest: bytes, hashes: Sequence[bytes]) -> bytes:
    """Return the running digest after another step, whose rows have the given hashes."""
    return hashlib.blake2b(digest + b"".join(hashes), digest_size=HASH_BYTES).digest()


def path_of(run: RunFolder, rank: int) -> Path:
    return run.path / "rows" / f"{rank}.bin"


def read_rows(path: Path) -> Iterator[TrainedRow]:
    """Yield the rows of a file in order. Raises RunLogError for a file of another format."""
    row: TrainedRow | None = None
    for step, hash in _read_records(path):
        if row is not None and step & _DOCUMENT_BIT:
            row = row._replace(documents=(*row.documents, hash))
            continue
        if row is not None:
            yield row
        row = TrainedRow(step, hash)
    if row is not None:
        yield row


def read_ranks(path: Path) -> int:
    """Return the number of ranks of a file. Raises RunLogError."""
    with _readable(path) as file:
        return _read_header(file, path)


def _read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    with _readable(path) as file:
        _read_header(file, path)
        while block := file.read(_RECORD.size * _AT_ONCE):
            whole = len(block) - len(block) % _RECORD.size
            yield from _RECORD.iter_unpack(block[:whole])


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise RunLogError.expected(
            "rows", path, "a file that can be read", error.strerror or str(error)
        ) from error


def _read_header(file: BinaryIO, path: Path) -> int:
    """Return the number of ranks."""
    header = file.read(_HEADER.size)
    magic, ranks, _ = _HEADER.unpack(header) if len(header) == _HEADER.size else (header, 0, 0)
    if magic != MAGIC:
        raise RunLogError.expected("rows", path, f"a file that begins with {MAGIC!r}", repr(magic))
    return int(ranks)


def _rows_in_order(rows: Iterator[TrainedRow], until: int) -> Iterator[TrainedRow]:
    """Yield the rows of steps 1 to `until`, up to the first row that is out of order: records that were not synced
    before a power loss may be zeros, which read as rows of step 0."""
    last = 1
    for row in rows:
        if not last <= row.step <= until:
            return
        last = row.step
        yield row


class RowsWriter:
    """Appends the rows of a session that continues after `step`."""

    def __init__(self, run: RunFolder, rank: int, ranks: int, step: int) -> None:
        """Keep the records up to `step`, and cut off the others. Raises RunLogError and DiskFull."""
        self.path = path_of(run, rank)
        self.digest, self._kept = NO_ROWS, 0
        """The running digest, and the number of records that are kept."""
        try:
            self.path.parent.mkdir(exist_ok=True)
            sync_folder(run.path)
            self._set_aside(ranks, step)
            if self.path.exists():
                self._read(step)
            if not self._kept:
                # Created together with its header, so that a kill in between leaves no empty file.
                write_whole(self.path, _HEADER.pack(MAGIC, ranks, 0), "rows")
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, _HEADER.size + self._kept * _RECORD.size)
        except OSError as error:
            raise write_error("rows", self.path, "to write the rows of steps to", error) from error

    def append(self, step: int, rows: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Write the rows of a step, each with its documents if it has several. Raises RunLogError and DiskFull."""
        records = [
            _RECORD.pack(number, digest)
            for row, documents in rows
            for number, digest in (
                (step, row),
                *((step | _DOCUMENT_BIT, part) for part in documents),
            )
        ]
        try:
            write_fully(self._file, b"".join(records))
        except OSError as error:
            raise write_error("rows", self.path, "to hold one more step", error) from error
        self.digest = extended(self.digest, [row for row, _ in rows])

    def sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise write_error("rows", self.path, "to be written to disk", error) from error

    def _set_aside(self, ranks: int, step: int) -> None:
        """Rename a file of another format or number of ranks: with another number of ranks, this rank gets other rows
        of each step."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            header = file.read(_HEADER.size)
        if header == _HEADER.pack(MAGIC, ranks, 0):
            return
        self.path.rename(self.path.with_name(f"{self.path.stem}-until-{step}.bin"))

    def _read(self, until: int) -> None:
        rows = _rows_in_order(read_rows(self.path), until)
        for _, group in itertools.groupby(rows, key=lambda row: row.step):
            rows_of_step = list(group)
            hashes = [row.hash for row in rows_of_step]
            self._kept += sum(1 + len(row.documents) for row in rows_of_step)
            self.digest = extended(self.digest, hashes)
