"""The parts of a decoder layer between its matmuls, for one token of each sequence.

    add_norm    kept += y, and out = RMS norm of kept
    gate        out = activation(gate) * up

One kernel each, where torch launches several: in a step of a small model the launches would take most of
the time. They round where the decoder's own operations round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.registry import compiled_as, launch

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: B rows, D columns

BLOCK = 1024


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
    both_ptr,  # (B, 2 D): gate, up
    out_ptr,  # (B, D), written
    D: tl.constexpr,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    d_D = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there_D = d_D < D
    gate_D = tl.load(both_ptr + row * 2 * D + d_D, mask=there_D, other=0).to(tl.float32)
    up_D = tl.load(both_ptr + row * 2 * D + D + d_D, mask=there_D, other=0).to(tl.float32)
    if GELU:
        inner_D = 0.7978845608028654 * (gate_D + 0.044715 * gate_D * gate_D * gate_D)
        open_D = gate_D * tl.sigmoid(2 * inner_D)
    else:
        open_D = gate_D * tl.sigmoid(gate_D)
    open_D = open_D.to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * D + d_D, (open_D * up_D).to(DTYPE), mask=there_D)


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


def gate(both_BN: Tensor, activation: str, out_BD: Tensor) -> None:
    """Write activation(gate) * up into `out_BD`; `both_BN` has gate and up side by side."""
    rows, columns = out_BD.shape
    pointers = (both_BN, out_BD)
    variant = compiled_as(
        _gate,
        *(each.dtype for each in pointers),
        warps=4,
        stages=1,
        D=columns,
        SIZE=BLOCK,
        GELU=activation != "silu",
    )
    launch(variant, (triton.cdiv(columns, BLOCK), rows), *pointers)
