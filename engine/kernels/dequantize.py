"""Values of packed weights, by kernels on a GPU and by plain torch elsewhere, with the same bits.

Triton is imported at the first use of a GPU, so that a machine without it can run everything.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

from engine.errors import InternalError
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
    """Whether kernels can be compiled here; without it, GPUs too dequantise in plain torch."""
    return importlib.util.find_spec("triton") is not None


def dequantize_rows(packed: PackedMatrix, out_RC: Tensor, first: int, count: int) -> None:
    """Writes the values of `count` rows from row `first` into `out_RC`, contiguous, of shape
    (count, columns), float32, float16 or bfloat16: float32 arithmetic, rounded once."""
    check_rows(packed, first, count)
    check_out(packed, out_RC, count)
    if out_RC.numel() == 0:
        return
    if packed.device.type != "cuda" or not has_triton():
        dequantize_rows_reference(packed, out_RC, first, count)
        return
    if not out_RC.is_contiguous():
        raise InternalError(f"dequantise: expected contiguous rows, found {out_RC.stride()}")
    from engine.kernels.dequantize_triton import dequantize_blocks

    dequantize_blocks(packed, out_RC, first, count)


def dequantize_gathered(packed: PackedMatrix, rows_I: Tensor, out_IC: Tensor) -> None:
    """Writes the values of the rows numbered in `rows_I` into `out_IC` of shape (I, columns): an
    embedding. Takes the packed rows together first, temporaries of twice their size."""
    dequantize_rows(take_rows(packed, rows_I), out_IC, 0, len(rows_I))
