"""The lowest and the highest value in any rows of a long column, without looking at each of them.

Rows are taken together in blocks of BLOCK or fewer; the extremes of a block are computed once and kept, or known
already by whoever made the rows (`Known`). A question about a million rows then costs some thousand
comparisons, and a column that grows is never looked at twice.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

BLOCK = 64
MANY = 64


@dataclass(frozen=True, slots=True)
class Range:
    """What is in some rows of a column."""

    low: float | None
    """Of the finite values; None when there is none."""
    high: float | None
    non_finite: bool
    """Whether one is NaN or infinite."""


Ranges: TypeAlias = tuple[bytes, bytes, bytes]
"""Of rows in blocks of BLOCK, and the rest in one: the lowest and the highest of each, float64, inf and -inf where
nothing is finite, and a byte that is 1 where something is not."""
Known: TypeAlias = tuple[int, int, Ranges]
"""The first of some rows, how many they are, and their ranges."""


class Extremes:
    """Of one column, which may grow; absent rows are no values. Safe to ask from several threads."""

    def __init__(
        self, column: array[float], absent: bytearray | bytes, known: Sequence[Known] = ()
    ) -> None:
        """`known` are ranges of rows of the column, in order and apart, and may grow with it."""
        self._column, self._absent = column, absent
        self._known, self._used = known, 0
        self._lows, self._highs, self._faults = array("d"), array("d"), bytearray()
        self._ends = array("q")
        self._lock = Lock()

    def of(self, start: int, stop: int, length: int) -> Range:
        """Extremes of rows [start, stop) of the first `length`."""
        self._grow(length)
        ends = self._ends
        begin, end = bisect_right(ends, start), bisect_right(ends, stop)
        if (ends[begin - 1] if begin else 0) < start:
            begin += 1
        if begin >= end:
            low, high, fault = self._look(start, stop)
        else:
            head = self._look(start, ends[begin - 1] if begin else 0)
            tail = self._look(ends[end - 1], stop)
            low = min(head[0], tail[0], min(self._lows[begin:end]))
            high = max(head[1], tail[1], max(self._highs[begin:end]))
            fault = head[2] or tail[2] or 1 in self._faults[begin:end]
        return Range(low, high, fault) if low <= high else Range(None, None, fault)

    def _grow(self, length: int) -> None:
        if self._covered + BLOCK > length:
            return
        with self._lock:
            while True:
                covered, stop = self._covered, length - (length - self._covered) % BLOCK
                if self._used < len(self._known):
                    first, rows, ranges = self._known[self._used]
                    if first <= covered:
                        if first == covered:
                            self._take(rows, ranges)
                        self._used += 1
                        continue
                    stop = first
                if covered >= stop:
                    return
                self._compute(covered, stop)

    @property
    def _covered(self) -> int:
        """How many rows are in blocks."""
        return self._ends[-1] if self._ends else 0

    def _take(self, rows: int, ranges: Ranges) -> None:
        covered, (lows, highs, faults) = self._covered, ranges
        self._lows.frombytes(lows)
        self._highs.frombytes(highs)
        self._faults += faults
        # Last, because it says how many blocks there are.
        self._ends.extend([*range(covered + BLOCK, covered + rows, BLOCK), covered + rows])

    def _compute(self, begin: int, stop: int) -> None:
        """Blocks of rows [begin, stop)."""
        while begin < stop:
            end = min(begin + MANY * BLOCK, stop)
            rows = slice(begin, end)
            self._take(end - begin, ranges_of(self._column[rows], self._absent[rows]))
            begin = end

    def _look(self, start: int, stop: int) -> tuple[float, float, bool]:
        return _look(self._column[start:stop], self._absent[start:stop])


def ranges_of(column: array[float], absent: bytes | bytearray) -> Ranges:
    """Of all rows of a column."""
    lows, highs, faults, begin = array("d"), array("d"), bytearray(), 0
    # Many blocks at once, twice as fast, where every value is there and finite.
    blocks = list(zip(*[iter(column)] * BLOCK, strict=False))
    if 1 not in absent and math.isfinite(sum(map(sum, blocks))):
        lows.extend(map(min, blocks))
        highs.extend(map(max, blocks))
        faults += bytes(len(blocks))
        begin = len(blocks) * BLOCK
    for start in range(begin, len(column), BLOCK):
        rows = slice(start, start + BLOCK)
        low, high, fault = _look(column[rows], absent[rows])
        lows.append(low)
        highs.append(high)
        faults.append(fault)
    return lows.tobytes(), highs.tobytes(), bytes(faults)


def _look(column: array[float], absent: bytes | bytearray) -> tuple[float, float, bool]:
    """Low, high and whether there is a fault; inf and -inf when nothing is finite."""
    values: array[float] | list[float] = column
    if 1 in absent:
        values = [y for y, gone in zip(values, absent, strict=True) if not gone]
    # One sum tells whether every value is finite: NaN and infinity go through it.
    if not math.isfinite(sum(values)):
        found = len(values)
        values = [y for y in values if math.isfinite(y)]
        low, high = min(values, default=math.inf), max(values, default=-math.inf)
        return low, high, found > len(values)
    return min(values, default=math.inf), max(values, default=-math.inf), False
