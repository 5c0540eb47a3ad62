"""Follow a whole run: its three logs folded into one view, as far as they have been written."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.log.events import AnyEvent
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.read import READ_BYTES, BrokenLog, Liveness, LogReader
from engine.log.view import SOURCES, LogLine, RunView, Source

if TYPE_CHECKING:
    from engine.log.columns import Segment, SegmentReader

LONG_BYTES = 4 << 20
"""Unread bytes from which using segments pays off."""


class Follower:
    """Polls the logs of one run. `view` is the newest frozen RunView; `alive` says which processes existed at
    the last poll."""

    def __init__(self, run: RunFolder, *, files: bool = False, keep: bool = False) -> None:
        """`files` uses valid segments beside a long log (`engine.log.columns`); `keep` also saves those that had
        to be built."""
        self.run = run
        self._files, self._keep = files, keep
        self._readers: dict[Source, LogReader] = {
            "events": LogReader(run.events),
            "device": LogReader(run.device),
            "watch": LogReader(run.watch),
        }
        self._segments: dict[Source, SegmentReader] = {}
        self.view = RunView()
        self.alive = Liveness(trainer=False, supervisor=False)
        self.is_behind = False
        """Whether the time of the newest `read_all` ran out before the end."""
        self._shown: dict[Source, int] = {}

    def new_lines(self) -> list[LogLine]:
        """Return the log lines of the view that no earlier call returned, ordered by time.

        Lines are identified by log and number, not by time: a line of one log may be read after a later line
        of another.
        """
        lines = [
            line for line in self.view.lines if line.event.seq > self._shown.get(line.source, -1)
        ]
        for line in lines:
            self._shown[line.source] = max(line.event.seq, self._shown.get(line.source, -1))
        return lines

    def reader(self, source: Source) -> LogReader:
        """Return the reader of one of the logs."""
        return self._readers[source]

    @property
    def share_read(self) -> float:
        """Return how much of what is on disk now has been read, 0 to 1."""
        sizes = {source: _size(reader.path) for source, reader in self._readers.items()}
        done = sum(min(self._readers[s].read_bytes, size) for s, size in sizes.items())
        return done / sum(sizes.values()) if sum(sizes.values()) else 1.0

    @property
    def state(self) -> str:
        """Return the state of the view; it is meaningful once everything on disk has been read."""
        return self.view.state(self.alive)

    def poll(self, max_bytes: int = READ_BYTES) -> bool:
        """Read new lines, at most about `max_bytes` of each log; True when the view changed.

        Raises BrokenLog, after folding what is sound in all three logs, when one cannot be read further.
        """
        # Liveness is read before the logs: a process that ends in between has already written its last line.
        self.alive = self.run.liveness()
        before = self.view
        fault: BrokenLog | None = None
        for source in SOURCES:
            events: Sequence[AnyEvent] | Sequence[Segment]
            try:
                events = self._read(source, max_bytes)
            except BrokenLog as broken:
                events, fault = broken.before, fault or broken
            self.view = fold(self.view, source, events)
        if fault is not None:
            raise fault
        return self.view is not before

    def _read(self, source: Source, max_bytes: int) -> Sequence[AnyEvent] | Sequence[Segment]:
        """Return what follows in one log: segments where it is long, events otherwise."""
        reader = self._readers[source]
        if source not in self._segments:
            if _size(reader.path) - reader.read_bytes < LONG_BYTES:
                return reader.poll(max_bytes)
            # Imported here because it imports numpy.
            from engine.log.columns import SegmentReader

            self._segments[source] = SegmentReader(reader, files=self._files, keep=self._keep)
        segments, max_bytes = self._segments[source].read(max_bytes)
        return segments or reader.poll(max_bytes)

    def read_all(self, until_s: float = math.inf) -> RunView:
        """Read until nothing new is left, or until a time of the monotonic clock; `is_behind` tells which.

        Raises BrokenLog at the end: every poll reads a share of each log, so that one broken log does not keep the
        others from being read to their end. After it, `view` has what could be read.
        """
        fault: BrokenLog | None = None
        self.is_behind = True
        while True:
            before = self.view
            try:
                self.poll()
            except BrokenLog as broken:
                fault = broken
            if self.view is before:
                break
            if time.monotonic() >= until_s:
                return self.view
        self.is_behind = False
        if fault is not None:
            raise fault
        return self.view


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
