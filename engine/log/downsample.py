"""Downsample columns of a run to as many points as can be drawn, for the terminal, the report and the notebook.

Rows are divided into intervals of equal width on x (`equal_widths`, for a zoomed window) or of equal row counts
(`equal_counts`, so that a long pause does not compress the curve before and after it). The lowest and the highest
value of each interval are kept, so that a spike of one step in a million is still drawn, and whether a value was NaN
or infinite. `buckets` returns the intervals, `window_traces` those of several columns of a table between two ends;
`points` returns the kept rows, each at its own x.
"""

# Shapes: N rows, I intervals

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from engine.log.table import Column, Table, is_absent, numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.log.table import Numbers

Row: TypeAlias = tuple[float, float | None]
"""A point: x, and y or None if y is absent."""

GAP = 1.5
"""Neighbours on a line are joined up to so many times their usual distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive rows of one column."""

    x_first: float
    x_last: float
    low: float | None
    """The lowest finite value; None if there is none."""
    high: float | None
    non_finite: int
    """Number of values that are NaN or infinite; an absent value is neither."""


def bucket_at(x: float, y: float | None) -> Bucket:
    """Return one row as a bucket."""
    finite = y if y is not None and math.isfinite(y) else None
    return Bucket(x_first=x, x_last=x, low=finite, high=finite, non_finite=int(y is not finite))


def equal_counts(count: int, limit: int) -> list[int]:
    """Return the I + 1 edges of at most `limit` intervals of `count` rows, equally many in each."""
    parts = min(count, limit)
    return [round(part * count / parts) for part in range(parts + 1)] if parts else [0]


def equal_widths(xs: Sequence[float] | Numbers, low: float, high: float, limit: int) -> list[int]:
    """Return the I + 1 edges of at most `limit` intervals of the rows whose x is in [low, high]; x must not decrease.
    The width is a round number, so that the intervals stay the same while rows are appended."""
    import numpy as np

    begin = int(np.searchsorted(xs, low))
    end = int(np.searchsorted(xs, high, side="right"))
    if end - begin <= limit:
        return list(range(begin, end + 1))
    width = _round_width((high - low) / limit)
    inner = np.searchsorted(xs, [low + width * index for index in range(1, limit)])
    return sorted({begin, end, *inner[inner < end].tolist()})


def _round_width(width: float) -> float:
    """Round up to the next of eight widths per doubling, which is at most an eighth wider."""
    share, exponent = math.frexp(width)
    return math.ldexp(math.ceil(share * 16) / 16, exponent)


def buckets(xs: Column, ys: Column, edges: Sequence[int]) -> list[Bucket]:
    """Return a bucket for each of the I intervals between I + 1 increasing edges, (I,)."""
    if len(edges) < 2:
        return []
    at = list(edges)
    x_N, y_N = numbers(xs), numbers(ys)
    lows, highs, finite, non_finite = _extremes(y_N[at[0] : at[-1]], [row - at[0] for row in at])
    return [
        Bucket(
            x_first=first,
            x_last=last,
            low=low if known else None,
            high=high if known else None,
            non_finite=count,
        )
        for first, last, low, high, known, count in zip(
            x_N[at[:-1]].tolist(),
            x_N[[row - 1 for row in at[1:]]].tolist(),
            lows.tolist(),
            highs.tolist(),
            finite,
            non_finite,
            strict=True,
        )
    ]


def points(xs: Column, ys: Column, limit: int, *, gaps: bool = False) -> tuple[Row, ...]:
    """Return the rows that have a value. More than 2 * `limit` rows are reduced to at most 3 * `limit`: the lowest,
    the highest and one non-finite value of each of `limit` intervals. With `gaps`, rows with an absent value are
    returned with None, at most one more for each interval. A row without x is left out."""
    import numpy as np

    x_N, y_N = numbers(xs), numbers(ys)
    rows = np.arange(len(y_N))
    if len(y_N) > 2 * limit:
        rows = _kept_rows(y_N, equal_counts(len(y_N), limit))
    absent = is_absent(y_N[rows])
    shown = ~np.isnan(x_N[rows]) & (gaps | ~absent)
    shown_rows = zip(
        x_N[rows[shown]].tolist(),
        y_N[rows[shown]].tolist(),
        absent[shown].tolist(),
        strict=True,
    )
    return tuple((x, None if is_gap else y) for x, y, is_gap in shown_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One column, ready to draw."""

    name: str
    buckets: tuple[Bucket, ...]
    last: float | None
    """The newest entry, None when it is absent."""
    gap: float = math.inf
    """Points further apart than this on x are not joined: nothing is known between them."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever logged in it."""
        return all(bucket.low is None and not bucket.non_finite for bucket in self.buckets)


def points_of(name: str, points: Sequence[tuple[float, float]]) -> Trace:
    """Return single points (x, y) as a line through them."""
    single = tuple(bucket_at(x, y) for x, y in points)
    return Trace(name=name, buckets=single, last=points[-1][1] if points else None)


def window_traces(
    table: Table,
    names: Sequence[str],
    low: float,
    high: float,
    count: int,
    *,
    gap: float = math.inf,
) -> tuple[Trace, ...]:
    """Return each named column over the steps [low, high], in at most `count` buckets.

    Every bucket holds the extremes of all its rows, which costs hardly more for a million rows than for a
    thousand. The width of buckets is a round number, so that they stay the same while rows are appended.
    """
    xs = table.column("step")
    edges = equal_widths(xs, low, high, count)
    traces = []
    for name in names:
        shown = tuple(buckets(xs, table.column(name), edges))
        last = table.value(name, edges[-1] - 1) if shown else None
        traces.append(Trace(name=name, buckets=shown, last=last, gap=gap))
    return tuple(traces)


def _extremes(
    column: Numbers, edges: Sequence[int]
) -> tuple[Numbers, Numbers, list[bool], list[int]]:
    """Return for each interval the lowest and the highest finite value, whether there is a finite value, and the
    number of non-finite values, (I,) each. All intervals share one call, because a call costs more than a few
    rows."""
    import numpy as np

    begins = edges[:-1]
    finite = np.isfinite(column)
    non_finite = ~(finite | is_absent(column))
    return (
        np.minimum.reduceat(np.where(finite, column, math.inf), begins),
        np.maximum.reduceat(np.where(finite, column, -math.inf), begins),
        np.logical_or.reduceat(finite, begins).tolist(),
        np.add.reduceat(non_finite, begins, dtype=np.int64).tolist(),
    )


def _kept_rows(column: Numbers, edges: Sequence[int]) -> NDArray[np.intp]:
    """Return, for each interval, the first row with its lowest value, with its highest, with a non-finite one, and with
    an absent one."""
    import numpy as np

    lows, highs, _, _ = _extremes(column, edges)
    counts, finite, absent = np.diff(edges), np.isfinite(column), is_absent(column)
    firsts = [
        _firsts(mask, edges)
        for mask in (
            finite & (column == np.repeat(lows, counts)),
            finite & (column == np.repeat(highs, counts)),
            ~(finite | absent),
            absent,
        )
    ]
    return np.unique(np.concatenate(firsts))


def _firsts(mask: NDArray[np.bool_], edges: Sequence[int]) -> NDArray[np.intp]:
    """Return the first row of each interval that is true in `mask`; intervals without such a row are left out."""
    import numpy as np

    true = np.append(np.flatnonzero(mask), edges[-1])
    firsts = true[np.searchsorted(true, edges[:-1])]
    return firsts[firsts < edges[1:]]
