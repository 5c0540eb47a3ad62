"""Attention for one token of each row: partial results over chunks of the KV cache, and their
reduction.

    _attend   one program per row, key/value head and chunk of CHUNK tokens
    _join     one program per row and block of 256 columns, the unit of the next matmul's input

A chunk is one tile, whose loads are all issued at once, before the queries are available. Each
program stores its largest score, its sum of exponentials and its weighted sum of values; a program
whose chunk is beyond the row's position ends at once. Chunks are reduced in order.

The reduction is a separate launch. The last program of a group of heads to finish could do it
instead, but it would first have to find out that it is the last and wait for that answer, and would
then do alone what 14 programs do here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.decode import _write, over_norm, rest_of, summed
from engine.kernels.dependent_launch import wait_for_inputs

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

# Arguments: see `decode.py`.
# Shapes: B blocks of 256 columns, E values of one or of a head, G query heads that share keys, R half a
# head's width, T tokens of a chunk, H heads of a block, W a head's width


@triton.jit
def _turned(
    left_GR, right_GR, norm_left_R, norm_right_R, cos_R, sin_R, eps,
    NORM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return both halves of some heads, normalised and rotated by the angle of their position."""
    if NORM:
        mean_G = tl.sum(left_GR * left_GR + right_GR * right_GR, axis=1) / (2 * left_GR.shape[1])
        over_G1 = tl.rsqrt(mean_G + eps)[:, None]
        left_GR *= over_G1 * norm_left_R.to(tl.float32)[None, :]
        right_GR *= over_G1 * norm_right_R.to(tl.float32)[None, :]
        left_GR, right_GR = left_GR.to(DTYPE).to(tl.float32), right_GR.to(DTYPE).to(tl.float32)
    cos_1R, sin_1R = cos_R[None, :], sin_R[None, :]
    first_GR = (left_GR * cos_1R).to(DTYPE).to(tl.float32)
    first_GR -= (right_GR * sin_1R).to(DTYPE).to(tl.float32)
    second_GR = (right_GR * cos_1R).to(DTYPE).to(tl.float32)
    second_GR += (left_GR * sin_1R).to(DTYPE).to(tl.float32)
    return first_GR.to(DTYPE), second_GR.to(DTYPE)


@triton.jit
def _largest_of(softmax_ptr, at_BH, there_BH, here):
    largest_BH = tl.load(softmax_ptr + 2 * at_BH, mask=there_BH & here, other=float("-inf"))
    # Masked heads get a finite number that produces no NaN.
    return tl.where(there_BH, largest_BH, 0.0)


@triton.jit
def _join(
    sums_ptr,  # *fp32 (chunks, rows, heads, WIDTH)
    softmax_ptr,  # *fp32 (chunks, rows, heads, 2)
    position_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    code_sums_ptr,
    rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,  # chunks in flight
    CODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    PER_BLOCK: tl.constexpr = 256 // WIDTH
    HEADS: tl.constexpr = COLUMNS // WIDTH
    row = tl.program_id(1)
    chunks = tl.load(position_ptr + row) // CHUNK + 1
    block_B = tl.program_id(0) + tl.arange(0, 1)
    head_BH = (block_B * PER_BLOCK)[:, None] + tl.arange(0, PER_BLOCK)[None, :]
    at_BHW = (head_BH * WIDTH)[:, :, None] + tl.arange(0, WIDTH)[None, None, :]
    there_BH, there_BHW = head_BH < HEADS, at_BHW < COLUMNS
    wait_for_inputs(EARLY)
    most_BH = tl.full([1, PER_BLOCK], float("-inf"), tl.float32)
    all_BH = tl.zeros([1, PER_BLOCK], tl.float32)
    y_BHW = tl.zeros([1, PER_BLOCK, WIDTH], tl.float32)
    for start in range(0, chunks, AHEAD):
        # As in `rest_of`: the first chunk's largest score, with which all else begins, is loaded
        # last. A chunk beyond the last one has weight 0.
        largest, totals, sums = (), (), ()
        for ahead in tl.static_range(AHEAD):
            here = start + ahead < chunks
            at = (start + ahead) * rows + row
            if ahead > 0:
                largest += (_largest_of(softmax_ptr, at * HEADS + head_BH, there_BH, here),)
            soft_BH = softmax_ptr + 2 * (at * HEADS + head_BH) + 1
            total_BH = tl.load(soft_BH, mask=there_BH & here, other=0)
            totals += (total_BH,)
            sums_BHW = sums_ptr + at * COLUMNS + at_BHW
            sum_BHW = tl.load(sums_BHW, mask=there_BHW & here, other=0)
            sums += (sum_BHW,)
        tl.debug_barrier()
        at = (start * rows + row) * HEADS
        largest_BH = _largest_of(softmax_ptr, at + head_BH, there_BH, start < chunks)
        for ahead in tl.static_range(AHEAD):
            if ahead > 0:
                largest_BH = largest[ahead - 1]
            larger_BH = tl.maximum(most_BH, largest_BH)
            before_BH, now_BH = tl.exp(most_BH - larger_BH), tl.exp(largest_BH - larger_BH)
            all_BH = all_BH * before_BH + totals[ahead] * now_BH
            y_BHW = y_BHW * before_BH[:, :, None] + sums[ahead] * now_BH[:, :, None]
            most_BH = larger_BH
    all_BH = tl.where(there_BH, all_BH, 1.0)
    y_BHW = (y_BHW / all_BH[:, :, None]).to(DTYPE).to(tl.float32)
    y_BE = tl.reshape(y_BHW, [1, 256])
    _write(y_BE, y_ptr, codes_ptr, scales_ptr, code_sums_ptr, row, COLUMNS, block_B, CODES)


@triton.jit
def _tile(keys_ptr, values_ptr, token_T, there_T, SLOT: tl.constexpr, R: tl.constexpr):
    """Load the keys (as two halves) and values of some tokens of one head."""
    r_R, e_E = tl.arange(0, R), tl.arange(0, 2 * R)
    at_RT = (token_T * SLOT)[None, :] + r_R[:, None]
    left_RT = tl.load(keys_ptr + at_RT, mask=there_T[None, :], other=0)
    right_RT = tl.load(keys_ptr + R + at_RT, mask=there_T[None, :], other=0)
    at_TE = (token_T * SLOT)[:, None] + e_E[None, :]
    return left_RT, right_RT, tl.load(values_ptr + at_TE, mask=there_T[:, None], other=0)


@triton.jit
def _attend(
    q_ptr,  # partial sums, rows of STRIDE with the query heads in order
    k_ptr,  # partial sums, rows of SHARED_STRIDE with the key heads; v alike
    v_ptr,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    turns_ptr,  # (slots, 2, R): cosines and sines of each position
    keys_ptr,  # (rows, slots, SHARED heads, 2 R), read and written
    values_ptr,
    position_ptr,  # *i32 (rows)
    squares_ptr,
    sums_ptr,  # *fp32 (chunks, rows, heads, 2 R), written: sums of values
    softmax_ptr,  # *fp32 (chunks, rows, heads, 2), written: largest score, sum of exponentials
    rows,
    slots,
    part_rows,
    eps,
    norm_eps,
    scale,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NORMED: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    STRIDE: tl.constexpr,
    SHARED_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = keys_ptr.dtype.element_ty
    row = tl.program_id(0) // SHARED
    head = tl.program_id(0) % SHARED
    first = tl.program_id(1) * CHUNK
    position = tl.load(position_ptr + row)
    if first <= position:
        # Tensor cores take at least 16 rows.
        G: tl.constexpr = 16
        SLOT: tl.constexpr = SHARED * 2 * R
        g_G, r_R, e_E = tl.arange(0, G), tl.arange(0, R), tl.arange(0, 2 * R)
        own_at = row.to(tl.int64) * slots * SLOT + head * 2 * R
        own_keys_ptr, own_values_ptr = keys_ptr + own_at, values_ptr + own_at
        token_T = first + tl.arange(0, CHUNK)
        there_T = token_T < position
        k_left_RT, k_right_RT, v_TE = _tile(own_keys_ptr, own_values_ptr, token_T, there_T, SLOT, R)
        turn_R = turns_ptr + position * (2 * R) + r_R
        cos_R = tl.load(turn_R).to(tl.float32)
        sin_R = tl.load(turn_R + R).to(tl.float32)
        at_GR = ((head * GROUP + g_G) * 2 * R)[:, None] + r_R[None, :]
        there_GR = (g_G < GROUP)[:, None] & (r_R >= 0)[None, :]
        # The new token itself, in the chunk that ends with it.
        own = position < first + CHUNK
        at_1R = (head * 2 * R + r_R)[None, :]
        own_1R = (at_1R >= 0) & own
        at_1E = (head * 2 * R + e_E)[None, :]
        own_1E = (at_1E >= 0) & own
        if BIAS:
            left_bias_GR = tl.load(q_bias_ptr + at_GR, mask=there_GR, other=0)
            right_bias_GR = tl.load(q_bias_ptr + R + at_GR, mask=there_GR, other=0)
            k_left_bias_1R = tl.load(k_bias_ptr + at_1R, mask=own_1R, other=0)
            k_right_bias_1R = tl.load(k_bias_ptr + R + at_1R, mask=own_1R, other=0)
            v_bias_1E = tl.load(v_bias_ptr + at_1E, mask=own_1E, other=0)
        q_norm_left_R, q_norm_right_R, k_norm_left_R, k_norm_right_R = cos_R, cos_R, cos_R, cos_R
        if NORM:
            q_norm_left_R, q_norm_right_R = tl.load(q_norm_ptr + r_R), tl.load(q_norm_ptr + R + r_R)
            k_norm_left_R, k_norm_right_R = tl.load(k_norm_ptr + r_R), tl.load(k_norm_ptr + R + r_R)
        q_row_ptr, k_row_ptr = q_ptr + row * STRIDE, k_ptr + row * SHARED_STRIDE
        v_row_ptr = v_ptr + row * SHARED_STRIDE
        q_split, shared_split = part_rows * STRIDE, part_rows * SHARED_STRIDE
        wait_for_inputs(EARLY)
        lefts = rest_of(q_row_ptr, at_GR, there_GR, q_split, SPLITS)
        rights = rest_of(q_row_ptr + R, at_GR, there_GR, q_split, SPLITS)
        k_lefts = rest_of(k_row_ptr, at_1R, own_1R, shared_split, SPLITS)
        k_rights = rest_of(k_row_ptr + R, at_1R, own_1R, shared_split, SPLITS)
        vs = rest_of(v_row_ptr, at_1E, own_1E, shared_split, SPLITS)
        tl.debug_barrier()
        left_GR = tl.load(q_row_ptr + at_GR, mask=there_GR, other=0)
        right_GR = tl.load(q_row_ptr + R + at_GR, mask=there_GR, other=0)
        k_left_1R = tl.load(k_row_ptr + at_1R, mask=own_1R, other=0)
        k_right_1R = tl.load(k_row_ptr + R + at_1R, mask=own_1R, other=0)
        v_1E = tl.load(v_row_ptr + at_1E, mask=own_1E, other=0)
        over = over_norm(squares_ptr, row, norm_eps, NORMED)
        left_GR = summed(left_GR, lefts, SPLITS) * over
        right_GR = summed(right_GR, rights, SPLITS) * over
        k_left_1R = summed(k_left_1R, k_lefts, SPLITS) * over
        k_right_1R = summed(k_right_1R, k_rights, SPLITS) * over
        v_1E = summed(v_1E, vs, SPLITS) * over
        if BIAS:
            left_GR += left_bias_GR.to(tl.float32)
            right_GR += right_bias_GR.to(tl.float32)
            k_left_1R += k_left_bias_1R.to(tl.float32)
            k_right_1R += k_right_bias_1R.to(tl.float32)
            v_1E += v_bias_1E.to(tl.float32)
        left_GR, right_GR = left_GR.to(DTYPE).to(tl.float32), right_GR.to(DTYPE).to(tl.float32)
        k_left_1R = k_left_1R.to(DTYPE).to(tl.float32)
        k_right_1R = k_right_1R.to(DTYPE).to(tl.float32)
        v_1E = v_1E.to(DTYPE).to(tl.float32)
        left_GR, right_GR = _turned(
            left_GR, right_GR, q_norm_left_R, q_norm_right_R, cos_R, sin_R, eps, NORM, DTYPE
        )
        k_left_1R, k_right_1R = _turned(
            k_left_1R, k_right_1R, k_norm_left_R, k_norm_right_R, cos_R, sin_R, eps, NORM, DTYPE
        )
        here = position * SLOT
        tl.store(own_keys_ptr + here + r_R[None, :], k_left_1R, mask=own_1R)
        tl.store(own_keys_ptr + here + R + r_R[None, :], k_right_1R, mask=own_1R)
        tl.store(own_values_ptr + here + e_E[None, :], v_1E.to(DTYPE), mask=own_1E)

        s_GT = tl.dot(left_GR, k_left_RT, input_precision="ieee")
        s_GT = tl.dot(right_GR, k_right_RT, s_GT, input_precision="ieee") * scale
        s_GT = tl.where(there_T[None, :], s_GT, float("-inf"))
        s_GR = left_GR.to(tl.float32) * k_left_1R.to(tl.float32)
        s_GR += right_GR.to(tl.float32) * k_right_1R.to(tl.float32)
        s_G = tl.where(own, tl.sum(s_GR, axis=1) * scale, float("-inf"))
        most_G = tl.maximum(tl.max(s_GT, axis=1), s_G)
        p_GT, p_G = tl.exp(s_GT - most_G[:, None]), tl.exp(s_G - most_G)
        total_G = tl.sum(p_GT, axis=1) + p_G
        y_GE = p_G.to(DTYPE).to(tl.float32)[:, None] * v_1E
        y_GE = tl.dot(p_GT.to(DTYPE), v_TE, y_GE, input_precision="ieee")

        at_G = (tl.program_id(1) * rows + row) * (SHARED * GROUP) + head * GROUP + g_G
        tl.store(softmax_ptr + 2 * at_G, most_G, mask=g_G < GROUP)
        tl.store(softmax_ptr + 2 * at_G + 1, total_G, mask=g_G < GROUP)
        at_GE = (at_G * 2 * R)[:, None] + e_E[None, :]
        tl.store(sums_ptr + at_GE, y_GE, mask=(g_G < GROUP)[:, None])
