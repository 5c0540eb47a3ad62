"""Compute the position of a value on an axis, and the round values of its labels.

Positions are computed from halves, because the difference of two large finite floats may overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.units import format_count

LARGEST_EXPONENT = 308.0
ROUND_DIGITS = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Tick:
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to dots 0..dots-1. On a logarithmic axis `low` and `high` are logarithms to base
    10."""

    low: float
    high: float
    dots: int
    is_log: bool = False

    def dot(self, value: float) -> int | None:
        """Return the dot of a value, clipped to the axis; None for a value at or below 0 on a logarithmic axis."""
        if self.is_log:
            if value <= 0:
                return None
            value = math.log10(value)
        return self.dots_of((value,))[0]

    def dots_of(self, places: Iterable[float]) -> list[int]:
        """Return the dot of each position, clipped to the axis; on a logarithmic axis a position is a logarithm."""
        low, half_span, last = self.low / 2, self.high / 2 - self.low / 2, self.dots - 1
        if not half_span > 0:
            return [round(0.5 * last) for _ in places]
        shares = [(place / 2 - low) / half_span for place in places]
        return [
            round(share * last) if 0.0 <= share <= 1.0 else last if share > 1.0 else 0
            for share in shares
        ]

    def heights(self, values: Sequence[float | None]) -> list[int | None]:
        """Return `dot` of many values; None also for an absent value."""
        known = [y if y is not None and (y > 0 or not self.is_log) else None for y in values]
        places = (y for y in known if y is not None)
        dots = iter(self.dots_of(map(math.log10, places) if self.is_log else places))
        return [None if y is None else next(dots) for y in known]

    def is_over(self, value: float) -> bool:
        """Return whether a value is above the upper end."""
        return (math.log10(value) if self.is_log and value > 0 else value) > self.high

    def ticks(self, count: int) -> list[Tick]:
        """Return about `count` round values, at least two where possible; otherwise the ends of the axis."""
        low, high = self.low, self.high
        if self.is_log:
            digits = [
                digit * 10.0**exponent
                for exponent in range(math.floor(low), math.ceil(high))
                for digit in ROUND_DIGITS
                if low <= math.log10(digit) + exponent <= high
            ]
            if len(digits) >= 3:
                kept = digits[:: math.ceil(len(digits) / count)]
                return [Tick(value, f"{value:g}") for value in kept]
            low, high = (10.0 ** min(end, LARGEST_EXPONENT) for end in (low, high))
        return _round_ticks(low, high, count) or [Tick(end, f"{end:.4g}") for end in {low, high}]


def _round_ticks(low: float, high: float, count: int) -> list[Tick]:
    """Return multiples of 1, 2 or 5 times a power of ten in [low, high]; empty if floats are too coarse or too large
    for that."""
    span = high - low
    if not (1e-300 < span < 1e300 and span > 1e-12 * max(abs(low), abs(high))):
        return []
    # A step with fewer than two ticks on the axis is too long: take the next shorter step.
    exponent = math.floor(math.log10(span / count)) + 1
    steps = [(digit, exponent - down) for down in range(3) for digit in reversed(ROUND_DIGITS)]
    for digit, power in steps:
        step = digit * 10.0**power
        first, last = math.ceil(low / step), math.floor(high / step)
        if step <= span / count * 2.5 and last > first:
            values = [index * step for index in range(first, last + 1)]
            return [Tick(value, _tick_text(value, power, max(-low, high))) for value in values]
    return []


def _tick_text(value: float, power: int, largest: float) -> str:
    """Format a multiple of 10^power with just enough digits to distinguish it from its neighbours."""
    if value == 0:
        return "0"
    if largest >= 1e12 or largest < 1e-3:
        return f"{value:.{max(0, math.floor(math.log10(largest)) - power)}e}"
    thousands = math.floor(math.log10(largest)) // 3
    # format_count keeps one decimal of k, M or G.
    if largest >= 10_000 and power >= 3 * thousands - 1:
        return format_count(value)
    return f"{value:.{max(0, -power)}f}"
