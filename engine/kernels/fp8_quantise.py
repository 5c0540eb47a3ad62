"""silu(gate) * up, and its rows in 8-bit floats, in one pass: what a feed-forward layer gives to its
second matmul when that is of 8-bit floats (`engine.models.fp8`).

The largest number of a row is known only when all of the row is there, and the row of a 7B model has
18944 numbers. A kernel that first looks for the largest and then reads again moves the inputs twice.
Here one program holds a row in its registers: gate and up are read once, the codes are written once,
which is 5 bytes a number.

A row is taken as two runs whose lengths are powers of two, as Triton wants them, the first the
largest that fits: 18944 = 16384 + 2560, the second padded to 4096.

The arithmetic is fp32: silu(g) u = g u / (1 + e^-g), then as `engine.models.fp8.quantise_rows` has it.
NaN in a row becomes NaN in its codes, and infinity too: the reductions of a GPU skip NaN, so it is
kept where codes are made.

e4m3 is an instruction from compute capability 8.9 on; there is no body for older GPUs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import InternalError
from engine.kernels.key import Variant
from engine.kernels.registry import compiled_as, launch

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: M rows, F columns of gate and of up

CAPABILITY = 89
"""The first with 8-bit floats: 8.9."""
LARGEST_ROW = 32768
"""Columns that fit in the registers of a program."""
WIDE = 8192
"""Columns from which a program has 16 warps and not 8: measured on an H200, 0.90 of a copy's rate for 18944
columns, with 8 warps 0.81."""
WIDTHS = (4864, 18944)
"""Feed-forward widths of Qwen2.5, 0.5B and 7B: what is compiled ahead of time."""


@triton.jit
def _gated(joined_ptr, start, columns, COLUMNS: tl.constexpr):
    """silu(gate) * up in fp32; 0 beyond the row."""
    there = columns < COLUMNS
    gate = tl.load(joined_ptr + start + columns, mask=there, other=0).to(tl.float32)
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
def _gated_to_fp8(
    joined_ptr,  # *    (M, 2 F): gate, up
    codes_ptr,  # *u8   (M, F); *fp32 takes what is rounded to codes
    scale_ptr,  # *fp32 (M)
    COLUMNS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source, target = row * (2 * COLUMNS), row * COLUMNS
    main = tl.arange(0, MAIN)
    values = _gated(joined_ptr, source, main, COLUMNS)
    largest = tl.max(tl.abs(values), axis=0)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        more = _gated(joined_ptr, source, rest, COLUMNS)
        largest = tl.maximum(largest, tl.max(tl.abs(more), axis=0))
    scale = tl.maximum(largest * (1.0 / 448.0), 1e-12)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    _store_codes(codes_ptr, target, main, values, inverse, COLUMNS)
    if REST > 0:
        _store_codes(codes_ptr, target, rest, more, inverse, COLUMNS)


@cache
def variant(columns: int, dtype: torch.dtype, codes: torch.dtype = torch.uint8) -> Variant:
    """The kernel for rows of `columns` numbers after the gate, from gate and up in `dtype`."""
    main = 1 << (columns.bit_length() - 1)
    rest = 0 if columns == main else triton.next_power_of_2(columns - main)
    warps = 16 if columns > WIDE else 8
    return compiled_as(
        *(_gated_to_fp8, dtype, codes, "*fp32"),
        warps=warps,
        stages=1,
        COLUMNS=columns,
        MAIN=main,
        REST=rest,
    )


def variants(arch: int) -> tuple[Variant, ...]:
    """What is compiled ahead of time for compute capability `arch` (90 is 9.0)."""
    if arch < CAPABILITY:
        return ()
    return tuple(variant(columns, torch.bfloat16) for columns in WIDTHS)


def takes(columns: int) -> bool:
    """Whether rows of so many numbers can be done."""
    return columns % 16 == 0 and columns <= LARGEST_ROW


def gated_to_fp8(joined_MG: Tensor, codes: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    """From gate and up side by side, (M, 2 F) contiguous, to codes as bytes (M, F) and scales (M, 1);
    with `codes=torch.float32`, to the numbers that codes are rounded from (Triton's interpreter rounds
    to 8 bits wrongly). Raises InternalError for other layouts and for rows that `takes` refuses.
    """
    rows, columns = joined_MG.shape[0], joined_MG.shape[1] // 2
    if not joined_MG.is_contiguous() or joined_MG.shape[1] % 2 or not takes(columns):
        raise InternalError(
            f"gated rows in fp8: expected contiguous rows of twice a multiple of 16, at most "
            f"{LARGEST_ROW}, found {tuple(joined_MG.shape)} with strides {joined_MG.stride()}"
        )
    codes_MF = torch.empty(rows, columns, dtype=codes, device=joined_MG.device)
    scale_M1 = torch.empty(rows, 1, dtype=torch.float32, device=joined_MG.device)
    if rows:
        kernel = variant(columns, joined_MG.dtype, codes)
        launch(kernel, (rows,), joined_MG, codes_MF, scale_M1)
    return codes_MF, scale_M1
