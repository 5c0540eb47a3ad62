"""The packs of a long log in files beside it, so that nobody has to decode its lines a second time.

    columns/events-000017.pack    packs of the lines that begin in the 17th CHUNK_BYTES of events.jsonl

They hold nothing that the log does not say: any of them may be deleted, and whoever needs it makes it again.
The supervisor makes them while the run goes on (`engine.log.keeper`); a viewer that had to make one may leave it
here. A file is written under another name and renamed when it is whole; it stands for itself and is never changed.
So there is no lock and no order between writers, and two who make the same one make the same. Where one cannot
be written there is none. It is never synced: what a power loss leaves of it is found out.

**When a pack is believed.** Its file must be whole (a CRC of all of it) and of this very layout. Then the log is
asked whether it still has these lines:

- It is the same file, on a machine that has not restarted since. Such a log is appended to; and it is cut, but only
  behind its last whole line, or in front of what a power loss left (`engine.log.recover`), after which other
  lines follow, whose numbers and microseconds are others. So where the last TAIL_BYTES of a pack stand where they
  stood, everything in front of them does. That reads two of a thousand bytes.
- Anything else: a copy, a log put in its place, a machine that was started again, whose disk may have zeros where
  its memory had lines. Every byte is compared (CRC-32): a third of a second for a gigabyte.

One doubt in one pack, and the file counts for nothing: the lines are read. What is not noticed is somebody who
overwrites bytes in the middle of a log in place. So this is for looking at a run; what proves something
(receipts, evidence, reports, `engine` in general) reads the lines.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.errors import BadInput
from engine.files import open_plain, read_bytes
from engine.limits import PACK_FILE
from engine.log.extremes import BLOCK
from engine.log.pack import (
    PACKED_GPUS,
    PACKED_HOSTS,
    PACKED_STEPS,
    RANGED,
    TAIL_BYTES,
    Columns,
    Pack,
    is_sound,
)
from engine.log.read import FileId, id_of
from engine.log.write import read_boot_id

FOLDER = "columns"
VERSION = 1
"""One more whenever the same lines would give another pack."""
CHUNK_BYTES = 4 << 20
LEFT_BYTES = 1 << 30
"""So much of a disk stays free for the run itself."""
UNKNOWN = "unknown"
_HEAD = struct.Struct("<8sIQI")
_MAGIC = b"aprpacks"
_PARTIAL = ".partial-"
_FAULTS = (OSError, BadInput, struct.error, msgspec.DecodeError)


def bounds(number: int) -> tuple[int, int]:
    """The bytes of a log that are a chunk of it."""
    return number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES


class Chunk(NamedTuple):
    """The packs of the lines that begin in one chunk of a log."""

    file_id: FileId
    packs: list[Pack]
    is_whole: bool = True
    """Whether the last of these lines was whole, so that there will be no others."""


class _Stored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    boot_id: str
    """Of the machine that made it."""
    file_id: FileId
    """Of the log that it was made of."""
    packs: list[Pack]


_decoder = msgspec.msgpack.Decoder(_Stored)


class PackFiles:
    """The files of one log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.folder = log.parent / FOLDER
        self._boot_id = read_boot_id()
        layout = (
            *(VERSION, sys.byteorder, TAIL_BYTES, BLOCK),
            *(PACKED_STEPS, PACKED_HOSTS, PACKED_GPUS, RANGED),
            *(Pack.__struct_fields__, Columns.__struct_fields__),
        )
        self._layout = zlib.crc32(repr(layout).encode())

    def path(self, number: int) -> Path:
        return self.folder / f"{self.log.stem}-{number:06}.pack"

    def numbers(self) -> set[int]:
        """The chunks of which there are files, believed or not."""
        begin, end = f"{self.log.stem}-", ".pack"
        with contextlib.suppress(OSError):
            names = os.listdir(self.folder)
            inner = [
                n[len(begin) : -len(end)] for n in names if n.startswith(begin) and n.endswith(end)
            ]
            return {int(name) for name in inner if name.isdecimal()}
        return set()

    def load(self, number: int) -> Chunk | None:
        """The packs of a chunk; None when there are none that can be believed."""
        try:
            data = read_bytes(self.path(number), "columns", PACK_FILE)
            payload = memoryview(data)[_HEAD.size :]
            if _HEAD.unpack_from(data) != self._head(payload):
                return None
            stored = _decoder.decode(payload)
            with open_plain(self.log) as log:
                file_id = id_of(os.fstat(log.fileno()))
                is_same = (stored.boot_id, stored.file_id) == (self._boot_id, file_id)
                in_part = is_same and self._boot_id != UNKNOWN and self._is_ours(number)
                if all(_stands(pack, log.fileno(), in_part=in_part) for pack in stored.packs) and (
                    in_part or all(map(is_sound, stored.packs))
                ):
                    return Chunk(file_id, stored.packs)
        except _FAULTS:
            pass
        return None

    def save(self, number: int, chunk: Chunk) -> bool:
        """Keep a whole chunk; False where there is no room or no right to. Raises nothing."""
        stored = _Stored(self._boot_id, chunk.file_id, chunk.packs)
        payload = msgspec.msgpack.encode(stored)
        path = self.path(number)
        partial = path.with_name(f"{path.name}{_PARTIAL}{os.getpid()}-{threading.get_ident()}")
        try:
            self.folder.mkdir(exist_ok=True)
            room = os.statvfs(self.folder)
            if room.f_bavail * room.f_frsize < LEFT_BYTES:
                return False
            try:
                with partial.open("wb") as file:
                    file.write(_HEAD.pack(*self._head(payload)))
                    file.write(payload)
                partial.replace(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        except OSError:
            return False
        return True

    def sweep(self) -> None:
        """Remove what was left by those who died while they wrote. One who writes now keeps nothing then."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{self.log.stem}-*{_PARTIAL}*"):
                path.unlink(missing_ok=True)

    def _is_ours(self, number: int) -> bool:
        """Whether who looks wrote a file, or root: another may put anything into it."""
        return self.path(number).stat().st_uid in (os.geteuid(), 0)

    def _head(self, payload: bytes | memoryview) -> tuple[bytes, int, int, int]:
        return _MAGIC, self._layout, len(payload), zlib.crc32(payload)


def _stands(pack: Pack, log: int, *, in_part: bool) -> bool:
    """Whether the lines of a pack are in an open log, where they were."""
    begin = max(pack.begin, pack.end - TAIL_BYTES) if in_part else pack.begin
    found = os.pread(log, pack.end - begin, begin)
    return len(found) == pack.end - begin and zlib.crc32(found) == pack.sums[in_part]
