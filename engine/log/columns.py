"""Read long logs fast: the numbers of their older lines, without the rest, and from segment files where there are some.

    columns/events-001048712.segment    a segment: the lines of events.jsonl from this byte on, about CHUNK_BYTES

A segment is a msgpack record with the columns of the steps and readings, and verbatim the other lines and the readings
that carry the newest values. It holds nothing that the log does not hold, so any of them may be deleted. A viewer that
had to decode the lines writes it, under another name until it is complete, and it is never changed, so writers need no
lock and no ordering. A segment never contains the opening of a session, a line out of sequence or an invalid record:
such lines have no segment, and the log reader, which alone reports faults, reads them.

A segment is valid for the file that it was made from, on a machine that has not rebooted since, if this user or root
has written it. Such a log is only appended to, or cut after its last whole line or before the hole that a power loss
left (`engine.log.write`); the lines that follow a cut have other sequence numbers and timestamps. So if the last
TAIL_BYTES of the lines are unchanged and in place, everything before them is unchanged too. For anything else (a copy,
a replaced log, a rebooted machine) the lines are decoded. Overwriting bytes in the middle of a log in place is not
detected. So segments are for looking at a run; code that verifies something reads the lines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from engine.errors import BadInput
from engine.files import open_plain, read_bytes
from engine.limits import COLUMNS_FILE
from engine.log.events import Count, Known, LogOpened, RunStarted, StepDone
from engine.log.read import NOT_JSON, READ_BYTES, BrokenLog, FileId, LogReader, decode_line, id_of
from engine.log.table import NOT_A_READING, Batch, batches_of, fields_of, split
from engine.log.write import read_boot_id

if TYPE_CHECKING:
    from engine.log.table import Numbers

FOLDER = "columns"
VERSION = 2
"""Layout version; increase it whenever an older reader would misread a segment."""
CHUNK_BYTES = 1 << 20
NEWEST_BYTES = 8 << 20
"""Bytes at the end of a log that are decoded whole: its newest lines are shown."""
TAIL_BYTES = 1 << 10
LEFT_BYTES = 1 << 30
"""Disk space in bytes that segments leave free for the run itself."""

# A step as its table keeps it: without its phases it decodes in half the time.
_FIELDS = {"seq", "t_s", "nf", *fields_of("step")}
_record: Any = msgspec.defstruct(
    "StepRow",
    [
        (field.name, field.type) if field.required else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(StepDone)
        if field.name in _FIELDS
    ],
    kw_only=True,
    gc=False,
    tag_field="kind",
    tag="step",
)
for _kind in get_args(Known):
    if _kind is not StepDone:
        _record = _record | _kind
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_record)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive whole lines of a log; none of them opens a session."""

    version: int
    boot_id: str
    """Boot id of the machine that wrote it."""
    file_id: FileId
    """Device and inode of the log."""
    first: Count
    """`seq` of the first line."""
    lines: Count
    end: Count
    """End of the lines in the log, in bytes."""
    tail: bytes
    """The last TAIL_BYTES of the lines."""
    tables: dict[str, dict[str, bytes]]
    """Columns of float64 by table."""
    rest: list[bytes]
    """The lines that are kept one by one."""


_segment_decoder = msgspec.msgpack.Decoder(Segment)


class BatchReader:
    """Reads one log as batches. Older lines than the last NEWEST_BYTES come without what only the newest are shown
    with: the phases of steps, and the rows themselves."""

    def __init__(self, lines: LogReader, *, files: bool = False, keep: bool = False) -> None:
        """`files` uses the segments of the log; `keep` saves those that it lacks."""
        self.lines, self._use, self._keep = lines, files, keep

    @cached_property
    def _boot_id(self) -> str:
        return read_boot_id()

    def poll(self, max_bytes: int = READ_BYTES) -> list[Batch]:
        """Return the next lines of the log, at most about `max_bytes` of it; empty when there is nothing new. Raises
        BrokenLog."""
        batches: list[Batch] = []
        until = self.lines.read_bytes + max_bytes
        try:
            while (left := until - self.lines.read_bytes) > 0 and (found := self._next(left)):
                batches += found
        except BrokenLog as broken:
            if not batches:
                raise
            # It is raised again at the next poll.
            batches += batches_of(broken.before)
        return batches

    def _next(self, max_bytes: int) -> list[Batch]:
        reader, begin = self.lines, self.lines.read_bytes
        try:
            older = reader.path.stat().st_size - begin - NEWEST_BYTES
        except OSError:
            older = 0
        if older < CHUNK_BYTES:
            return batches_of(reader.poll(max_bytes))
        if self._use and (batch := self._load()) is not None:
            return [batch]
        first, lines = reader.lines_read, reader.read_lines(CHUNK_BYTES)
        try:
            events = reader.decode(lines, _decoder)
        except BrokenLog as broken:
            sound = lines.split(b"\n")[: len(broken.before)]
            broken.before = tuple(decode_line(line, "") for line in sound)
            raise
        batches = [
            replace(
                batch,
                rows={n: _carrying_newest(rows) for n, rows in batch.rows.items() if n != "step"},
                shown=batch.others,
            )
            for batch in batches_of(events)
        ]
        opens = not {LogOpened, RunStarted}.isdisjoint(map(type, events))
        if self._keep and self._boot_id != "unknown" and not opens:
            self._save(begin, first, lines, batches[0])
        return batches

    def _path(self, begin: int) -> Path:
        log = self.lines.path
        return log.parent / FOLDER / f"{log.stem}-{begin:09}.segment"

    def _load(self) -> Batch | None:
        """Return the lines of the segment that begins at the reader's position; None when there is no valid one."""
        reader = self.lines
        begin, first = reader.read_bytes, reader.lines_read
        try:
            path = self._path(begin)
            segment = _segment_decoder.decode(read_bytes(path, "columns", COLUMNS_FILE))
            with open_plain(reader.path) as log:
                file_id = id_of(os.fstat(log.fileno()))
                tail = os.pread(log.fileno(), TAIL_BYTES, segment.end - len(segment.tail))
            wanted = VERSION, self._boot_id, file_id, first
            if (
                (segment.version, segment.boot_id, segment.file_id, segment.first) != wanted
                or reader.file_id not in (None, file_id)
                or not tail.startswith(segment.tail)
                or path.stat().st_uid not in (os.geteuid(), 0)
            ):
                return None
            batch = _batch_of(segment)
        except (OSError, BadInput, ValueError, *NOT_JSON):
            return None
        times = [event.t_s for event in batch.others]
        times += [float(columns["t_s"].max()) for columns in batch.tables.values()]
        reader.pass_over(file_id, segment.lines, segment.end, max(times))
        return batch

    def _save(self, begin: int, first: int, lines: bytes, batch: Batch) -> None:
        """Write a segment, where there is the space and the permission."""
        import numpy as np

        file_id, raw = self.lines.file_id, lines.split(b"\n")
        assert file_id is not None, "its lines have been read"
        kept = sorted(row.seq for rows in (batch.others, *batch.rows.values()) for row in rows)
        segment = Segment(
            version=VERSION,
            boot_id=self._boot_id,
            file_id=file_id,
            first=first,
            lines=len(raw) - 1,
            end=begin + len(lines),
            tail=lines[-TAIL_BYTES:],
            tables={
                table: {
                    name: np.asarray(column, "<f8").tobytes() for name, column in columns.items()
                }
                for table, columns in batch.tables.items()
            },
            rest=[raw[seq - first] for seq in kept],
        )
        path = self._path(begin)
        # Another viewer that writes it now writes the same.
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(exist_ok=True)
            disk = os.statvfs(path.parent)
            if disk.f_bavail * disk.f_frsize < LEFT_BYTES:
                return
            partial.write_bytes(msgspec.msgpack.encode(segment))
            partial.replace(path)
        except OSError:
            return


def _carrying_newest(rows: Sequence[Any]) -> list[Any]:
    """Return the last row, and of each reading the last with its value and the last with a reason why it is missing."""
    kept: dict[str, Any] = {}
    for row in rows:
        if row.absent:
            kept |= dict.fromkeys(row.absent, row)
    reasons = [*kept.values(), rows[-1]]
    for name in set(rows[-1].__struct_fields__) - NOT_A_READING:
        kept[name] = next((row for row in reversed(rows) if getattr(row, name) is not None), None)
    carrying = {row.seq: row for row in (*reasons, *kept.values()) if row is not None}
    return [carrying[seq] for seq in sorted(carrying)]


def _batch_of(segment: Segment) -> Batch:
    import numpy as np

    tables: dict[str, dict[str, Numbers]] = {
        table: {name: np.frombuffer(column, "<f8") for name, column in columns.items()}
        for table, columns in segment.tables.items()
    }
    rows, others = split([decode_line(line, "") for line in segment.rest])
    return Batch(tables, rows, others, others)
