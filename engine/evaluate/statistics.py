"""Compute confidence intervals and tests for few problems or documents.

    wilson      interval of a proportion of problems: never below 0 or above 1, and not empty at 0 of n, where
                the usual p +- 1.96 sqrt(p (1-p) / n) has width 0 (Wilson 1927)
    mcnemar     two models on the same problems: only problems that one model alone solves count; if the models
                are equally good, each of these is a fair coin toss; exact, from the binomial
    bootstrap   a ratio of sums over documents, resampled with replacement: percentiles of 2,000 resamples
                with a fixed seed. Documents are resampled, because tokens of a document are not independent.
                With fewer than about 20 documents the interval is too narrow.
    pass_at_k   in `engine.evaluate.passk`

All intervals are 95 % intervals. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054
_DRAWS = 2000
_SEED = 20


class Interval(NamedTuple):
    low: float
    high: float


def wilson(successes: float, count: int) -> Interval | None:
    """Return the 95 % interval of a proportion; None if `count` is 0.

    `successes` may be a sum of fractions, one for each of `count` problems. Fractions vary less than 0 and 1 with
    the same mean, so the interval is then too wide rather than too narrow.
    """
    assert 0 <= successes <= count
    if count == 0:
        return None
    share = successes / count
    centre = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    half /= 1 + Z95**2 / count
    # Exactly 0 and 1 at the ends, where rounding would leave 1e-17.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == count else centre + half
    return Interval(low, high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p value, if the first model alone solves `only_first` problems and the second alone
    solves `only_second`; 1 if both are 0."""
    count, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, k) for k in range(fewer + 1))
    # In integers: 2 ** count overflows a float from 1,024 problems on.
    return min(1.0, float(2 * tail / 2**count))


def bootstrap(sums: Sequence[float], counts: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of sum(sums) / sum(counts) over documents; None for fewer than two documents."""
    if len(sums) < 2:
        return None
    sums_N, counts_N = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    random = np.random.Generator(np.random.Philox(_SEED))
    ratios = np.empty(_DRAWS)
    for draw in range(_DRAWS):
        picked_N = random.integers(0, len(sums_N), len(sums_N))
        ratios[draw] = sums_N[picked_N].sum() / counts_N[picked_N].sum()
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Interval(float(low), float(high))
