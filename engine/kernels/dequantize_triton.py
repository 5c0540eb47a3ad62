"""Kernels that turn packed blocks into floats, bit by bit as `engine.quant.reference` does.

    dequantize_k.py     Q4_K, Q5_K, Q6_K
    dequantize_32.py    Q8_0, Q4_0, Q5_0, Q5_1

A GPU spends this time on moving bytes: 0.56 (Q4_K) to 0.82 (Q6_K) read and 2 written for a bf16
value. So a thread takes 8 or 16 neighbouring bytes of codes, as words, and writes 16 bytes at a time
of neighbouring values. Fields that many values share are loaded once for each run of values that a
thread holds, from the cache.

Little time is left for arithmetic, and turning an integer into a float is slow. Codes are taken
apart four at a time, in the bytes of a word, and a byte becomes a float by being the last byte of
one: the bits 0x4B0000xx are the float32 2^23 + xx, from which subtracting 2^23 is exact. The code of
the value 0 is subtracted in the same step.

The arithmetic is float32 in the order that the reference fixes, without fused multiply-adds, and
rounds once to the type of the result.

Arguments of every kernel: the planes, whose codes are read as words; `out_ptr`, to the values, of
any float type; and which to do. In `dequantize_32.py` that is `first`, i64, the block of the planes to begin
with, and `count`, i32, how many blocks: rows follow each other there, so a range of rows is a range of blocks.
A program does BLOCKS of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from engine.kernels.dequantize_32 import (
    _dequantize_q4_0,
    _dequantize_q5_0,
    _dequantize_q5_1,
    _dequantize_q8_0,
)
from engine.kernels.dequantize_k import _dequantize_q4_k, _dequantize_q5_k, _dequantize_q6_k
from engine.kernels.key import Variant
from engine.kernels.registry import compiled_as, launch
from engine.quant.blocks import BLOCK_TYPES, BlockType, group_rows
from engine.quant.planes import PackedMatrix, fields


@dataclass(frozen=True, slots=True)
class Tuning:
    function: Any
    blocks: int
    """Blocks of one program."""
    warps: int


# Measured on an H200, where each moves its bytes at 0.93 of the rate of a copy or more.
TUNINGS = {
    "Q4_K": Tuning(_dequantize_q4_k, blocks=8, warps=2),
    "Q5_K": Tuning(_dequantize_q5_k, blocks=8, warps=2),
    "Q6_K": Tuning(_dequantize_q6_k, blocks=4, warps=1),
    "Q8_0": Tuning(_dequantize_q8_0, blocks=64, warps=4),
    "Q4_0": Tuning(_dequantize_q4_0, blocks=64, warps=4),
    "Q5_0": Tuning(_dequantize_q5_0, blocks=64, warps=4),
    "Q5_1": Tuning(_dequantize_q5_1, blocks=64, warps=4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def variant(type_: BlockType, dtype: torch.dtype) -> Variant:
    """The kernel that writes values of `dtype`."""
    tuning = TUNINGS[type_.name]
    ranges = ("i64", "i32") if group_rows(type_) == 1 else ("i32", "i32", "i32")
    return compiled_as(
        tuning.function,
        *(*(part.dtype for part in fields(type_)), dtype, *ranges),
        warps=tuning.warps,
        stages=1,
        fp_fusion=False,
        BLOCKS=tuning.blocks,
    )


def variants() -> tuple[Variant, ...]:
    """Every kernel of this file that a run can use."""
    return tuple(variant(BLOCK_TYPES[name], dtype) for name in TUNINGS for dtype in DTYPES)


def dequantize_blocks(packed: PackedMatrix, out_RC: Tensor, first: int, count: int) -> None:
    """Writes the values of `count` rows from row `first` into `out_RC`, contiguous, of shape
    (count, columns), in one launch."""
    kernel = variant(packed.type, out_RC.dtype)
    planes, row_blocks, group = packed.planes().values(), packed.row_blocks, packed.group_rows
    rows = count if group == 1 else (triton.cdiv(first + count, group) - first // group) * group
    grid = (triton.cdiv(rows * row_blocks, TUNINGS[packed.type.name].blocks),)
    if group == 1:
        launch(kernel, grid, *planes, out_RC, first * row_blocks, count * row_blocks)
    else:
        launch(kernel, grid, *planes, out_RC, first, count, row_blocks)
