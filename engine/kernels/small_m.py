"""y = x W^T for up to 8 rows of x, unpacking W while multiplying: one pass over the packed bytes.

With one row of x the time is that of reading W, and packed W has 3.6 (Q4_K) or 2.4 (Q6_K) times
fewer bytes than bf16. x comes as integers, and sums within a block are exact (`small_m_codes.py`).

Sums over the columns of W may be split between programs if W has too few rows to occupy a GPU
(split-K); the caller then adds the parts. Results are deterministic, and the bits of a row of x do
not depend on the number of rows.

    products        the matmul
    config_for      the launch configuration, from `small_m_table.py`

Not covered: gradients, types with blocks of 32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import knobs

from engine.errors import InternalError
from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, launch
from engine.kernels.small_m_codes import _products
from engine.kernels.small_m_inputs import Inputs
from engine.kernels.small_m_table import TILE, Config, config_for, tiles_of
from engine.quant.blocks import BlockType
from engine.quant.planes import PackedMatrix

__all__ = ["config_for", "products"]

# Shapes: M rows of x, K columns, N rows of W, S splits


def products(
    x: Inputs,
    weights: Sequence[PackedMatrix],
    y: Tensor,
    config: Config,
    bias_N: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """Write x W^T of 1 to 3 matrices of equal width, concatenated, into y of shape (splits, M, all
    rows). The first two of three matrices must have the same type.

    The bias is added if `config` does not split sums. For `early` see
    `engine.kernels.dependent_launch`.
    """
    m = len(x.scales_MB)
    blocks = weights[0].row_blocks
    split_blocks = triton.cdiv(blocks, config.splits)
    if len(weights) > 3 or (len(weights) > 1 and weights[0].type != weights[1].type):
        found = ", ".join(weight.type.name for weight in weights)
        raise InternalError(
            f"products: expected up to 3 matrices, the first two of one type, found {found}"
        )
    each = [_planes_of(weight) for weight in weights]
    each += [each[0]] * (3 - len(each))
    rows = [weight.rows for weight in weights] + [0] * (3 - len(weights))
    splits = triton.cdiv(blocks, split_blocks)
    tiles = tiles_of(rows, splits)
    programs = sum(tiles) * (TILE // config.rows)
    launch(
        product([weight.type for weight in weights], config, y.dtype, _dtype(bias_N), early=early),
        (programs, splits),
        *x,
        *(plane for planes in each for plane in planes),
        x.scales_MB if bias_N is None else bias_N,
        y,
        *rows,
        *tiles,
        blocks,
        m,
        split_blocks,
    )


def _planes_of(weight: PackedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return low, high, header and d of a matrix, with another plane in the place of one it lacks."""
    planes = weight.planes()
    low = planes["low"]
    if weight.type.name == "Q6_K":
        return (
            low,
            planes["high"],
            planes["scales"].view(torch.int32),
            planes["d"].view(torch.uint8),
        )
    return low, planes.get("high", low), planes["header"], low


def product(
    types: Sequence[BlockType],
    config: Config,
    out: torch.dtype,
    bias: torch.dtype | None,
    *,
    plain: bool = False,
    early: bool = False,
) -> Variant:
    """Return the kernel of `products`."""
    planes = ("*u8", "*u8", "*i32", "*u8") * 3
    return compiled_as(
        _products,
        *("*i8", "*fp32", "*i32", *planes, bias or torch.float32, out, *["i32"] * 9),
        warps=config.warps,
        stages=config.stages,
        # Rounding happens only where it is written, so that it does not depend on the number of
        # rows.
        fp_fusion=False,
        early=early,
        COUNT=len(types),
        KIND=types[0].name,
        LAST=types[-1].name,
        MP=config.padded,
        TILE=TILE,
        ROWS=config.rows,
        BIAS=bias is not None and config.splits == 1,
        PLAIN=plain or bool(knobs.runtime.interpret),
        STAGES=config.stages,
        EARLY=early,
    )


def _dtype(bias_N: Tensor | None) -> torch.dtype | None:
    return None if bias_N is None else bias_N.dtype
