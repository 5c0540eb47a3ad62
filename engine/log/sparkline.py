"""Draw a metric in one line of text, as bars, or in ASCII as digits from 0 to 9."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Values = Sequence[float | None]
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "0123456789"


def sparkline(values: Values, width: int = 60, *, ascii_only: bool = False) -> str:
    """Draw the values: each cell is the mean of its interval, or a dot (in ASCII an x) if the interval has an absent
    or non-finite value."""
    bars, gap_sign = (ASCII_BARS, "x") if ascii_only else (BARS, "·")
    low, high = value_range(values)
    drawn = []
    for begin, end in intervals(len(values), min(width, len(values))):
        part = values[begin:end]
        known = finite_of(part)
        if len(known) < len(part):
            drawn.append(gap_sign)
        else:
            height = (math.fsum(known) / len(known) - low) / (high - low)
            drawn.append(bars[min(len(bars) - 1, int(height * len(bars)))])
    return "".join(drawn)


def intervals(count: int, parts: int) -> list[tuple[int, int]]:
    """Return the begin and end of each of `parts` equal intervals of `count` items."""
    return list(pairwise(round(i * count / parts) for i in range(parts + 1))) if parts else []


def finite_of(values: Values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def value_range(values: Values) -> tuple[float, float]:
    """Return the lowest and the highest finite value, never the same."""
    known = finite_of(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    if high > low:
        return low, high
    # A flat line is drawn relative to zero.
    return min(low, 0.0), max(high, 0.0) if high else 1.0
