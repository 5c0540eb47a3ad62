"""Student's interval, for experiments whose number of pairs is fixed in advance; no flip uses it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from engine.flips.statistics import ALPHA, Interval, t_tail


def fixed_interval(differences: Sequence[float], *, alpha: float = ALPHA) -> Interval:
    """Return Student's interval: narrower, and valid only for a number of pairs fixed in advance."""
    n = len(differences)
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences) if n > 1 else 0.0
    half = math.inf
    if n >= 2:
        half = t_quantile(1 - alpha / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean=mean, low=mean - half, high=mean + half, pairs=n, deviation=deviation)


def t_quantile(p: float, degrees: int) -> float:
    """t with P(T <= t) = p, for p above one half; by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > 1 - p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - p else (low, middle)
    return high
