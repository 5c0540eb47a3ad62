"""A QuantTensor's bytes fit its shape, or it is not made."""

from __future__ import annotations

import pytest
import torch

from engine.quant.blocks import BLOCK_TYPES, QuantError
from engine.quant.quantize import quantize
from engine.quant.tensor import QuantTensor


def test_blocks_and_shape_that_fit_make_a_tensor() -> None:
    blocks = torch.zeros(3, 2, 2 * 210, dtype=torch.uint8)
    found = QuantTensor(blocks=blocks, type=BLOCK_TYPES["Q6_K"], shape=(3, 2, 512))
    assert found.nbytes == 3 * 2 * 420
    assert found.device == torch.device("cpu")
    assert found.dequantize().shape == (3, 2, 512)
    assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert "420" not in repr(found)  # the shape and the type, not the bytes


@pytest.mark.parametrize(
    ("bytes_shape", "shape"),
    [((4, 143), (4, 256)), ((4, 144), (5, 256)), ((576,), (4, 256)), ((4, 144), (2, 2, 256))],
)
def test_bytes_that_do_not_fit_are_refused(
    bytes_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    blocks = torch.zeros(bytes_shape, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        QuantTensor(blocks=blocks, type=BLOCK_TYPES["Q4_K"], shape=shape)


def test_rows_and_columns_swapped_are_refused() -> None:
    # Both sizes are multiples of 256, so that only the number of bytes in a row tells.
    blocks = torch.zeros(256, 2 * 144, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        QuantTensor(blocks=blocks, type=BLOCK_TYPES["Q4_K"], shape=(512, 256))


def test_a_row_length_that_blocks_do_not_fill_is_refused_with_the_fallback() -> None:
    blocks = torch.zeros(4, 144, dtype=torch.uint8)
    with pytest.raises(QuantError, match="found 224\nhint: Q5_0 fits this row"):
        QuantTensor(blocks=blocks, type=BLOCK_TYPES["Q4_K"], shape=(4, 224))


def test_other_dtypes_and_scalars_are_refused() -> None:
    with pytest.raises(AssertionError):
        QuantTensor(
            blocks=torch.zeros(1, 34, dtype=torch.int8), type=BLOCK_TYPES["Q8_0"], shape=(1, 32)
        )
    with pytest.raises(AssertionError):
        QuantTensor(blocks=torch.zeros(2, dtype=torch.uint8), type=BLOCK_TYPES["F16"], shape=())


def test_moving_keeps_the_bytes() -> None:
    made = quantize(torch.randn(3, 64), BLOCK_TYPES["Q5_0"])
    moved = made.to("cpu")
    assert moved.shape == (3, 64)
    assert torch.equal(moved.blocks, made.blocks)
    assert made.to("meta").nbytes == made.nbytes
