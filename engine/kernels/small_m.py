"""y = x W^T + b for few rows of x, unpacking W while multiplying: one pass over the packed bytes.

With one row of x the time is that of reading W, and packed W has 3.6 (Q4_K) or 2.4 (Q6_K) times
fewer bytes than bf16. There are two families of kernels, both for any number of rows of W:

    codes     1 to 8 rows of x    x as integers, exact sums within a block (`small_m_codes.py`)
    tiles     9 to 64 rows, and   weights scaled in float32 and rounded once to the dtype of x
              all of float32      (`small_m_tiles.py`)

Sums over the columns of W may be split between programs if W has too few rows to occupy a GPU
(split-K); a second kernel then adds the parts in a fixed order. Results are deterministic, and with
`codes` the bits of a row of x do not depend on the number of rows.

    fused_linear    runs the whole operation
    products        only the matmul, for callers that have x as integers and add the parts themselves
    takes           whether it can run
    crossover_rows  up to how many rows of x it is faster than dequantisation and a matmul
    config_for      the launch configuration, from `small_m_table.py`
    variants        everything that a matrix can need, for warm-up

Not covered: gradients, types with blocks of 32, more than 64 rows of x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from engine.errors import InternalError
from engine.kernels import small_m_inputs
from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, current_arch, launch
from engine.kernels.small_m_codes import _products
from engine.kernels.small_m_inputs import Inputs, as_integers
from engine.kernels.small_m_parts import _add_splits
from engine.kernels.small_m_table import (
    CODES_ROWS,
    MAX_ROWS,
    TILE,
    Config,
    config_for,
    crossover_rows,
    tiles_of,
)
from engine.kernels.small_m_tiles import _tiles_k45, _tiles_q6_k
from engine.quant.blocks import BlockType
from engine.quant.planes import PackedMatrix

__all__ = [
    "MAX_ROWS",
    "config_for",
    "crossover_rows",
    "fused_linear",
    "products",
    "takes",
    "variants",
]

# Shapes: M rows of x, K columns, N rows of W, S splits

_ADD_SIZE = 256
_TILES: dict[str, Any] = {"Q4_K": _tiles_k45, "Q5_K": _tiles_k45, "Q6_K": _tiles_q6_k}
_PLANES = {
    # Q4_K has no high bits, so the low ones are passed again in their place.
    "Q4_K": (("low", "*u8"), ("low", "*u8"), ("header", "*i32")),
    "Q5_K": (("low", "*u8"), ("high", "*u8"), ("header", "*i32")),
    "Q6_K": (("low", "*u8"), ("high", "*u8"), ("scales", "*i8"), ("d", "*fp16")),
}
"""The planes that the `tiles` kernels take pointers to."""


def takes(type_: BlockType, m: int, device: torch.device) -> bool:
    """Whether `fused_linear` supports `m` rows times weights of this type on this device."""
    return type_.name in _TILES and 1 <= m <= MAX_ROWS and device.type == "cuda"


def fused_linear(
    x_MK: Tensor, weight: PackedMatrix, bias_N: Tensor | None, out_MN: Tensor | None = None
) -> Tensor:
    """Return x W^T + b of shape (M, N) in the dtype of x, float32, float16 or bfloat16, for M from
    1 to 64.

    `out_MN`, if given, must be contiguous, and is returned. The bias may have any of these dtypes.
    """
    if out_MN is None:
        out_MN = x_MK.new_empty(len(x_MK), weight.rows)
    _check(x_MK, weight, bias_N, out_MN)
    m = len(x_MK)
    arch = 0 if knobs.runtime.interpret else current_arch(x_MK.get_device())
    config = _config(weight.type, weight.rows, weight.columns, m, arch, x_MK.dtype)
    split_blocks = triton.cdiv(weight.row_blocks, config.splits)
    splits = triton.cdiv(weight.row_blocks, split_blocks)
    y = out_MN
    if config.splits > 1:
        y = torch.empty(splits, m, weight.rows, dtype=torch.float32, device=x_MK.device)
    bias = x_MK if bias_N is None else bias_N
    if config.family == "codes":
        products(as_integers(x_MK), [weight], y, config, bias_N)
    else:
        planes = weight.planes()
        launch(
            _tile(weight.type, config, x_MK.dtype, y.dtype, _dtype(bias_N)),
            (triton.cdiv(weight.rows, config.rows), splits),
            x_MK,
            *(planes[name] for name, _ in _PLANES[weight.type.name]),
            bias,
            y,
            weight.rows,
            weight.row_blocks,
            m,
            split_blocks,
        )
    if config.splits > 1:
        grid = (triton.cdiv(weight.rows, _ADD_SIZE), m)
        adding = _adding(x_MK.dtype, _dtype(bias_N))
        launch(adding, grid, y, bias, out_MN, splits, weight.rows, m)
    return out_MN


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


def variants(
    type_: BlockType,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    *,
    arch: int,
    m: Iterable[int] = range(1, MAX_ROWS + 1),
) -> Iterator[Variant]:
    """Yield what `fused_linear` launches for a matrix and inputs of `m` rows, each variant once."""
    seen = set()
    for count in m:
        config = _config(type_, rows, columns, count, arch, dtype)
        out = torch.float32 if config.splits > 1 else dtype
        if config.family == "codes":
            needed = [small_m_inputs.variant(dtype), product([type_], config, out, bias)]
        else:
            needed = [_tile(type_, config, dtype, out, bias)]
        if config.splits > 1:
            needed.append(_adding(dtype, bias))
        for variant in needed:
            if variant not in seen:
                seen.add(variant)
                yield variant


def _config(
    type_: BlockType, rows: int, columns: int, m: int, arch: int, dtype: torch.dtype
) -> Config:
    if dtype == torch.float32:
        # Nothing of x is rounded. It has twice the bytes and the matmuls run without tensor cores,
        # so tiles are small, to fit on every GPU.
        config = config_for(type_, rows, columns, max(m, CODES_ROWS + 1), arch)
        return dataclasses.replace(config, rows=16, warps=4, stages=1)
    return config_for(type_, rows, columns, m, arch)


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


def _tile(
    type_: BlockType,
    config: Config,
    dtype: torch.dtype,
    out: torch.dtype,
    bias: torch.dtype | None,
    *,
    plain: bool = False,
) -> Variant:
    """Return the kernel of `tiles`. If sums are split, `out` is float32 and the bias is added
    later. `plain` selects the implementation without PTX.
    """
    planes = (type_name for _, type_name in _PLANES[type_.name])
    high: dict[str, Any] = {"Q4_K": {"HIGH": 0}, "Q5_K": {"HIGH": 16}}.get(type_.name, {})
    return compiled_as(
        _TILES[type_.name],
        *(dtype, *planes, bias or dtype, out, *["i32"] * 4),
        warps=config.warps,
        stages=config.stages,
        **high,
        MP=config.padded,
        ROWS=config.rows,
        BIAS=bias is not None and config.splits == 1,
        PLAIN=plain or dtype == torch.float32 or bool(knobs.runtime.interpret),
        STAGES=config.stages,
    )


def _adding(dtype: torch.dtype, bias: torch.dtype | None) -> Variant:
    types = ("*fp32", bias or dtype, dtype, "i32", "i32", "i32")
    has_bias = bias is not None
    return compiled_as(_add_splits, *types, warps=4, stages=1, BIAS=has_bias, SIZE=_ADD_SIZE)


def _dtype(bias_N: Tensor | None) -> torch.dtype | None:
    return None if bias_N is None else bias_N.dtype


def _check(x_MK: Tensor, weight: PackedMatrix, bias_N: Tensor | None, out_MN: Tensor) -> None:
    name = weight.type.name
    if name not in _TILES or x_MK.ndim != 2 or not 1 <= len(x_MK) <= MAX_ROWS:
        raise InternalError(
            f"fused linear: expected 1 to {MAX_ROWS} rows times {', '.join(_TILES)}, "
            f"found {tuple(x_MK.shape)} times {name}"
        )
    wanted = {"x": (len(x_MK), weight.columns), "out": (len(x_MK), weight.rows)}
    for what, tensor in (("x", x_MK), ("out", out_MN)):
        if tuple(tensor.shape) != wanted[what] or not tensor.is_contiguous():
            raise InternalError(
                f"fused linear: {what} — expected contiguous {wanted[what]}, "
                f"found {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if out_MN.dtype != x_MK.dtype:
        raise InternalError(f"fused linear: out — expected {x_MK.dtype}, found {out_MN.dtype}")
    if bias_N is not None and tuple(bias_N.shape) != (weight.rows,):
        raise InternalError(
            f"fused linear: bias — expected ({weight.rows},), found {tuple(bias_N.shape)}"
        )
