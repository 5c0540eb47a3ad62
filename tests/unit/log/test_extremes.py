"""The extremes of any rows of a column are those that looking at each row gives."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.log.extremes as extremes_module
from engine.log.extremes import BLOCK, Extremes, ranges_of
from engine.log.table import Table, pack

VALUES = st.none() | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308])


def table_of(ys: list[float | None]) -> Table:
    return Table(("y",)).extended([{"y": y} for y in ys])


@given(st.lists(VALUES, max_size=5 * BLOCK), st.data())
def test_a_range_is_what_its_rows_are(ys: list[float | None], data: st.DataObject) -> None:
    table = table_of(ys)
    start = data.draw(st.integers(0, len(ys)))
    stop = data.draw(st.integers(start, len(ys)))
    found = table.range("y", start, stop)
    finite = [y for y in ys[start:stop] if y is not None and math.isfinite(y)]
    assert (found.low, found.high) == (min(finite, default=None), max(finite, default=None))
    assert found.non_finite == any(y is not None and not math.isfinite(y) for y in ys[start:stop])


@given(st.lists(st.tuples(st.lists(VALUES, max_size=9), st.booleans()), max_size=8), st.data())
def test_ranges_that_came_with_some_of_the_rows_are_those_of_the_rows(
    pieces: list[tuple[list[float | None], bool]], data: st.DataObject
) -> None:
    table, ys = Table(("y",)), list[float | None]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extremes_module, "BLOCK", 3)
        for rows, is_known in pieces:
            packed = pack(rows)
            column, absent = array("d", packed[0][0].cast("d")), packed[1][0]
            known = {"y": [(0, len(rows), ranges_of(column, absent))]} if is_known and rows else {}
            table, ys = table.extended_packed({"y": packed}, known), ys + rows
            if data.draw(st.booleans()):
                length = data.draw(st.integers(0, len(ys)))
                table, ys = table.cut(length), ys[:length]
            start = data.draw(st.integers(0, len(ys)))
            stop = data.draw(st.integers(start, len(ys)))
            found = table.range("y", start, stop)
            finite = [y for y in ys[start:stop] if y is not None and math.isfinite(y)]
            assert (found.low, found.high) == (min(finite, default=None), max(finite, default=None))
            odd = any(y is not None and not math.isfinite(y) for y in ys[start:stop])
            assert found.non_finite == odd
            # What is in a block is not looked at again.
            assert table._extremes["y"]._covered + 3 > len(ys)


def test_a_column_that_grows_is_asked_again_and_an_older_table_does_not_see_it() -> None:
    table = table_of([1.0] * (2 * BLOCK))
    assert table.range("y").high == 1.0
    grown = table.extended([{"y": 9.0}] * (2 * BLOCK))
    assert grown.range("y").high == 9.0
    assert table.range("y").high == 1.0
    assert grown.cut(BLOCK).extended([{"y": -5.0}] * BLOCK).range("y").low == -5.0


def test_a_million_rows_are_looked_at_once() -> None:
    class Counted(bytearray):
        rows = 0

        def __getitem__(self, key: object) -> object:
            if isinstance(key, slice):
                type(self).rows += len(range(*key.indices(len(self))))
            return super().__getitem__(key)  # type: ignore[index,call-overload]

    count = 1_000_000
    extremes = Extremes(array("d", bytes(8 * count)), Counted(count))
    extremes.of(0, count, count)
    assert Counted.rows == count
    for start in range(0, count, 5000):
        extremes.of(start, start + 5000, count)
    assert Counted.rows < count + 200 * 2 * BLOCK
