"""Follow a log with bounded reads; return whole lines only, and report every missing line.

`LogReader.poll` returns the events appended since the last call. The reader keeps the byte
offset and the sequence number of the first line that it has not returned. A torn last line (the writer is in the
middle of it, or died there) is left in place and read again at the next poll.

A line that is missing, repeated, out of order or not a valid record raises `BrokenLog`. So does a file that was
cut, replaced or removed while it was being followed. The error carries the sound events before the
fault, so that one bad byte does not hide what a run did before it. The reader stays at the fault
and raises again at the next poll.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from engine.errors import RunLogError
from engine.files import NotRegular, depth_of, open_plain
from engine.limits import JSON_DEPTH, LOG_FILE, LOG_LINE, LOG_NUMBER
from engine.log.earlier import as_now
from engine.log.events import (
    KINDS,
    NON_FINITE,
    AnyEvent,
    Event,
    FactsRead,
    Known,
    LogOpened,
    Note,
    StepDone,
    StepRow,
    Unrecognised,
)
from engine.terminal import clipped

READ_BYTES = 16 << 20
"""Bytes that one poll reads by default."""
PART_BYTES = 128 << 10
"""Approximate bytes of lines that are decoded in one call, and between two of a reader's points."""
NEWEST_BYTES = 8 << 20
"""Bytes at the end of a log whose steps are decoded with all their fields for a view."""
LONGEST_LINE_BYTES = LOG_LINE.most
LINES_KEPT = 2000
"""Number of newest lines of a log that a viewer keeps."""

_plain = msgspec.json.Decoder()
_known = msgspec.json.Decoder(Known)
# A step without its phases decodes in half the time.
_rows_alone: Any = StepRow
for _kind in get_args(Known):
    if _kind is not StepDone:
        _rows_alone = _rows_alone | _kind
_numbers: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_rows_alone)
FileId = tuple[int, int]
"""Device and inode of a file."""


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def id_of(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


class BrokenLog(RunLogError):
    """A log that cannot be read further; `before` holds the events before the fault that no poll has returned. `hole`
    means that the fault is zero bytes in place of lines, as after a power loss; the next writer cuts them off."""

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
    """Decode one record. An unknown kind becomes `Unrecognised`. Raises RunLogError for anything that is not a
    valid record."""
    try:
        record = _plain.decode(line)
    except NOT_JSON:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise RunLogError(f"run log: {where} — expected a record, found {line[:60]!r}")
    kind = record["kind"]
    try:
        if depth_of(record) > JSON_DEPTH.most:
            raise ValueError(f"expected values nested {JSON_DEPTH}, found more")
        record = as_now(record)
        non_finite = _take_non_finite(record, record.pop("nf", None) or {})
        if (known := KINDS.get(record["kind"])) is not None:
            return _with_non_finite(msgspec.convert(record, known), non_finite)
        for path, value in non_finite.items():
            record = _replaced(record, path, value)
        envelope = {name: record.pop(name) for name in ("v", "seq", "t_s") if name in record}
        del record["kind"]
        return msgspec.convert({"kind": kind, "fields": record, **envelope}, Unrecognised)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunLogError(
            f"run log: {where} — expected a {kind[:60]!r} record, found one that breaks its form: "
            f"{clipped(str(error), 200)}"
        ) from None


EventT = TypeVar("EventT", bound=Event)
FieldPath: TypeAlias = tuple[str, ...]
"""Path of a value in a record: field names and list indices."""
_PLACEHOLDER = -0.5 * LOG_NUMBER.most
"""Placeholder for a non-finite number while a record is checked: within the range of measured numbers, but outside
the ranges of times and counts."""


def _take_non_finite(record: dict[str, Any], non_finite: dict[str, str]) -> dict[FieldPath, float]:
    """Return the values named under `nf` by path, replacing each null in `record` by a placeholder number."""
    if not isinstance(non_finite, dict):
        raise TypeError(f"`nf` is {non_finite!r:.40}")
    values: dict[FieldPath, float] = {}
    for path, text in non_finite.items():
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/"))
        parent: Any = record
        for part in parents:
            parent = parent[int(part) if isinstance(parent, list) else part]
        key = int(last) if isinstance(parent, list) else last
        if parent[key] is not None:
            raise ValueError(f"`nf` names {path:.80}, which has a value")
        parent[key] = _PLACEHOLDER
        values[(*parents, last)] = NON_FINITE[text]
    return values


def _with_non_finite(event: EventT, values: dict[FieldPath, float]) -> EventT:
    """Return a checked event with its non-finite values; a field that only a later version knows is skipped."""
    if not values:
        return event
    fields: dict[str, Any] = {}
    for (name, *path), value in values.items():
        if name in event.__struct_fields__:
            fields[name] = _replaced(fields.get(name, getattr(event, name)), tuple(path), value)
    return msgspec.structs.replace(event, **fields)


def _replaced(value: Any, path: FieldPath, number: float) -> Any:
    """Return `value` with the number at `path` replaced."""
    if not path:
        return number
    if isinstance(value, dict):
        return {**value, path[0]: _replaced(value[path[0]], path[1:], number)}
    at = int(path[0]) % len(value)
    return type(value)([*value[:at], _replaced(value[at], path[1:], number), *value[at + 1 :]])


# contract: run-log-v1
class LogReader:
    """Reads one log from its start and then follows it. A file that does not exist yet reads as empty."""

    def __init__(self, path: Path, *, at: Point | None = None, older_as_rows: bool = False) -> None:
        """Read from the beginning, or from a point that another reader of this log has recorded. With
        `older_as_rows`, a step before the last NEWEST_BYTES of the log may be returned as a StepRow."""
        self.path, self._older_as_rows = path, older_as_rows
        begin = at or Point(0, 0, 0.0, -math.inf)
        self._offset = begin.offset
        self._next_seq = begin.number
        self._file_id: FileId | None = None
        self.points = [begin]
        """Points about PART_BYTES apart in the lines that have been read; append-only."""

    def poll(self, max_bytes: int = READ_BYTES) -> list[AnyEvent]:
        """Return the events since the last call, at most about `max_bytes` of them (at least one line); empty
        when there is nothing new. Raises BrokenLog."""
        decoder = _known
        if self._older_as_rows and (older := self._size() - self._offset - NEWEST_BYTES) > 0:
            max_bytes, decoder = min(max_bytes, older), _numbers
        return self._decode(self._read_lines(max_bytes), decoder)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def read_bytes(self) -> int:
        """Byte offset of the first line that has not been returned."""
        return self._offset

    def _read_lines(self, max_bytes: int) -> bytes:
        """Read whole lines from the offset on; `_decode` advances past them."""
        try:
            with open_plain(self.path) as file:
                status = os.fstat(file.fileno())
                file_id = id_of(status)
                # The newline before the offset is read again: it is missing if the file was cut or rewritten.
                file.seek(max(0, self._offset - 1))
                is_other = self._file_id not in (None, file_id)
                if self._offset and (is_other or file.read(1) != b"\n"):
                    raise BrokenLog(
                        f"run log: {self.path} — expected the {self._offset} bytes read so far, "
                        f"found {status.st_size}: it was cut or replaced while it was being read"
                    )
                if status.st_size > LOG_FILE.most:
                    raise BrokenLog.expected(
                        "run log", self.path, str(LOG_FILE), f"{status.st_size:,}"
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
        except NotRegular as error:
            raise BrokenLog(
                f"run log: {self.path} — expected a regular file, found {error.strerror}"
            ) from None
        except OSError as error:
            raise BrokenLog(
                f"run log: {self.path} — expected to read it, found {error.strerror}"
            ) from error
        end = end_of_lines(block)
        if not end and len(block) >= LONGEST_LINE_BYTES:
            raise BrokenLog(
                f"run log: {self.path} @{self._offset} — expected lines under "
                f"{LONGEST_LINE_BYTES} bytes, found a longer one"
            )
        return block[:end]

    @property
    def lines_read(self) -> int:
        """Number of the first line that has not been returned, from 0."""
        return self._next_seq

    def _decode(self, lines: bytes, decoder: msgspec.json.Decoder[Any]) -> list[AnyEvent]:
        """Decode the whole lines that follow, and advance past them. Raises BrokenLog."""
        events: list[AnyEvent] = []
        # Decode in parts, so that one line of an unusual form does not slow down a long block.
        for part in _parts(lines):
            decoded = self._decode_at_once(part, decoder)
            if decoded is None:
                try:
                    decoded = self._decode_each(part)
                except BrokenLog as broken:
                    broken.before = (*events, *broken.before)
                    raise
            events += decoded
        return events

    def _decode_at_once(
        self, lines: bytes, decoder: msgspec.json.Decoder[Any] = _known
    ) -> list[AnyEvent] | None:
        """Decode many lines in one call; None if they have to be decoded one by one."""
        try:
            events: list[Any] = decoder.decode_lines(lines)
            # `>=`: the record adds one level around the facts.
            facts = (event.facts for event in events if type(event) is FactsRead)
            if any(depth_of(fact) >= JSON_DEPTH.most for fact in facts):
                return None
            # Every kind of event has `nf`.
            if any(map(attrgetter("nf"), events)):
                pairs = zip(events, lines.split(b"\n"), strict=False)
                events = [decode_line(line, "") if event.nf else event for event, line in pairs]
        except (*NOT_JSON, RunLogError):
            return None
        # The decoder skips empty lines.
        numbers = range(self._next_seq, self._next_seq + lines.count(b"\n"))
        if [event.seq for event in events] != list(numbers) or min(
            map(attrgetter("t_s"), events)
        ) < 0:
            return None
        self._advance(lines, events)
        return events

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
            self._advance(lines[: offset - self._offset], events)
            if hole:
                raise BrokenLog(
                    f"run log: {where} — expected a record, found zeros: the lines there had not reached the disk "
                    "when the machine stopped",
                    hint="`engine distill --resume` continues from the newest checkpoint",
                    before=events,
                    hole=True,
                ) from None
            raise BrokenLog(fault.message, before=events) from None
        self._advance(lines, events)
        return events

    def _advance(self, lines: bytes, events: Sequence[AnyEvent]) -> None:
        """Advance past `lines`, and note this position."""
        number, _, opened_s, latest_s = self.points[-1]
        if not events:
            return
        opens = LogOpened in set(map(type, events))
        for event in events if opens else (max(events, key=attrgetter("t_s")),):
            if type(event) is LogOpened:
                opened_s = event.unix_s
            latest_s = max(latest_s, opened_s + event.t_s)
        self._offset += len(lines)
        self._next_seq = number + len(events)
        self.points.append(Point(self._next_seq, self._offset, opened_s, latest_s))


class RankReader(LogReader):
    """Reads the log of a rank other than the first. A fault becomes one note at level error after the sound lines; the
    reader raises no error, so that the run's other logs are still read."""

    def __init__(self, path: Path, *, at: Point | None = None) -> None:
        super().__init__(path, at=at)
        self._has_reported = False

    def poll(self, max_bytes: int = READ_BYTES) -> list[AnyEvent]:
        try:
            return super().poll(max_bytes)
        except BrokenLog as broken:
            events = list(broken.before)
            if not self._has_reported:
                point = self.points[-1]
                t_s = max(0.0, point.unix_s - point.opened_unix_s)
                events.append(Note(level="error", text=broken.message, seq=point.number, t_s=t_s))
            self._has_reported = True
            return events


def end_of_lines(block: bytes) -> int:
    """Return the end of the last whole line; if a line is too long, the end of the line before it."""
    end = 0
    while (newline := block.rfind(b"\n", end, end + LONGEST_LINE_BYTES)) >= 0:
        end = newline + 1
    return end


def _parts(lines: bytes) -> Iterator[bytes]:
    """Split whole lines into parts of about PART_BYTES."""
    begin = 0
    while begin < len(lines):
        end = lines.find(b"\n", begin + PART_BYTES) + 1 or len(lines)
        yield lines[begin:end]
        begin = end


def writer_is_alive(path: Path) -> bool:
    """Return whether a process holds this log open for writing, according to the kernel's lock. A missing file, or a
    path that is not a regular file, has no writer. Raises RunLogError if the file cannot be opened or its lock not
    tested."""
    try:
        file = open_plain(path)
    except (FileNotFoundError, NotRegular):
        return False
    except OSError as error:
        raise RunLogError(
            f"run log: {path} — expected to open it, found {error.strerror}"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            raise RunLogError(
                f"run log: {path} — expected to ask for its lock, found {error.strerror}"
            ) from error
        return False


class Point(NamedTuple):
    """A position from which a log can be read again."""

    number: int
    """Number of the line that begins here, from 0."""
    offset: int
    opened_unix_s: float
    """Wall time of `t_s = 0` in the session that continues here."""
    unix_s: float
    """Latest time of the lines before this point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The processes of a run that exist now: the first rank's trainer and the supervisor. It is not part of the log,
    and valid only at the moment of the query."""

    trainer: bool
    supervisor: bool
    boot_id: str = ""
    """The kernel's boot id; empty if it was not read."""
    host: str = ""
    """Name of this machine; empty if it was not read."""
    silent_s: float = math.inf
    """Seconds since the newest write to events.jsonl, or to the `watch` or `device` log."""


def events_of(log: Path) -> Iterator[AnyEvent]:
    """Yield the events of a log of any length. Raises BrokenLog at a fault; its `before` has the sound events that were
    not yielded."""
    reader = LogReader(log)
    while events := reader.poll():
        yield from events
