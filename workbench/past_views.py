"""A run as it was at any past time: the snapshots that a feed would have given, rebuilt from the log.

The logs are folded once from the beginning, in order of time (`engine.log.in_order`), and after each stretch the
view and the positions in the logs are kept. A view is frozen and shares its columns, so keeping it costs next to
nothing. A query for a time starts at the newest kept view before it, reads the few thousand lines that follow, and
folds those that are not later.

A view of the past contains nothing later: an alert raised a minute afterwards is not active in it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from engine.log.events import AnyEvent
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.in_order import InOrder, blocks
from engine.log.read import BrokenLog, Liveness, LogReader
from engine.log.table import batches_of
from engine.log.text import status_text
from engine.log.view import RunView, Source
from workbench.feed import Snapshot, command_of
from workbench.log_pages import LogBook

BUDGET_S = 0.25
"""Seconds of reading between two answers."""
PAGE_BYTES = 256 << 10
STRIDE = 2048
"""Lines between two views that are kept."""
BOTH = Liveness(trainer=True, supervisor=True)
NOBODY = Liveness(trainer=False, supervisor=False)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The view at a time, and how many lines of each log are in it."""

    unix_s: float
    view: RunView
    taken: dict[Source, int]


class ReplayFeed:
    """Gives snapshots of one run at any time. `read` advances through the logs; `at` uses what has been read.

    Used from one thread at a time.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        logs = InOrder(run)
        self._lines, self._readers = iter(logs), logs.readers
        self._view = RunView()
        self._taken: dict[Source, int] = dict.fromkeys(self._readers, 0)
        self._kept = [_Kept(float("-inf"), self._view, dict(self._taken))]
        self._book = LogBook(self._readers["events"])
        self.is_read = False
        self._command = command_of(run)

    @property
    def first_unix_s(self) -> float:
        """Return when the run began, according to its log."""
        return self._view.first_unix_s or 0.0

    @property
    def last_unix_s(self) -> float:
        """Return the latest time that was read."""
        return max(self._view.last_unix_s or 0.0, self._kept[-1].unix_s, self.first_unix_s)

    def read(self, budget_s: float = BUDGET_S) -> bool:
        """Read on for about `budget_s`; True when everything was read."""
        until_s = time.monotonic() + budget_s
        while not self.is_read and time.monotonic() < until_s:
            self._step()
        return self.is_read

    def _step(self) -> None:
        """Fold the next lines in order of time, and keep the view."""
        stretch = list(islice(self._lines, STRIDE))
        if not stretch:
            self.is_read = True
            return
        for source in self._readers:
            events = [line.event for line in stretch if line.source == source]
            self._view = fold(self._view, source, batches_of(events))
            self._taken[source] += len(events)
        # The lines of a view are complete events, which can be read from the log again.
        kept = replace(self._view, lines=())
        self._kept.append(_Kept(stretch[-1].order_s, kept, dict(self._taken)))

    def at(self, unix_s: float) -> Snapshot:
        """Return the run as it was at a time, as far as it was read."""
        index = bisect_right(self._kept, unix_s, key=lambda kept: kept.unix_s) - 1
        kept = self._kept[max(0, index)]
        view = kept.view
        if index + 1 < len(self._kept):
            later = self._kept[index + 1]
            for source, taken in kept.taken.items():
                events = self._between(source, taken, later.taken[source] - taken, unix_s)
                view = fold(view, source, batches_of(events))
        whole = self._book.log(self._view.asides)
        alive = _alive(view)
        return Snapshot(
            run=self.run,
            view=view,
            alive=alive,
            state=view.state(alive),
            status=status_text(view, alive),
            now_unix_s=unix_s,
            error=None,
            behind=False,
            log=whole.until(unix_s),
            command=self._command,
        )

    def _between(self, source: Source, first: int, count: int, unix_s: float) -> list[AnyEvent]:
        """Return `count` lines of a log from number `first` on, without those later than a time."""
        if not count:
            return []
        reader = self._readers[source]
        point = reader.points[bisect_right(reader.points, first, key=lambda p: p.number) - 1]
        rereader, lines = LogReader(reader.path, at=point), []
        with suppress(BrokenLog):
            for block in blocks(source, rereader, PAGE_BYTES):
                lines += block
                if rereader.lines_read >= first + count:
                    break
        wanted = lines[first - point.number : first + count - point.number]
        return [line.event for line in wanted if line.order_s <= unix_s]


def _alive(view: RunView) -> Liveness:
    """Return which processes existed, according to the logs so far."""
    if not view.clocks:
        return NOBODY
    return BOTH if view.exit is None and view.finished is None else NOBODY
