"""Shared parts of the kernels for few rows of activations: codes as floats, inputs in pairs,
results.

`floats`: codes are loaded as 16-bit words, because that is what a tensor core takes: a lane holds
two adjacent 16-bit numbers in one register. One shift and one 32-bit operation extract a nibble of
such a word and place it into a float whose other bits are fixed: 0x43000000 | q << 16 is 128 + q,
exactly, for q < 128. So no conversion is needed, which would be slow; the constant is subtracted
together with the minimum.

Triton does not generate these operations on pairs, so they are written in PTX. The plain
implementation of the same is for float32 inputs and for the interpreter, and tests require both to
give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.quant.blocks import GROUP_ROWS

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: R rows of W, K 16-bit words of a block, N columns of a matmul, M rows of x

GROUP: tl.constexpr = tl.constexpr(GROUP_ROWS)
"""Distance from a block of a row to the row's next one, in blocks."""


@triton.jit
def _plain(low, high, LOW: tl.constexpr, DOWN: tl.constexpr, MASK: tl.constexpr):
    """Return codes as integers: bits LOW to LOW + 4 of each word of `low` and, unless MASK is 0,
    the bits in MASK of `high` shifted DOWN.
    """
    code = (low >> LOW) & 15
    if MASK != 0:
        code |= ((high >> DOWN) if DOWN >= 0 else (high << -DOWN)) & MASK
    return code


@triton.jit
def floats(
    low,
    high,
    LOW: tl.constexpr,
    DOWN: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Return the codes of `_plain` plus 128 in float32, where 0x43000000 | q << 16 is 128 + q."""
    if PLAIN:
        out = (_plain(low, high, LOW, DOWN, MASK) + 128).to(tl.float32)
    else:
        # $0 is for the lower word of a pair, $1 for the upper one.
        UP: tl.constexpr = 16 - LOW
        FIRST: tl.constexpr = f"shl.b32 t, $2, {UP}; lop3.b32 $0, t, 0x000F0000, 0x43000000, 0xEA;"
        SECOND: tl.constexpr = (
            f"shr.u32 t, $2, {LOW}; lop3.b32 $1, t, 0x000F0000, 0x43000000, 0xEA;"
        )
        if MASK == 0:
            bits = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; {FIRST} {SECOND} }}",
                "=&r,=&r,r",
                [low],
                dtype=tl.int32,
                is_pure=True,
                pack=2,
            )
        else:
            MOVE: tl.constexpr = "shr" if DOWN >= 0 else "shl"
            BY: tl.constexpr = DOWN if DOWN >= 0 else -DOWN
            HIGH_UP: tl.constexpr = 16 - DOWN
            MASKS: tl.constexpr = MASK * 0x10000
            bits = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; {FIRST} {SECOND}"
                f" shl.b32 t, $3, {HIGH_UP}; lop3.b32 $0, t, {MASKS}, $0, 0xEA;"
                f" {MOVE}.b32 t, $3, {BY}; lop3.b32 $1, t, {MASKS}, $1, 0xEA; }}",
                "=&r,=&r,r,r",
                [low, high],
                dtype=tl.int32,
                is_pure=True,
                pack=2,
            )
        out = bits.to(tl.float32, bitcast=True)
    return out


@triton.jit
def inputs(x_ptr, pair, there, DOT: tl.constexpr):
    """Load inputs 2 `pair` and 2 `pair` + 1, 0 where not `there`. 16-bit inputs are loaded as
    pairs: four adjacent pairs are a vector of 16 bytes, which can be copied asynchronously ahead of
    its use.
    """
    if DOT == tl.float32:
        even = tl.load(x_ptr + 2 * pair, mask=there, other=0)
        odd = tl.load(x_ptr + 2 * pair + 1, mask=there, other=0)
    else:
        both = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pair, mask=there, other=0)
        even = both.to(tl.int16).to(DOT, bitcast=True)
        odd = (both >> 16).to(tl.int16).to(DOT, bitcast=True)
    return even, odd


@triton.jit
def four_words(pointer_R):
    """Load the four 32-bit words at each pointer, which is aligned to 16 bytes: one vector load."""
    words = tl.load(pointer_R[:, None] + tl.arange(0, 4)[None, :], eviction_policy="evict_first")
    even, odd = tl.split(tl.reshape(words, [pointer_R.shape[0], 2, 2]))
    first_R, third_R = tl.split(even)
    second_R, fourth_R = tl.split(odd)
    return first_R, second_R, third_R, fourth_R


@triton.jit
def turned(tile, step, start, end):
    """Return the block for `tile` at `step` of start to end. Each tile starts at another block and
    wraps around: tiles run concurrently, and would otherwise all read the same inputs from the same
    part of the L2 cache.
    """
    at = step + tile % (end - start)
    return tl.where(at >= end, at - (end - start), at)


@triton.jit
def half(word, shift):
    """Return the float16 in bits `shift` to `shift` + 16 of 32-bit words, as float32."""
    return (word >> shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def first_blocks(row_R, row_blocks):
    """Return the index of each row's first block in a plane."""
    place_R = row_R & (GROUP - 1)
    return (row_R - place_R) * row_blocks + place_R


@triton.jit
def words_of_d(d_ptr, block_R, b):
    """Return the 32-bit words that contain d of block b of each row, and its bit offset in the
    word.
    """
    at_R = block_R + b * GROUP
    word_R = tl.load(d_ptr.to(tl.pointer_type(tl.int32)) + (at_R >> 1))
    return word_R, (16 * (at_R & 1)).to(tl.int32)


@triton.jit
def rows_of(program, tiles, rows, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Return the tile of a program and its first and end row. A matrix is cut into `tiles` of
    nearly equal numbers of rows, at most TILE, and each is processed by TILE / ROWS programs, some
    of which may have no rows.
    """
    tile = program // (TILE // ROWS)
    start_row = (tile.to(tl.int64) * rows // tiles).to(tl.int32)
    end_row = ((tile + 1).to(tl.int64) * rows // tiles).to(tl.int32)
    first_row = start_row + program % (TILE // ROWS) * ROWS
    return tile, tl.minimum(first_row, end_row), tl.minimum(first_row + ROWS, end_row)


@triton.jit
def both_bytes(p_RN):
    """Return 128 times the sums over upper bytes of x plus those over lower ones, which are in
    adjacent columns.
    """
    ROWS: tl.constexpr = p_RN.shape[0]
    upper_RC, lower_RC = tl.split(tl.reshape(p_RN, [ROWS, p_RN.shape[1] // 2, 2]))
    return upper_RC * 128 + lower_RC


@triton.jit
def sum_of_four(y_RC):
    """Return the sum of every four columns: (0 + 1) + (2 + 3)."""
    ROWS: tl.constexpr = y_RC.shape[0]
    C: tl.constexpr = y_RC.shape[1]
    one_RC, other_RC = tl.split(tl.reshape(y_RC, [ROWS, C // 2, 2]))
    one_RM, other_RM = tl.split(tl.reshape(one_RC + other_RC, [ROWS, C // 4, 2]))
    return one_RM + other_RM


@triton.jit
def store(y_RM, y_ptr, bias_ptr, first_row, rows, stride, m, BIAS: tl.constexpr):
    """Store rows `first_row` to `rows` of W times all rows of x into y of shape (splits, m,
    stride), at the split of this program.
    """
    ROWS: tl.constexpr = y_RM.shape[0]
    row_R = first_row + tl.arange(0, ROWS)
    m_M = tl.arange(0, y_RM.shape[1])
    if BIAS:
        bias_R = tl.load(bias_ptr + row_R, mask=row_R < rows, other=0)
        y_RM += bias_R.to(tl.float32)[:, None]
    there = (row_R < rows)[:, None] & (m_M < m)[None, :]
    at_M = (tl.program_id(1) * m + m_M).to(tl.int64) * stride
    tl.store(y_ptr + at_M[None, :] + row_R[:, None], y_RM.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _add_splits(
    parts_ptr,  # *fp32  (splits, m, rows)
    bias_ptr,  # *       (rows)
    y_ptr,  # *          (m, rows)
    splits,
    rows,
    m,
    BIAS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row_E = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = row_E < rows
    at_E = tl.program_id(1).to(tl.int64) * rows + row_E
    y_E = tl.zeros([SIZE], tl.float32)
    if BIAS:
        y_E += tl.load(bias_ptr + row_E, mask=there, other=0).to(tl.float32)
    # Always in this order, so that the same inputs give the same bits.
    for split in range(splits):
        y_E += tl.load(parts_ptr + split * m.to(tl.int64) * rows + at_E, mask=there, other=0)
    tl.store(y_ptr + at_E, y_E.to(y_ptr.dtype.element_ty), mask=there)
