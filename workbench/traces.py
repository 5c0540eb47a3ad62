"""Columns of a run as few enough points to draw: buckets, each the lowest and highest value of
consecutive rows, so that a spike of one step in a million is still drawn.

`WindowTraces` makes them of a table's columns, between two ends, from extremes that the table keeps;
`Decimator` of rows that come one after the other: when its buckets are full, neighbours are merged and the
stride doubles, and no row is looked at twice.

NaN and infinity are no values: a bucket that holds one says so (`non_finite`) and its low and high
are of the finite rest. An absent entry (None) is neither; a bucket of nothing but absent entries
has no low and no high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.log.table import Table

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

    x_name: str = "step"
    """What x counts."""

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


class WindowTraces:
    """Columns of a table over the rows whose x is in a window, made again at each look.

    Every bucket holds the extremes of all its rows, which costs hardly more for a million rows than for a
    thousand. The width of buckets is a round number, so that in a run that goes on only the newest bucket
    changes from one look to the next, and the others are kept.
    """

    def __init__(self) -> None:
        self._storage: object = None
        self._kept: dict[tuple[str, int, int], Bucket] = {}

    def traces(
        self,
        table: Table,
        names: Sequence[str],
        low: float,
        high: float,
        count: int,
        *,
        x: str = "step",
        gap: float = math.inf,
    ) -> tuple[Trace, ...]:
        """Each named column over [low, high], in at most `count` buckets; `x` names a column that never
        decreases."""
        if table.columns is not self._storage:
            self._storage, self._kept = table.columns, {}
        edges = _edges(table, low, high, count, x)
        xs, kept, found = table.columns[x], self._kept, {}
        traces = []
        for name in names:
            buckets = []
            for first, stop in pairwise(edges):
                key = name, first, stop
                bucket = kept.get(key)
                if bucket is None:
                    rows = table.range(name, first, stop)
                    bucket = Bucket(
                        x_first=xs[first],
                        x_last=xs[stop - 1],
                        low=rows.low,
                        high=rows.high,
                        non_finite=rows.non_finite,
                    )
                found[key] = bucket
                buckets.append(bucket)
            last = table.value(name, edges[-1] - 1) if buckets else None
            traces.append(Trace(name=name, buckets=tuple(buckets), last=last, gap=gap))
        self._kept = found
        return tuple(traces)


def _edges(table: Table, low: float, high: float, count: int, x: str) -> Sequence[int]:
    """The rows where buckets begin, and the row after the last."""
    begin, end = table.find(x, low), table.find(x, math.nextafter(high, math.inf))
    if end - begin <= count:
        return range(begin, end + 1)
    width = _round_width((high - low) / count)
    inner = {table.find(x, low + width * index) for index in range(1, count)}
    return sorted({begin, end} | {row for row in inner if row < end})


def _round_width(width: float) -> float:
    """The next of eight widths in each doubling: never more than an eighth wider."""
    share, exponent = math.frexp(width)
    return math.ldexp(math.ceil(share * 16) / 16, exponent)
