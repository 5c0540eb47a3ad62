"""A sparkline: a cell for each interval, in bars or in digits."""

from __future__ import annotations

import math

import pytest

from engine.log.sparkline import sparkline


def test_a_value_that_is_absent_or_not_finite_has_a_sign() -> None:
    values = [1.0, 2.0, None, 3.0, math.nan]
    assert sparkline(values) == "▁▅·█·"
    assert sparkline(values, ascii_only=True) == "05x9x"


@pytest.mark.parametrize(("value", "bars"), [(0.0, "▁▁"), (96.0, "██")])
def test_a_flat_line_is_as_high_as_it_is_far_from_zero(value: float, bars: str) -> None:
    assert sparkline([value, value]) == bars


def test_more_values_than_cells_are_drawn_as_means() -> None:
    assert sparkline([0.0, 0.0, 4.0, 4.0, 8.0, 8.0], 3, ascii_only=True) == "059"
