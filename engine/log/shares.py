"""A long stretch of a log made into packs by several processes.

The stretch is dealt out in chunks, from the front. Those of which there are files (`pack_files`) are taken out of
them. Of the others this process and its helpers each make the next one that nobody has, so none of them
waits for a slower one; whoever makes one may keep it in a file. `take` gives all in the order of the log. A
helper is another interpreter that reads the log for itself and answers with bytes. It is a convenience:
where none can be started, or one dies, this process does all there is to do.

Whatever is no plain stretch of whole, sound lines is left out, and is for the reader of the log to look at.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

import engine.log.pack_files as pack_files
from engine.files import open_plain
from engine.log.pack import pack_lines
from engine.log.pack_files import Chunk, PackFiles
from engine.log.read import LONGEST_LINE_BYTES, PART_BYTES, id_of

HELP_FROM_BYTES = 48 << 20
"""So much has to be made for helpers: starting one takes a tenth of a second."""
PARTS = 4
"""So many parts are in one pack."""
ANSWER_BYTES = 1 << 20
"""So much of an answer is read at once, however long it says that it is."""
REQUEST = struct.Struct("<QQq")
"""Begin and end of a stretch, and the number of the file to keep its packs in; NONE for no file."""
NONE = -1
LENGTH = struct.Struct("<Q")
_answer: msgspec.msgpack.Decoder[Chunk] = msgspec.msgpack.Decoder(Chunk)


def spare_cores() -> int:
    """How many helpers a viewer may have: one less than there are cores, and few."""
    return min(3, len(os.sched_getaffinity(0)) - 1)


def pack_chunk(path: Path, begin: int, end: int) -> Chunk:
    """The packs of all lines that begin in bytes [begin, end) of a file, those left out that are for its
    reader. Raises OSError."""
    packs = []
    with open_plain(path) as file:
        file_id = id_of(os.fstat(file.fileno()))
        # The byte in front tells whether a line begins at `begin`.
        file.seek(max(0, begin - 1))
        offset = begin + max(0, len(file.readline(LONGEST_LINE_BYTES)) - 1) if begin else 0
        with _no_collection():
            while parts := _parts(file, end - offset):
                if (pack := pack_lines(parts, offset)) is not None:
                    packs.append(pack)
                offset += sum(map(len, parts))
    return Chunk(file_id, packs, is_whole=offset >= end)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing that is made of lines is part of a cycle: looking for cycles is a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parts(file: IO[bytes], size: int) -> list[bytes]:
    """Whole lines of a pack, in parts of about PART_BYTES; at most `size` bytes and the rest of a line."""
    parts: list[bytes] = []
    while len(parts) < PARTS and (left := size - sum(map(len, parts))) > 0:
        lines = file.read(min(PART_BYTES, left))
        if not lines.endswith(b"\n"):
            lines += file.readline(LONGEST_LINE_BYTES)
        if not lines.endswith(b"\n"):
            lines = lines[: lines.rfind(b"\n") + 1]
            return [*parts, lines] if lines else parts
        parts.append(lines)
    return parts


class Shares:
    """The packs of bytes [begin, end) of a log. With `files` those there are taken out of them, and with
    `keep` those that were made are put there."""

    def __init__(
        self,
        path: Path,
        begin: int,
        end: int,
        *,
        helpers: int,
        files: PackFiles | None = None,
        keep: bool = False,
    ) -> None:
        self._path, self._files, self._keep = path, files, keep
        size = pack_files.CHUNK_BYTES
        self._numbers = range(begin // size, -(-end // size))
        self._bytes = begin, end
        self._filed = files.numbers().intersection(self._numbers) if files else set()
        self._unclaimed = [n for n in reversed(self._numbers) if n not in self._filed]
        self._made: dict[int, Chunk] = {}
        self._given = self._numbers.start
        self._changed = threading.Condition()
        if len(self._unclaimed) * size < HELP_FROM_BYTES:
            helpers = 0
        for number in range(min(helpers, len(self._unclaimed) - 1)):
            name = f"log-helper-{number}"
            threading.Thread(target=self._be_helped, name=name, daemon=True).start()

    @property
    def is_next_filed(self) -> bool:
        """Whether there is a file of the next chunk."""
        return self._given in self._filed

    def take(self) -> Chunk | None:
        """The packs of the next chunk, in the order of the log; None behind the last. Raises OSError."""
        while self._given < self._numbers.stop:
            if self.is_next_filed:
                self._given += 1
                return self._loaded(self._given - 1)
            with self._changed:
                if self._given in self._made:
                    self._given += 1
                    return self._made.pop(self._given - 1)
                number = self._claim()
                if number is None:
                    self._changed.wait()
                    continue
            self._made[number] = make_chunk(self._path, *self._request(number))
        return None

    def _loaded(self, number: int) -> Chunk:
        """Out of its file, or made where that cannot be believed."""
        assert self._files is not None
        return self._files.load(number) or make_chunk(self._path, *self._request(number))

    def _request(self, number: int) -> tuple[int, int, int]:
        """What is asked for to get a chunk."""
        begin, end = pack_files.bounds(number)
        is_whole = self._bytes[0] <= begin and end <= self._bytes[1]
        return (
            max(begin, self._bytes[0]),
            min(end, self._bytes[1]),
            number if self._keep and is_whole else NONE,
        )

    def close(self) -> None:
        """Give up what is not done yet."""
        with self._changed:
            self._unclaimed.clear()

    def _claim(self) -> int | None:
        """The next chunk that nobody has."""
        with self._changed:
            return self._unclaimed.pop() if self._unclaimed else None

    def _be_helped(self) -> None:
        """Have one helper make packs until there is nothing left to do."""
        try:
            process = subprocess.Popen(
                # -S: what site would find is in PYTHONPATH already.
                [sys.executable, "-S", "-m", "engine.log.shares", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # What was not written to one that died must not come up again when its pipe is closed.
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError:
            return
        assert process.stdin is not None and process.stdout is not None
        with process, contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
            # A pipe that holds a whole answer saves the switches between the two processes.
            with contextlib.suppress(OSError):
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, ANSWER_BYTES)
            try:
                while (number := self._claim()) is not None:
                    self._ask(number, process.stdin, process.stdout)
            finally:
                process.kill()

    def _ask(self, number: int, requests: IO[bytes], answers: IO[bytes]) -> None:
        """Have a helper make the packs of a chunk. Raises when it has ended or answers nonsense: the chunk is
        somebody else's then."""
        packed = None
        try:
            requests.write(REQUEST.pack(*self._request(number)))
            packed = _heard(answers)
        finally:
            with self._changed:
                if packed is None:
                    self._unclaimed.append(number)
                else:
                    self._made[number] = packed
                self._changed.notify_all()


def make_chunk(path: Path, begin: int, end: int, number: int) -> Chunk:
    """The packs of a stretch of a log, kept in the file of a number, if any and if they are whole."""
    chunk = pack_chunk(path, begin, end)
    if number != NONE and chunk.is_whole:
        PackFiles(path).save(number, chunk)
    return chunk


def _heard(stream: IO[bytes]) -> Chunk:
    """One answer. Raises EOFError when the helper has ended."""
    return _answer.decode(_whole(stream, LENGTH.unpack(_whole(stream, LENGTH.size))[0]))


def _whole(stream: IO[bytes], length: int) -> bytes:
    parts = []
    while length:
        part = stream.read(min(length, ANSWER_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def help_with(path: Path, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests for chunks of a log until there are no more."""
    while len(request := requests.read(REQUEST.size)) == REQUEST.size:
        answer = msgspec.msgpack.encode(make_chunk(path, *REQUEST.unpack(request)))
        answers.write(LENGTH.pack(len(answer)))
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    help_with(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
