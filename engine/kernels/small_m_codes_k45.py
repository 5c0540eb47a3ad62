"""Codes of Q4_K and Q5_K times rows of x in integers: what `small_m_codes.py` does with their blocks.

A block has 8 sub-blocks of 32 values: chunk c of 64 has sub-blocks 2 c in its low nibbles and 2 c + 1 in its high
ones, each with a scale sc and a minimum mn of 6 bits.

    apart       1 to 4 rows of x    a column of the matrix unit for each row of x, chunk and byte of x, in
                                    which the inputs of all other chunks are 0: two products cover a block
    together    8 rows              a column for each row; a product for each sub-block and byte

Both keep a float32 sum for each chunk, and add the four in one order at the end: nothing is exchanged
between threads before that, and they give the same bits.
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
)

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

# Arguments: see `small_m_codes.py`.
# Shapes: R rows of W, K codes of a product, N its columns, C columns of sums, M rows of x


@triton.jit
def _nibbles(low, U: tl.constexpr, PLAIN: tl.constexpr):
    """Nibble U of each byte."""
    if PLAIN:
        code = ((low >> (4 * U)) & 15).to(tl.int8)
    else:
        code = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;"
            if U == 0
            else "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
            "=r,r",
            [low],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return code


@triton.jit
def _five_bits(low, high, U: tl.constexpr, J: tl.constexpr, PLAIN: tl.constexpr):
    """Nibble U of each byte, and bit J of `high` above it."""
    if PLAIN:
        code = (((low >> (4 * U)) & 15) | (((high >> J) & 1) << 4)).to(tl.int8)
    else:
        MOVE: tl.constexpr = "shr" if J >= 4 else "shl"
        BY: tl.constexpr = J - 4 if J >= 4 else 4 - J
        code = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, s; shr.u32 t, $1, {4 * U}; and.b32 t, t, 0x0F0F0F0F;"
            f" {MOVE}.b32 s, $2, {BY}; lop3.b32 $0, s, 0x10101010, t, 0xEA; }}",
            "=r,r,r",
            [low, high],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return code


@triton.jit
def _scales_and_mins(first, second, third, shift, late):
    """sc and mn of sub-blocks 2 c and 2 c + 1, each pair in two bytes, from the three words of 6-bit
    scales: `shift` is 16 (c mod 2), `late` is c >= 2."""
    mask = tl.where(late, 0x0F0F, 0x3F3F)
    top = tl.where(late, 0x3030, 0)
    sc = (tl.where(late, third, first) >> shift) & mask
    sc |= (first >> (shift + 2)) & top
    mn = (tl.where(late, third >> 4, second) >> shift) & mask
    mn |= (second >> (shift + 2)) & top
    return sc, mn


@triton.jit
def _weights_k45(low_R, high_R, header_R, b, HIGH: tl.constexpr, RUN: tl.constexpr):
    """A block of each row: its header, its fifth bits and its nibbles, product by product."""
    k_K = tl.arange(0, RUN)
    header = four_words(header_R + b * (4 * GROUP))
    high = 0
    if HIGH:
        high = tl.load(
            (high_R + b * (32 * GROUP))[:, None] + k_K[None, :], eviction_policy="evict_first"
        )
    lows = ()
    for run in tl.static_range(128 // RUN):
        at_RK = (low_R + b * (128 * GROUP) + run * RUN)[:, None] + k_K[None, :]
        lows += (tl.load(at_RK, eviction_policy="evict_first"),)
    return header, high, lows


@triton.jit
def _apart_k45(
    y_RC, weights, x_ptr, scale_ptr, sums_ptr, row_blocks, m, b,
    HIGH: tl.constexpr, MP: tl.constexpr, RUN: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`y_RC` plus a block, with a column for each row of x and chunk."""
    header, high, lows = weights
    both_R, first_R, second_R, third_R = header
    # Of a product there are two for each of those, one for each byte of x.
    n_N = tl.arange(0, 8 * MP)
    there_N = n_N // 8 < m
    c_C = tl.arange(0, 4 * MP)
    chunk_C, m_C = c_C % 4, c_C // 4
    there_C = m_C < m
    k_K = tl.arange(0, RUN)
    sc_RC, mn_RC = _scales_and_mins(
        first_R[:, None], second_R[:, None], third_R[:, None],
        (16 * (chunk_C % 2))[None, :], (chunk_C >= 2)[None, :],
    )  # fmt: skip
    s_RC = tl.zeros([y_RC.shape[0], 4 * MP], tl.int32)
    t_RC = tl.zeros([y_RC.shape[0], 4 * MP], tl.int32)
    x_N = (n_N // 8) * (row_blocks * 512) + 256 * (n_N % 2)
    for u in tl.static_range(2):
        p_RN = tl.zeros([y_RC.shape[0], 8 * MP], tl.int32)
        for run in tl.static_range(128 // RUN):
            if HIGH:
                code = _five_bits(lows[run], high, u, 2 * run + u, PLAIN)
            else:
                code = _nibbles(lows[run], u, PLAIN)
            value_K = b * 512 + 64 * run + 64 * (k_K // 32) + 32 * u + k_K % 32
            own_KN = (run + k_K // 32)[:, None] == (n_N % 8 // 2)[None, :]
            own_KN = own_KN & there_N[None, :]
            x_KN = tl.load(x_ptr + (value_K[:, None] + x_N[None, :]), mask=own_KN, other=0)
            p_RN = tl.dot(code, x_KN, p_RN, out_dtype=tl.int32)
        at_C = sums_ptr + (m_C * row_blocks + b) * 8 + 2 * chunk_C + u
        sum_C = tl.load(at_C, mask=there_C, other=0)
        s_RC += both_bytes(p_RN) * ((sc_RC >> (8 * u)) & 255)
        t_RC += ((mn_RC >> (8 * u)) & 255) * sum_C[None, :]
    scale_C = tl.load(scale_ptr + m_C * row_blocks + b, mask=there_C, other=0)
    return _added_k45(y_RC, both_R, s_RC, t_RC, scale_C)


@triton.jit
def _together_k45(
    y, weights, x_ptr, scale_ptr, sums_ptr, row_blocks, m, b,
    HIGH: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The same with a column for each of 8 rows of x, chunk by chunk: `y` are the sums of each."""
    header, high, lows = weights
    both_R, first_R, second_R, third_R = header
    m_M = tl.arange(0, 8)
    there_M = m_M < m
    k_K = tl.arange(0, 32)
    scale_M = tl.load(scale_ptr + m_M * row_blocks + b, mask=there_M, other=0)
    out = ()
    for c in tl.static_range(4):
        sc_R, mn_R = _scales_and_mins(first_R, second_R, third_R, 16 * (c % 2), c >= 2)
        s_RM = tl.zeros([both_R.shape[0], 8], tl.int32)
        t_RM = tl.zeros([both_R.shape[0], 8], tl.int32)
        for u in tl.static_range(2):
            if HIGH:
                code = _five_bits(lows[c], high, u, 2 * c + u, PLAIN)
            else:
                code = _nibbles(lows[c], u, PLAIN)
            at_K = b * 512 + 64 * c + 32 * u + k_K
            at_KM = at_K[:, None] + (m_M * (row_blocks * 512))[None, :]
            upper_KM = tl.load(x_ptr + at_KM, mask=there_M[None, :], other=0)
            lower_KM = tl.load(x_ptr + at_KM + 256, mask=there_M[None, :], other=0)
            p_RM = tl.dot(code, upper_KM, out_dtype=tl.int32) * 128
            p_RM += tl.dot(code, lower_KM, out_dtype=tl.int32)
            at_M = sums_ptr + (m_M * row_blocks + b) * 8 + 2 * c + u
            sum_M = tl.load(at_M, mask=there_M, other=0)
            s_RM += p_RM * ((sc_R >> (8 * u)) & 255)[:, None]
            t_RM += ((mn_R >> (8 * u)) & 255)[:, None] * sum_M[None, :]
        out += (_added_k45(y[c], both_R, s_RM, t_RM, scale_M),)
    return out


@triton.jit
def _added_k45(y_RC, both_R, s_RC, t_RC, scale_C):
    d_RC = half(both_R, 0)[:, None] * s_RC.to(tl.float32)
    dmin_RC = half(both_R, 16)[:, None] * t_RC.to(tl.float32)
    return y_RC + scale_C[None, :] * (d_RC - dmin_RC)


@triton.jit
def codes_k45(
    program,
    tiles,
    x_ptr,
    scale_ptr,
    sums_ptr,
    low_ptr,
    high_ptr,
    header_ptr,
    bias_ptr,
    y_ptr,
    rows,
    stride,
    row_blocks,
    m,
    split_blocks,
    HIGH: tl.constexpr,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Codes of one product: a whole block's low or high nibbles, or those of a chunk where the chunks
    # have their fifth bits in different places or the rows of x have the columns.
    RUN: tl.constexpr = 128 if MP < 8 and not HIGH else 32
    tile, first_row, end_row = rows_of(program, tiles, rows, TILE, ROWS)
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), end_row - 1).to(tl.int64)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    block_R = first_blocks(row_R, row_blocks)
    header_R = header_ptr + block_R * 4
    low_R = low_ptr + block_R * 128
    high_R = high_ptr + block_R * 32
    if MP < 8:
        y = tl.zeros([ROWS, 4 * MP], tl.float32)
    else:
        zero_RM = tl.zeros([ROWS, MP], tl.float32)
        y = (zero_RM, zero_RM, zero_RM, zero_RM)
    wait_for_inputs(EARLY)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(tile, step, start, end)
        weights = _weights_k45(low_R, high_R, header_R, b, HIGH, RUN)
        if MP < 8:
            y = _apart_k45(
                y, weights, x_ptr, scale_ptr, sums_ptr, row_blocks, m, b, HIGH, MP, RUN, PLAIN
            )
        else:
            y = _together_k45(y, weights, x_ptr, scale_ptr, sums_ptr, row_blocks, m, b, HIGH, PLAIN)
    if MP < 8:
        y_RM = sum_of_four(y)
    else:
        y_RM = (y[0] + y[1]) + (y[2] + y[3])
    store(y_RM, y_ptr, bias_ptr, first_row, end_row, stride, m, BIAS)
