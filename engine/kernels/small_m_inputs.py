"""Activations quantised to 13-bit integers, for matmuls with codes (`small_m_codes.py`).

In each run of 256 values, the block of a K-quant, the largest becomes 4095:

    scale = max |x| / 4095,  x ~ scale n,  n = 128 upper + lower,  |upper| <= 32, -64 <= lower < 64

The error is at most half a `scale`: relative to typical values it is 2e-4, and 1.2e-3 in a block in
which one value outweighs all others; rounding a result to bf16 has 1.7e-3. A block with NaN or
infinity gets NaN as its scale, and so does everything computed from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, launch

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: M rows of x, K columns, B blocks of a row, E values of a block

BLOCK = 256
LARGEST = 4095


class Inputs(NamedTuple):
    """Rows of x as integers."""

    codes_MB2E: Tensor
    """int8: the upper bytes of a block's integers, then the lower ones."""
    scales_MB: Tensor
    """float32."""
    sums_MB8: Tensor
    """int32: the sum of each 32 integers."""


def empty_inputs(m: int, columns: int, device: torch.device) -> Inputs:
    blocks = columns // BLOCK
    return Inputs(
        torch.empty(m, blocks, 2, BLOCK, dtype=torch.int8, device=device),
        torch.empty(m, blocks, dtype=torch.float32, device=device),
        torch.empty(m, blocks, 8, dtype=torch.int32, device=device),
    )


@triton.jit
def write_codes(x_BE, codes_ptr, scales_ptr, sums_ptr, block_B, there_B):
    """Store blocks of values, float32 of (B, 256), as integers at the given block numbers."""
    B: tl.constexpr = x_BE.shape[0]
    # 0 times NaN or infinity is NaN; a maximum would ignore a NaN.
    largest_B = tl.max(tl.abs(x_BE), axis=1) + tl.sum(x_BE * 0.0, axis=1)
    some_B = largest_B > 0
    inverse_B = tl.where(some_B, 4095.0 / tl.where(some_B, largest_B, 1.0), 0.0)
    # Adding 1.5 * 2^23 leaves no fraction bits, so it rounds to the nearest integer, ties to even.
    n_BE = (x_BE * inverse_B[:, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    n_BE = tl.minimum(tl.maximum(n_BE, -4095), 4095)
    upper_BE = (n_BE + 64) >> 7
    at_BE = (block_B * 512)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = there_B[:, None] & (tl.arange(0, 256) >= 0)[None, :]
    tl.store(codes_ptr + at_BE, upper_BE.to(tl.int8), mask=there_BE)
    tl.store(codes_ptr + 256 + at_BE, (n_BE - upper_BE * 128).to(tl.int8), mask=there_BE)
    sums_B8 = tl.sum(tl.reshape(n_BE, [B, 8, 32]), axis=2)
    at_B8 = (block_B * 8)[:, None] + tl.arange(0, 8)[None, :]
    there_B8 = there_B[:, None] & (tl.arange(0, 8) >= 0)[None, :]
    tl.store(sums_ptr + at_B8, sums_B8, mask=there_B8)
    tl.store(scales_ptr + block_B, largest_B / 4095.0, mask=there_B)


@triton.jit
def _write_inputs(
    x_ptr,  # *       (m, row_blocks * 256)
    codes_ptr,  # *i8   (m, row_blocks, 2, 256)
    scales_ptr,  # *fp32 (m, row_blocks)
    sums_ptr,  # *i32  (m, row_blocks, 8)
):
    block_B = tl.program_id(0) + tl.arange(0, 1)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    x_BE = tl.load(x_ptr + at_BE).to(tl.float32)
    write_codes(x_BE, codes_ptr, scales_ptr, sums_ptr, block_B, block_B >= 0)


def variant(dtype: torch.dtype) -> Variant:
    types = (dtype, "*i8", "*fp32", "*i32")
    return compiled_as(_write_inputs, *types, warps=1, stages=1, fp_fusion=False)


def as_integers(x_MK: Tensor) -> Inputs:
    """Return contiguous rows of any float dtype as integers."""
    m, columns = x_MK.shape
    found = empty_inputs(m, columns, x_MK.device)
    launch(variant(x_MK.dtype), (m * (columns // BLOCK),), x_MK, *found)
    return found
