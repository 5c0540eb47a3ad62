"""Quantise rows to fp8 in one pass, as inputs of fp8 matmuls (`engine.models.fp8`). The same pass can compute the
operation before the matmul: silu(gate) * up in a feed-forward layer, or a norm.

The maximum of a row is known only after the whole row was read, and a row of a 7B model has 18944
elements. A kernel that first finds the maximum and then reads the row again would read the inputs
twice. Here one program holds a row in registers: gate and up are read once and the codes are
written once, which is 5 bytes per element.

A row is processed as two runs whose lengths are powers of two, as Triton requires, the first being
the largest that fits: 18944 = 16384 + 2560, with the second padded to 4096.

The arithmetic is fp32: silu(g) u = g u / (1 + e^-g), then as in `engine.models.fp8.quantise_rows`.
A row with NaN or infinity gets NaN codes: reductions on a GPU skip NaN, so it is propagated where
the codes are computed.

e4m3 conversion is an instruction from compute capability 8.9 on; there is no kernel for older GPUs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, launch
from engine.kernels.sizes import next_power_of_2

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: M rows, F columns of gate and of up, K columns of an input: F, or 2 F with gate and up

CAPABILITY = 89
"""The first compute capability with fp8: 8.9."""
LARGEST_ROW = 32768
"""Maximum number of columns that fit in the registers of a program."""
WIDE = 8192
"""Number of columns above which a program has 16 warps instead of 8. Measured on an H200 for 18944
columns: 0.90 of a copy's bandwidth, against 0.81 with 8 warps.
"""
WIDTHS = (4864, 18944)
"""Feed-forward widths of Qwen2.5 0.5B and 7B, which are compiled ahead of time."""
NORM_WIDTH = 3584
"""Model width of Qwen2.5 7B, compiled ahead of time."""


@triton.jit
def _values(joined_ptr, start, columns, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """Return the elements of the row, or silu(gate) * up of them, in fp32; 0 beyond the end of the row."""
    there = columns < COLUMNS
    gate = tl.load(joined_ptr + start + columns, mask=there, other=0).to(tl.float32)
    if not GATED:
        return gate
    up = tl.load(joined_ptr + start + COLUMNS + columns, mask=there, other=0).to(tl.float32)
    return gate * up / (1.0 + tl.exp(-gate))


@triton.jit
def _store_codes(codes_ptr, start, columns, values, inverse, COLUMNS: tl.constexpr):
    scaled = values * inverse
    limited = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if codes_ptr.dtype.element_ty == tl.uint8:
        limited = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + start + columns, limited, mask=columns < COLUMNS)


@triton.jit
def _to_fp8(
    joined_ptr,  # *    (M, F), or (M, 2 F): gate, up
    codes_ptr,  # *u8   (M, F); *fp32 gets the values before rounding
    scale_ptr,  # *fp32 (M)
    COLUMNS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source, target = row * (2 * COLUMNS if GATED else COLUMNS), row * COLUMNS
    main = tl.arange(0, MAIN)
    values = _values(joined_ptr, source, main, COLUMNS, GATED)
    largest = tl.max(tl.abs(values), axis=0)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        more = _values(joined_ptr, source, rest, COLUMNS, GATED)
        largest = tl.maximum(largest, tl.max(tl.abs(more), axis=0))
    scale = tl.maximum(largest * (1.0 / 448.0), 1e-12)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    _store_codes(codes_ptr, target, main, values, inverse, COLUMNS)
    if REST > 0:
        _store_codes(codes_ptr, target, rest, more, inverse, COLUMNS)


@triton.jit
def _norm_to_fp8(
    y_ptr,  # *    (M, F), added if ADD
    x_ptr,  # *    (M, F)
    weight_ptr,  # *    (F)
    kept_ptr,  # *    (M, F), the sum, if ADD
    codes_ptr,  # *u8   (M, F); *fp32 gets the values before rounding
    scale_ptr,  # *fp32 (M)
    eps,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    there = columns < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + columns, mask=there, other=0).to(tl.float32)
    if ADD:
        x += tl.load(y_ptr + row * COLUMNS + columns, mask=there, other=0).to(tl.float32)
        x = x.to(DTYPE).to(tl.float32)
        tl.store(kept_ptr + row * COLUMNS + columns, x.to(DTYPE), mask=there)
    over = tl.rsqrt(tl.sum(x * x, axis=0) / COLUMNS + eps)
    weight = tl.load(weight_ptr + columns, mask=there, other=0).to(tl.float32)
    # Round as a norm does that writes its result to memory.
    values = (x * over * weight).to(DTYPE).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) * (1.0 / 448.0), 1e-12)
    tl.store(scale_ptr + row, scale)
    _store_codes(codes_ptr, row * COLUMNS, columns, values, tl.div_rn(1.0, scale), COLUMNS)


@cache
def norm_variant(
    columns: int, dtype: torch.dtype, *, add: bool, codes: torch.dtype = torch.uint8
) -> Variant:
    """Return the kernel for norms of rows of `columns` elements in `dtype`."""
    padded = next_power_of_2(columns)
    return compiled_as(
        *(_norm_to_fp8, dtype, dtype, dtype, dtype, codes, "*fp32", "fp32"),
        warps=4 if padded <= 2048 else 8,
        stages=1,
        fp_fusion=False,  # a fused multiply-add would skip the rounding of values
        COLUMNS=columns,
        PADDED=padded,
        ADD=add,
    )


@cache
def variant(
    columns: int, dtype: torch.dtype, codes: torch.dtype = torch.uint8, gated: bool = True
) -> Variant:
    """Return the kernel for rows of `dtype` that become `columns` codes; if gated, the input has twice as many."""
    main = 1 << (columns.bit_length() - 1)
    rest = 0 if columns == main else next_power_of_2(columns - main)
    warps = 16 if columns > WIDE else 8
    return compiled_as(
        *(_to_fp8, dtype, codes, "*fp32"),
        warps=warps,
        stages=1,
        COLUMNS=columns,
        MAIN=main,
        REST=rest,
        GATED=gated,
    )


def variants(arch: int) -> tuple[Variant, ...]:
    """Return the variants that are compiled ahead of time for compute capability `arch` (90 is 9.0)."""
    if arch < CAPABILITY:
        return ()
    gated = (variant(columns, torch.bfloat16) for columns in WIDTHS)
    norms = (norm_variant(NORM_WIDTH, torch.bfloat16, add=add) for add in (False, True))
    return (*gated, *norms)


def takes(columns: int) -> bool:
    """Whether rows of this length are supported."""
    return columns % 16 == 0 and columns <= LARGEST_ROW


def to_fp8(
    x_MK: Tensor, *, gated: bool = False, codes: torch.dtype = torch.uint8
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of x, or silu(gate) * up with gate and up concatenated in x (M, 2 F), and return codes
    as bytes (M, F) and scales (M, 1). x is contiguous.

    With `codes=torch.float32`, return the values before rounding to codes (Triton's interpreter
    rounds to fp8 wrongly).
    """
    rows, columns = x_MK.shape[0], x_MK.shape[1] // (1 + gated)
    assert x_MK.is_contiguous() and x_MK.shape[1] % (1 + gated) == 0 and takes(columns), x_MK.shape
    codes_MF = torch.empty(rows, columns, dtype=codes, device=x_MK.device)
    scale_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x_MK.device)
    if rows:
        launch(variant(columns, x_MK.dtype, codes, gated), (rows,), x_MK, codes_MF, scale_M1)
    return codes_MF, scale_M1


def norm_to_fp8(
    y_MF: Tensor | None,
    x_MF: Tensor,
    weight_F: Tensor,
    eps: float,
    kept_MF: Tensor,
    *,
    codes: torch.dtype = torch.uint8,
) -> tuple[Tensor, Tensor]:
    """Write x + y into `kept_MF`, and return the RMS norm of the sum, quantised as by `to_fp8`. Without y, return the
    norm of x and write nothing. All tensors must be contiguous and have the same dtype.
    """
    rows, columns = x_MF.shape
    codes_MF = torch.empty(rows, columns, dtype=codes, device=x_MF.device)
    scale_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x_MF.device)
    pointers = (x_MF if y_MF is None else y_MF, x_MF, weight_F, kept_MF, codes_MF, scale_M1)
    kernel = norm_variant(columns, x_MF.dtype, add=y_MF is not None, codes=codes)
    launch(kernel, (rows,), *pointers, eps)
    return codes_MF, scale_M1
