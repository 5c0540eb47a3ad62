"""Columns of a run as few enough points to draw, kept up to date in time proportional to the new
rows.

A column of any length becomes at most LIMIT buckets, each the lowest and highest value of `stride`
consecutive rows, so a spike of one step in a million is still drawn. When the buckets are full,
neighbours are merged and the stride doubles; no row is ever looked at twice. Only a resume, which
cuts the table, makes the buckets be built again.

NaN and infinity are no values: a bucket that holds one says so (`non_finite`) and its low and high
are of the finite rest. An absent entry (None) is neither; a bucket of nothing but absent entries
has no low and no high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.runlog.table import Table

LIMIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive rows of one column."""

    x_first: float
    x_last: float
    low: float | None
    high: float | None
    non_finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One column, ready to draw."""

    name: str
    buckets: tuple[Bucket, ...]
    last: float | None
    """The newest entry, None when it is absent."""
    gap: float = math.inf
    """Points further apart than this on x belong to no common line: between them nothing is known."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever logged in it."""
        return all(bucket.low is None and not bucket.non_finite for bucket in self.buckets)


def _bucket_of(xs: Sequence[float], ys: Sequence[float | None]) -> Bucket:
    present = [y for y in ys if y is not None] if None in ys else ys
    # One sum tells whether every value is finite: NaN and infinity go through it.
    finite = present
    if not math.isfinite(sum(present)):  # type: ignore[arg-type]
        finite = [y for y in present if y is not None and math.isfinite(y)]
    return Bucket(
        x_first=xs[0],
        x_last=xs[-1],
        low=min(finite, default=None),  # type: ignore[type-var]
        high=max(finite, default=None),  # type: ignore[type-var]
        non_finite=len(finite) != len(present),
    )


def _merged(left: Bucket, right: Bucket) -> Bucket:
    lows = [y for y in (left.low, right.low) if y is not None]
    highs = [y for y in (left.high, right.high) if y is not None]
    return Bucket(
        x_first=left.x_first,
        x_last=right.x_last,
        low=min(lows, default=None),
        high=max(highs, default=None),
        non_finite=left.non_finite or right.non_finite,
    )


class Decimator:
    """The buckets of one column, fed with its new rows."""

    def __init__(self, limit: int = LIMIT) -> None:
        assert limit >= 2 and limit % 2 == 0, "buckets are merged in pairs"
        self._limit = limit
        self._closed: list[Bucket] = []
        self._open: Bucket | None = None
        self._open_rows = 0
        self.stride = 1

    def extend(self, xs: Sequence[float], ys: Sequence[float | None]) -> None:
        """Add rows; `xs` never decreases."""
        start = 0
        while start < len(ys):
            stop = start + self.stride - self._open_rows
            bucket = _bucket_of(xs[start:stop], ys[start:stop])
            self._open = bucket if self._open is None else _merged(self._open, bucket)
            self._open_rows += min(stop, len(ys)) - start
            start = stop
            if self._open_rows == self.stride:
                self._closed.append(self._open)
                self._open, self._open_rows = None, 0
                if len(self._closed) == self._limit:
                    halves = zip(self._closed[::2], self._closed[1::2], strict=True)
                    self._closed = [_merged(left, right) for left, right in halves]
                    self.stride *= 2

    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets so far, the unfinished one included: at most LIMIT."""
        return (*self._closed, self._open) if self._open else tuple(self._closed)


Column = Callable[[Table, int], Sequence[float | None]]
"""Entries of a table from a row on."""


def column(name: str) -> Column:
    """A column as it was logged."""
    return lambda table, start: table.values(name, start)


STEP_COLUMNS: Mapping[str, Column] = {
    "loss": column("loss"),
    "ce": column("ce"),
    "kd": column("kd"),
    "step_s": column("step_s"),
    "tokens_per_s": column("tokens_per_s"),
}


class TableTraces:
    """Traces of one growing table. Call `update` with each newer snapshot of it, from one
    thread."""

    def __init__(self, columns: Mapping[str, Column] = STEP_COLUMNS, x: str = "step") -> None:
        self._columns, self._x = columns, x
        self._storage: object = None
        self._rows = 0
        self._decimators: dict[str, Decimator] = {}
        self._traces: Mapping[str, Trace] = {}

    def update(self, table: Table) -> Mapping[str, Trace]:
        """Every trace as of `table`; the same mapping as before when there is nothing new."""
        if table.columns is not self._storage or len(table) < self._rows:
            self._storage, self._rows = table.columns, 0
            self._decimators = {name: Decimator() for name in self._columns}
            self._traces = {name: Trace(name=name, buckets=(), last=None) for name in self._columns}
        start, self._rows = self._rows, len(table)
        if start == self._rows:
            return self._traces
        xs = [x or 0.0 for x in table.values(self._x, start)]
        traces = {}
        for name, read in self._columns.items():
            ys = read(table, start)
            self._decimators[name].extend(xs, ys)
            traces[name] = Trace(name=name, buckets=self._decimators[name].buckets(), last=ys[-1])
        self._traces = traces
        return traces


def trace_in(
    table: Table,
    name: str,
    low: float,
    high: float,
    count: int,
    *,
    x: str = "step",
    gap: float = math.inf,
) -> Trace:
    """A column over the rows whose `x` is in [low, high], in at most `count` buckets of equal width on x.

    `x` names a column that never decreases. Every bucket holds the extremes of all its rows, which costs
    hardly more for a million rows than for a thousand.
    """
    begin, end = table.find(x, low), table.find(x, math.nextafter(high, math.inf))
    if end - begin <= count:
        edges = range(begin, end + 1)
    else:
        width = (high - low) / count
        inner = {table.find(x, low + width * index) for index in range(1, count)}
        edges = sorted({begin, end} | inner)  # type: ignore[assignment]
    xs = table.columns[x]
    buckets = []
    for first, stop in pairwise(edges):
        found = table.range(name, first, stop)
        buckets.append(
            Bucket(
                x_first=xs[first],
                x_last=xs[stop - 1],
                low=found.low,
                high=found.high,
                non_finite=found.non_finite,
            )
        )
    last = table.value(name, end - 1) if end > begin else None
    return Trace(name=name, buckets=tuple(buckets), last=last, gap=gap)
