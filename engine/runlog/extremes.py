"""The lowest and the highest value in any rows of a long column, without looking at each of them.

Rows are taken together in blocks of BLOCK; the extremes of a block are computed once and kept. A
question about a million rows then costs some thousand comparisons, and a column that grows is never
looked at twice.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from threading import Lock

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


class Extremes:
    """Of one column, which may grow; absent rows are no values. Safe to ask from several threads."""

    def __init__(self, column: array[float], absent: bytearray) -> None:
        self._column, self._absent = column, absent
        self._lows, self._highs, self._faults = array("d"), array("d"), bytearray()
        self._lock = Lock()

    def of(self, start: int, stop: int, length: int) -> Range:
        """Extremes of rows [start, stop) of the first `length`."""
        begin, end = -(-start // BLOCK), stop // BLOCK
        if begin >= end:
            low, high, fault = self._look(start, stop)
        else:
            self._grow(length)
            head = self._look(start, begin * BLOCK)
            tail = self._look(end * BLOCK, stop)
            low = min(head[0], tail[0], min(self._lows[begin:end]))
            high = max(head[1], tail[1], max(self._highs[begin:end]))
            fault = head[2] or tail[2] or 1 in self._faults[begin:end]
        return Range(low, high, fault) if low <= high else Range(None, None, fault)

    def _grow(self, length: int) -> None:
        if len(self._faults) >= length // BLOCK:
            return
        with self._lock:
            begin, end = len(self._faults), length // BLOCK
            # Many blocks at once, twice as fast, as long as every value is there and finite.
            for block in range(begin, end - MANY, MANY):
                stretch = slice(block * BLOCK, (block + MANY) * BLOCK)
                blocks = list(zip(*[iter(self._column[stretch])] * BLOCK, strict=True))
                if 1 in self._absent[stretch] or not math.isfinite(sum(map(sum, blocks))):
                    break
                self._lows.extend(map(min, blocks))
                self._highs.extend(map(max, blocks))
                self._faults += bytes(MANY)
            for block in range(len(self._faults), end):
                low, high, fault = self._look(block * BLOCK, (block + 1) * BLOCK)
                self._lows.append(low)
                self._highs.append(high)
                # Last, because its length says how many blocks there are.
                self._faults.append(fault)

    def _look(self, start: int, stop: int) -> tuple[float, float, bool]:
        """Low, high and whether there is a fault; inf and -inf when nothing is finite."""
        values: array[float] | list[float] = self._column[start:stop]
        absent = self._absent[start:stop]
        if 1 in absent:
            values = [y for y, gone in zip(values, absent, strict=True) if not gone]
        # One sum tells whether every value is finite: NaN and infinity go through it.
        if not math.isfinite(sum(values)):
            found = len(values)
            values = [y for y in values if math.isfinite(y)]
            return (
                min(values, default=math.inf),
                max(values, default=-math.inf),
                found > len(values),
            )
        return min(values, default=math.inf), max(values, default=-math.inf), False
