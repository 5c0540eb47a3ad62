"""The kernels between the matmuls of a decoder's layer in a decode step (one token per row).

    _norm      x + what the layer gave, kept; its RMS norm, by blocks of 256 columns or whole rows
    _attend    attention: what is kept of the token itself is written, its rotation and the norms of
               Qwen3 included; and _join (`decode_attend.py`)
    _gate      silu(gate) * up
    _largest   and _choose: the likeliest id of the logits (`decode_choose.py`)

At one row nothing here is work: a layer of a 7B model reads 130 MB of weights, and these kernels a few
kB. What counts is how many there are, how often each waits for memory, and that none asks the host:
positions and tokens are on the device, and lengths of loops are read there. Each is written so that its
results become the next matmul's inputs, as floats or as integers (`small_m_inputs.py`), without a
kernel for that.

Every program knows of no row but its own: a row's bits do not depend on what is run beside it.
`engine.models.decoder` is the oracle. A matmul may leave its sums in parts (`small_m.products`):
whoever reads them adds them, in order. A matmul of floats is one part.

A kernel takes as long as the loads that wait for one another: some 0.3 us each for what is in the L2
cache, 0.6 us and more for the rest. So each asks for everything at once. Numbers of parts, widths and
strides are constants: loops over parts are unrolled, their loads are in flight together, and 16 bytes
wide, because the compiler can tell how addresses are aligned.

RMS norm in blocks: matmuls are linear, so the divisor of a row, sqrt(mean x^2 + eps), can be applied
to what comes out of the matmul instead of to what goes in. Then a block of columns knows all it needs,
and a row is done by as many programs as it has blocks, none of which waits for another:

    norm        x_b = kept_b + parts_b;  squares_b = sum x_b^2;  codes of x_b w_b
    matmul     of those codes
    its reader  matmul * rsqrt(sum of squares / columns + eps)

The block's values are not rounded to bf16 on their way into 13-bit codes: one rounding less than the
decoder's. All other roundings are the decoder's. Whoever needs the norm itself (matmuls of floats,
which add their bias themselves; the head, whose results are logits) has a program do whole rows.

The assembler moves loads down to their use and sums up between loads, as far as it may: each load then
waits for the one before. A barrier behind all parts but the first keeps them together (`rest_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.dependent_launch import wait_for_inputs
from engine.kernels.small_m_inputs import write_codes

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

# Arguments: `parts_ptr` to (SPLITS, part_rows, stride), of which the first rows are read; `codes_ptr`,
# `scales_ptr`, `code_sums_ptr` the inputs of a matmul, written if CODES, else `y_ptr`, floats;
# `squares_ptr` to (rows, blocks of NORMED columns), float32.
# Shapes: B blocks of 256 values, E values of one


@triton.jit
def _write(
    x_BE, y_ptr, codes_ptr, scales_ptr, sums_ptr, row, columns, block_B, CODES: tl.constexpr
):
    """Blocks of one row, float32 of (B, 256), that are rounded as far as they have to be."""
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    if CODES:
        blocks = columns // 256
        write_codes(x_BE, codes_ptr, scales_ptr, sums_ptr, row * blocks + block_B, block_B < blocks)
    else:
        tl.store(
            y_ptr + row * columns + at_BE, x_BE.to(y_ptr.dtype.element_ty), mask=at_BE < columns
        )


@triton.jit
def rest_of(parts_ptr, at, there, split_stride, SPLITS: tl.constexpr):
    """All parts at `at` but the first, which has to be loaded behind a barrier: as sums begin with it,
    the assembler cannot put one between these loads, which would then wait for one another."""
    parts = ()
    for split in tl.static_range(1, SPLITS):
        parts += (tl.load(parts_ptr + split * split_stride + at, mask=there, other=0),)
    return parts


@triton.jit
def summed(first, rest, SPLITS: tl.constexpr):
    """In their order, float32."""
    sum = first.to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        sum += rest[split - 1].to(tl.float32)
    return sum


@triton.jit
def over_norm(squares_ptr, row, eps, NORMED: tl.constexpr):
    """One over the RMS norm's divisor of a row whose blocks left their squares; 1 without NORMED."""
    over = 1.0
    if NORMED > 0:
        BLOCKS: tl.constexpr = NORMED // 256
        block_B = tl.arange(0, triton.next_power_of_2(BLOCKS))
        square_B = tl.load(squares_ptr + row * BLOCKS + block_B, mask=block_B < BLOCKS, other=0)
        over = tl.rsqrt(tl.sum(square_B, axis=0) / NORMED + eps)
    return over


@triton.jit
def _norm(
    parts_ptr,
    kept_ptr,  # (rows, COLUMNS), read and written
    weight_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    code_sums_ptr,
    squares_ptr,  # written if LATE
    part_rows,
    eps,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: nothing is added
    BLOCKS: tl.constexpr,  # of a program: all of a row unless LATE
    LATE: tl.constexpr,  # leaves the divisor to whoever reads the matmul
    CODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = kept_ptr.dtype.element_ty
    if SPLITS == 0:
        # Of the first layer: what is kept was written by the kernel ahead.
        wait_for_inputs(EARLY)
    row = tl.program_id(1)
    block_B = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < COLUMNS
    w_BE = tl.load(weight_ptr + at_BE, mask=there_BE, other=0).to(tl.float32)
    x_BE = tl.load(kept_ptr + row * COLUMNS + at_BE, mask=there_BE, other=0).to(tl.float32)
    if SPLITS > 0:
        wait_for_inputs(EARLY)
        at_parts_BE = row * COLUMNS + at_BE
        rest = rest_of(parts_ptr, at_parts_BE, there_BE, part_rows * COLUMNS, SPLITS)
        tl.debug_barrier()
        added_BE = summed(tl.load(parts_ptr + at_parts_BE, mask=there_BE, other=0), rest, SPLITS)
        x_BE = (x_BE + added_BE.to(DTYPE).to(tl.float32)).to(DTYPE)
        tl.store(kept_ptr + row * COLUMNS + at_BE, x_BE, mask=there_BE)
        x_BE = x_BE.to(tl.float32)
    square_B = tl.sum(x_BE * x_BE, axis=1)
    if LATE:
        tl.static_assert(BLOCKS == 1 and CODES)
        tl.store(squares_ptr + row * (COLUMNS // 256) + block_B, square_B)
        y_BE = x_BE * w_BE
    else:
        mean = tl.sum(square_B, axis=0) / COLUMNS
        y_BE = (x_BE * tl.rsqrt(mean + eps) * w_BE).to(DTYPE).to(tl.float32)
    _write(y_BE, y_ptr, codes_ptr, scales_ptr, code_sums_ptr, row, COLUMNS, block_B, CODES)


@triton.jit
def _gate(
    gate_ptr,
    up_ptr,
    squares_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    code_sums_ptr,
    part_rows,
    eps,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMED: tl.constexpr,
    CODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(1)
    block_B = tl.program_id(0) + tl.arange(0, 1)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < COLUMNS
    at_parts_BE = row * STRIDE + at_BE
    wait_for_inputs(EARLY)
    gates = rest_of(gate_ptr, at_parts_BE, there_BE, part_rows * STRIDE, SPLITS)
    ups = rest_of(up_ptr, at_parts_BE, there_BE, part_rows * STRIDE, SPLITS)
    tl.debug_barrier()
    gate_BE = tl.load(gate_ptr + at_parts_BE, mask=there_BE, other=0)
    up_BE = tl.load(up_ptr + at_parts_BE, mask=there_BE, other=0)
    over = over_norm(squares_ptr, row, eps, NORMED)
    gate_BE = (summed(gate_BE, gates, SPLITS) * over).to(DTYPE).to(tl.float32)
    up_BE = (summed(up_BE, ups, SPLITS) * over).to(DTYPE).to(tl.float32)
    open_BE = (gate_BE / (1.0 + tl.exp(-gate_BE))).to(DTYPE).to(tl.float32)
    y_BE = (open_BE * up_BE).to(DTYPE).to(tl.float32)
    _write(y_BE, y_ptr, codes_ptr, scales_ptr, code_sums_ptr, row, COLUMNS, block_B, CODES)
