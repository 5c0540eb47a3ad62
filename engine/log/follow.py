"""Follow a whole run: read its logs as they are written, and fold them into one view."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.log.beats import read_beats
from engine.log.events import AnyEvent
from engine.log.fold import OF_RANKS, fold
from engine.log.folder import RunFolder
from engine.log.read import READ_BYTES, BrokenLog, Liveness, LogReader, RankReader
from engine.log.view import SOURCES, LogLine, RunView, Source, rank_of


class Follower:
    """Polls the logs of one run. `view` is the newest frozen RunView; `alive` has the processes that existed at the
    last poll."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        logs = run.logs()
        self._readers: dict[Source, LogReader] = {
            source: LogReader(logs[source], older_as_rows=True) for source in SOURCES
        }
        self._further: dict[Source, RankReader] = {}
        """Readers of the logs of the other ranks and hosts, added as they appear."""
        self.view = RunView()
        self.alive = Liveness(trainer=False, supervisor=False)
        self.is_behind = False
        """Whether the newest `read_all` reached its time limit before the end of the logs."""
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
        """Share of the bytes on disk that have been read, 0 to 1."""
        sizes = {reader: _size(reader.path) for reader in self._readers.values()}
        done = sum(min(reader.read_bytes, size) for reader, size in sizes.items())
        return done / sum(sizes.values()) if sum(sizes.values()) else 1.0

    @property
    def state(self) -> str:
        """State of the run according to the view; valid once everything on disk has been read."""
        return self.view.state(self.alive)

    def poll(self, max_bytes: int = READ_BYTES) -> bool:
        """Read new lines, at most about `max_bytes` of each log; return whether the view changed.

        Raises BrokenLog if a log cannot be read further, after folding the sound lines of all three logs.
        """
        # Liveness is read before the logs: a process that ends in between has already written its last line.
        self.alive = self.run.liveness()
        before = self.view
        fault: BrokenLog | None = None
        for source in SOURCES:
            try:
                events: Sequence[AnyEvent] = self._readers[source].poll(max_bytes)
            except BrokenLog as broken:
                events, fault = broken.before, fault or broken
            self.view = fold(self.view, source, events)
        self._poll_further(max_bytes)
        if fault is not None:
            raise fault
        return self.view is not before

    def _poll_further(self, max_bytes: int) -> None:
        """Read the logs of the other hosts, and the failures in the other ranks' logs, which are few lines.

        A log that cannot be read further becomes an error in the view, so that the run's other logs are still read.
        """
        has_ranks = False
        for source, path in self.run.logs().items():
            if source in SOURCES:
                continue
            reader = self._further.setdefault(source, RankReader(path))
            events = reader.poll(max_bytes)
            if rank_of(source):
                has_ranks = True
                events = [event for event in events if type(event) in OF_RANKS]
            self.view = fold(self.view, source, events)
        if has_ranks and (beats := tuple(read_beats(self.run))) != self.view.beats:
            self.view = replace(self.view, beats=beats)

    def _bytes_read(self) -> int:
        readers = [*self._readers.values(), *self._further.values()]
        return sum(reader.read_bytes for reader in readers)

    def read_all(self, until_s: float = math.inf) -> RunView:
        """Read until nothing new is left, or until a time of the monotonic clock, in which case `is_behind` is set.

        Raises BrokenLog only at the end: every poll reads a part of each log, so that a broken log does not prevent
        the others from being read to their end. `view` then has all that could be read.
        """
        fault: BrokenLog | None = None
        self.is_behind = True
        while True:
            before = self._bytes_read()
            try:
                self.poll()
            except BrokenLog as broken:
                fault = broken
            if self._bytes_read() == before:
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
