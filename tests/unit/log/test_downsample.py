"""Buckets: no spike is lost, and NaN is never taken for a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.log.downsample import Bucket, bucket_at, buckets, equal_counts, equal_widths, points
from engine.log.table import Range, Table
from engine.report.chart import Series, line_chart

LIMIT = 1024

VALUES = st.none() | st.floats()


def filled(ys: Sequence[float | None], limit: int = LIMIT) -> list[Bucket]:
    return buckets([float(x) for x in range(len(ys))], ys, equal_counts(len(ys), limit))


def test_one_spike_in_a_million_rows_survives() -> None:
    ys: list[float | None] = [1.0] * 1_000_000
    ys[777_777] = 9.0
    found = filled(ys)
    assert max(b.high for b in found if b.high is not None) == 9.0
    assert len(found) <= LIMIT
    assert (777_777.0, 9.0) in points([float(x) for x in range(len(ys))], ys, 100)


@given(st.lists(VALUES, max_size=200), st.sampled_from([2, 4, 16]))
def test_buckets_cover_every_row_in_order_and_stay_under_the_limit(
    ys: list[float | None], limit: int
) -> None:
    found = filled(ys, limit)
    assert len(found) <= limit
    ends = [x for bucket in found for x in (bucket.x_first, bucket.x_last)]
    assert ends == sorted(ends)
    if ys:
        assert (ends[0], ends[-1]) == (0.0, len(ys) - 1.0)


@given(st.lists(VALUES, min_size=1, max_size=200))
def test_extremes_are_of_finite_values_and_the_rest_is_flagged(ys: list[float | None]) -> None:
    found = filled(ys, 4)
    finite = [y for y in ys if y is not None and math.isfinite(y)]
    assert min((b.low for b in found if b.low is not None), default=None) == min(
        finite, default=None
    )
    assert max((b.high for b in found if b.high is not None), default=None) == max(
        finite, default=None
    )
    assert any(b.non_finite for b in found) == any(
        y is not None and not math.isfinite(y) for y in ys
    )


def test_absent_rows_are_neither_values_nor_faults() -> None:
    (bucket,) = filled([None])
    assert (bucket.low, bucket.high, bucket.non_finite) == (None, None, False)
    assert points([0.0, 1.0, 2.0], [1.0, None, 3.0], 9) == ((0.0, 1.0), (2.0, 3.0))
    assert points([0.0, 1.0], [1.0, None], 9, gaps=True) == ((0.0, 1.0), (1.0, None))


@settings(max_examples=20)
@given(st.integers(1, 5000))
def test_the_buckets_are_as_many_as_fit(count: int) -> None:
    found = filled([1.0] * count, 8)
    rows = [bucket.x_last - bucket.x_first + 1 for bucket in found]
    assert len(rows) == min(count, 8) and max(rows) - min(rows) <= 1


@given(st.lists(VALUES, min_size=1, max_size=320), st.data())
def test_a_bucket_holds_the_range_of_its_rows(ys: list[float | None], data: st.DataObject) -> None:
    table = Table(("y",)).extended([{"y": y} for y in ys])
    edges = sorted(data.draw(st.sets(st.integers(0, len(ys)), min_size=2)))
    found = buckets(range(len(ys)), table.column("y"), edges)
    ranges = [Range(one.low, one.high, one.non_finite) for one in found]
    assert ranges == [table.range("y", *part) for part in pairwise(edges)]
    assert [bucket_at(0.0, y) for y in ys] == [b for y in ys for b in buckets([0.0], [y], [0, 1])]


def test_an_absent_value_in_many_rows_is_one_gap_in_each_interval_that_has_one() -> None:
    ys = [None if 300 <= x < 400 else 1.0 for x in range(1000)]
    found = points([float(x) for x in range(1000)], ys, 10, gaps=True)
    assert [x for x, y in found if y is None] == [300.0]


@given(st.integers(1, 3000), st.integers(0, 5000))
def test_equal_widths_stay_where_they_are_while_rows_are_appended(count: int, more: int) -> None:
    xs = [float(x) for x in range(count + more)]
    before, after = (equal_widths(xs[:rows], 0.0, 10_000.0, 100) for rows in (count, count + more))
    if count > 100:
        assert set(before[:-1]) <= set(after)


@given(
    st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=400),
    st.integers(min_value=1, max_value=40),
)
def test_points_lose_no_extreme_and_hide_no_nan(ys: list[float | None], limit: int) -> None:
    xs = [float(i) for i in range(len(ys))]
    kept = points(xs, ys, limit)
    assert len(kept) <= 3 * limit
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    finite = [y for y in ys if y is not None and math.isfinite(y)]
    left = [y for _, y in kept if math.isfinite(y)]
    assert (min(left, default=None), max(left, default=None)) == (
        min(finite, default=None),
        max(finite, default=None),
    )
    odd = any(y is not None and not math.isfinite(y) for y in ys)
    assert any(not math.isfinite(y) for _, y in kept) == odd
    line_chart("t", [Series(name="s", rows=kept)], x_name="step")
    assert set(kept) <= set(zip(xs, ys, strict=True)) or odd
