"""Few rows of x times Q4_K, Q5_K or Q6_K blocks, unpacked on the way into the tensor cores.

A block of Q4_K or Q5_K is 64 words of 16 bits: chunk c of 16 words holds sub-block 2c in its low
nibbles and 2c + 1 in its high ones, the even values in the low byte of a word and the odd ones in
the high byte. So four matmuls of the same words, each shifted differently, cover a block:

    u, v       values of the words, i within the chunk    inputs
    0, 0       2i     of sub-block 2c                     even ones of the chunk's first 32
    0, 1       2i + 1 of sub-block 2c                     odd ones
    1, 0       2i     of sub-block 2c + 1                 even ones of its last 32
    1, 1       2i + 1 of sub-block 2c + 1                 odd ones

The planes of Q6_K have another order. Half h of a block has 32 words of 16 bits, and its groups of
32 values g = 0..3 are in words 16 (g mod 2) to 16 (g mod 2) + 16, in the low nibbles for g < 2 and
in the high ones otherwise. Word i of those holds values 2i and 2i + 1; the top two bits of both are
bits 2g and 2g + 1 of the two bytes of word 16 h + i of the high plane. A scale belongs to 16
values, which is 8 words.

Columns of a matmul are rows of x, up to 64. Weights are scaled before the matmul and rounded once
to the dtype of x, as in dequantisation. For up to 8 rows `small_m_codes.py` is faster.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.small_m_parts import (
    GROUP,
    first_blocks,
    floats,
    four_words,
    half,
    inputs,
    store,
    turned,
    words_of_d,
)

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Arguments: `x_ptr` to (m, row_blocks * 256); the planes `low_ptr`, *u8, 128 per block, `high_ptr`,
# *u8, 32, and `header_ptr`, *i32, 4; `bias_ptr` to (rows), read if BIAS; `y_ptr` to (splits, m,
# rows). Program (i, s) processes rows ROWS i to ROWS (i + 1) and blocks s split_blocks to (s + 1)
# split_blocks. HIGH is 0 for Q4_K, for which `high_ptr` is not read, and 16 for Q5_K, the value of
# a code's high bit. MP is m, padded to a power of two.
# Shapes: R rows of W, K words of a chunk, M rows of x


@triton.jit
def _early(first, second, J: tl.constexpr):
    return ((first >> (8 * J)) & 63).to(tl.float32), ((second >> (8 * J)) & 63).to(tl.float32)


@triton.jit
def _late(first, second, third, J: tl.constexpr):
    sc = ((third >> (8 * J)) & 15) | ((first >> (8 * J + 2)) & 48)
    mn = ((third >> (8 * J + 4)) & 15) | ((second >> (8 * J + 2)) & 48)
    return sc.to(tl.float32), mn.to(tl.float32)


@triton.jit
def _tiles_k45(
    x_ptr,
    low_ptr,
    high_ptr,
    header_ptr,
    bias_ptr,
    y_ptr,
    rows,
    row_blocks,
    m,
    split_blocks,
    HIGH: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
):
    DOT: tl.constexpr = x_ptr.dtype.element_ty
    first_row = tl.program_id(0) * ROWS
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    i_K = tl.arange(0, 16)
    m_M = tl.arange(0, MP)
    there_M = m_M < m
    x_M = m_M * (row_blocks * 128)
    block_R = first_blocks(row_R, row_blocks)
    words = low_ptr.to(tl.pointer_type(tl.int16)) + (block_R * 64)[:, None]
    words += i_K[None, :]
    high_words = high_ptr.to(tl.pointer_type(tl.int16)) + (block_R * 16)[:, None]
    high_words += i_K[None, :]
    header_R = header_ptr + block_R * 4
    y_RM = tl.zeros([ROWS, MP], tl.float32)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(tl.program_id(0), step, start, end)
        both_R, first_R, second_R, third_R = four_words(header_R + b * (4 * GROUP))
        if HIGH != 0:
            high = tl.load(high_words + b * (16 * GROUP))
        for c in tl.static_range(4):
            low = tl.load(words + b * (64 * GROUP) + c * 16, eviction_policy="evict_first")
            if HIGH == 0:
                high = low
            for u in tl.static_range(2):
                if c < 2:
                    sc_R, mn_R = _early(first_R, second_R, 2 * c + u)
                else:
                    sc_R, mn_R = _late(first_R, second_R, third_R, 2 * c + u - 4)
                scale_R = half(both_R, 0) * sc_R
                # The offset of the codes is folded into the minimum.
                least = (half(both_R, 16) * mn_R + 128.0 * scale_R)[:, None]
                pair_K = b * 128 + c * 32 + u * 16 + i_K
                at_KM = x_M[None, :] + pair_K[:, None]
                even_KM, odd_KM = inputs(x_ptr, at_KM, there_M[None, :], DOT)
                even = floats(low, high, 4 * u, u + 2 * c - 4, HIGH, PLAIN)
                odd = floats(low, high, 4 * u + 8, u + 2 * c + 4, HIGH, PLAIN)
                even = (scale_R[:, None] * even - least).to(DOT)
                odd = (scale_R[:, None] * odd - least).to(DOT)
                y_RM = tl.dot(even, even_KM, y_RM, input_precision="ieee")
                y_RM = tl.dot(odd, odd_KM, y_RM, input_precision="ieee")
    store(y_RM, y_ptr, bias_ptr, first_row, rows, rows, m, BIAS)


# Arguments: `x_ptr` to (m, row_blocks * 256); the planes `low_ptr`, *u8, 128 per block, `high_ptr`,
# *u8, 64, `scales_ptr`, *i8, 16, and `d_ptr`, *fp16, 1; the rest as above.
# Shapes: R rows of W, K words of a group, M rows of x


@triton.jit
def _tiles_q6_k(
    x_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    d_ptr,
    bias_ptr,
    y_ptr,
    rows,
    row_blocks,
    m,
    split_blocks,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
):
    DOT: tl.constexpr = x_ptr.dtype.element_ty
    first_row = tl.program_id(0) * ROWS
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    i_K = tl.arange(0, 16)
    m_M = tl.arange(0, MP)
    there_M = m_M < m
    x_M = m_M * (row_blocks * 128)
    block_R = first_blocks(row_R, row_blocks)
    low_words = (low_ptr + block_R * 128).to(tl.pointer_type(tl.int16))[:, None]
    low_words += i_K[None, :]
    high_words = (high_ptr + block_R * 64).to(tl.pointer_type(tl.int16))[:, None]
    high_words += i_K[None, :]
    scales_R = (scales_ptr + block_R * 16).to(tl.pointer_type(tl.int32))
    y_RM = tl.zeros([ROWS, MP], tl.float32)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(tl.program_id(0), step, start, end)
        word_R, place_R = words_of_d(d_ptr, block_R, b)
        d_R = half(word_R, place_R)
        s0_R, s1_R, s2_R, s3_R = four_words(scales_R + b * (4 * GROUP))
        for h in tl.static_range(2):
            high = tl.load(high_words + b * (32 * GROUP) + h * 16, eviction_policy="evict_first")
            for v in tl.static_range(2):
                low = tl.load(
                    low_words + b * (64 * GROUP) + h * 32 + v * 16, eviction_policy="evict_first"
                )
                for u in tl.static_range(2):
                    if h == 0:
                        four_R = s1_R if u else s0_R
                    else:
                        four_R = s3_R if u else s2_R
                    first_R = d_R * ((four_R << (24 - 16 * v)) >> 24).to(tl.float32)
                    second_R = d_R * ((four_R << (16 - 16 * v)) >> 24).to(tl.float32)
                    scale = tl.where((i_K < 8)[None, :], first_R[:, None], second_R[:, None])
                    at_KM = x_M[None, :] + (b * 128 + h * 64 + v * 16 + u * 32 + i_K)[:, None]
                    even_KM, odd_KM = inputs(x_ptr, at_KM, there_M[None, :], DOT)
                    even = floats(low, high, 4 * u, 4 * u + 2 * v - 4, 48, PLAIN)
                    odd = floats(low, high, 4 * u + 8, 4 * u + 2 * v + 4, 48, PLAIN)
                    # The code of 0 is 32, and codes come with 128 added.
                    zero = 160.0 * scale
                    even = (scale * even - zero).to(DOT)
                    odd = (scale * odd - zero).to(DOT)
                    y_RM = tl.dot(even, even_KM, y_RM, input_precision="ieee")
                    y_RM = tl.dot(odd, odd_KM, y_RM, input_precision="ieee")
    store(y_RM, y_ptr, bias_ptr, first_row, rows, rows, m, BIAS)
