"""Read the logs of a run as one, in order of time, with bounded memory.

Lines of one log keep their order. Of two lines in different logs the earlier comes first; at the same time, the line
of the log that is first in `RunFolder.logs`. A clock that was set back between two sessions does not reorder a log: a
line counts as no earlier than the lines before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from engine.log.events import AnyEvent, LogOpened
from engine.log.folder import RunFolder
from engine.log.read import BrokenLog, LogReader, RankReader
from engine.log.view import SOURCES, Source

BLOCK_BYTES = 2 << 20
"""Bytes of a log that are read at a time."""


class Line(NamedTuple):
    source: Source
    event: AnyEvent
    unix_s: float
    order_s: float
    """`unix_s` made non-decreasing within the log."""


def blocks(source: Source, reader: LogReader, max_bytes: int) -> Iterator[list[Line]]:
    """Yield the lines after the reader's position, in blocks. Raises BrokenLog after the lines before the fault."""
    fault = None
    while fault is None:
        position = reader.points[-1]
        opened_s, latest_s = position.opened_unix_s, position.unix_s
        events: list[AnyEvent] | tuple[AnyEvent, ...]
        try:
            events = reader.poll(max_bytes)
        except BrokenLog as broken:
            events, fault = broken.before, broken
        if not events:
            break
        lines = []
        for event in events:
            if type(event) is LogOpened:
                opened_s = event.unix_s
            unix_s = opened_s + event.t_s
            latest_s = max(latest_s, unix_s)
            lines.append(Line(source, event, unix_s, latest_s))
        yield lines
    if fault is not None:
        raise fault


class InOrder:
    """The lines of a run in order, as far as its logs can be read."""

    def __init__(self, run: RunFolder) -> None:
        self.readers: dict[Source, LogReader] = {
            source: (LogReader if source in SOURCES else RankReader)(path)
            for source, path in run.logs().items()
        }
        self.fault: BrokenLog | None = None
        """Reason why a log could not be read to its end."""

    def __iter__(self) -> Iterator[Line]:
        logs = (self._lines(source, reader) for source, reader in self.readers.items())
        return heapq.merge(*logs, key=attrgetter("order_s"))

    def _lines(self, source: Source, reader: LogReader) -> Iterator[Line]:
        try:
            for block in blocks(source, reader, BLOCK_BYTES):
                yield from block
        except BrokenLog as broken:
            self.fault = self.fault or broken
