"""Statistics of paired runs of two arms, valid at every look.

The unit is a pair of fresh processes, one of each arm, in random order. A pair gives one number, d = ln(y_B /
y_A), the log-ratio of the two runs' medians. Steps of one process are not independent of each other and are
never pooled: a test on steps calls equal arms different most of the time.

After each pair the mean of d has an interval that is valid however often one looks (a mixture of Student t
tests over the effect, right-Haar prior on the scale, g-prior of weight g on the mean):

    nu = n - 1,  q = 1 + n g,  a = (sqrt(q) / alpha)^(2 / (nu + 1))
    h  = s_d sqrt((nu / n) (a - 1) / (1 - a / q))    if a < q, else infinite
    [mean - h, mean + h]

The margin is the difference that is too small to matter (5 % by default). An interval outside the margin
decides, an interval inside it means that the arms are equivalent, and any other needs more pairs. Each
verdict is a one-sided claim (more than the margin, less than minus the margin, and for equivalence the two
opposite ones, as in two one-sided tests). So a verdict that is wrong in at most `ALPHA` of experiments uses
the interval of level 1 - 2 ALPHA, each end of which is exceeded with probability ALPHA.

Validity assumes that the d are independent and roughly normal. `diagnose` looks for violations (order, trend,
autocorrelation); a finding makes a verdict invalid. Arms that did not finish
are outcomes without a time; `sign_bound` gives their p value. Of several metrics one decides; the others are
tested together (`anytime_p`), each at its share of `ALPHA`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FASTER, SLOWER, EQUIVALENT = "B_FASTER", "B_SLOWER", "EQUIVALENT"
INCONCLUSIVE = "INCONCLUSIVE"
ALPHA = 0.05
LEVEL = 1 - 2 * ALPHA
PRIOR_WEIGHT = 2.0
"""g: gives the narrowest interval at eight pairs, and a finite one from the four pairs of the earliest
verdict."""
AUTOCORRELATION_LIMIT = 0.5
AUTOCORRELATION_ERRORS = 2.58
"""The limit in standard errors, which must be exceeded too. Independent pairs correlate by 1 / sqrt(n) at
random, so with few pairs the correlation exceeds 0.5 by chance in one experiment of eight, but 2.58 standard
errors in 1 % of them."""
DIAGNOSIS_P_LIMIT = 0.01
"""For the tests on order and trend. The limit is on p and not on t, because with two pairs of either order t
exceeds 3 by chance in one experiment of ten."""
_ENOUGH_FOR_DIAGNOSIS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Interval of the mean log-ratio; `low` and `high` are infinite while there are too few pairs."""

    mean: float
    low: float
    high: float
    pairs: int
    deviation: float
    """Standard deviation of d between pairs; 0 for a single one."""

    @property
    def ratio(self) -> float:
        """B over A: 0.9 means that B takes 10 % less."""
        return math.exp(self.mean)

    @property
    def ends(self) -> list[float | None]:
        """Both ends as ratios; None for an open end."""
        return [math.exp(x) if math.isfinite(x) else None for x in (self.low, self.high)]


# contract: flip-statistics-v1
def anytime_interval(
    differences: Sequence[float], *, alpha: float = ALPHA, prior_weight: float = PRIOR_WEIGHT
) -> Interval:
    """Return the interval that is valid at a look after every pair. Raises ValueError without a pair."""
    n = len(differences)
    mean, deviation = _moments(differences)
    half = math.inf
    if n >= 2:
        q = 1 + n * prior_weight
        a = (math.sqrt(q) / alpha) ** (2 / n)
        if a < q:
            half = deviation * math.sqrt((n - 1) / n * (a - 1) / (1 - a / q))
    return Interval(mean=mean, low=mean - half, high=mean + half, pairs=n, deviation=deviation)


# contract: flip-statistics-v1
def decide(interval: Interval, margin: float) -> str | None:
    """Return FASTER, SLOWER or EQUIVALENT; None while more pairs are needed. `margin` is a
    fraction: 0.05 is 5 %. For a metric where less is better."""
    delta = math.log1p(margin)
    if interval.high < -delta:
        return FASTER
    if interval.low > delta:
        return SLOWER
    if -delta < interval.low and interval.high < delta:
        return EQUIVALENT
    return None


def pairs_needed(interval: Interval, margin: float) -> int | None:
    """Estimate how many pairs would decide if mean and deviation stay as they are.

    None when the mean lies on the margin, or with fewer than two pairs. The anytime interval is about 3 standard errors
    wide.
    """
    delta = math.log1p(margin)
    gap = min(abs(interval.mean - delta), abs(interval.mean + delta))
    if interval.pairs < 2 or gap == 0:
        return None
    return max(interval.pairs + 1, math.ceil((3 * interval.deviation / gap) ** 2))


def pairs_to_confirm(attempt: int) -> int:
    """Return how many pairs in a row must show the observation in A alone, in test number `attempt` of a finding.

    If the change made no difference, runs of both arms would show it with one probability p, so n pairs in a row come
    out so with (p (1 - p))^n, at most 4^-n. Over all attempts these bounds add up to 1.7 %.
    """
    return 3 if attempt <= 1 else attempt + 3


def shown_to_confirm(attempt: int) -> int:
    """Return how many pairs must show the observation in A, with no pair that shows it in B, if A does not show it in
    every pair.

    If the change made no difference, a pair with the observation in one arm alone would have it in A with probability
    1/2, so n such pairs have it in A with 2^-n. Over all attempts these bounds add up to 0.2 %.
    """
    return 9 + attempt


def sign_bound(pairs: int) -> float:
    """One-sided p that the same arm fails in every one of `pairs` by chance: 2^-n."""
    return 2.0**-pairs


def diagnose(
    differences: Sequence[float], b_first: Sequence[bool], times_s: Sequence[float]
) -> dict[str, str]:
    """Find evidence against independent, unordered pairs, by name. `b_first` says whether B ran first in a pair,
    `times_s` when the pair began."""
    found = {}
    n = len(differences)
    correlation = _lag_one(differences) if n >= _ENOUGH_FOR_DIAGNOSIS else 0.0
    if abs(correlation) > max(AUTOCORRELATION_LIMIT, AUTOCORRELATION_ERRORS / math.sqrt(n)):
        found["autocorrelation"] = f"neighbouring pairs correlate by {correlation:+.2f}"
    order, p = _slope_t(differences, b_first) if 1 < sum(b_first) < n - 1 else (0.0, 1.0)
    if p < DIAGNOSIS_P_LIMIT:
        found["order"] = (
            f"pairs that began with B differ from the others (t = {order:.1f}, p = {p:.3f})"
        )
    _, trend = _slope_t(differences, times_s) if n >= _ENOUGH_FOR_DIAGNOSIS else (0.0, 1.0)
    if trend < DIAGNOSIS_P_LIMIT:
        found["trend"] = f"the difference drifts with time (p = {trend:.3f})"
    return found


def anytime_p(differences: Sequence[float]) -> float:
    """The smallest alpha whose `anytime_interval` excludes 0: the interval's formula solved for alpha."""
    n = len(differences)
    mean, deviation = _moments(differences)
    if n < 2 or mean == 0:
        return 1.0
    q = 1 + n * PRIOR_WEIGHT
    if deviation == 0:
        a = q
    else:
        r = (mean / deviation) ** 2 * n / (n - 1)
        a = (1 + r) / (1 + r / q)
    return min(1.0, math.sqrt(q) * math.pow(a, -n / 2))


def _moments(differences: Sequence[float]) -> tuple[float, float]:
    deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return statistics.fmean(differences), deviation


def _lag_one(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    centred = [v - mean for v in values]
    power = sum(c * c for c in centred)
    return sum(a * b for a, b in pairwise(centred)) / power if power else 0.0


def _slope_t(values: Sequence[float], over: Sequence[float]) -> tuple[float, float]:
    """Return Student's t of the slope of `values`, and its two-sided p; (0, 1) without a slope. Over 0 and 1 it is the
    t of two samples with pooled variance."""
    if len(set(over)) < 2 or len(set(values)) < 2:
        return 0.0, 1.0
    correlation, degrees = statistics.correlation(over, values), len(values) - 2
    # Rounding can take a perfect correlation past 1.
    if abs(correlation) >= 1:
        return math.copysign(math.inf, correlation), 0.0
    slope = correlation * math.sqrt(degrees / (1 - correlation**2))
    return slope, 2 * t_tail(abs(slope), degrees)


def t_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's t for t >= 0: half of I_x(nu / 2, 1 / 2) at x = nu / (nu + t^2)."""
    from mpmath import fp  # 60 ms to import, and only a verdict's diagnosis needs it

    x = degrees / (degrees + t * t)
    return float(fp.betainc(degrees / 2, 0.5, 0, x, regularized=True)) / 2
