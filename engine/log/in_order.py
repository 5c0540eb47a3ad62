"""Read the logs of a run as one, in order of time, with bounded memory.

Lines of one log keep their order; of two logs the earlier time comes first, and at the same time the log that is
first in `RunFolder.logs`. A clock that was set back between two sessions does not reorder a log: its lines count as no
earlier than those before them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from engine.log.events import AnyEvent, LogOpened
from engine.log.folder import RunFolder
from engine.log.read import BrokenLog, LogReader, RankReader
from engine.log.view import SOURCES, Source

STRIDE = 2048
"""Maximum number of lines of one log in a stretch."""
BLOCK_BYTES = 2 << 20
"""Bytes of a log that are read at a time."""


class Line(NamedTuple):
    source: Source
    event: AnyEvent
    unix_s: float
    order_s: float
    """`unix_s` made non-decreasing within the log."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive lines of all logs."""

    until_s: float
    """Every line before this time is in this stretch or an earlier one."""
    lines: dict[Source, list[Line]]

    def in_order(self) -> Iterator[Line]:
        return heapq.merge(*self.lines.values(), key=attrgetter("order_s"))


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


class _LogAhead:
    """One log, read ahead of what has been returned."""

    def __init__(self, source: Source, reader: LogReader) -> None:
        self.reader = reader
        self.lines: list[Line] = []
        self.done = 0
        self.fault: BrokenLog | None = None
        self._blocks = blocks(source, reader, BLOCK_BYTES)

    def fill(self) -> bool:
        """Read on when every line has been returned; False at the end of the log."""
        if self.done == len(self.lines):
            try:
                self.lines, self.done = next(self._blocks, []), 0
            except BrokenLog as broken:
                self.lines, self.done, self.fault = [], 0, broken
        return bool(self.lines)


class InOrder:
    """An iterator over the stretches of a run, as far as its logs can be read."""

    def __init__(self, run: RunFolder) -> None:
        self._logs = {
            source: _LogAhead(source, (LogReader if source in SOURCES else RankReader)(path))
            for source, path in run.logs().items()
        }

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(self._logs)

    def reader(self, source: Source) -> LogReader:
        return self._logs[source].reader

    @property
    def fault(self) -> BrokenLog | None:
        """Reason why a log could not be read to its end."""
        return next((log.fault for log in self._logs.values() if log.fault is not None), None)

    def __iter__(self) -> Iterator[Stretch]:
        return self

    def __next__(self) -> Stretch:
        logs_left = [(n, log) for n, log in enumerate(self._logs.values()) if log.fill()]
        if not logs_left:
            raise StopIteration
        # The time up to which every log has been read.
        until_s, first = min(
            (log.lines[min(log.done + STRIDE, len(log.lines)) - 1].order_s, n)
            for n, log in logs_left
        )
        lines = {}
        for place, (source, log) in enumerate(self._logs.items()):
            # Logs up to `first` also give their lines at exactly this time, because those come first.
            bisect = bisect_right if place <= first else bisect_left
            end = bisect(log.lines, until_s, log.done, key=attrgetter("order_s"))
            lines[source], log.done = log.lines[log.done : end], end
        return Stretch(until_s, lines)
