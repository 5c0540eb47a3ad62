"""Groups of compared runs by the value of a setting: the mean of each group, and a band around it.

    band    mean - s to mean + s, s = sqrt(sum (y - mean)^2 / (n - 1)), where n >= 3 runs have a value y
            lowest to highest value of its runs where fewer have one: s of two runs is a guess

Runs log at different steps, begin late, end early, and have holes. So the x axis is divided into columns, and each
run has in a column the mean, the lowest and the highest of its finite values there; between two of its rows that
are no further apart than its gap it has the straight line between them. Before its first row, after its last and in
a hole it has nothing. The mean of a group is that of the runs that have something in the column, however many they
are: each run counts once, whatever the number of its rows there. A value that is not finite counts for nothing, is
flagged, and no line passes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.log.downsample import Bucket
from engine.log.table import is_absent
from workbench.traces import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FOR_DEVIATION = 3
"""Minimum number of runs with a value whose standard deviation is shown."""


def band_words(runs: Iterable[int]) -> str:
    """Describe the lines and bands of groups; `runs` are the numbers of runs in the groups."""
    if max(runs, default=0) < FOR_DEVIATION:
        return "mean, band from lowest to highest"
    return f"mean ± standard deviation (n-1); of fewer than {FOR_DEVIATION} runs, lowest to highest"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The rows of one run that have a value, finite or not, in the order of x."""

    xs: Floats
    ys: Floats
    gap: float = math.inf
    """Rows further apart than this on x are not joined."""


def samples_of(
    xs: Sequence[float] | Floats,
    ys: Sequence[float] | Floats,
    *,
    gap: float = math.inf,
) -> Samples:
    """Return the rows of a column that are not absent."""
    import numpy as np

    values = np.array(ys, dtype=np.float64)
    is_logged = ~is_absent(values)
    return Samples(xs=np.array(xs, dtype=np.float64)[is_logged], ys=values[is_logged], gap=gap)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """A group in each column; NaN where none of its runs has a value."""

    xs: Floats
    mean: Floats
    low: Floats
    """The lower edge of the band, and `high` the upper one."""
    high: Floats
    non_finite: NDArray[np.int64]
    """Number of NaN or infinite values of its runs."""

    def mean_trace(self, name: str) -> Trace:
        """Return the mean as a line."""
        return _trace(name, self.xs, self.mean, self.mean, self.non_finite)

    def band_trace(self, name: str) -> Trace:
        """Return the band as a line of buckets, each from the lower to the upper edge."""
        return _trace(name, self.xs, self.low, self.high, self.non_finite)


def _trace(name: str, xs: Floats, lows: Floats, highs: Floats, bad: NDArray[np.int64]) -> Trace:
    buckets = []
    for x, low, high, non_finite in zip(
        xs.tolist(), lows.tolist(), highs.tolist(), bad.tolist(), strict=True
    ):
        known = math.isfinite(low) and math.isfinite(high)
        buckets.append(
            Bucket(
                x_first=x,
                x_last=x,
                low=low if known else None,
                high=high if known else None,
                non_finite=non_finite,
            )
        )
    last = next((b.low for b in reversed(buckets) if b.low is not None), None)
    return Trace(name=name, buckets=tuple(buckets), last=last)


def spread_of(samples: Sequence[Samples], low: float, high: float, count: int) -> Spread:
    """Return mean and band of one run or more in `count` columns from `low` to `high`."""
    import numpy as np

    xs = np.linspace(low, high, max(1, count) if high > low else 1)
    columns_of_runs = [_columns(run, xs) for run in samples]
    values = np.stack([statistics for statistics, _ in columns_of_runs])
    known = np.isfinite(values[:, 0])
    runs = known.sum(axis=0)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.where(known, values[:, 0], 0.0).sum(axis=0) / np.where(runs, runs, math.nan)
        squares = np.where(known, values[:, 0] - mean, 0.0) ** 2
        has_deviation = runs >= FOR_DEVIATION
        deviation = np.sqrt(squares.sum(axis=0) / np.where(has_deviation, runs - 1, math.nan))
        lower, upper = mean - deviation, mean + deviation
    return Spread(
        xs=xs,
        mean=mean,
        low=np.where(has_deviation, lower, np.fmin.reduce(values[:, 1])),
        high=np.where(has_deviation, upper, np.fmax.reduce(values[:, 2])),
        non_finite=np.sum([bad for _, bad in columns_of_runs], axis=0),
    )


def _columns(samples: Samples, xs: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return mean, lowest and highest of one run in each column, and how many of its values are not finite."""
    import numpy as np

    statistics = np.full((3, len(xs)), math.nan)
    bad = np.zeros(len(xs), np.int64)
    # Rows are in the order of x, so those of a column lie between two bounds.
    begin = np.searchsorted(samples.xs, xs[0])
    end = np.searchsorted(samples.xs, xs[-1], side="right")
    inner = np.searchsorted(samples.xs, xs[:-1] / 2 + xs[1:] / 2)
    bounds = np.concatenate([[begin], inner, [end]])
    full = np.flatnonzero(np.diff(bounds))
    if len(full):
        ys, first = samples.ys[begin:end], bounds[full] - begin
        finite = np.isfinite(ys)
        rows = np.add.reduceat(finite, first, dtype=np.int64)
        bad[full] = np.diff(first, append=len(ys)) - rows
        fills = (0.0, math.inf, -math.inf)
        total, low, high = (ys if finite.all() else np.where(finite, ys, x) for x in fills)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            parts = (
                np.add.reduceat(total, first) / rows,
                np.minimum.reduceat(low, first),
                np.maximum.reduceat(high, first),
            )
        statistics[:, full] = np.where(rows, parts, math.nan)
    after = np.searchsorted(samples.xs, xs)
    between = np.isnan(statistics[0]) & (bad == 0) & (after > 0) & (after < len(samples.xs))
    joined = np.flatnonzero(between)
    right = after[joined]
    left = right - 1
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = samples.xs[right] - samples.xs[left]
        share = (xs[joined] - samples.xs[left]) / apart
        line = samples.ys[left] * (1 - share) + samples.ys[right] * share
    statistics[:, joined] = np.where(np.isfinite(line) & (apart <= samples.gap), line, math.nan)
    return statistics, bad
