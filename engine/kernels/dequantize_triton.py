"""Kernels that dequantise packed blocks, bit-identical to `engine.quant.reference`.

    dequantize_k.py     Q4_K, Q5_K, Q6_K
    dequantize_32.py    Q8_0, Q4_0, Q5_0

The other types are rare: they are dequantised by the reference, also on a GPU.

The work is memory-bound: per bf16 value 0.56 (Q4_K) to 0.82 (Q6_K) bytes are read and 2 are
written. So a thread loads 8 or 16 adjacent bytes of codes, as words, and stores 16 bytes of
adjacent values at a time. Fields shared by many values are loaded from the cache, once for each run of
adjacent values of a thread.

Little time is left for arithmetic, and converting an integer to a float is slow. Codes are unpacked
four at a time, in the bytes of a word. A byte xx becomes a float by setting the lowest byte of the
bits 0x4B000000: 0x4B0000xx is the float32 2^23 + xx, from which subtracting 2^23 is exact. The same
subtraction also subtracts the code of the value 0.

The arithmetic is float32 in the order that the reference fixes, without fused multiply-adds, and is
rounded once to the dtype of the result.

Arguments of every kernel: the planes, whose codes are read as words; `out_ptr`, to the values, of
any float dtype; and the range. In `dequantize_32.py` the range is `first`, i64, the first block of
the planes, and `count`, i32, the number of blocks: rows are consecutive there, so a range of rows
is a range of blocks. A program processes BLOCKS of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels.compiler import Variant
from engine.kernels.dequantize_32 import _dequantize_q4_0, _dequantize_q5_0, _dequantize_q8_0
from engine.kernels.dequantize_k import _dequantize_q4_k, _dequantize_q5_k, _dequantize_q6_k
from engine.kernels.registry import compiled_as, launch
from engine.kernels.sizes import cdiv
from engine.quant.blocks import BLOCK_TYPES, BlockType, group_rows
from engine.quant.planes import PackedMatrix, fields


@dataclass(frozen=True, slots=True)
class Tuning:
    function: Any
    blocks: int
    """Blocks per program."""
    warps: int


# Measured on an H200, where each kernel reaches at least 0.93 of the bandwidth of a copy.
TUNINGS = {
    "Q4_K": Tuning(_dequantize_q4_k, blocks=8, warps=2),
    "Q5_K": Tuning(_dequantize_q5_k, blocks=8, warps=2),
    "Q6_K": Tuning(_dequantize_q6_k, blocks=4, warps=1),
    "Q8_0": Tuning(_dequantize_q8_0, blocks=64, warps=4),
    "Q4_0": Tuning(_dequantize_q4_0, blocks=64, warps=4),
    "Q5_0": Tuning(_dequantize_q5_0, blocks=64, warps=4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def variant(type_: BlockType, dtype: torch.dtype) -> Variant:
    """Return the kernel that writes values of `dtype`."""
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
    """Return every dequantisation kernel that a run can use."""
    return tuple(variant(BLOCK_TYPES[name], dtype) for name in TUNINGS for dtype in DTYPES)


def dequantize_blocks(packed: PackedMatrix, out_RC: Tensor, first: int, count: int) -> None:
    """Write the values of `count` rows from row `first` into `out_RC`, contiguous, of shape (count,
    columns), in one launch.
    """
    kernel = variant(packed.type, out_RC.dtype)
    planes, row_blocks, group = packed.planes().values(), packed.row_blocks, packed.group_rows
    rows = count if group == 1 else (cdiv(first + count, group) - first // group) * group
    grid = (cdiv(rows * row_blocks, TUNINGS[packed.type.name].blocks),)
    if group == 1:
        launch(kernel, grid, *planes, out_RC, first * row_blocks, count * row_blocks)
    else:
        launch(kernel, grid, *planes, out_RC, first, count, row_blocks)
