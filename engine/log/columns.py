"""Read the older lines of a long log fast: the numbers of their steps and readings, without what only the newest lines
are shown with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import msgspec

from engine.log.events import Known, StepDone
from engine.log.read import READ_BYTES, BrokenLog, LogReader, decode_line
from engine.log.table import Batch, batches_of, fields_of

CHUNK_BYTES = 1 << 20
NEWEST_BYTES = 8 << 20
"""Bytes at the end of a log that are decoded whole: its newest lines are shown."""

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


class BatchReader:
    """Reads one log as batches. Older lines than the last NEWEST_BYTES come without the phases of steps, and are not
    among the lines that are shown."""

    def __init__(self, lines: LogReader) -> None:
        self.lines = lines

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
        reader = self.lines
        try:
            older = reader.path.stat().st_size - reader.read_bytes - NEWEST_BYTES
        except OSError:
            older = 0
        if older < CHUNK_BYTES:
            return batches_of(reader.poll(max_bytes))
        lines = reader.read_lines(CHUNK_BYTES)
        try:
            events = reader.decode(lines, _decoder)
        except BrokenLog as broken:
            sound = lines.split(b"\n")[: len(broken.before)]
            broken.before = tuple(decode_line(line, "") for line in sound)
            raise
        return [
            replace(
                batch,
                rows={name: rows for name, rows in batch.rows.items() if name != "step"},
                shown=batch.others,
            )
            for batch in batches_of(events)
        ]
