"""Few rows of x times Q4_K or Q5_K blocks, unpacked on the way into the matrix unit.

A block is 64 words of 16 bits: chunk c of 16 words holds sub-block 2c in its low nibbles and 2c + 1
in its high ones, the even values in the low byte of a word and the odd ones in the high byte. So
four products of the same words, each shifted differently, cover a block:

    u, v       values of the words, i within the chunk    inputs
    0, 0       2i     of sub-block 2c                     even ones of the chunk's first 32
    0, 1       2i + 1 of sub-block 2c                     odd ones
    1, 0       2i     of sub-block 2c + 1                 even ones of its last 32
    1, 1       2i + 1 of sub-block 2c + 1                 odd ones

`_columns_k45`, up to 4 rows of x. Scales differ between sub-blocks, and a product sums over all words
of a block; so each sub-block gets a column of its own, in which the inputs of all others are 0:

    p[r, j] = sum over values k of sub-block j of (128 + q[r, k]) x[k]
    y[r]   += sum over j of d sc[r, j] (p[r, j] - 128 X[j]) - dmin mn[r, j] X[j],  X[j] = sum x[k]

A matrix unit multiplies 8 columns at least, which one row of x would leave idle. Codes times 16-bit
inputs are exact in float32, and scales are applied in float32: the only rounding is that of sums.
The lane that holds p[r, j] is the one that unpacks scale j of row r: each is unpacked once.

`_tiles_k45`, up to 64 rows: columns are rows of x, and weights are scaled before the product and
rounded once to the type of x, as in dequantisation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.small_m_parts import codes, floats, four_words, half, inputs, store, turned

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Arguments of both: `x_ptr` to (m, row_blocks * 256); the planes `low_ptr`, *u8 (rows,
# row_blocks, 128), `high_ptr`, *u8 (.., 32), and `header_ptr`, *i32 (.., 4); `bias_ptr` to (rows), read
# if BIAS; `y_ptr` to (splits, m, rows). Program (i, s) does rows ROWS i to ROWS (i + 1), blocks s
# split_blocks to (s + 1) split_blocks. HIGH is 0 for Q4_K, for which `high_ptr` is not read, and for
# Q5_K the bit of a code that is high, 16; MP the power of two that m is padded to.
# Shapes: R rows of W, K words of a block or of a chunk, N columns, M rows of x, L values of a
# sub-block


@triton.jit
def _scale_and_min(first, second, third, low_shift, late):
    """sc and mn from the three words of 6-bit scales, of sub-block j: `low_shift` is 8 (j mod 4),
    `late` is j >= 4."""
    mask = tl.where(late, 15, 63)
    top = tl.where(late, 48, 0)
    sc = (tl.where(late, third, first) >> low_shift) & mask
    sc |= (first >> (low_shift + 2)) & top
    mn = (tl.where(late, third, second) >> (low_shift + tl.where(late, 4, 0))) & mask
    mn |= (second >> (low_shift + 2)) & top
    return sc.to(tl.float32), mn.to(tl.float32)


@triton.jit
def _early(first, second, J: tl.constexpr):
    return ((first >> (8 * J)) & 63).to(tl.float32), ((second >> (8 * J)) & 63).to(tl.float32)


@triton.jit
def _late(first, second, third, J: tl.constexpr):
    sc = ((third >> (8 * J)) & 15) | ((first >> (8 * J + 2)) & 48)
    mn = ((third >> (8 * J + 4)) & 15) | ((second >> (8 * J + 2)) & 48)
    return sc.to(tl.float32), mn.to(tl.float32)


@triton.jit
def _columns_k45(
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
    OFFSET: tl.constexpr = 1024.0 if DOT == tl.float16 else 128.0
    # The words of a block are taken in runs that have the same bits of `high`.
    RUN: tl.constexpr = 64 if HIGH == 0 else 16
    # One row of x has a column for each of 8 sub-blocks; more rows have one for each of 4 chunks,
    # and separate sums for the two sub-blocks of a chunk.
    SINGLE: tl.constexpr = MP == 1
    N: tl.constexpr = 8 if SINGLE else 4 * MP
    first_row = tl.program_id(0) * ROWS
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    header_R = header_ptr + row_R * (row_blocks * 4)
    i_K = tl.arange(0, RUN)
    words = low_ptr.to(tl.pointer_type(tl.int16)) + (row_R * (row_blocks * 64))[:, None]
    words += i_K[None, :]
    high_words = high_ptr.to(tl.pointer_type(tl.int16)) + (row_R * (row_blocks * 16))[:, None]
    high_words += i_K[None, :]
    n_N = tl.arange(0, N)
    chunk_N = n_N // (2 if SINGLE else MP)
    m_N = n_N * 0 if SINGLE else n_N % MP
    there_N = m_N < m
    x_N = m_N * (row_blocks * 256)
    y_RN = tl.zeros([ROWS, N], tl.float32)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(step, start, end)
        both_R, first_R, second_R, third_R = four_words(header_R + b * 4)
        if HIGH != 0:
            high = tl.load(high_words + b * 16, eviction_policy="evict_first")
        p_RN = tl.zeros([ROWS, N], tl.float32)
        q_RN = tl.zeros([ROWS, N], tl.float32)
        for run in tl.static_range(64 // RUN):
            at = b * 64 + run * RUN
            low = tl.load(words + at, eviction_policy="evict_first")
            if HIGH == 0:
                high = low
            c_K = run * (RUN // 16) + i_K // 16
            for u in tl.static_range(2):
                own = (c_K[:, None] == chunk_N[None, :]) & there_N[None, :]
                if SINGLE:
                    own = own & ((n_N % 2) == u)[None, :]
                pair_K = b * 128 + 32 * c_K + 16 * u + i_K % 16
                at_KN = (m_N * (row_blocks * 128))[None, :] + pair_K[:, None]
                even_KN, odd_KN = inputs(x_ptr, at_KN, own, DOT)
                even = codes(low, high, 4 * u, 2 * run + u - 4, HIGH, DOT, PLAIN)
                odd = codes(low, high, 4 * u + 8, 2 * run + u + 4, HIGH, DOT, PLAIN)
                if SINGLE:
                    # Two sums, because each product waits for the one before it.
                    p_RN = tl.dot(even, even_KN, p_RN, input_precision="ieee")
                    q_RN = tl.dot(odd, odd_KN, q_RN, input_precision="ieee")
                elif u == 0:
                    p_RN = tl.dot(even, even_KN, p_RN, input_precision="ieee")
                    p_RN = tl.dot(odd, odd_KN, p_RN, input_precision="ieee")
                else:
                    q_RN = tl.dot(even, even_KN, q_RN, input_precision="ieee")
                    q_RN = tl.dot(odd, odd_KN, q_RN, input_precision="ieee")
        if SINGLE:
            p_RN += q_RN
        for u in tl.static_range(1 if SINGLE else 2):
            j_N = n_N if SINGLE else 2 * chunk_N + u
            at_NL = (x_N + b * 256 + 32 * j_N)[:, None] + tl.arange(0, 32)[None, :]
            x_NL = tl.load(x_ptr + at_NL, mask=there_N[:, None], other=0)
            sum_N = tl.sum(x_NL.to(tl.float32), axis=1)[None, :]
            sc, mn = _scale_and_min(
                first_R[:, None],
                second_R[:, None],
                third_R[:, None],
                (8 * (j_N & 3))[None, :],
                (j_N >= 4)[None, :],
            )
            y_RN += (half(both_R, 0)[:, None] * sc) * ((p_RN if u == 0 else q_RN) - OFFSET * sum_N)
            y_RN -= (half(both_R, 16)[:, None] * mn) * sum_N
    if SINGLE:
        y_RM = tl.sum(y_RN, axis=1)[:, None]
    else:
        y_RM = tl.sum(tl.reshape(y_RN, [ROWS, 4, MP]), axis=1)
    store(y_RM, y_ptr, bias_ptr, first_row, rows, m, BIAS)


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
    words = low_ptr.to(tl.pointer_type(tl.int16)) + (row_R * (row_blocks * 64))[:, None]
    words += i_K[None, :]
    high_words = high_ptr.to(tl.pointer_type(tl.int16)) + (row_R * (row_blocks * 16))[:, None]
    high_words += i_K[None, :]
    header_R = header_ptr + row_R * (row_blocks * 4)
    y_RM = tl.zeros([ROWS, MP], tl.float32)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(step, start, end)
        both_R, first_R, second_R, third_R = four_words(header_R + b * 4)
        if HIGH != 0:
            high = tl.load(high_words + b * 16)
        for c in tl.static_range(4):
            low = tl.load(words + b * 64 + c * 16, eviction_policy="evict_first")
            if HIGH == 0:
                high = low
            for u in tl.static_range(2):
                if c < 2:
                    sc_R, mn_R = _early(first_R, second_R, 2 * c + u)
                else:
                    sc_R, mn_R = _late(first_R, second_R, third_R, 2 * c + u - 4)
                scale_R = half(both_R, 0) * sc_R
                # The offset of the codes goes into the minimum.
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
    store(y_RM, y_ptr, bias_ptr, first_row, rows, m, BIAS)
