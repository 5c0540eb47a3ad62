"""The parts of a decoder layer between its matmuls, without gradients.

    add_norm    kept += y, and out = RMS norm of kept
    gate        out = activation(gate) * up
    turn        rotates queries or keys by their positions, in place

One kernel each, where torch launches several: each value is read and written once, and in a step of a small
model the launches would take most of the time. They round where the decoder's own operations round.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, launch

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: B rows, D columns, H heads, E width of a head, R pairs of it that RoPE rotates, P positions

BLOCK = 1024
PLACES = 16
"""Heads of a program of `turn`."""


@triton.jit
def _add_norm(
    y_ptr,  # (B, D), added unless not ADD
    kept_ptr,  # (B, D), read and written
    weight_ptr,  # (D)
    out_ptr,  # (B, D), written
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    ADD: tl.constexpr,
):
    KEPT: tl.constexpr = kept_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, DP)
    there_D = d_D < D
    x_D = tl.load(kept_ptr + row * D + d_D, mask=there_D, other=0).to(tl.float32)
    if ADD:
        x_D += tl.load(y_ptr + row * D + d_D, mask=there_D, other=0).to(tl.float32)
        x_D = x_D.to(KEPT).to(tl.float32)
        tl.store(kept_ptr + row * D + d_D, x_D.to(KEPT), mask=there_D)
    over = tl.rsqrt(tl.sum(x_D * x_D, axis=0) / D + eps)
    weight_D = tl.load(weight_ptr + d_D, mask=there_D, other=0).to(tl.float32)
    out_D = (x_D * over * weight_D).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + d_D, out_D, mask=there_D)


@triton.jit
def _gate(
    gate_ptr,  # (B, D)
    up_ptr,
    out_ptr,
    D: tl.constexpr,
    IN: tl.constexpr,  # from a row to the next
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    d_D = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there_D = d_D < D
    gate_D = tl.load(gate_ptr + row * IN + d_D, mask=there_D, other=0).to(tl.float32)
    up_D = tl.load(up_ptr + row * IN + d_D, mask=there_D, other=0).to(tl.float32)
    if GELU:
        inner_D = 0.7978845608028654 * (gate_D + 0.044715 * gate_D * gate_D * gate_D)
        open_D = gate_D * tl.sigmoid(2 * inner_D)
    else:
        open_D = gate_D * tl.sigmoid(gate_D)
    open_D = open_D.to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * OUT + d_D, (open_D * up_D).to(DTYPE), mask=there_D)


@triton.jit
def _turn(
    x_ptr,  # (B, H, E), read and written
    cos_ptr,  # (P, R), the position of a row is row % P
    sin_ptr,
    positions,
    ROW: tl.constexpr,  # from a row to the next
    H: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    HEADS: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0)
    h_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    r_R = tl.arange(0, RP)
    there_HR = (h_H < H)[:, None] & (r_R < R)[None, :]
    angle_R = (row % positions) * R + r_R
    cos_1R = tl.load(cos_ptr + angle_R, mask=r_R < R, other=0).to(tl.float32)[None, :]
    sin_1R = tl.load(sin_ptr + angle_R, mask=r_R < R, other=0).to(tl.float32)[None, :]
    left_ptr = x_ptr + row.to(tl.int64) * ROW + (h_H * E)[:, None] + r_R[None, :]
    left_HR = tl.load(left_ptr, mask=there_HR, other=0).to(tl.float32)
    right_HR = tl.load(left_ptr + R, mask=there_HR, other=0).to(tl.float32)
    a_HR = (left_HR * cos_1R).to(DTYPE).to(tl.float32)
    b_HR = (right_HR * sin_1R).to(DTYPE).to(tl.float32)
    tl.store(left_ptr, (a_HR - b_HR).to(DTYPE), mask=there_HR)
    a_HR = (right_HR * cos_1R).to(DTYPE).to(tl.float32)
    b_HR = (left_HR * sin_1R).to(DTYPE).to(tl.float32)
    tl.store(left_ptr + R, (a_HR + b_HR).to(DTYPE), mask=there_HR)


def add_norm(
    y_BD: Tensor | None, kept_BD: Tensor, weight_D: Tensor, eps: float, out_BD: Tensor
) -> None:
    """Add `y_BD` to `kept_BD`, and write the RMS norm of the sum into `out_BD`."""
    rows, columns = kept_BD.shape
    pointers = (kept_BD if y_BD is None else y_BD, kept_BD, weight_D, out_BD)
    padded = triton.next_power_of_2(columns)
    variant = compiled_as(
        _add_norm,
        *(each.dtype for each in pointers),
        "fp32",
        warps=4 if padded <= 2048 else 8,
        stages=1,
        D=columns,
        DP=padded,
        ADD=y_BD is not None,
    )
    launch(variant, (rows,), *pointers, eps)


@cache
def gate_variant(
    columns: int, row: int, out_row: int, dtype: torch.dtype, activation: str
) -> Variant:
    """Return the kernel of `gate` for `columns` columns, with `row` elements from a row of its inputs to the next."""
    return compiled_as(
        *(_gate, dtype, dtype, dtype),
        warps=4,
        stages=1,
        D=columns,
        IN=row,
        OUT=out_row,
        SIZE=BLOCK,
        GELU=activation != "silu",
    )


def gate(gate_BD: Tensor, up_BD: Tensor, activation: str, out_BD: Tensor) -> None:
    """Write activation(gate) * up into `out_BD`, which may be `gate_BD`. Columns are contiguous, and rows of gate and
    up equally far apart.
    """
    rows, columns = out_BD.shape
    variant = gate_variant(columns, gate_BD.stride(0), out_BD.stride(0), out_BD.dtype, activation)
    launch(variant, (triton.cdiv(columns, BLOCK), rows), gate_BD, up_BD, out_BD)


@cache
def turn_variant(row: int, heads: int, width: int, pairs: int, dtype: torch.dtype) -> Variant:
    """Return the kernel of `turn` for `heads` heads of `width` elements, of which 2 `pairs` are rotated, with `row`
    elements from a row to the next.
    """
    return compiled_as(
        *(_turn, dtype, dtype, dtype, "i32"),
        warps=4,
        stages=1,
        fp_fusion=False,  # a fused multiply-add would not round the product
        ROW=row,
        H=heads,
        E=width,
        R=pairs,
        RP=triton.next_power_of_2(pairs),
        HEADS=min(PLACES, triton.next_power_of_2(heads)),
    )


def turn(x_BHE: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> None:
    """Rotate each pair (x[i], x[i + R]) of a head by the angle of its row's position, in place.

    Row b has position b % P. The heads of a row are contiguous, and so are cosines and sines.
    """
    rows, heads, width = x_BHE.shape
    positions, pairs = cos_PR.shape
    variant = turn_variant(x_BHE.stride(0), heads, width, pairs, x_BHE.dtype)
    programs = triton.cdiv(heads, min(PLACES, triton.next_power_of_2(heads)))
    launch(variant, (rows, programs), x_BHE, cos_PR, sin_PR, positions)
