"""Columns of a run as lines that can be drawn: `window_traces` makes them from a table, between two ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.log.downsample import Bucket, bucket_at, buckets, equal_widths
from engine.log.table import Table

GAP = 1.5
"""Neighbours on a line are joined up to so many times their usual distance."""


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


def smoothed(trace: Trace, reach: float) -> Trace:
    """Return the exponential moving average over x of the middles of buckets: a point at distance `reach`
    before x has weight 1/e.

    The weights are those of the points seen so far (as in Adam's bias correction), so it does not begin at 0. It
    begins again after a value that is not finite.
    """
    averaged, mean, weight, before = [], 0.0, 0.0, 0.0
    for bucket in trace.buckets:
        if bucket.low is None or bucket.high is None or bucket.non_finite:
            weight = 0.0 if bucket.non_finite else weight
            averaged.append(bucket)
            continue
        x = bucket.x_first / 2 + bucket.x_last / 2
        # Places do not decrease, but a clock may have been set back between two logs.
        kept = weight * math.exp(min(0.0, before - x) / reach) if reach > 0 else 0.0
        weight, before = kept + 1.0, x
        mean += ((bucket.low / 2 + bucket.high / 2) - mean) / weight
        averaged.append(replace(bucket, low=mean, high=mean))
    return replace(trace, buckets=tuple(averaged))


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
