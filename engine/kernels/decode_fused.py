"""The kernels between the products of a step of generation, with fewer launches and round trips.

They do what `decode.py` does, for the same products, in another cut:

    _norm_blocks     x + what the layer gave, kept; its RMS norm, by blocks of 256 columns or whole rows
    _attend_joined   attention and the join of its chunks: `decode_fused_attend.py`
    _gate_blocks     silu(gate) * up

At one row a kernel takes as long as the loads that wait for one another: some 0.3 us each for what is
in the L2 cache, 0.6 us and more for the rest. So each kernel here asks for everything at once. Numbers
of parts, widths and strides are constants: loops over parts are unrolled, their loads are in flight
together, and 16 bytes wide, because the compiler can tell how addresses are aligned.

RMS norm in blocks: products are linear, so the divisor of a row, sqrt(mean x^2 + eps), can be applied
to what comes out of the product instead of to what goes in. Then a block of columns knows all it needs,
and a row is done by as many programs as it has blocks, none of which waits for another:

    norm        x_b = kept_b + parts_b;  squares_b = sum x_b^2;  codes of x_b w_b
    product     of those codes
    its reader  product * rsqrt(sum of squares / columns + eps)

The block's values are not rounded to bf16 on their way into 13-bit codes, as they are in `decode.py`:
one rounding less, other bits. Whoever needs the norm itself (products of floats, which add their bias
themselves; the head, whose results are logits) has a program do whole rows.

The assembler moves loads down to their use and sums up between loads, as far as it may: each load then
waits for the one before. A barrier behind all parts but the first keeps them together (`rest_of`).

DEPENDENT kernels load before they wait whatever the kernels close before them do not write: weights, the
cache, the kept row. A product may let the next kernel begin before it has itself waited, so the
kernel before a product may still run: what that one wrote is loaded after the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.decode import _begin, _write

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

# Arguments: `parts_ptr` to (SPLITS, part_rows, stride), of which the first rows are read; `codes_ptr`,
# `scales_ptr`, `code_sums_ptr` the inputs of a product, written if CODES, else `y_ptr`, floats;
# `squares_ptr` to (rows, blocks of NORMED columns), float32.
# Shapes: B blocks of 256 values, E values of one


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
def _norm_blocks(
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
    LATE: tl.constexpr,  # leaves the divisor to whoever reads the product
    CODES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    DTYPE: tl.constexpr = kept_ptr.dtype.element_ty
    row = tl.program_id(1)
    block_B = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < COLUMNS
    w_BE = tl.load(weight_ptr + at_BE, mask=there_BE, other=0).to(tl.float32)
    if SPLITS == 0:
        # Of the kernel just before.
        _begin(DEPENDENT)
    x_BE = tl.load(kept_ptr + row * COLUMNS + at_BE, mask=there_BE, other=0).to(tl.float32)
    if SPLITS > 0:
        _begin(DEPENDENT)
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
def _gate_blocks(
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
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(1)
    block_B = tl.program_id(0) + tl.arange(0, 1)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < COLUMNS
    at_parts_BE = row * STRIDE + at_BE
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
