"""Mean and band of several runs: columns are aligned whatever steps the runs logged, and nothing is made up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from workbench.groups import Samples, Spread, band_words, spread_of

NAN, INF = math.nan, math.inf


def run(points: Sequence[tuple[float, float]], gap: float = INF) -> Samples:
    found = np.array(points, dtype=float).reshape(-1, 2)
    return Samples(xs=found[:, 0], ys=found[:, 1], gap=gap)


def each_step(*ys: float, gap: float = INF) -> Samples:
    return run(list(enumerate(ys)), gap)


def lists(found: Spread) -> tuple[list[float], list[float], list[float]]:
    return found.mean.tolist(), found.low.tolist(), found.high.tolist()


def same(found: Sequence[float], expected: Sequence[float]) -> bool:
    return np.array_equal(found, expected, equal_nan=True)


def test_two_runs_of_the_same_steps_have_mean_lowest_and_highest_of_each() -> None:
    found = spread_of([each_step(1, 2, 3), each_step(3, 2, 9)], 0, 2, 3)
    assert lists(found) == ([2, 2, 6], [1, 2, 3], [3, 2, 9])


@pytest.mark.parametrize("shift", [0.0, 1e6], ids=["small", "far from zero"])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_the_band_of_three_runs_or_more_is_their_standard_deviation(
    count: int, shift: float
) -> None:
    ys = [[shift + math.sin(7 * n + step) for step in range(5)] for n in range(count)]
    found = spread_of([each_step(*row) for row in ys], 0, 4, 5)
    for step, of_step in enumerate(zip(*ys, strict=True)):
        mean, deviation = statistics.mean(of_step), statistics.stdev(of_step)
        edges = (found.mean[step], found.low[step], found.high[step])
        # Digits of the deviation that a value so far from zero has.
        within = 4 * math.ulp(shift) + 1e-12
        assert edges == pytest.approx((mean, mean - deviation, mean + deviation), abs=within, rel=0)


def test_a_run_of_many_rows_is_one_value_in_the_deviation() -> None:
    rows = [(x / 10, float(x % 10)) for x in range(31)]
    runs = [run(rows), each_step(2, 2, 2, 2), each_step(9, 9, 9, 9)]
    found = spread_of(runs, 0, 3, 4)
    in_column = [y for x, y in rows if 0.5 <= x < 1.5]
    values = [statistics.mean(in_column), 2, 9]
    assert found.high[1] - found.mean[1] == pytest.approx(statistics.stdev(values))


def test_where_fewer_than_three_runs_have_a_value_the_band_is_their_range() -> None:
    runs = [each_step(1, 1, 1), each_step(2, 2), each_step(6, 6)]
    found = spread_of([*runs, each_step(NAN, 3)], 0, 2, 3)
    assert found.low.tolist() == pytest.approx(
        [3 - statistics.stdev([1, 2, 6]), 3 - statistics.stdev([1, 2, 6, 3]), 1]
    )
    assert (found.low[2], found.high[2]) == (1, 1)


def test_the_words_name_the_band_that_is_drawn() -> None:
    assert band_words([1, 2]) == band_words([]) == "mean, band from lowest to highest"
    said = "mean ± standard deviation (n-1); of fewer than 3 runs, lowest to highest"
    assert band_words([1, 3]) == said


def test_equal_runs_have_a_band_of_no_width_and_huge_ones_none() -> None:
    _, low, high = lists(spread_of([each_step(0.1, 0.1)] * 3, 0, 1, 2))
    assert [*low, *high] == pytest.approx([0.1] * 4)
    huge = spread_of([each_step(1e200), each_step(-1e200), each_step(0)], 0, 0, 1)
    assert huge.mean.tolist() == [0] and huge.band_trace("x").buckets[0].low is None


def test_another_grid_of_steps_is_joined_by_straight_lines() -> None:
    found = spread_of([each_step(0, 1, 2, 3, 4), run([(0, 10), (4, 14)])], 0, 4, 5)
    assert lists(found) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [10, 11, 12, 13, 14])


def test_the_mean_is_that_of_the_runs_that_reach_so_far() -> None:
    found = spread_of([each_step(2, 2, 2, 2), each_step(4, 4)], 0, 3, 4)
    assert lists(found) == ([3, 3, 2, 2], [2, 2, 2, 2], [4, 4, 2, 2])


def test_a_run_has_nothing_before_its_first_step_or_in_missing_steps() -> None:
    late = run([(1, 1), (2, 1), (5, 1)], gap=1.5)
    found = spread_of([late], 0, 6, 7)
    assert same(found.mean.tolist(), [NAN, 1, 1, NAN, NAN, 1, NAN])
    trace = found.mean_trace("late")
    assert [b.low for b in trace.buckets] == [None, 1, 1, None, None, 1, None]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_flagged_and_in_no_mean(bad: float) -> None:
    found = spread_of([each_step(1, bad, 1), each_step(3, 5, 3)], 0, 2, 3)
    assert lists(found) == ([2, 5, 2], [1, 5, 1], [3, 5, 3])
    assert found.non_finite.tolist() == [False, True, False]
    assert [b.non_finite for b in found.band_trace("x").buckets] == [False, True, False]


def test_no_line_passes_a_value_that_is_not_finite() -> None:
    found = spread_of([run([(0, 1), (2, NAN), (4, 1)])], 0, 4, 5)
    assert same(found.mean.tolist(), [1, NAN, NAN, NAN, 1])
    assert found.non_finite.tolist() == [False, False, True, False, False]


def test_a_run_counts_once_however_many_rows_a_column_has_and_a_spike_is_in_the_band() -> None:
    many = run([(x / 100, 100.0 if x == 150 else 0.0) for x in range(201)])
    found = spread_of([many, each_step(2, 2, 2)], 0, 2, 3)
    assert found.high.tolist()[2] == 100
    assert found.mean.tolist()[0] == 1
    assert found.low.tolist() == [0, 0, 0]


def test_runs_without_rows_leave_every_column_empty() -> None:
    found = spread_of([run([]), run([])], 0, 3, 4)
    assert all(same(part, [NAN] * 4) for part in lists(found))
    assert found.mean_trace("none").is_empty


def test_one_column_and_one_place_on_the_axis_hold_all_rows() -> None:
    assert lists(spread_of([each_step(1, 2, 3)], 0, 2, 1)) == ([1], [1], [1])
    assert lists(spread_of([run([(5, 1)]), run([(5, 3)])], 5, 5, 4))[0][0] == 2


def test_numbers_as_large_as_floats_go_leave_a_hole_in_place_of_a_wrong_mean() -> None:
    found = spread_of([each_step(1e308, 1), each_step(1.7e308, 1)], 0, 1, 2)
    trace = found.mean_trace("large")
    assert [b.low for b in trace.buckets] == [None, 1]
    assert found.high.tolist() == [1.7e308, 1]
