"""The kernels between the matmuls of a decoder layer in a decode step (one token per row).

    _norm      adds the matmul's output to the residual and stores it; its RMS norm, by blocks of
               256 columns or by whole rows
    _attend    attention, including the KV cache update, RoPE and the q/k norms of Qwen3; and its
               reduction _join (`decode_attend.py`)
    _gate      silu(gate) * up
    _largest   and _choose: the argmax of the logits (`decode_choose.py`)

At one row these kernels do almost no work: a layer of a 7B model reads 130 MB of weights, and they
read a few kB. Their cost is the number of launches and the latency of dependent loads, and they
must never synchronise with the host: positions, tokens and loop lengths are read on the device.
Each kernel writes its result directly as the next matmul's input, as floats or as integers
(`small_m_inputs.py`), so no extra kernel is needed for that.

Every program works on a single row, so a row's bits do not depend on the other rows.
`engine.models.decoder` is the reference. A matmul may leave partial sums (`small_m.products`),
which its consumer adds in order. A dense matmul is one part.

The run time is the chain of dependent loads: about 0.3 us each for data in the L2 cache, 0.6 us and
more otherwise. So each kernel issues all its loads at once. The number of parts, widths and strides
are constants: loops over parts are unrolled, so their loads are in flight together, and the loads
are 16 bytes wide, because the compiler knows the alignment of the addresses.

Blockwise RMS norm: matmuls are linear, so the divisor of a row, sqrt(mean x^2 + eps), can be
applied to the matmul's output instead of its input. Then a block of columns needs only its own
values, and a row is processed by one program per block, none of which waits for another:

    norm        x_b = kept_b + parts_b;  squares_b = sum x_b^2;  codes of x_b w_b
    matmul      of those codes
    consumer    matmul * rsqrt(sum of squares / columns + eps)

The block's values are not rounded to bf16 before they become 13-bit codes, which is one rounding
less than in the decoder. All other roundings are the decoder's. Where the normalised values
themselves are needed (dense matmuls, which add their own bias, and the head, whose output is
logits), one program processes a whole row.

ptxas sinks loads to their uses and moves additions between the loads, so that each load waits for
the one before it. A barrier after the loads of all parts but the first keeps them together
(`rest_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.dependent_launch import wait_for_inputs
from engine.kernels.small_m_inputs import write_codes

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

# Arguments: `parts_ptr` to (SPLITS, part_rows, stride), of which the first rows are read;
# `codes_ptr`, `scales_ptr`, `code_sums_ptr` the inputs of a matmul, written if CODES, else `y_ptr`,
# floats; `squares_ptr` to (rows, blocks of NORMED columns), float32.
# Shapes: B blocks of 256 values, E values of one


@triton.jit
def _write(
    x_BE, y_ptr, codes_ptr, scales_ptr, sums_ptr, row, columns, block_B, CODES: tl.constexpr
):
    """Store blocks of one row, float32 of (B, 256), rounded to codes or to the dtype of y."""
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
    """Load all parts at `at` except the first, which the caller must load after a barrier. Every
    sum begins with the first part, so ptxas cannot move an addition between these loads, which
    would serialise them.
    """
    parts = ()
    for split in tl.static_range(1, SPLITS):
        parts += (tl.load(parts_ptr + split * split_stride + at, mask=there, other=0),)
    return parts


@triton.jit
def summed(first, rest, SPLITS: tl.constexpr):
    """Return the sum of the parts in order, float32."""
    sum = first.to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        sum += rest[split - 1].to(tl.float32)
    return sum


@triton.jit
def over_norm(squares_ptr, row, eps, NORMED: tl.constexpr):
    """Return 1 / RMS of a row from the sums of squares of its blocks, or 1 if NORMED is 0."""
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
    BLOCKS: tl.constexpr,  # per program: the whole row unless LATE
    LATE: tl.constexpr,  # defer the division to the consumer of the matmul
    CODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = kept_ptr.dtype.element_ty
    if SPLITS == 0:
        # In the first layer the previous kernel wrote the residual itself.
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
