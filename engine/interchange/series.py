"""Store the values of a run by name and step, for import and export.

If a step is not greater than the preceding step, the run was restarted there: the new value replaces the values from
that step on, as in a resumed run. So the steps of a series always increase.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple


class Point(NamedTuple):
    step: int
    unix_s: float
    name: str
    value: float
    """Value, which may be NaN or infinite. A step without a value has no point."""


@dataclass(slots=True)
class Series:
    """The values of one name."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    unix_s: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    replaced: int = 0
    """Number of values that restarts have replaced."""
    seen: int = 0
    every: int = 1
    """One of `every` values is kept; more than 1 after `add` has thinned the values out."""

    def add(self, step: int, unix_s: float, value: float, limit: int | None = None) -> None:
        """Add a value. Once `limit` values are kept, every second value is dropped, except NaN and infinities."""
        self.seen += 1
        if self.seen % self.every and math.isfinite(value):
            return
        if self.steps and step <= self.steps[-1]:
            self.rewind(step)
        if limit is not None and len(self.steps) >= limit:
            self.every *= 2
            indices = [
                index
                for index, stored in enumerate(self.values)
                if not index % 2 or not math.isfinite(stored)
            ]
            if len(indices) > 3 * limit // 4:
                indices = list(range(0, limit, 2))
            self.steps = array("q", [self.steps[index] for index in indices])
            self.unix_s = array("d", [self.unix_s[index] for index in indices])
            self.values = array("d", [self.values[index] for index in indices])
        self.steps.append(step)
        self.unix_s.append(unix_s)
        self.values.append(value)

    def rewind(self, step: int) -> None:
        """Drop the values from `step` on."""
        keep = bisect_left(self.steps, step)
        self.replaced += len(self.steps) - keep
        for column in (self.steps, self.unix_s, self.values):
            del column[keep:]

    def points(self, name: str) -> Iterator[Point]:
        for step, unix_s, value in zip(self.steps, self.unix_s, self.values, strict=True):
            yield Point(step, unix_s, name, value)


def by_step(series: Mapping[str, Series]) -> Iterator[tuple[int, Iterable[Point]]]:
    """Yield each step that has a value, in order, with its points."""
    return groupby(merge(*(one.points(name) for name, one in series.items())), itemgetter(0))
