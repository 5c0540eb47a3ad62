"""Reduce columns of a run to as many points as can be drawn: buckets with the lowest and highest value of
consecutive rows, so that a spike of one step in a million is still drawn.

`WindowTraces` makes them from the columns of a table between two ends; `buckets_of` from a few rows that are
not in a table.

A bucket that contains NaN or infinity is flagged (`non_finite`), and its low and high are those of the finite
values. Absent entries (None) are ignored; a bucket with only absent entries has no low and no high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Points further apart than this on x are not joined: nothing is known between them."""

    x_name: str = "step"
    """The unit of x."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever logged in it."""
        return all(bucket.low is None and not bucket.non_finite for bucket in self.buckets)


def _bucket_of(xs: Sequence[float], ys: Sequence[float | None]) -> Bucket:
    present = [y for y in ys if y is not None] if None in ys else ys
    # One sum shows whether every value is finite: NaN and infinity propagate.
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


def buckets_of(
    xs: Sequence[float], ys: Sequence[float | None], limit: int = LIMIT
) -> tuple[Bucket, ...]:
    """Return all rows in at most `limit` buckets of equal row counts."""
    stride = max(1, -(-len(ys) // limit))
    return tuple(
        _bucket_of(xs[start : start + stride], ys[start : start + stride])
        for start in range(0, len(ys), stride)
    )


def points_of(name: str, points: Sequence[tuple[float, float]]) -> Trace:
    """Return single points (x, y) as a line through them."""
    buckets = tuple(_bucket_of([x], [y]) for x, y in points)
    return Trace(name=name, buckets=buckets, last=points[-1][1] if points else None)


def smoothed(trace: Trace, reach: float) -> Trace:
    """Return the exponential moving average over x of the middles of buckets: what lies `reach` behind counts 1/e.

    The weights are those of the points seen so far (as in Adam's bias correction), so it does not begin at 0. It
    begins again after a value that is not finite.
    """
    buckets, mean, weight, before = [], 0.0, 0.0, 0.0
    for bucket in trace.buckets:
        if bucket.low is None or bucket.high is None or bucket.non_finite:
            weight = 0.0 if bucket.non_finite else weight
            buckets.append(bucket)
            continue
        x = bucket.x_first / 2 + bucket.x_last / 2
        # Places do not decrease, but a clock may have been set back between two logs.
        kept = weight * math.exp(min(0.0, before - x) / reach) if reach > 0 else 0.0
        weight, before = kept + 1.0, x
        mean += ((bucket.low / 2 + bucket.high / 2) - mean) / weight
        buckets.append(replace(bucket, low=mean, high=mean))
    return replace(trace, buckets=tuple(buckets))


class WindowTraces:
    """Columns of a table over the rows whose x is in a window, recomputed at each poll.

    Every bucket holds the extremes of all its rows, which costs hardly more for a million rows than for a
    thousand. The width of buckets is a round number, so that in an active run only the newest bucket changes
    from one poll to the next, and the others are cached.
    """

    def __init__(self) -> None:
        self._storage: object = None
        self._kept: dict[tuple[str, str, int, int], Bucket] = {}

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
        """Return each named column over [low, high], in at most `count` buckets; `x` names a non-decreasing
        column."""
        if table.columns is not self._storage:
            self._storage, self._kept = table.columns, {}
        edges = _edges(table, low, high, count, x)
        kept = self._kept
        found: dict[tuple[str, str, int, int], Bucket] = {}
        traces = []
        for name in names:
            keys = [(name, x, first, stop) for first, stop in pairwise(edges)]
            new = [place for place, key in enumerate(keys) if key not in kept]
            if new:
                # Those between two new ones are computed again: that costs less than one call for each.
                begin, end = new[0], new[-1] + 1
                kept.update(
                    zip(
                        keys[begin:end],
                        _buckets(table, name, x, edges[begin : end + 1]),
                        strict=True,
                    )
                )
            buckets = tuple(kept[key] for key in keys)
            found.update(zip(keys, buckets, strict=True))
            last = table.value(name, edges[-1] - 1) if buckets else None
            traces.append(Trace(name=name, buckets=buckets, last=last, gap=gap))
        self._kept = found
        return tuple(traces)


def _buckets(table: Table, name: str, x: str, edges: Sequence[int]) -> list[Bucket]:
    """Return the rows of a column between each two edges as buckets."""
    xs, rows = table.columns[x], list(edges)
    firsts, lasts = xs[rows[:-1]].tolist(), xs[[stop - 1 for stop in rows[1:]]].tolist()
    return [
        Bucket(x_first=first, x_last=last, low=r.low, high=r.high, non_finite=r.non_finite)
        for first, last, r in zip(firsts, lasts, table.ranges(name, edges), strict=True)
    ]


def _edges(table: Table, low: float, high: float, count: int, x: str) -> Sequence[int]:
    """Return the rows where buckets begin, and the row after the last."""
    begin, end = table.find(x, low), table.find(x, math.nextafter(high, math.inf))
    if end - begin <= count:
        return range(begin, end + 1)
    width = _round_width((high - low) / count)
    inner = table.find_each(x, [low + width * index for index in range(1, count)])
    return sorted({begin, end, *(row for row in inner if row < end)})


def _round_width(width: float) -> float:
    """Round up to the next of eight widths per doubling: never more than an eighth wider."""
    share, exponent = math.frexp(width)
    return math.ldexp(math.ceil(share * 16) / 16, exponent)
