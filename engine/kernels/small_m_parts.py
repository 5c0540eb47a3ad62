"""Shared parts of the kernels for few rows of activations: loads, sums and results."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.quant.blocks import GROUP_ROWS

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: R rows of W, K 16-bit words of a block, N columns of a matmul, M rows of x

GROUP: tl.constexpr = tl.constexpr(GROUP_ROWS)
"""Distance from a block of a row to the row's next one, in blocks."""


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
