"""The flip's statistics: each formula against published numbers, and the diagnoses that guard them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.flips.statistics import (
    anytime_interval,
    anytime_p,
    decide,
    diagnose,
    pairs_needed,
    sign_bound,
    t_tail,
)
from tests.support.fixed_interval import fixed_interval, t_quantile

NUMBERS = st.floats(-1, 1).filter(lambda x: x == 0 or abs(x) > 1e-9)


def multiplier(interval_of: object, n: int) -> float:
    values = [(-1.0) ** i for i in range(n)]
    interval = interval_of(values)  # type: ignore[operator]
    return float((interval.high - interval.mean) / interval.deviation)


@pytest.mark.parametrize(
    ("n", "anytime", "fixed"),
    [
        (4, 3.27, 1.59),
        (5, 2.42, 1.24),
        (6, 2.00, 1.05),
        (8, 1.56, 0.84),
        (10, 1.32, 0.72),
        (16, 0.97, 0.53),
        (24, 0.77, 0.42),
    ],
)
def test_half_widths_are_the_published_multiples_of_the_deviation(
    n: int, anytime: float, fixed: float
) -> None:
    published = partial(anytime_interval, alpha=0.05, prior_weight=10.0)
    assert multiplier(published, n) == pytest.approx(anytime, abs=0.006)
    assert multiplier(fixed_interval, n) == pytest.approx(fixed, abs=0.006)


def test_one_or_two_pairs_decide_nothing() -> None:
    assert anytime_interval([-1.0]).high == math.inf
    assert decide(anytime_interval([-1.0, -1.1]), 0.05) is None


@given(st.lists(NUMBERS, min_size=3, max_size=12))
def test_exchanging_the_arms_mirrors_the_interval_and_the_decision(values: list[float]) -> None:
    one, other = anytime_interval(values), anytime_interval([-v for v in values])
    assert one.low == pytest.approx(-other.high) and one.high == pytest.approx(-other.low)
    mirrored = {"B_FASTER": "B_SLOWER", "B_SLOWER": "B_FASTER"}
    first = decide(one, 0.05)
    assert mirrored.get(first or "", first) == decide(other, 0.05)


@given(st.lists(NUMBERS, min_size=2, max_size=12), st.floats(0.01, 0.2))
def test_the_anytime_interval_contains_the_fixed_one(values: list[float], alpha: float) -> None:
    wide, narrow = anytime_interval(values, alpha=alpha), fixed_interval(values, alpha=alpha)
    assert wide.low <= narrow.low + 1e-12 and narrow.high <= wide.high + 1e-12


def test_equal_pairs_are_equivalent_and_a_constant_effect_is_not() -> None:
    assert decide(anytime_interval([0.0] * 4), 0.05) == "EQUIVALENT"
    assert decide(anytime_interval([-0.3] * 4), 0.05) == "B_FASTER"
    assert decide(anytime_interval([0.3] * 4), 0.05) == "B_SLOWER"


def test_pairs_needed_falls_as_the_effect_grows() -> None:
    noisy = [0.02, -0.02, 0.03, -0.03]
    near = pairs_needed(anytime_interval([v - 0.06 for v in noisy]), 0.05)
    far = pairs_needed(anytime_interval([v - 0.30 for v in noisy]), 0.05)
    assert near is not None and far is not None and far < near


def test_without_a_pair_there_is_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one"):
        anytime_interval([])


def test_a_hang_of_the_same_arm_in_every_pair_is_bounded_by_coin_flips() -> None:
    assert sign_bound(5) == 1 / 32


def test_an_order_effect_is_named() -> None:
    b_first = [True, False] * 4
    values = [0.05 * first + 0.001 * i for i, first in enumerate(b_first)]
    assert "order" in diagnose(values, b_first, range(8))


def test_a_trend_is_named() -> None:
    values = [0.01 * i + 0.001 * (-1) ** i for i in range(8)]
    found = diagnose(values, [True, True, False, False] * 2, range(8))
    assert "trend" in found


def test_autocorrelated_pairs_are_named() -> None:
    values = [0.1] * 5 + [-0.1] * 5 + [0.1] * 5 + [-0.1] * 5
    found = diagnose(values, [True, False] * 10, range(20))
    assert "autocorrelation" in found


def test_independent_pairs_raise_no_diagnosis() -> None:
    random = np.random.default_rng(1)
    for pairs in (4, 8):
        alarms = sum(
            bool(
                diagnose(
                    random.normal(0, 0.01, pairs).tolist(), random.random(pairs) < 0.5, range(pairs)
                )
            )
            for _ in range(400)
        )
        # Three tests at about 1 % each, one of them with four pairs.
        assert alarms / 400 < (0.02 if pairs == 4 else 0.05)


@pytest.mark.parametrize(
    ("p", "degrees", "t"),
    [
        (0.975, 1, 12.706),
        (0.975, 3, 3.182),
        (0.975, 10, 2.228),
        (0.95, 5, 2.015),
        (0.995, 30, 2.750),
    ],
)
def test_students_quantiles_are_those_of_the_tables(p: float, degrees: int, t: float) -> None:
    assert t_quantile(p, degrees) == pytest.approx(t, abs=6e-4)
    assert t_tail(t_quantile(p, degrees), degrees) == pytest.approx(1 - p, rel=1e-9)


@given(st.lists(NUMBERS, min_size=3, max_size=12), st.floats(0.001, 0.3))
def test_p_is_below_alpha_exactly_where_the_interval_leaves_out_zero(
    values: list[float], alpha: float
) -> None:
    interval, p = anytime_interval(values, alpha=alpha), anytime_p(values)
    outside = interval.low > 0 or interval.high < 0
    if abs(p - alpha) > 1e-9 and interval.deviation > 1e-9:
        assert outside == (p < alpha)
