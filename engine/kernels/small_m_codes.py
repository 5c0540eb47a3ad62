"""Up to 8 rows of x times K-quant blocks in whole numbers: what generating text waits for.

Codes of weights have 4 to 6 bits, and rows of x come as 13-bit whole numbers in two bytes
(`small_m_inputs.py`), so that a matrix unit for bytes multiplies them, four times as many at once as
floats, and nothing has to become a float before it does:

    s[r] = sum over sub-blocks j of sc[r, j] sum over k in j of q[r, k] x[k]
    t[r] = sum over sub-blocks j of mn[r, j] X[j],  X[j] = sum over k in j of x[k]
    y[r] += scale (d[r] s[r] - dmin[r] t[r])                  Q4_K, Q5_K
    y[r] += scale d[r] s[r], with q - 32 for q                Q6_K

s and t are exact: of a block, the largest that there can be is below 2^31 (Q6_K: of half a block). What
is rounded is x, to 1/4095 of its block's largest value, and the sums over blocks, in float32.

With up to 4 rows of x each has a column of the matrix unit for each sub-block and byte, in which the
inputs of all others are 0, so that one product covers a block; with more rows each has one column. The
exact sums do not know which it was, the float32 operations are the same, and their order is that of the
blocks: a row of x gets the same bits whatever the number of rows beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.small_m_parts import (
    after_others,
    four_words,
    half,
    prefetched,
    store,
    turned,
    words_of_d,
)

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Arguments: `x_ptr`, *i8 (m, row_blocks, 2, 256), `scale_ptr`, *fp32 (m, row_blocks), and `sums_ptr`,
# *i32 (m, row_blocks, 8), the inputs. One to three matrices stand side by side in y: the first two are
# of type KIND, the third of type LAST. Of each the planes `low`, *u8 (rows, row_blocks, 128), `high`,
# *u8 (.., 32 or 64), `header`, *i32 (.., 4), which is the scales of Q6_K, and `d`, *u8 (.., 2); what
# a type lacks is not read, nor is the matrix of a number above COUNT. `bias_ptr` to (rows), read if
# BIAS; `y_ptr` to (splits, m, all rows). Program (i, s) does ROWS rows, blocks s split_blocks to
# (s + 1) split_blocks. MP is m, padded to 1, 2, 4 or 8. AHEAD is how many blocks are asked for
# while the kernel before still runs; 0 where it cannot be.
# Shapes: R rows of W, K codes of a product, N its columns, M rows of x


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
def _scale_and_min(first, second, third, low_shift, late):
    """sc and mn from the three words of 6-bit scales, of sub-block j: `low_shift` is 8 (j mod 4),
    `late` is j >= 4."""
    mask = tl.where(late, 15, 63)
    top = tl.where(late, 48, 0)
    sc = (tl.where(late, third, first) >> low_shift) & mask
    sc |= (first >> (low_shift + 2)) & top
    mn = (tl.where(late, third, second) >> (low_shift + tl.where(late, 4, 0))) & mask
    mn |= (second >> (low_shift + 2)) & top
    return sc, mn


@triton.jit
def _scale_and_min_of(first, second, third, J: tl.constexpr):
    if J < 4:
        sc = (first >> (8 * J)) & 63
        mn = (second >> (8 * J)) & 63
    else:
        sc = ((third >> (8 * J - 32)) & 15) | ((first >> (8 * J - 30)) & 48)
        mn = ((third >> (8 * J - 28)) & 15) | ((second >> (8 * J - 30)) & 48)
    return sc, mn


@triton.jit
def codes_k45(
    tile,
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
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    # Codes of one product: a whole block's low or high nibbles, or those of a chunk where the chunks
    # have their fifth bits in different places or the rows of x have the columns.
    APART: tl.constexpr = MP < 8
    RUN: tl.constexpr = 128 if APART and not HIGH else 32
    N: tl.constexpr = 8 * MP if APART else MP
    first_row = tile * ROWS
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    header_R = header_ptr + row_R * (row_blocks * 4)
    low_R = low_ptr + row_R * (row_blocks * 128)
    if AHEAD > 0:
        prefetched(low_R, 128, tile, start, end, AHEAD)
        after_others()
    k_K = tl.arange(0, RUN)
    low_RK = low_R[:, None] + k_K[None, :]
    high_RK = (high_ptr + row_R * (row_blocks * 32))[:, None] + k_K[None, :]
    n_N = tl.arange(0, N)
    # Columns apart: one for each row of x, chunk of 64 values and byte of x. Else one for each row.
    chunk_N = n_N % 8 // 2
    part_N = n_N % 2
    weight_N = tl.where(part_N == 0, 128, 1)[None, :]
    m_N = n_N // 8 if APART else n_N
    there_N = m_N < m
    first_N = there_N & (part_N == 0)
    m_M = tl.arange(0, MP)
    y_RM = tl.zeros([ROWS, MP], tl.float32)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(tile, step, start, end)
        both_R, first_R, second_R, third_R = four_words(header_R + b * 4)
        if HIGH:
            high = tl.load(high_RK + b * 32, eviction_policy="evict_first")
        s_RN = tl.zeros([ROWS, N], tl.int32)
        t_RN = tl.zeros([ROWS, N], tl.int32)
        for run in tl.static_range(128 // RUN):
            low = tl.load(low_RK + b * 128 + run * RUN, eviction_policy="evict_first")
            for u in tl.static_range(2):
                if not HIGH:
                    code = _nibbles(low, u, PLAIN)
                else:
                    code = _five_bits(low, high, u, 2 * run + u, PLAIN)
                value_K = b * 512 + 64 * run + 64 * (k_K // 32) + 32 * u + k_K % 32
                if APART:
                    own_KN = (run + k_K // 32)[:, None] == chunk_N[None, :]
                    own_KN = own_KN & there_N[None, :]
                    at_KN = (m_N * (row_blocks * 512) + 256 * part_N)[None, :] + value_K[:, None]
                    x_KN = tl.load(x_ptr + at_KN, mask=own_KN, other=0)
                    p_RN = tl.dot(code, x_KN, out_dtype=tl.int32)
                    if RUN == 128:
                        j_N = 2 * chunk_N + u
                        at_N = sums_ptr + (m_N * row_blocks + b) * 8 + j_N
                        sum_N = tl.load(at_N, mask=first_N, other=0)
                        sc, mn = _scale_and_min(
                            first_R[:, None],
                            second_R[:, None],
                            third_R[:, None],
                            (8 * (j_N & 3))[None, :],
                            (j_N >= 4)[None, :],
                        )
                        s_RN += p_RN * (sc * weight_N)
                        t_RN += mn * sum_N[None, :]
                    else:
                        at_N = sums_ptr + (m_N * row_blocks + b) * 8 + 2 * run + u
                        sum_N = tl.load(at_N, mask=first_N & (chunk_N == 0), other=0)
                        sc_R, mn_R = _scale_and_min_of(first_R, second_R, third_R, 2 * run + u)
                        s_RN += p_RN * (sc_R[:, None] * weight_N)
                        t_RN += mn_R[:, None] * sum_N[None, :]
                else:
                    at_KN = (m_N * (row_blocks * 512))[None, :] + value_K[:, None]
                    upper_KN = tl.load(x_ptr + at_KN, mask=there_N[None, :], other=0)
                    lower_KN = tl.load(x_ptr + at_KN + 256, mask=there_N[None, :], other=0)
                    p_RN = tl.dot(code, upper_KN, out_dtype=tl.int32) * 128
                    p_RN += tl.dot(code, lower_KN, out_dtype=tl.int32)
                    at_N = sums_ptr + (m_N * row_blocks + b) * 8 + 2 * run + u
                    sum_N = tl.load(at_N, mask=there_N, other=0)
                    sc_R, mn_R = _scale_and_min_of(first_R, second_R, third_R, 2 * run + u)
                    s_RN += p_RN * sc_R[:, None]
                    t_RN += mn_R[:, None] * sum_N[None, :]
        d_RM = half(both_R, 0)[:, None]
        dmin_RM = half(both_R, 16)[:, None]
        if APART:
            s_RM = tl.sum(tl.reshape(s_RN, [ROWS, MP, 8]), axis=2).to(tl.float32)
            t_RM = tl.sum(tl.reshape(t_RN, [ROWS, MP, 8]), axis=2).to(tl.float32)
        else:
            s_RM = s_RN.to(tl.float32)
            t_RM = t_RN.to(tl.float32)
        scale_M = tl.load(scale_ptr + m_M * row_blocks + b, mask=m_M < m, other=0)
        scale = scale_M[None, :]
        y_RM += scale * (d_RM * s_RM - dmin_RM * t_RM)
    store(y_RM, y_ptr, bias_ptr, first_row, rows, stride, m, BIAS)


@triton.jit
def codes_q6_k(
    tile,
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
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    first_row = tile * ROWS
    row_R = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    start = tl.program_id(1) * split_blocks
    end = tl.minimum(start + split_blocks, row_blocks)
    low_R = low_ptr + row_R * (row_blocks * 128)
    high_R = high_ptr + row_R * (row_blocks * 64)
    if AHEAD > 0:
        prefetched(low_R, 128, tile, start, end, AHEAD)
        after_others()
    scales_R = scales_ptr + row_R * (row_blocks * 4)
    # Products are of 32 values of each half of a block, which have their top bits in the same place.
    APART: tl.constexpr = MP < 8
    PAIR: tl.constexpr = 64 if APART else 32
    N: tl.constexpr = 8 * MP if APART else 2 * MP
    k_K = tl.arange(0, PAIR)
    low_RK = low_R[:, None] + (64 * (k_K // 32) + k_K % 32)[None, :]
    high_RK = high_R[:, None] + k_K[None, :]
    n_N = tl.arange(0, N)
    # Columns apart: one for each row of x, half of a block, 16 values of the 32, and byte of x. Else
    # one for each 16 values and row.
    half_N = n_N % 8 // 4
    sixteen_N = n_N // 2 % 2 if APART else n_N // MP
    part_N = n_N % 2
    weight_N = tl.where(part_N == 0, 128, 1)[None, :]
    m_N = n_N // 8 if APART else n_N % MP
    there_N = m_N < m
    m_M = tl.arange(0, MP)
    y_RM = tl.zeros([ROWS, MP], tl.float32)
    for step in tl.range(start, end, num_stages=STAGES):
        b = turned(tile, step, start, end)
        word_R, place_R = words_of_d(d_ptr, row_R, row_blocks, b)
        s0_R, s1_R, s2_R, s3_R = four_words(scales_R + b * 4)
        # Two sums, because of a whole block they could pass 2^31.
        early_RN = tl.zeros([ROWS, N], tl.int32)
        late_RN = tl.zeros([ROWS, N], tl.int32)
        for h in tl.static_range(64 // PAIR):
            high = tl.load(high_RK + b * 64 + 32 * h, eviction_policy="evict_first")
            for v in tl.static_range(2):
                at_RK = low_RK + b * 128 + 64 * h + 32 * v
                low = tl.load(at_RK, eviction_policy="evict_first")
                for u in tl.static_range(2):
                    code = _four_times_signed(low, high, u, v + 2 * u, PLAIN)
                    value_K = b * 512 + 128 * h + 128 * (k_K // 32) + 64 * u + 32 * v + k_K % 32
                    own_KN = (k_K // 16 % 2)[:, None] == sixteen_N[None, :]
                    own_KN = own_KN & there_N[None, :]
                    at_KN = (m_N * (row_blocks * 512))[None, :] + value_K[:, None]
                    if APART:
                        own_KN = own_KN & ((k_K // 32)[:, None] == half_N[None, :])
                        at_KN += (256 * part_N)[None, :]
                        x_KN = tl.load(x_ptr + at_KN, mask=own_KN, other=0)
                        p_RN = (tl.dot(code, x_KN, out_dtype=tl.int32) >> 2) * weight_N
                        first_R, second_R = (s1_R, s3_R) if u else (s0_R, s2_R)
                        four_RN = tl.where(
                            (half_N == 1)[None, :], second_R[:, None], first_R[:, None]
                        )
                    else:
                        upper_KN = tl.load(x_ptr + at_KN, mask=own_KN, other=0)
                        lower_KN = tl.load(x_ptr + at_KN + 256, mask=own_KN, other=0)
                        p_RN = (tl.dot(code, upper_KN, out_dtype=tl.int32) >> 2) * 128
                        p_RN += tl.dot(code, lower_KN, out_dtype=tl.int32) >> 2
                        if h == 0:
                            four_RN = (s1_R if u else s0_R)[:, None]
                        else:
                            four_RN = (s3_R if u else s2_R)[:, None]
                    # Moves the byte to the top, and down again with its sign.
                    scale_RN = (four_RN << (24 - 16 * v - 8 * sixteen_N)[None, :]) >> 24
                    if u == 0:
                        early_RN += p_RN * scale_RN
                    else:
                        late_RN += p_RN * scale_RN
        if APART:
            early_RM = tl.sum(tl.reshape(early_RN, [ROWS, MP, 8]), axis=2)
            late_RM = tl.sum(tl.reshape(late_RN, [ROWS, MP, 8]), axis=2)
        else:
            early_RM = tl.sum(tl.reshape(early_RN, [ROWS, 2, MP]), axis=1)
            late_RM = tl.sum(tl.reshape(late_RN, [ROWS, 2, MP]), axis=1)
        scale_M = tl.load(scale_ptr + m_M * row_blocks + b, mask=m_M < m, other=0)
        s_RM = early_RM.to(tl.float32) + late_RM.to(tl.float32)
        y_RM += scale_M[None, :] * (half(word_R, place_R)[:, None] * s_RM)
    store(y_RM, y_ptr, bias_ptr, first_row, rows, stride, m, BIAS)


@triton.jit
def _one_product(
    tile,
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
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if KIND == "Q6_K":
        codes_q6_k(
            tile, x_ptr, scale_ptr, low_ptr, high_ptr, header_ptr, d_ptr, bias_ptr, y_ptr, rows,
            stride, row_blocks, m, split_blocks, MP, ROWS, BIAS, PLAIN, STAGES, AHEAD,
        )  # fmt: skip
    else:
        tl.static_assert(KIND == "Q4_K" or KIND == "Q5_K")
        HIGH: tl.constexpr = KIND == "Q5_K"
        codes_k45(
            tile, x_ptr, scale_ptr, sums_ptr, low_ptr, high_ptr, header_ptr, bias_ptr, y_ptr, rows,
            stride, row_blocks, m, split_blocks, HIGH, MP, ROWS, BIAS, PLAIN, STAGES, AHEAD,
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
    row_blocks,
    m,
    split_blocks,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    LAST: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    tl.static_assert(COUNT <= 3 and (COUNT == 3 or LAST == KIND))
    tile = tl.program_id(0)
    stride = rows_0 + rows_1 + rows_2
    tiles_0 = tl.cdiv(rows_0, ROWS)
    tiles_1 = tl.cdiv(rows_1, ROWS)
    low, high, header, d, rows, y = low_0, high_0, header_0, d_0, rows_0, y_ptr
    if COUNT > 1:
        if tile >= tiles_0:
            low, high, header, d, rows, y = low_1, high_1, header_1, d_1, rows_1, y_ptr + rows_0
    if COUNT < 3:
        _one_product(
            tile - tl.where(tile >= tiles_0, tiles_0, 0), x_ptr, scale_ptr, sums_ptr, low, high,
            header, d, bias_ptr, y, rows, stride, row_blocks, m, split_blocks, KIND, MP, ROWS, BIAS,
            PLAIN, STAGES, AHEAD,
        )  # fmt: skip
    elif tile < tiles_0 + tiles_1:
        _one_product(
            tile - tl.where(tile >= tiles_0, tiles_0, 0), x_ptr, scale_ptr, sums_ptr, low, high,
            header, d, bias_ptr, y, rows, stride, row_blocks, m, split_blocks, KIND, MP, ROWS, BIAS,
            PLAIN, STAGES, AHEAD,
        )  # fmt: skip
    else:
        _one_product(
            tile - tiles_0 - tiles_1, x_ptr, scale_ptr, sums_ptr, low_2, high_2, header_2, d_2,
            bias_ptr, y_ptr + rows_0 + rows_1, rows_2, stride, row_blocks, m, split_blocks, LAST, MP,
            ROWS, BIAS, PLAIN, STAGES, AHEAD,
        )  # fmt: skip
