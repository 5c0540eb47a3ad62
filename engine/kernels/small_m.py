"""y = x W^T + b for few rows of x, multiplied while W is unpacked: one pass over the packed bytes.

With one row of x the time is that of reading W, and packed W has 3.6 (Q4_K) or 2.4 (Q6_K) times
fewer bytes than bf16. Two families of kernels (`small_m_k45.py`, `small_m_q6k.py`), both for any
number of rows of W:

    columns   1 to 4 rows of x    scales applied to exact products of codes, in float32
    tiles     5 to 64             weights scaled in float32, rounded once to the type of x

Sums over the columns of W may be split between programs when W has too few rows to occupy a GPU; the
parts are then added by a second kernel, in a fixed order. Results are the same bits every time.

    fused_linear    runs it
    takes           whether it can run
    crossover_rows  up to how many rows of x it is faster than dequantising and a matrix product
    config_for      how it is launched, from `small_m_table.py`
    variants        all that a matrix can need, for warm-up

Not covered: gradients, types in blocks of 32, more than 64 rows of x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from engine.errors import InternalError
from engine.kernels.key import Constant, Variant
from engine.kernels.registry import current_arch, launch, pointer_type
from engine.kernels.small_m_k45 import _columns_k45, _tiles_k45
from engine.kernels.small_m_parts import _add_splits
from engine.kernels.small_m_q6k import _columns_q6_k, _tiles_q6_k
from engine.kernels.small_m_table import MAX_ROWS, Config, config_for, crossover_rows
from engine.quant.blocks import BlockType
from engine.quant.planes import PackedMatrix

__all__ = ["MAX_ROWS", "config_for", "crossover_rows", "fused_linear", "takes", "variants"]

# Shapes: M rows of x, K columns, N rows of W, S splits

_ADD_SIZE = 256
_KERNELS: dict[str, dict[str, Any]] = {
    "Q4_K": {"columns": _columns_k45, "tiles": _tiles_k45},
    "Q5_K": {"columns": _columns_k45, "tiles": _tiles_k45},
    "Q6_K": {"columns": _columns_q6_k, "tiles": _tiles_q6_k},
}
_PLANES = {
    # Without high bits, the low ones are passed again in their place.
    "Q4_K": (("low", "*u8"), ("low", "*u8"), ("header", "*i32")),
    "Q5_K": (("low", "*u8"), ("high", "*u8"), ("header", "*i32")),
    "Q6_K": (("low", "*u8"), ("high", "*u8"), ("scales", "*i8"), ("d", "*fp16")),
}
"""What the kernels have pointers to."""


def takes(type_: BlockType, m: int, device: torch.device) -> bool:
    """Whether `fused_linear` runs `m` rows times weights of this type on this device."""
    return type_.name in _KERNELS and 1 <= m <= MAX_ROWS and device.type == "cuda"


def fused_linear(
    x_MK: Tensor, weight: PackedMatrix, bias_N: Tensor | None, out_MN: Tensor | None = None
) -> Tensor:
    """x W^T + b of shape (M, N) in the dtype of x, float32, float16 or bfloat16, for M from 1 to 64.

    `out_MN`, where given, is contiguous, and is returned. The bias may have any of those dtypes.
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
    planes = weight.planes()
    launch(
        _product(weight.type, config, x_MK.dtype, y.dtype, _dtype(bias_N)),
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
    """What `fused_linear` launches for a matrix and inputs of `m` rows, each variant once."""
    seen = set()
    for count in m:
        config = _config(type_, rows, columns, count, arch, dtype)
        needed = [_product(type_, config, dtype, dtype, bias)]
        if config.splits > 1:
            needed = [
                _product(type_, config, dtype, torch.float32, bias),
                _adding(dtype, bias),
            ]
        for variant in needed:
            if variant not in seen:
                seen.add(variant)
                yield variant


def _config(
    type_: BlockType, rows: int, columns: int, m: int, arch: int, dtype: torch.dtype
) -> Config:
    config = config_for(type_, rows, columns, m, arch)
    if dtype == torch.float32:
        # Twice the bytes, and products without a matrix unit: small, so that it fits everywhere.
        config = dataclasses.replace(config, rows=16, warps=4, stages=1)
    return config


def _product(
    type_: BlockType,
    config: Config,
    dtype: torch.dtype,
    out: torch.dtype,
    bias: torch.dtype | None,
    *,
    plain: bool = False,
) -> Variant:
    """The kernel that multiplies. Where sums are split, `out` is float32 and the bias is added
    later. `plain` keeps the form without PTX where that is not the only one."""
    constants: list[tuple[str, Constant]] = []
    if type_.name != "Q6_K":
        constants.append(("HIGH", 16 if type_.name == "Q5_K" else 0))
    constants += [
        ("MP", config.padded),
        ("ROWS", config.rows),
        ("BIAS", bias is not None and config.splits == 1),
        ("PLAIN", plain or dtype == torch.float32 or bool(knobs.runtime.interpret)),
        ("STAGES", config.stages),
    ]
    planes = (type_name for _, type_name in _PLANES[type_.name])
    pointers = [pointer_type(dtype), *planes]
    pointers += [pointer_type(dtype if bias is None else bias), pointer_type(out)]
    return Variant(
        function=_KERNELS[type_.name][config.family],
        types=(*pointers, *["i32"] * 4),
        constants=tuple(constants),
        warps=config.warps,
        stages=config.stages,
    )


def _adding(dtype: torch.dtype, bias: torch.dtype | None) -> Variant:
    pointers = (torch.float32, dtype if bias is None else bias, dtype)
    return Variant(
        function=_add_splits,
        types=(*(pointer_type(p) for p in pointers), "i32", "i32", "i32"),
        constants=(("BIAS", bias is not None), ("SIZE", _ADD_SIZE)),
        warps=4,
        stages=1,
    )


def _dtype(bias_N: Tensor | None) -> torch.dtype | None:
    return None if bias_N is None else bias_N.dtype


def _check(x_MK: Tensor, weight: PackedMatrix, bias_N: Tensor | None, out_MN: Tensor) -> None:
    name = weight.type.name
    if name not in _KERNELS or x_MK.ndim != 2 or not 1 <= len(x_MK) <= MAX_ROWS:
        raise InternalError(
            f"fused linear: expected 1 to {MAX_ROWS} rows times {', '.join(_KERNELS)}, "
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
