"""Up to 8 rows of x times K-quant blocks in integer arithmetic: the matmul that dominates text
generation.

Codes of weights have 4 to 6 bits, and rows of x are 13-bit integers in two bytes
(`small_m_inputs.py`), so int8 tensor cores can multiply them: four times as many at once as floats,
without converting the codes to floats first. For some sub-blocks j of a block:

    s[r] = sum over j of sc[r, j] sum over k in j of q[r, k] x[k]
    t[r] = sum over j of mn[r, j] X[j],  X[j] = sum over k in j of x[k]
    y[r] += scale (d[r] s[r] - dmin[r] t[r])                  Q4_K, Q5_K
    y[r] += scale d[r] s[r], with q - 32 for q                Q6_K

s and t are exact in int32: each covers 64 values (a chunk of Q4_K and Q5_K, or four runs of 16 in a
half of a Q6_K block), and the largest possible magnitude is below 2^31. Only two things are
rounded: x, to multiples of 1/4095 of its block's largest value, and the float32 sums over blocks.
There are four such sums per row, each for a quarter of every block.

The exact sums do not depend on how the tensor core's columns are used, the float32 operations are
the same, and their order is that of the blocks of a tile. So a row of x gets the same bits whatever
the number of rows.

A block of Q4_K or Q5_K has 8 sub-blocks of 32 values: chunk c of 64 values holds sub-block 2 c in
its low nibbles and 2 c + 1 in its high ones, each with a 6-bit scale sc and a 6-bit minimum mn.

    apart       1 to 4 rows of x    a column of the tensor core for each row of x, chunk and byte of x, in
                                    which the inputs of all other chunks are 0: two matmuls cover a block
    together    8 rows              a column for each row; a matmul for each sub-block and byte

Both keep a float32 sum for each chunk, and add the four in the same order at the end. Threads
exchange nothing before that, and both give the same bits.

A block of Q6_K has 16 scales, of 16 values each. A matmul covers values whose two upper bits are at
the same position in their byte.

    apart       1 to 4 rows of x    a column of the tensor core for each row of x, half of a block, 16 values
                                    of 32 and byte of x: four matmuls cover a block
    together    8 rows              a column for each row of x and 16 values of 32

Both keep a float32 sum for each half and 16 values of 32, and add the four in the same order at the
end.
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

# Shapes: R rows of W, K codes of a matmul, N its columns, C columns of sums, M rows of x


@triton.jit
def _nibbles(low, U: tl.constexpr, PLAIN: tl.constexpr):
    """Return nibble U of each byte."""
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
    """Return nibble U of each byte, with bit J of `high` above it."""
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
    """Return sc and mn of sub-blocks 2 c and 2 c + 1, each pair in two bytes, from the three words
    of 6-bit scales: `shift` is 16 (c mod 2), `late` is c >= 2.
    """
    mask = tl.where(late, 0x0F0F, 0x3F3F)
    top = tl.where(late, 0x3030, 0)
    sc = (tl.where(late, third, first) >> shift) & mask
    sc |= (first >> (shift + 2)) & top
    mn = (tl.where(late, third >> 4, second) >> shift) & mask
    mn |= (second >> (shift + 2)) & top
    return sc, mn


@triton.jit
def _weights_k45(low_R, high_R, header_R, b, HIGH: tl.constexpr, RUN: tl.constexpr):
    """Load a block of each row: its header, its fifth bits and its nibbles, one item per matmul."""
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
    """Return `y_RC` plus a block, with a column for each row of x and chunk."""
    header, high, lows = weights
    both_R, first_R, second_R, third_R = header
    # A matmul has two columns for each of those, one for each byte of x.
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
    """Return `y` plus a block, with a column for each of 8 rows of x; `y` has one item per chunk."""
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
    # Codes of one matmul: a whole block's low or high nibbles, or those of a single chunk if the
    # chunks have their fifth bits at different positions or if the columns are taken by the rows of
    # x.
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


@triton.jit
def _four_times_signed(low, high, U: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr):
    """Return 4 (q - 32), where q is nibble U of each byte with bits 2 G and 2 G + 1 of `high` above
    it. With the code in the upper bits of its byte, the sign costs no extra operation.
    """
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
    """Load a block of each row: d, scales, high bits of each half, low bits of each matmul."""
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
    """Return one signed byte of each word: shifted to the top, and back down with its sign."""
    return (words_RC << (24 - 16 * v - 8 * sixteen_C)[None, :]) >> 24


@triton.jit
def _apart_q6_k(
    y_RC, weights, x_ptr, scale_ptr, row_blocks, m, b, MP: tl.constexpr, PLAIN: tl.constexpr
):
    """Return `y_RC` plus a block, with a column for each row of x, half of a block and 16 values of
    32.
    """
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
    """Return `y` plus a block, with a column for each of 8 rows of x and 16 values of 32; `y` has
    one item per half.
    """
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
    # A matmul covers 32 values of each half of a block, whose top bits are at the same position.
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


# Arguments: `x_ptr`, *i8 (m, row_blocks, 2, 256), `scale_ptr`, *fp32 (m, row_blocks), and
# `sums_ptr`, *i32 (m, row_blocks, 8), are the inputs. One to three matrices are concatenated in y:
# the first two are of type KIND, the third of type LAST. Each has the planes `low`, *u8, 128 per
# block, `high`, *u8, 32 or 64, `header`, *i32, 4, which holds the scales for Q6_K, and `d`, *u8, 2.
# Planes that a type lacks and matrices beyond COUNT are not read. `bias_ptr` to (rows), read if
# BIAS; `y_ptr` to (splits, m, all rows). `tiles` are the numbers of tiles of each matrix; program
# (i, s) processes ROWS rows of one of them, blocks s split_blocks to (s + 1) split_blocks. MP is m,
# padded to 1, 2, 4 or 8.


@triton.jit
def _one_product(
    program,
    tiles,
    x_ptr,
    scale_ptr,
    sums_ptr,
    low_ptr,
    high_ptr,
    header_ptr,
    d_ptr,
    bias_ptr,
    y_ptr,
    rows,
    stride,
    row_blocks,
    m,
    split_blocks,
    KIND: tl.constexpr,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if KIND == "Q6_K":
        codes_q6_k(
            program, tiles, x_ptr, scale_ptr, low_ptr, high_ptr, header_ptr, d_ptr, bias_ptr, y_ptr,
            rows, stride, row_blocks, m, split_blocks, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
    else:
        tl.static_assert(KIND == "Q4_K" or KIND == "Q5_K")
        HIGH: tl.constexpr = KIND == "Q5_K"
        codes_k45(
            program, tiles, x_ptr, scale_ptr, sums_ptr, low_ptr, high_ptr, header_ptr, bias_ptr,
            y_ptr, rows, stride, row_blocks, m, split_blocks, HIGH, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip


@triton.jit
def _products(
    x_ptr,
    scale_ptr,
    sums_ptr,
    low_0,
    high_0,
    header_0,
    d_0,
    low_1,
    high_1,
    header_1,
    d_1,
    low_2,
    high_2,
    header_2,
    d_2,
    bias_ptr,
    y_ptr,
    rows_0,
    rows_1,
    rows_2,
    tiles_0,
    tiles_1,
    tiles_2,
    row_blocks,
    m,
    split_blocks,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    LAST: tl.constexpr,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    tl.static_assert(COUNT <= 3 and (COUNT == 3 or LAST == KIND))
    program = tl.program_id(0)
    stride = rows_0 + rows_1 + rows_2
    first_1 = tiles_0 * (TILE // ROWS)
    first_2 = first_1 + tiles_1 * (TILE // ROWS)
    low, high, header, d, rows, y, tiles = low_0, high_0, header_0, d_0, rows_0, y_ptr, tiles_0
    if COUNT > 1:
        if program >= first_1:
            low, high, header, d, rows, y = low_1, high_1, header_1, d_1, rows_1, y_ptr + rows_0
            tiles = tiles_1
    own = program - tl.where(program >= first_1, first_1, 0)
    if COUNT < 3:
        _one_product(
            own, tiles, x_ptr, scale_ptr, sums_ptr, low, high, header, d, bias_ptr, y, rows, stride,
            row_blocks, m, split_blocks, KIND, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
    elif program < first_2:
        _one_product(
            own, tiles, x_ptr, scale_ptr, sums_ptr, low, high, header, d, bias_ptr, y, rows, stride,
            row_blocks, m, split_blocks, KIND, MP, TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
    else:
        _one_product(
            program - first_2, tiles_2, x_ptr, scale_ptr, sums_ptr, low_2, high_2, header_2, d_2,
            bias_ptr, y_ptr + rows_0 + rows_1, rows_2, stride, row_blocks, m, split_blocks, LAST, MP,
            TILE, ROWS, BIAS, PLAIN, STAGES, EARLY,
        )  # fmt: skip
