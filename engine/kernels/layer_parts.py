"""Compute the operations between a decoder layer's matmuls, and their gradients.

    add_norm       kept = x + y, and out = RMS norm of kept
    gate           out = activation(gate) * up
    rotate_into    rotates queries or keys by their positions

Each of them is one kernel; torch would launch several. So each value is read and written once, and there are fewer
launches, which take most of the time of a small model's step. The kernels round where the decoder's torch operations
round.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, launch
from engine.kernels.sizes import cdiv, next_power_of_2

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: B rows, D columns, H heads, E width of a head, R pairs of it that RoPE rotates, P positions

BLOCK = 1024
HEADS_PER_PROGRAM = 16
"""Number of heads per program of `rotate_into`."""
PARTS = 528
"""Number of programs of `add_norm_backward`: four for each of 132 multiprocessors. Each sums the weight's gradient
over its rows."""
VALUES_PER_PROGRAM = 4096
"""Number of values of each tensor that a program of `add_norm_backward` holds."""


@triton.jit
def _add_norm(
    y_ptr,  # (B, D), added if ADD
    x_ptr,  # (B, D)
    weight_ptr,  # (D)
    kept_ptr,  # (B, D), the sum; may be x
    out_ptr,  # (B, D), its norm
    rstd_ptr,  # *fp32 (B), 1 / RMS, if TRAINED
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    ADD: tl.constexpr,
    TRAINED: tl.constexpr,
):
    KEPT: tl.constexpr = kept_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, DP)
    there_D = d_D < D
    x_D = tl.load(x_ptr + row * D + d_D, mask=there_D, other=0).to(tl.float32)
    if ADD:
        x_D += tl.load(y_ptr + row * D + d_D, mask=there_D, other=0).to(tl.float32)
        x_D = x_D.to(KEPT).to(tl.float32)
        tl.store(kept_ptr + row * D + d_D, x_D.to(KEPT), mask=there_D)
    rstd = tl.rsqrt(tl.sum(x_D * x_D, axis=0) / D + eps)
    if TRAINED:
        tl.store(rstd_ptr + row, rstd)
    weight_D = tl.load(weight_ptr + d_D, mask=there_D, other=0).to(tl.float32)
    out_D = (x_D * rstd * weight_D).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + d_D, out_D, mask=there_D)


@triton.jit
def _add_norm_backward(
    dout_ptr,  # (B, D)
    dkept_ptr,  # (B, D), added if PASSED
    kept_ptr,  # (B, D)
    weight_ptr,  # (D)
    rstd_ptr,  # *fp32 (B)
    dx_ptr,  # (B, D), written
    dy_ptr,  # (B, D), written if ADD
    dweight_ptr,  # *fp32 (programs, D), written if WEIGHT
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    PASSED: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """With u = x / RMS and g = w dout:  dx = (g - u mean(g u)) / RMS,  dw = sum over rows of u dout."""
    d_1D = tl.arange(0, DP)[None, :]
    weight_1D = tl.load(weight_ptr + d_1D, mask=d_1D < D, other=0).to(tl.float32)
    dweight_RD = tl.zeros([ROWS, DP], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row_R1 = first + tl.arange(0, ROWS)[:, None]
        there_RD = (row_R1 < rows) & (d_1D < D)
        at_RD = row_R1.to(tl.int64) * D + d_1D
        rstd_R1 = tl.load(rstd_ptr + row_R1, mask=row_R1 < rows, other=0)
        unit_RD = tl.load(kept_ptr + at_RD, mask=there_RD, other=0).to(tl.float32) * rstd_R1
        dout_RD = tl.load(dout_ptr + at_RD, mask=there_RD, other=0).to(tl.float32)
        if WEIGHT:
            dweight_RD += dout_RD * unit_RD
        g_RD = dout_RD * weight_1D
        dx_RD = rstd_R1 * (g_RD - unit_RD * (tl.sum(g_RD * unit_RD, axis=1) / D)[:, None])
        if PASSED:
            dx_RD += tl.load(dkept_ptr + at_RD, mask=there_RD, other=0).to(tl.float32)
        tl.store(dx_ptr + at_RD, dx_RD.to(dx_ptr.dtype.element_ty), mask=there_RD)
        if ADD:
            tl.store(dy_ptr + at_RD, dx_RD.to(dy_ptr.dtype.element_ty), mask=there_RD)
    if WEIGHT:
        d_D = tl.arange(0, DP)
        part_D = tl.sum(dweight_RD, axis=0)
        tl.store(dweight_ptr + tl.program_id(0) * D + d_D, part_D, mask=d_D < D)


@triton.jit
def _gate(
    gate_ptr,  # (B, D)
    up_ptr,
    out_ptr,
    D: tl.constexpr,
    IN: tl.constexpr,  # row stride of gate and up
    OUT: tl.constexpr,  # row stride of out
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    # Rows and columns share one axis of the grid, because CUDA limits the other axes to 65,535 programs.
    row = (tl.program_id(0) // tl.cdiv(D, SIZE)).to(tl.int64)
    d_D = tl.program_id(0) % tl.cdiv(D, SIZE) * SIZE + tl.arange(0, SIZE)
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
def _gate_backward(
    gate_ptr,  # (B, D)
    up_ptr,
    dout_ptr,
    dgate_ptr,  # (B, D), written
    dup_ptr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
):
    DTYPE: tl.constexpr = dup_ptr.dtype.element_ty
    d_D = tl.program_id(0) % tl.cdiv(D, SIZE) * SIZE + tl.arange(0, SIZE)
    there_D = d_D < D
    at_D = (tl.program_id(0) // tl.cdiv(D, SIZE)).to(tl.int64) * D + d_D
    gate_D = tl.load(gate_ptr + at_D, mask=there_D, other=0).to(tl.float32)
    up_D = tl.load(up_ptr + at_D, mask=there_D, other=0).to(tl.float32)
    dout_D = tl.load(dout_ptr + at_D, mask=there_D, other=0).to(tl.float32)
    if GELU:
        square_D = gate_D * gate_D
        share_D = tl.sigmoid(1.5957691216057308 * (gate_D + 0.044715 * square_D * gate_D))
        inner_D = 1.5957691216057308 * (gate_D + 0.134145 * square_D * gate_D)
    else:
        share_D = tl.sigmoid(gate_D)
        inner_D = gate_D
    # The derivative of x s(f(x)) is s + s (1 - s) x f'(x).
    slope_D = share_D + share_D * (1 - share_D) * inner_D
    open_D = (gate_D * share_D).to(DTYPE).to(tl.float32)
    tl.store(dup_ptr + at_D, (dout_D * open_D).to(DTYPE), mask=there_D)
    dopen_D = (dout_D * up_D).to(DTYPE).to(tl.float32)
    tl.store(dgate_ptr + at_D, (dopen_D * slope_D).to(DTYPE), mask=there_D)


@triton.jit
def _rotate(
    x_ptr,  # (B, H, E)
    out_ptr,  # (B, H, E); may be x
    cos_ptr,  # (P, R), the position of a row is row % P
    sin_ptr,
    positions,
    ROW: tl.constexpr,  # row stride of x
    OUT: tl.constexpr,  # row stride of out
    H: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0)
    h_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    r_R = tl.arange(0, RP)
    there_HR = (h_H < H)[:, None] & (r_R < R)[None, :]
    angle_R = (row % positions) * R + r_R
    cos_1R = tl.load(cos_ptr + angle_R, mask=r_R < R, other=0).to(tl.float32)[None, :]
    sin_1R = tl.load(sin_ptr + angle_R, mask=r_R < R, other=0).to(tl.float32)[None, :]
    if BACK:
        sin_1R = -sin_1R
    at_HR = (h_H * E)[:, None] + r_R[None, :]
    x_ptr += row.to(tl.int64) * ROW
    out_ptr += row.to(tl.int64) * OUT
    left_HR = tl.load(x_ptr + at_HR, mask=there_HR, other=0).to(tl.float32)
    right_HR = tl.load(x_ptr + at_HR + R, mask=there_HR, other=0).to(tl.float32)
    a_HR = (left_HR * cos_1R).to(DTYPE).to(tl.float32)
    b_HR = (right_HR * sin_1R).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + at_HR, (a_HR - b_HR).to(DTYPE), mask=there_HR)
    a_HR = (right_HR * cos_1R).to(DTYPE).to(tl.float32)
    b_HR = (left_HR * sin_1R).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + at_HR + R, (a_HR + b_HR).to(DTYPE), mask=there_HR)


def add_norm(
    y_BD: Tensor | None,
    x_BD: Tensor,
    weight_D: Tensor,
    eps: float,
    kept_BD: Tensor,
    out_BD: Tensor,
    rstd_B: Tensor | None = None,
) -> None:
    """Write `x_BD` + `y_BD` into `kept_BD`, which may be `x_BD`, and the RMS norm of the sum into `out_BD`.

    `rstd_B` (fp32) gets 1 / RMS, for `add_norm_backward`.
    """
    rows, columns = x_BD.shape
    y_BD, rstd = x_BD if y_BD is None else y_BD, kept_BD if rstd_B is None else rstd_B
    pointers = (y_BD, x_BD, weight_D, kept_BD, out_BD, rstd)
    padded = next_power_of_2(columns)
    variant = _variant(
        _add_norm,
        (*(each.dtype for each in pointers), "fp32"),
        4 if padded <= 2048 else 8,
        True,
        D=columns,
        DP=padded,
        ADD=y_BD is not x_BD,
        TRAINED=rstd_B is not None,
    )
    launch(variant, (rows,), *pointers, eps)


def add_norm_backward(
    dout_BD: Tensor,
    dkept_BD: Tensor | None,
    kept_BD: Tensor,
    weight_D: Tensor,
    rstd_B: Tensor,
    dx_BD: Tensor,
    dy_BD: Tensor | None,
    dweight_PD: Tensor | None,
) -> None:
    """Write the gradients of `add_norm`: `dx_BD`; `dy_BD`, the same values in its own dtype; and `dweight_PD`, the
    weight's gradient as `PARTS` partial sums.
    """
    rows, columns = kept_BD.shape
    pointers = (
        *(dout_BD, dout_BD if dkept_BD is None else dkept_BD, kept_BD, weight_D, rstd_B),
        *(dx_BD, dx_BD if dy_BD is None else dy_BD, rstd_B if dweight_PD is None else dweight_PD),
    )
    padded = next_power_of_2(columns)
    variant = _variant(
        _add_norm_backward,
        (*(each.dtype for each in pointers), "i32"),
        8,
        True,
        D=columns,
        DP=padded,
        ROWS=max(1, VALUES_PER_PROGRAM // padded),
        PASSED=dkept_BD is not None,
        ADD=dy_BD is not None,
        WEIGHT=dweight_PD is not None,
    )
    launch(variant, (PARTS,), *pointers, rows)


@cache
def _variant(
    function: Any, types: tuple[Any, ...], warps: int, fusion: bool, **constants: int
) -> Variant:
    """Return a variant from the cache; a step launches each variant some hundred times."""
    return compiled_as(function, *types, warps=warps, stages=1, fp_fusion=fusion, **constants)


def gate(gate_BD: Tensor, up_BD: Tensor, activation: str, out_BD: Tensor) -> None:
    """Write activation(gate) * up into `out_BD`, which may be `gate_BD`. Columns must be contiguous, and gate and up
    must have the same row stride.
    """
    rows, columns = out_BD.shape
    variant = _variant(
        _gate,
        (gate_BD.dtype, up_BD.dtype, out_BD.dtype),
        4,
        True,
        D=columns,
        IN=gate_BD.stride(0),
        OUT=out_BD.stride(0),
        SIZE=BLOCK,
        GELU=activation != "silu",
    )
    launch(variant, (rows * cdiv(columns, BLOCK),), gate_BD, up_BD, out_BD)


def gate_backward(
    gate_BD: Tensor, up_BD: Tensor, dout_BD: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; all are contiguous."""
    rows, columns = gate_BD.shape
    found = torch.empty_like(gate_BD), torch.empty_like(up_BD)
    pointers = (gate_BD, up_BD, dout_BD, *found)
    variant = _variant(
        _gate_backward,
        tuple(each.dtype for each in pointers),
        4,
        True,
        D=columns,
        SIZE=BLOCK,
        GELU=activation != "silu",
    )
    launch(variant, (rows * cdiv(columns, BLOCK),), *pointers)
    return found


def rotate_into(
    x_BHE: Tensor, cos_PR: Tensor, sin_PR: Tensor, out_BHE: Tensor, *, back: bool = False
) -> None:
    """Rotate each pair (x[i], x[i + R]) of a head by the angle of its row's position, or by minus that angle if `back`.

    The result is written into `out_BHE`, which may be `x_BHE`; elements that are not rotated are not written. Row b has
    position b % P. The heads of a row must be contiguous, and so must cosines and sines.
    """
    rows, heads, width = x_BHE.shape
    positions, pairs = cos_PR.shape
    block = min(HEADS_PER_PROGRAM, next_power_of_2(heads))
    pointers = (x_BHE, out_BHE, cos_PR, sin_PR)
    variant = _variant(
        _rotate,
        (*(each.dtype for each in pointers), "i32"),
        4,
        False,  # a fused multiply-add would not round the product
        ROW=x_BHE.stride(0),
        OUT=out_BHE.stride(0),
        H=heads,
        E=width,
        R=pairs,
        RP=next_power_of_2(pairs),
        HEADS=block,
        BACK=back,
    )
    launch(variant, (rows, cdiv(heads, block)), *pointers, positions)
