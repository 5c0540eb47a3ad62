"""Tables: the extremes of any rows are those that looking at each row gives, and a column may appear later."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.log.table import Range, Table
from tests.support.perf import within

VALUES = st.none() | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308])


def table_of(ys: list[float | None]) -> Table:
    return Table(("y",)).extended([{"y": y} for y in ys])


@given(st.lists(VALUES, max_size=320), st.data())
def test_a_range_is_what_its_rows_are(ys: list[float | None], data: st.DataObject) -> None:
    table = table_of(ys)
    start = data.draw(st.integers(0, len(ys)))
    stop = data.draw(st.integers(start, len(ys)))
    found = table.range("y", start, stop)
    finite = [y for y in ys[start:stop] if y is not None and math.isfinite(y)]
    assert (found.low, found.high) == (min(finite, default=None), max(finite, default=None))
    assert found.non_finite == any(y is not None and not math.isfinite(y) for y in ys[start:stop])


def test_a_metric_that_appears_later_is_absent_in_the_rows_before() -> None:
    table = Table(("y",)).extended_by({"y": [1.0, math.nan]})
    grown = table.extended_by({"y": [2.0], "z": [3.0]}).extended_by({"z": [4.0, None]})
    assert repr(grown.values("y")) == repr([1.0, math.nan, 2.0, None, None])
    assert grown.values("z") == [None, None, 3.0, 4.0, None]
    assert "z" not in table.columns and len(table) == 2


def test_a_column_that_grows_is_asked_again_and_an_older_table_does_not_see_it() -> None:
    table = table_of([1.0] * (128))
    assert table.range("y").high == 1.0
    grown = table.extended([{"y": 9.0}] * (128))
    assert grown.range("y").high == 9.0
    assert table.range("y").high == 1.0
    assert grown.cut(64).extended([{"y": -5.0}] * 64).range("y").low == -5.0


@pytest.mark.perf
def test_any_rows_of_a_million_are_looked_at_in_milliseconds() -> None:
    count = 1_000_000
    table = Table(("y",)).extended_by({"y": np.zeros(count)})
    begin = time.process_time()
    for start in range(0, count, 5000):
        assert table.range("y", start, start + 5000).high == 0.0
    assert table.range("y") == Range(0.0, 0.0, False)
    within(time.process_time() - begin, 0.2)
