"""Buckets: no spike is lost, and NaN is never taken for a value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.traces import LIMIT, Bucket, Trace, buckets_of

VALUES = st.none() | st.floats()


def filled(ys: Sequence[float | None], limit: int = LIMIT) -> tuple[Bucket, ...]:
    return buckets_of([float(x) for x in range(len(ys))], ys, limit)


def test_one_spike_in_a_million_rows_survives() -> None:
    ys: list[float | None] = [1.0] * 1_000_000
    ys[777_777] = 9.0
    buckets = filled(ys)
    assert max(b.high for b in buckets if b.high is not None) == 9.0
    assert len(buckets) <= LIMIT


@given(st.lists(VALUES, max_size=200), st.sampled_from([2, 4, 16]))
def test_buckets_cover_every_row_in_order_and_stay_under_the_limit(
    ys: list[float | None], limit: int
) -> None:
    buckets = filled(ys, limit)
    assert len(buckets) <= limit
    ends = [x for bucket in buckets for x in (bucket.x_first, bucket.x_last)]
    assert ends == sorted(ends)
    if ys:
        assert (ends[0], ends[-1]) == (0.0, len(ys) - 1.0)


@given(st.lists(VALUES, min_size=1, max_size=200))
def test_extremes_are_of_finite_values_and_the_rest_is_flagged(ys: list[float | None]) -> None:
    buckets = filled(ys, 4)
    finite = [y for y in ys if y is not None and math.isfinite(y)]
    assert min((b.low for b in buckets if b.low is not None), default=None) == min(
        finite, default=None
    )
    assert max((b.high for b in buckets if b.high is not None), default=None) == max(
        finite, default=None
    )
    assert any(b.non_finite for b in buckets) == any(
        y is not None and not math.isfinite(y) for y in ys
    )


def test_absent_rows_are_neither_values_nor_faults() -> None:
    (bucket,) = filled([None])
    assert (bucket.low, bucket.high, bucket.non_finite) == (None, None, False)
    assert Trace(name="kd", buckets=(bucket,), last=None).is_empty


@settings(max_examples=20)
@given(st.integers(1, 5000))
def test_the_buckets_are_as_many_as_fit(count: int) -> None:
    buckets = filled([1.0] * count, 8)
    rows = [bucket.x_last - bucket.x_first + 1 for bucket in buckets]
    assert rows[0] == max(rows) == -(-count // 8) and len(set(rows[:-1])) <= 1
