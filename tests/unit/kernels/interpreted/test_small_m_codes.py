"""Rows of x as whole numbers times codes: the right numbers, and the same bits for a row of x whatever
the number of rows beside it.

x is rounded to 1/4095 of the largest of 256 values, so results of normal numbers are off by 3e-4; where
x is whole numbers already, by nothing but float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import InternalError
from engine.quant.planes import pack
from engine.quant.tensor import QuantTensor

pytest.importorskip("triton")

from engine.kernels import small_m
from engine.kernels.small_m_inputs import LARGEST, Inputs, as_integers
from engine.kernels.small_m_table import Config
from tests.support.random_blocks import error, random_matrix

TYPES = ("Q4_K", "Q5_K", "Q6_K")
PADDED = ((1, 1), (2, 2), (4, 3), (8, 7))
"""Rows of x that a kernel has room for, and has."""


def times(
    x_MK: Tensor, weights: list[QuantTensor], padded: int, splits: int = 1, part: int = 16
) -> Tensor:
    """The product, by programs of `part` rows of W."""
    rows = sum(weight.shape[0] for weight in weights)
    y = torch.full((splits, len(x_MK), rows), torch.nan)
    config = Config(padded, part, 1, 1, splits)
    small_m.products(as_integers(x_MK), [pack(weight) for weight in weights], y, config)
    return y.sum(0)


def whole(m: int, columns: int) -> Tensor:
    """Random whole numbers, of which each block has the largest there is."""
    x_MK = torch.randint(-LARGEST, LARGEST + 1, (m, columns)).float()
    x_MK[:, ::256] = LARGEST
    return x_MK


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("Q4_K", "Q5_K")), "Q6_K"]
)
def test_products_are_right_and_the_same_bits_for_any_number_of_rows(name: str) -> None:
    weight, x_MK = random_matrix(name, 9, 512), whole(7, 512)
    first = None
    for padded, m in PADDED:
        y_MN = times(x_MK[:m], [weight], padded, splits=2)
        assert error(y_MN, x_MK[:m], weight, None) < 1e-6, padded
        first = y_MN[0] if first is None else first
        assert torch.equal(y_MN[0], first), padded


@pytest.mark.soak
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_every_row_of_tiles_of_any_height_is_written_and_has_the_bits_of_larger_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two multiprocessors: 70 rows are 2 tiles, which is even; 150 are 3, and become 4 of 37 and 38.
    monkeypatch.setattr("engine.kernels.small_m_table.MULTIPROCESSORS", 2)
    for rows in (70, 150):
        weight, x_MK = random_matrix(name, rows, 512), torch.randn(1, 512)
        y_MN = times(x_MK, [weight], 1, part=64)
        assert error(y_MN, x_MK, weight, None) < 1e-3
        assert torch.equal(times(x_MK, [weight], 1, part=16), y_MN)
        assert torch.equal(times(x_MK, [weight], 8, part=32), y_MN)


def test_matrices_of_one_input_stand_side_by_side() -> None:
    x_MK = torch.randn(1, 256)
    for names in (("Q4_K", "Q4_K", "Q6_K"), ("Q6_K", "Q6_K", "Q5_K")):
        weights = [random_matrix(name, 17 - 6 * i, 256, i) for i, name in enumerate(names)]
        y_MN = times(x_MK, weights, 1)
        parts = torch.split(y_MN, [weight.shape[0] for weight in weights], dim=1)
        for part, weight in zip(parts, weights, strict=True):
            assert torch.equal(part, times(x_MK, [weight], 1))
    with pytest.raises(InternalError, match="the first two of one type, found Q4_K, Q6_K"):
        times(x_MK, [random_matrix("Q4_K", 4, 256), random_matrix("Q6_K", 4, 256)], 1)


def test_the_largest_codes_and_inputs_fit() -> None:
    for name in TYPES:
        weight = random_matrix(name, 1, 256)
        blocks = weight.blocks.view(1, -1)
        if name == "Q6_K":
            blocks[:, :192] = 0  # codes of -32
            blocks[:, 192:208] = 128  # scales of -128
        else:
            blocks[:, 4:] = 255
        x_MK = torch.full((1, 256), float(LARGEST))
        for padded in (1, 8):
            assert error(times(x_MK, [weight], padded), x_MK, weight, None) < 1e-6, name


def numbers(found: Inputs) -> Tensor:
    upper, lower = found.codes_MB2E.int().unbind(2)
    return upper * 128 + lower


def test_whole_numbers_are_the_nearest() -> None:
    x_MK = torch.randn(3, 512) * torch.tensor([1e-30, 1.0, 1e30])[:, None]
    found = as_integers(x_MK)
    n_MBE = numbers(found)
    x_MBE = x_MK.view(3, 2, 256)
    assert torch.equal(n_MBE.abs().amax(-1), torch.full((3, 2), LARGEST))
    scales = found.scales_MB[..., None]
    assert ((n_MBE * scales - x_MBE).abs() <= 0.501 * scales).all()
    assert torch.equal(found.sums_MB8, n_MBE.view(3, 2, 8, 32).sum(-1).int())


# The interpreter's numpy warns of the NaN that are wanted.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_is_nothing_and_a_block_that_is_not_finite_spoils_its_row_alone() -> None:
    x_MK = torch.randn(4, 256)
    x_MK[0] = 0
    x_MK[1, 200] = torch.nan
    x_MK[2, 7] = -torch.inf
    y_MN = times(x_MK, [random_matrix("Q4_K", 3, 256)], 4)
    assert (y_MN[0] == 0).all()
    assert y_MN[1:3].isnan().all()
    assert y_MN[3].isfinite().all()
