"""A run as it was at any past time: the snapshots that a feed would have given, rebuilt from the log.

The logs are folded once from the beginning, in order of time, and every STRIDE lines the view and the
positions in the logs are kept. A view is frozen and shares its columns, so keeping it costs next to nothing.
A query for a time starts at the newest kept view before it, reads the few thousand lines that follow, and
folds those that are not later. So jumping by a day costs no more than jumping by a minute.

Lines of one log are in order; of two logs the earlier time comes first. A view of the past contains nothing
later: an alert raised a minute afterwards is not active in it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.errors import RunLogError
from engine.log.events import AnyEvent, LogOpened, RunStarted
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.read import BrokenLog, Liveness, LogReader
from engine.log.table import Table
from engine.log.text import status_text
from engine.log.view import SOURCES, RunView, Source
from workbench.feed import Snapshot
from workbench.log import LogBook

STRIDE = 2048
READ_BYTES = 2 << 20
BUDGET_S = 0.25
KEPT = -1
"""Marks a session row that the fold has not changed."""
BOTH = Liveness(trainer=True, supervisor=True)
NOBODY = Liveness(trainer=False, supervisor=False)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The view at a time, and how many lines of each log are in it."""

    unix_s: float
    view: RunView
    taken: dict[Source, int]


class _Ahead:
    """One log, read ahead of what is folded: its lines with their times, which never decrease."""

    def __init__(self, reader: LogReader) -> None:
        self.reader = reader
        self.events: list[AnyEvent] = []
        self.times: list[float] = []
        self.done = 0
        self.is_over = False
        self._opened_s, self._latest_s = 0.0, float("-inf")

    def fill(self) -> None:
        """Read on until there are lines that are not folded yet, or the log ends."""
        if self.done < len(self.events) or self.is_over:
            return
        try:
            found = self.reader.poll(READ_BYTES)
        except BrokenLog as broken:
            # Lines after the fault are unknown; lines before it can be shown.
            found, self.is_over = list(broken.before), True
        self.events, self.times, self.done = found, [], 0
        self.is_over = self.is_over or not found
        for event in found:
            if type(event) is LogOpened:
                self._opened_s = event.unix_s
            self._latest_s = max(self._latest_s, self._opened_s + event.t_s)
            self.times.append(self._latest_s)

    def take(self, until_s: float) -> list[AnyEvent]:
        """Return the lines read so far that are not later than a time."""
        end = bisect_right(self.times, until_s, self.done)
        taken, self.done = self.events[self.done : end], end
        return taken


class ReplayFeed:
    """Gives snapshots of one run at any time. `read` advances through the logs; `at` uses what has been read.

    Used from one thread at a time.
    """

    def __init__(self, run: RunFolder, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._monotonic = monotonic
        self._logs = {source: _Ahead(LogReader(getattr(run, source))) for source in SOURCES}
        self._view = RunView()
        self._taken: dict[Source, int] = dict.fromkeys(SOURCES, 0)
        self._kept = [_Kept(float("-inf"), self._view, dict(self._taken))]
        self._book = LogBook(self._logs["events"].reader)
        self.is_read = False

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
        until_s = self._monotonic() + budget_s
        while not self.is_read and self._monotonic() < until_s:
            self._step()
        return self.is_read

    def _step(self) -> None:
        """Fold the next lines in order of time, and keep the view."""
        waiting = []
        for log in self._logs.values():
            log.fill()
            if log.done < len(log.events):
                waiting.append(log)
        if not waiting:
            self.is_read = True
            return
        # No further than every log has been read, and at most STRIDE lines of any.
        limit_s = min(log.times[min(log.done + STRIDE, len(log.times)) - 1] for log in waiting)
        for source, log in self._logs.items():
            events = log.take(limit_s)
            self._view = fold(self._view, source, events)
            self._taken[source] += len(events)
        # The lines of a view are complete events, which can be read from the log again.
        kept = replace(self._view, lines=())
        self._kept.append(_Kept(limit_s, kept, dict(self._taken)))

    def at(self, unix_s: float) -> Snapshot:
        """Return the run as it was at a time, as far as it was read."""
        index = bisect_right(self._kept, unix_s, key=lambda kept: kept.unix_s) - 1
        kept = self._kept[max(0, index)]
        view = kept.view
        if index + 1 < len(self._kept):
            later = self._kept[index + 1]
            between = {
                source: self._between(
                    log.reader, kept.taken[source], later.taken[source] - kept.taken[source], unix_s
                )
                for source, log in self._logs.items()
            }
            view = _folded(view, later.view, between)
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
        )

    def _between(self, reader: LogReader, first: int, count: int, unix_s: float) -> list[AnyEvent]:
        """Return `count` lines of a log from number `first` on, without those later than a time."""
        if not count:
            return []
        index = bisect_right(reader.points, first, key=lambda point: point.number) - 1
        point = reader.points[index]
        again = LogReader(reader.path, at=point)
        found: list[AnyEvent] = []
        try:
            while again.lines_read < first + count and (block := again.poll(READ_BYTES // 8)):
                found += block
        except RunLogError as problem:
            found += problem.before if isinstance(problem, BrokenLog) else ()
        opened_s, latest_s = point.opened_unix_s, point.unix_s
        kept = []
        for number, event in enumerate(found[: first + count - point.number], start=point.number):
            if type(event) is LogOpened:
                opened_s = event.unix_s
            latest_s = max(latest_s, opened_s + event.t_s)
            if latest_s > unix_s:
                break
            if number >= first:
                kept.append(event)
        return kept


def _folded(view: RunView, later: RunView, between: Mapping[Source, list[AnyEvent]]) -> RunView:
    """Extend a view by the lines that follow it. `later` already has the rows of these lines, so no long column
    is copied to add a few."""
    opens = any(
        type(event) in (LogOpened, RunStarted) for events in between.values() for event in events
    )
    if opens or not _goes_on(view, later):
        # A resume may remove rows, and its counts depend on all of them.
        for source, events in between.items():
            view = fold(view, source, events)
        return view
    last = [{name: view.steps.last(name) for name in view.steps.columns}] if len(view.steps) else []
    thin = replace(
        view,
        session_row=KEPT,
        steps=Table(view.steps.columns).extended(last),
        hosts=Table(view.hosts.columns),
        gpu_tables={n: Table(table.columns) for n, table in view.gpu_tables.items()},
    )
    for source, events in between.items():
        thin = fold(thin, source, events)
    counts = {n: len(table) for n, table in view.gpu_tables.items()}
    rows = len(view.steps) - len(last) + len(thin.steps)
    return replace(
        thin,
        # The fold starts a session after all steps, or leaves it where it was.
        session_row=view.session_row if thin.session_row == KEPT else rows,
        steps=later.steps.first(rows),
        hosts=later.hosts.first(len(view.hosts) + len(thin.hosts)),
        gpu_tables={
            n: later.gpu_tables[n].first(counts.get(n, 0) + len(table))
            for n, table in thin.gpu_tables.items()
        },
    )


def _goes_on(view: RunView, later: RunView) -> bool:
    """Whether the rows of a view are a prefix of those of a later one."""
    pairs = [(view.steps, later.steps), (view.hosts, later.hosts)]
    pairs += [(table, later.gpu_tables[n]) for n, table in view.gpu_tables.items()]
    return all(table.columns is longer.columns for table, longer in pairs)


def _alive(view: RunView) -> Liveness:
    """Return which processes existed, according to the logs so far."""
    if not view.clocks:
        return NOBODY
    return BOTH if view.exit is None and view.finished is None else NOBODY
