"""Sizes of grids and blocks are those that Triton's own functions compute."""

from __future__ import annotations

import pytest

from engine.kernels.sizes import cdiv, next_power_of_2

triton = pytest.importorskip("triton")


def test_sizes_are_tritons() -> None:
    for count in (*range(1, 1030), 151936):
        assert next_power_of_2(count) == triton.next_power_of_2(count)
        for size in (1, 7, 64, 1024):
            assert cdiv(count, size) == triton.cdiv(count, size)
