"""The rows that a model wrote for each step (`engine.train.rollout`), as tokens: a file for each rank.

    <run>/rows/written-RANK.bin    "aprwrote", then for each row a record of RECORD and its tokens (u32 each): those of
                                   the prompt, then those of the text; all little-endian, in the order of the steps

The key of a row is (step, number, row): `number` counts the micro-batches of a step whose rows a model wrote, `row` the
rows of such a micro-batch over all ranks, both from 0. With the run's seed the key gives the numbers that drew the text
(`engine.generation.sampling`).

A resume at a step cuts off the records of later steps.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.errors import RunLogError, write_error
from engine.log.folder import RunFolder, write_whole
from engine.log.write import write_fully

MAGIC = b"aprwrote"
WRITTEN_BY = "written_by"
"""Key of effective.json for the folder of the run whose written rows a replay (`engine verify`) takes."""
RECORD = struct.Struct("<QIIIIId")
"""Step, number, row, 1 if the text ends by itself, tokens of the prompt, tokens of the text, log-probability."""
MOST_TOKENS = 1 << 24
"""Largest number of tokens of a row; a record with more is invalid."""


class WrittenRow(NamedTuple):
    """A row that a model wrote."""

    step: int
    number: int
    row: int
    prompt: list[int]
    text: list[int]
    ended: bool
    log_p: float
    """Sum of the log-probabilities of the text's tokens, as they were drawn, in nats."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.step, self.number, self.row


def path_of(run: RunFolder, rank: int) -> Path:
    return run.path / "rows" / f"written-{rank}.bin"


def read_written(path: Path) -> Iterator[WrittenRow]:
    """Yield the whole records of a file in order. Raises RunLogError for a file of another format."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise RunLogError.expected(
                    "written rows", path, f"a file that begins with {MAGIC!r}", repr(magic)
                )
            while (row := _read(file)) is not None:
                yield row
    except OSError as error:
        raise RunLogError.expected(
            "written rows", path, "a file that can be read", error.strerror or str(error)
        ) from error


def _read(file: BinaryIO) -> WrittenRow | None:
    """Return the next row, or None at the end of the whole records."""
    head = file.read(RECORD.size)
    if len(head) < RECORD.size:
        return None
    step, number, row, ended, prompt, text, log_p = RECORD.unpack(head)
    # Records that were not synced before a power loss may be zeros.
    if not step or not text or prompt + text > MOST_TOKENS:
        return None
    data = file.read(4 * (prompt + text))
    if len(data) < 4 * (prompt + text):
        return None
    tokens = list(struct.unpack(f"<{prompt + text}I", data))
    return WrittenRow(step, number, row, tokens[:prompt], tokens[prompt:], bool(ended), log_p)


class WrittenWriter:
    """Appends the written rows of a session that continues after `step`."""

    def __init__(self, run: RunFolder, rank: int, step: int) -> None:
        """Keep the records up to `step`. Raises RunLogError and DiskFull."""
        self.path = path_of(run, rank)
        try:
            kept = len(MAGIC)
            if step and self.path.exists():
                for row in read_written(self.path):
                    if row.step > step:
                        break
                    kept += RECORD.size + 4 * (len(row.prompt) + len(row.text))
            else:
                write_whole(self.path, MAGIC, "written rows")
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, kept)
        except OSError as error:
            raise write_error("written rows", self.path, "to write rows to", error) from error

    def append(self, rows: Sequence[WrittenRow]) -> None:
        """Write the rows of a step. Raises RunLogError and DiskFull."""
        parts = []
        for row in rows:
            prompt, text = len(row.prompt), len(row.text)
            parts.append(RECORD.pack(*row.key, row.ended, prompt, text, row.log_p))
            parts.append(struct.pack(f"<{prompt + text}I", *row.prompt, *row.text))
        try:
            write_fully(self._file, b"".join(parts))
        except OSError as error:
            raise write_error("written rows", self.path, "to hold one more step", error) from error

    def sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise write_error("written rows", self.path, "to be written to disk", error) from error
