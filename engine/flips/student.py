"""Student's t distribution by the incomplete beta function, for a package that must load without numpy.

    P(T > t) = I_x(nu / 2, 1 / 2) / 2  with  x = nu / (nu + t^2),  for t >= 0

Good to about 1e-12; compared with published quantiles in the tests.
"""

from __future__ import annotations

import math


def t_tail(t: float, degrees: int) -> float:
    """P(T > t) for t >= 0: half the regularised incomplete beta function at nu / (nu + t^2)."""
    return 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(p: float, degrees: int) -> float:
    """t with P(T <= t) = p, for p above one half; by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > 1 - p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if t_tail(middle, degrees) > 1 - p:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), Lentz's way."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    total = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            total *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * total / a
