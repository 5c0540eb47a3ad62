"""Dequantise packed weights: with kernels on a GPU, with plain torch elsewhere and for rare types. The results are
bit-identical.

Triton is imported only when a GPU is first used, so that everything runs on a machine without it.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

from engine.quant.planes import (
    PackedMatrix,
    check_out,
    check_rows,
    dequantize_rows_reference,
    take_rows,
)

# Shapes: R rows, C columns, I looked-up rows


@cache
def has_triton() -> bool:
    """Return whether Triton is installed. Without it, weights on GPUs are dequantised in plain torch too."""
    return importlib.util.find_spec("triton") is not None


def dequantize_rows(packed: PackedMatrix, out_RC: Tensor, first: int, count: int) -> None:
    """Write the values of `count` rows from row `first` into `out_RC`: contiguous, of shape (count,
    columns), float32, float16 or bfloat16. The arithmetic is float32, rounded once.
    """
    check_rows(packed, first, count)
    check_out(packed, out_RC, count)
    if out_RC.numel() == 0:
        return
    if packed.device.type == "cuda" and has_triton():
        from engine.kernels.dequantize_triton import TUNINGS, dequantize_blocks

        if packed.type.name in TUNINGS:
            assert out_RC.is_contiguous(), out_RC.stride()
            dequantize_blocks(packed, out_RC, first, count)
            return
    dequantize_rows_reference(packed, out_RC, first, count)


def dequantize_gathered(packed: PackedMatrix, rows_I: Tensor, out_IC: Tensor) -> None:
    """Write the values of the rows numbered in `rows_I` into `out_IC` of shape (I, columns), as an
    embedding lookup. It gathers the packed rows first, which needs temporary memory of twice their size.
    """
    dequantize_rows(take_rows(packed, rows_I), out_IC, 0, len(rows_I))
