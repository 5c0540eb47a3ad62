"""Following a log: bounded reads, whole lines only, and no silence about a line that is missing.

`LogReader.poll` returns the events appended since the last call. The reader keeps two numbers, the
byte offset and the sequence number of the first line it has not returned. A torn last line (the
writer is in the middle of it, or died there) simply waits: it is read again next time.

A line that is lost, repeated, altered or no record raises `BrokenLog` with its byte offset, and so
does a file that was cut, replaced or removed behind the reader's back. The error carries the sound
events in front of the fault, so that one bad byte does not hide what a run did before it; the
reader stays at the fault and raises again when it is asked again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import RunLogError
from engine.runlog.events import KINDS, NON_FINITE, AnyEvent, Known, Unrecognised

READ_BYTES = 2 << 20
LONGEST_LINE_BYTES = 8 << 20

_typed = msgspec.json.Decoder(Known)
_plain = msgspec.json.Decoder()
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BrokenLog(RunLogError):
    """A log that cannot be read further; `before` holds the events in front of the fault, not
    returned by any poll. `hole` says that the fault is zeros where lines should be, as a power loss
    leaves them: the next writer cuts them off."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        before: Sequence[AnyEvent] = (),
        hole: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.before = tuple(before)
        self.hole = hole


def decode_line(line: bytes, where: str) -> AnyEvent:
    """One record. An unknown kind becomes `Unrecognised`; anything that is not a record is a
    RunLogError."""
    try:
        record = _plain.decode(line)
    except _NOT_JSON:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise RunLogError(f"run log: {where} — expected a record, found {line[:60]!r}")
    kind = record["kind"]
    try:
        _put_back(record, record.pop("nf", None) or {})
        if kind in KINDS:
            return msgspec.convert(record, KINDS[kind])
        envelope = {name: record.pop(name) for name in ("v", "seq", "t_s") if name in record}
        del record["kind"]
        return msgspec.convert({"kind": kind, "fields": record, **envelope}, Unrecognised)
    except (LookupError, TypeError, ValueError) as error:
        raise RunLogError(
            f"run log: {where} — expected a {kind!r} record, found one that breaks its form: "
            f"{error}"
        ) from None


def _put_back(record: dict[str, Any], non_finite: dict[str, str]) -> None:
    """Put the values named under `nf` into the places that hold null for them."""
    if not isinstance(non_finite, dict):
        raise TypeError(f"`nf` is {non_finite!r:.40}")
    for path, text in non_finite.items():
        *way, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/"))
        place: Any = record
        for part in way:
            place = place[int(part) if isinstance(place, list) else part]
        key = int(last) if isinstance(place, list) else last
        if place[key] is not None:
            raise ValueError(f"`nf` names {path}, which has a value")
        place[key] = NON_FINITE[text]


# contract: run-log-v1
class LogReader:
    """Reads one log from its start and then follows it. A file that does not exist yet is an empty
    one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._next_seq = 0
        self._file_id: tuple[int, int] | None = None

    def poll(self, max_bytes: int = READ_BYTES) -> list[AnyEvent]:
        """Events since the last call, at most about `max_bytes` of them (one line at least); an
        empty list when there is nothing new. Raises BrokenLog."""
        lines = self._read_lines(max_bytes)
        if not lines:
            return []
        events = self._decode_at_once(lines)
        if events is None:
            events = self._decode_each(lines)
        self._advance(len(lines), len(events))
        return events

    def _read_lines(self, max_bytes: int) -> bytes:
        """Whole lines from the offset on."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                file_id = (status.st_dev, status.st_ino)
                # The newline in front of the offset is read too: it is gone when the file was cut
                # or rewritten.
                file.seek(max(0, self._offset - 1))
                if self._offset and (file_id != self._file_id or file.read(1) != b"\n"):
                    raise BrokenLog(
                        f"run log: {self.path} — expected the {self._offset} bytes read so far, "
                        f"found {status.st_size}: it was cut or replaced while it was being read"
                    )
                self._file_id = file_id
                block = file.read(max_bytes)
                if len(block) == max_bytes and not block.endswith(b"\n"):
                    block += file.readline(LONGEST_LINE_BYTES)
        except FileNotFoundError:
            if self._offset:
                raise BrokenLog(
                    f"run log: {self.path} — expected the {self._offset} bytes read so far, "
                    "found no file: it was removed while it was being read"
                ) from None
            return b""
        except OSError as error:
            raise BrokenLog(
                f"run log: {self.path} — expected to read it, found {error.strerror}"
            ) from error
        end = block.rfind(b"\n") + 1
        if not end and len(block) >= LONGEST_LINE_BYTES:
            raise BrokenLog(
                f"run log: {self.path} @{self._offset} — expected lines under "
                f"{LONGEST_LINE_BYTES} bytes, found a longer one"
            )
        return block[:end]

    def _decode_at_once(self, lines: bytes) -> list[AnyEvent] | None:
        """The events of many lines; None when a line needs a closer look."""
        if b'"nf"' in lines:
            return None
        try:
            events: list[AnyEvent] = _typed.decode_lines(lines)
        except _NOT_JSON:
            return None
        first = self._next_seq
        numbered = [event.seq for event in events] == list(range(first, first + len(events)))
        timed = min([event.t_s for event in events], default=0.0) >= 0
        return events if numbered and timed and len(events) == lines.count(b"\n") else None

    def _decode_each(self, lines: bytes) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        offset, seq = self._offset, self._next_seq
        hole, where = False, ""
        try:
            for line in lines[:-1].split(b"\n"):
                where = f"{self.path} @{offset}"
                hole = 0 in line
                event = decode_line(line, where)
                if event.seq != seq:
                    raise RunLogError(
                        f"run log: {where} — expected line number {seq}, found {event.seq}: "
                        "a line was lost, repeated or altered"
                    )
                if not event.t_s >= 0:
                    raise RunLogError(f"run log: {where} — expected a time, found t_s {event.t_s}")
                events.append(event)
                offset += len(line) + 1
                seq += 1
        except RunLogError as fault:
            self._advance(offset - self._offset, len(events))
            if hole:
                raise BrokenLog(
                    f"run log: {where} — expected a record, found zeros: what was written there had "
                    "not reached the disk when the machine stopped",
                    hint="`engine distill --resume` goes on from the newest checkpoint",
                    before=events,
                    hole=True,
                ) from None
            raise BrokenLog(fault.message, before=events) from None
        return events

    def _advance(self, read_bytes: int, events: int) -> None:
        self._offset += read_bytes
        self._next_seq += events


def writer_is_alive(path: Path) -> bool:
    """Whether some process holds this log open for writing, asked of the kernel's lock and not of a
    pid."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunLogError(
            f"run log: {path} — expected to open it, found {error.strerror}"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise RunLogError(
            f"run log: {path} — expected to ask for its lock, found {error.strerror}"
        ) from error
    else:
        return False
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Which processes of a run exist now. Not part of the log: it is true only at the moment it was
    asked."""

    trainer: bool
    supervisor: bool
    boot_id: str = ""
    """The kernel's id of this boot; empty when it was not asked."""
