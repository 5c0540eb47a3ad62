"""The kernels for few rows compute x W^T + b, in any shape and however the sums are split.

Results are compared with float64 products of the exactly dequantised weights. Codes come to the
products with 128 added, which is taken off again: sums are some 16 times as large as their result,
and one float32 rounding is 6e-8, so that an error of 1e-5 is that of a wrong weight.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine.errors import InternalError
from engine.quant.planes import pack
from tests.support.random_blocks import error, random_matrix

pytest.importorskip("triton")

from engine.kernels import small_m, small_m_inputs
from engine.kernels.compiler import Variant
from engine.kernels.small_m_table import CODES_ROWS, MAX_ROWS, Config, config_for

TYPES = ("Q4_K", "Q5_K", "Q6_K")


CASES = [
    *itertools.product((1, 2, 7, 16), (1, 37), (256,)),
    (1, 2, 3584),
    (3, 16, 512),
    (7, 5, 512),
    (16, 5, 512),
    (33, 17, 256),
    (64, 5, 512),
]
"""Rows of x, rows and columns of W."""


@pytest.mark.parametrize(
    ("m", "rows", "columns", "name"),
    # Each case with one of the types, in turn; the others in the soak.
    [
        pytest.param(*case, name, marks=pytest.mark.soak if (place + turn) % 3 else ())
        for place, case in enumerate(CASES)
        for turn, name in enumerate(TYPES)
    ],
)
def test_few_rows_times_packed_weights(name: str, m: int, rows: int, columns: int) -> None:
    weight = random_matrix(name, rows, columns)
    x_MK, bias_N = torch.randn(m, columns), torch.randn(rows)
    y_MN = torch.full((m, rows), torch.nan)
    assert small_m.fused_linear(x_MK, pack(weight), bias_N, y_MN) is y_MN
    assert error(y_MN, x_MK, weight, bias_N) < 1e-5
    assert error(small_m.fused_linear(x_MK, pack(weight), None), x_MK, weight, None) < 1e-5


@pytest.mark.parametrize(
    ("m", "splits", "name"),
    [
        pytest.param(*case, name, marks=pytest.mark.soak if (place + turn) % 3 else ())
        for place, case in enumerate([(1, 2), (1, 5), (4, 3), (20, 8)])
        for turn, name in enumerate(TYPES)
    ],
)
def test_sums_may_be_split_between_programs(
    name: str, m: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_matrix(name, 21, 1280)

    def config(*arguments: Any) -> Config:
        usual = config_for(*arguments)
        return Config(usual.family, usual.padded, 16, usual.warps, usual.stages, splits)

    monkeypatch.setattr(small_m, "config_for", config)
    x_MK, bias_N = torch.randn(m, 1280), torch.randn(21)
    y_MN = small_m.fused_linear(x_MK, pack(weight), bias_N)
    assert error(y_MN, x_MK, weight, bias_N) < 1e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name == "Q5_K" else name for name in TYPES],
)
def test_each_value_of_a_block_meets_its_own_input(name: str) -> None:
    weight = random_matrix(name, 4, 256)
    # As many as become integers, and as many as tiles take.
    for m in (CODES_ROWS, MAX_ROWS):
        found = [small_m.fused_linear(x_MK, pack(weight), None) for x_MK in torch.eye(256).split(m)]
        # A weight alone: the rounding of its code with 128 added is all the error there is.
        expected = weight.dequantize().t()
        assert torch.allclose(torch.cat(found), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", TYPES)
def test_a_block_of_nan_reaches_its_row_only(name: str) -> None:
    weight = random_matrix(name, 3, 512)
    start = 208 if name == "Q6_K" else 0
    second = weight.blocks.view(6, -1)[2]
    second[start : start + 2] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    y_MN = small_m.fused_linear(torch.randn(2, 512), pack(weight), None)
    assert y_MN.isnan().tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("bias", [None, torch.float32])
def test_warm_up_knows_each_variant_that_is_launched(
    name: str, bias: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Variant] = []
    for module in (small_m, small_m_inputs):
        monkeypatch.setattr(module, "launch", lambda variant, *rest: launched.append(variant))
    weight = pack(random_matrix(name, 21, 1280))
    bias_N = None if bias is None else torch.randn(21, dtype=bias)
    for dtype in (torch.float32, torch.bfloat16):
        for m in (1, 3, 9, 64):
            launched.clear()
            small_m.fused_linear(torch.randn(m, 1280).to(dtype), weight, bias_N)
            known = small_m.variants(weight.type, 21, 1280, dtype, bias, arch=0, m=(m,))
            assert launched == list(known)


def test_what_does_not_fit_is_refused_by_name() -> None:
    weight = pack(random_matrix("Q4_K", 4, 256))
    good = torch.randn(2, 256)
    for x_MK, bias_N, out_MN, message in (
        (torch.randn(65, 256), None, None, "1 to 64 rows"),
        (torch.randn(2, 512), None, None, "x — expected contiguous"),
        (torch.randn(256, 2).t(), None, None, "x — expected contiguous"),
        (good, torch.randn(5), None, "bias"),
        (good, None, torch.empty(2, 5), "out"),
        (good, None, torch.empty(2, 4).half(), "out"),
    ):
        with pytest.raises(InternalError, match=message):
            small_m.fused_linear(x_MK, weight, bias_N, out_MN)
