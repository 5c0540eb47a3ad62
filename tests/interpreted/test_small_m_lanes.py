"""Rows of x times codes, each thread on its own: the right numbers in any shape, and the same bits for a
row of x whatever is beside it.

Where x is whole numbers already, results are off by nothing but float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import InternalError
from engine.quant.planes import pack
from engine.quant.tensor import QuantTensor

pytest.importorskip("triton")

from test_small_m import error, random_matrix
from test_small_m_codes import whole

from engine.kernels.small_m_inputs import LARGEST, whole_numbers
from engine.kernels.small_m_lanes import TYPES, Lanes, product_by_lanes

SMALL = Lanes(turns=2, blocks=1, warps=1, stages=1, splits=1)
"""8 rows of W a program."""


def times(x_MK: Tensor, weight: QuantTensor, lanes: Lanes, bias_N: Tensor | None = None) -> Tensor:
    y = torch.full((lanes.splits, len(x_MK), weight.shape[0]), torch.nan)
    product_by_lanes(whole_numbers(x_MK), pack(weight), y, lanes, bias_N)
    return y.sum(0)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "m", "lanes"),
    [
        # Rows that fill no program, an odd number of blocks, fewer rows of x than there is room for.
        (9, 768, 3, Lanes(turns=4, blocks=1, warps=1, stages=2)),
        # Blocks side by side that the last step and the last split have not all.
        pytest.param(
            3,
            1280,
            1,
            Lanes(turns=4, blocks=4, warps=1, stages=1, splits=2),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            9, 2304, 8, Lanes(turns=8, blocks=2, warps=1, stages=2), marks=pytest.mark.soak
        ),
    ],
)
def test_products_by_lanes_are_right(
    name: str, rows: int, columns: int, m: int, lanes: Lanes
) -> None:
    weight, x_MK = random_matrix(name, rows, columns), whole(m, columns)
    y_MN = times(x_MK, weight, lanes)
    assert error(y_MN, x_MK, weight, None) < 1e-6
    # Beside others or alone.
    assert torch.equal(y_MN[:1], times(x_MK[:1], weight, lanes))


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
        bias_N = torch.full((1,), 3.0)
        y_MN = times(x_MK, weight, SMALL, bias_N)
        assert error(y_MN, x_MK, weight, bias_N) < 1e-6, name


def test_what_does_not_fit_is_refused() -> None:
    weight = random_matrix("Q5_K", 4, 256)
    with pytest.raises(InternalError, match=r"Q4_K or Q6_K into .*, found 1 times Q5_K"):
        times(torch.zeros(1, 256), weight, SMALL)
    weight = random_matrix("Q4_K", 4, 256)
    with pytest.raises(InternalError, match=r"at most 4 blocks at a time .*, found 8"):
        times(torch.zeros(1, 256), weight, Lanes(turns=1, blocks=8, warps=1, stages=1))
