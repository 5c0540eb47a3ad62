"""Codes of Q6_K times rows of x in integers: what `small_m_codes.py` does with their blocks.

A block has 16 scales, of 16 values each. A product is of values whose two upper bits lie in the same place.

    apart       1 to 4 rows of x    a column of the matrix unit for each row of x, half of a block, 16 values of
                                    32 and byte of x: four products cover a block
    together    8 rows              a column for each row of x and 16 values of 32

Both keep a float32 sum for each half and 16 values of 32, and add the four in one order at the end, as
`small_m_codes_k45.py` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.dependent_launch import wait_for_inputs
from engine.kernels.small_m_parts import (
    GROUP,
    both_bytes,
    first_blocks,
    four_words,
    half,
    rows_of,
    store,
    sum_of_four,
    turned,
    words_of_d,
)

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

# Arguments: see `small_m_codes.py`.
# Shapes: R rows of W, K codes of a product, N its columns, C columns of sums, M rows of x


@triton.jit
def _four_times_signed(low, high, U: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr):
    """4 (q - 32), q being nibble U of each byte and bits 2 G and 2 G + 1 of `high` above it. As the
    code is in the upper bits of its byte, its sign costs nothing."""
    if PLAIN:
        code = ((low >> (4 * U)) & 15) | (((high >> (2 * G)) & 3) << 4)
        code = ((code << 2) ^ 128).to(tl.int8, bitcast=True)
    else:
        FIRST: tl.constexpr = "shl.b32 t, $1, 2;" if U == 0 else "shr.u32 t, $1, 2;"
        # 0x6A is (a and b) xor c; 0xEA is (a and b) or c.
        code = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, s; {FIRST} shl.b32 s, $2, {6 - 2 * G};"
            " lop3.b32 s, s, 0xC0C0C0C0, 0x80808080, 0x6A;"
            " lop3.b32 $0, t, 0x3C3C3C3C, s, 0xEA; }",
            "=r,r,r",
            [low, high],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return code


@triton.jit
def _weights_q6_k(low_R, high_R, scales_R, d_ptr, block_R, b, PAIR: tl.constexpr):
    """A block of each row: d, scales, high bits of each half, low bits of each product's."""
    k_K = tl.arange(0, PAIR)
    low_RK = low_R[:, None] + (64 * (k_K // 32) + k_K % 32)[None, :]
    high_RK = high_R[:, None] + k_K[None, :]
    d = words_of_d(d_ptr, block_R, b)
    scales = four_words(scales_R + b * (4 * GROUP))
    highs, lows = (), ()
    for h in tl.static_range(64 // PAIR):
        highs += (tl.load(high_RK + b * (64 * GROUP) + 32 * h, eviction_policy="evict_first"),)
        for v in tl.static_range(2):
            at_RK = low_RK + b * (128 * GROUP) + 64 * h + 32 * v
            lows += (tl.load(at_RK, eviction_policy="evict_first"),)
    return d, scales, highs, lows


@triton.jit
def _scale_q6_k(words_RC, v: tl.constexpr, sixteen_C):
    """One signed byte of each word: moved to the top, and down again with its sign."""
    return (words_RC << (24 - 16 * v - 8 * sixteen_C)[None, :]) >> 24


@triton.jit
def _apart_q6_k(
    y_RC, weights, x_ptr, scale_ptr, row_blocks, m, b, MP: tl.constexpr, PLAIN: tl.constexpr
):
    """`y_RC` plus a block, with a column for each row of x, half of a block and 16 values of 32."""
    d, scales, highs, lows = weights
    word_R, place_R = d
    n_N = tl.arange(0, 8 * MP)
    there_N = n_N // 8 < m
    c_C = tl.arange(0, 4 * MP)
    half_C, sixteen_C, m_C = c_C // 2 % 2, c_C % 2, c_C // 4
    k_K = tl.arange(0, 64)
    own_KN = (k_K // 16)[:, None] == (n_N % 8 // 2)[None, :]
    own_KN = own_KN & there_N[None, :]
    x_N = (n_N // 8) * (row_blocks * 512) + 256 * (n_N % 2)
    s_RC = tl.zeros([y_RC.shape[0], 4 * MP], tl.int32)
    for u in tl.static_range(2):
        four_RC = tl.where((half_C == 1)[None, :], scales[2 + u][:, None], scales[u][:, None])
        for v in tl.static_range(2):
            code = _four_times_signed(lows[v], highs[0], u, v + 2 * u, PLAIN)
            value_K = b * 512 + 128 * (k_K // 32) + 64 * u + 32 * v + k_K % 32
            x_KN = tl.load(x_ptr + (value_K[:, None] + x_N[None, :]), mask=own_KN, other=0)
            p_RN = tl.dot(code, x_KN, out_dtype=tl.int32) >> 2
            s_RC += both_bytes(p_RN) * _scale_q6_k(four_RC, v, sixteen_C)
    scale_C = tl.load(scale_ptr + m_C * row_blocks + b, mask=m_C < m, other=0)
    return _added_q6_k(y_RC, half(word_R, place_R), s_RC, scale_C)


@triton.jit
def _together_q6_k(y, weights, x_ptr, scale_ptr, row_blocks, m, b, PLAIN: tl.constexpr):
    """The same with a column for each of 8 rows of x and 16 values of 32, half by half."""
    d, scales, highs, lows = weights
    word_R, place_R = d
    n_N = tl.arange(0, 16)
    sixteen_N, m_N = n_N // 8, n_N % 8
    k_K = tl.arange(0, 32)
    own_KN = ((k_K // 16)[:, None] == sixteen_N[None, :]) & (m_N < m)[None, :]
    scale_N = tl.load(scale_ptr + m_N * row_blocks + b, mask=m_N < m, other=0)
    out = ()
    for h in tl.static_range(2):
        s_RN = tl.zeros([word_R.shape[0], 16], tl.int32)
        for u in tl.static_range(2):
            for v in tl.static_range(2):
                code = _four_times_signed(lows[2 * h + v], highs[h], u, v + 2 * u, PLAIN)
                at_K = b * 512 + 128 * h + 64 * u + 32 * v + k_K
                at_KN = at_K[:, None] + (m_N * (row_blocks * 512))[None, :]
                upper_KN = tl.load(x_ptr + at_KN, mask=own_KN, other=0)
                lower_KN = tl.load(x_ptr + at_KN + 256, mask=own_KN, other=0)
                p_RN = (tl.dot(code, upper_KN, out_dtype=tl.int32) >> 2) * 128
                p_RN += tl.dot(code, lower_KN, out_dtype=tl.int32) >> 2
                s_RN += p_RN * _scale_q6_k(scales[2 * h + u][:, None], v, sixteen_N)
        out += (_added_q6_k(y[h], half(word_R, place_R), s_RN, scale_N),)
    return out


@triton.jit
def _added_q6_k(y_RC, d_R, s_RC, scale_C):
    return y_RC + scale_C[None, :] * (d_R[:, None] * s_RC.to(tl.float32))


@triton.jit
def codes_q6_k(
    program,
    tiles,
    x_ptr,
    scale_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    d_ptr,
    bias_ptr,
    y_ptr,
    rows,
    stride,
    row_blocks,
    m,
    split_blocks,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Products are of 32 values of each half of a block, which have their top bits in the same place.
    PAIR: tl.constexpr = 64 if MP < 8 else 32
    tile, first_row, end_row = rows_of(program, tiles, rows, TILE, ROWS)
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), end_row - 1).to(tl.int64)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    block_R = first_blocks(row_R, row_blocks)
    low_R = low_ptr + block_R * 128
    high_R = high_ptr + block_R * 64
    scales_R = scales_ptr + block_R * 4
    if MP < 8:
        y = tl.zeros([ROWS, 4 * MP], tl.float32)
    else:
        zero_RN = tl.zeros([ROWS, 2 * MP], tl.float32)
        y = (zero_RN, zero_RN)
    wait_for_inputs(EARLY)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(tile, step, start, end)
        weights = _weights_q6_k(low_R, high_R, scales_R, d_ptr, block_R, b, PAIR)
        if MP < 8:
            y = _apart_q6_k(y, weights, x_ptr, scale_ptr, row_blocks, m, b, MP, PLAIN)
        else:
            y = _together_q6_k(y, weights, x_ptr, scale_ptr, row_blocks, m, b, PLAIN)
    if MP < 8:
        y_RM = sum_of_four(y)
    else:
        early_RM = tl.sum(tl.reshape(y[0], [ROWS, 2, MP]), axis=1)
        y_RM = early_RM + tl.sum(tl.reshape(y[1], [ROWS, 2, MP]), axis=1)
    store(y_RM, y_ptr, bias_ptr, first_row, end_row, stride, m, BIAS)
