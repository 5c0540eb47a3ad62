"""The values of a run by name, each over its steps: what both directions pass on.

A step that is not above the one before is a restart: the values from that step on are replaced, as in a view
of a resumed run, so that the steps of a series always increase.
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
    """May be NaN or infinite; what is absent is no point."""


@dataclass(slots=True)
class Series:
    """The values of one name."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    unix_s: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    replaced: int = 0
    """Number of values that a restart has replaced."""
    seen: int = 0
    every: int = 1
    """Number of values of which one is kept; more than 1 where `add` has thinned them."""

    def add(self, step: int, unix_s: float, value: float, most: int | None = None) -> None:
        """Add a value. With more than `most`, every second one is dropped, and so on; what is not finite is kept."""
        self.seen += 1
        if self.seen % self.every and math.isfinite(value):
            return
        if self.steps and step <= self.steps[-1]:
            self.rewind(step)
        if most is not None and len(self.steps) >= most:
            self.every *= 2
            kept = [
                at for at, one in enumerate(self.values) if not at % 2 or not math.isfinite(one)
            ]
            if len(kept) > 3 * most // 4:
                kept = list(range(0, most, 2))
            self.steps = array("q", [self.steps[at] for at in kept])
            self.unix_s = array("d", [self.unix_s[at] for at in kept])
            self.values = array("d", [self.values[at] for at in kept])
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
