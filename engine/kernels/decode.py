"""What stands between the products of a decoder's layer when one token of each row is run.

    _norm          x + what the layer gave, kept; its RMS norm
    _attend        one chunk of a row's keys and values, for the heads that share them: what is kept of
                   the token itself is written, its rotation and the norms of Qwen3 included
    _join          the chunks of a row, as one softmax
    _gate          silu(gate) * up
    _largest       of each part of the logits: the largest, the lowest id it has, how many are not finite
    _choose        of a whole row; the token is the next step's input, at the next position

At one row nothing here is work: a layer of a 7B model reads 130 MB of weights, and these kernels a few
kB. What counts is how many there are, and that none asks the host: positions and tokens are on the
device, and lengths of loops are read there. Each is written so that its results become the next
product's inputs, as floats or as whole numbers (`small_m_inputs.py`), without a kernel for that.

Every program does a part of one row and knows of no other: a row's bits do not depend on what is run
beside it. Roundings are those of `engine.models.decoder`, which is the oracle.

A product may leave its sums in parts (`small_m.products`): whoever reads them adds them, in order. A
dense product is one part.

DEPENDENT kernels begin while the kernel before them still runs, and wait for its results
(programmatic dependent launch). They let the next one begin only then: its programs would take the
places of those of the kernel before, unevenly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.small_m_inputs import write_codes

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Arguments: `parts_ptr` to (splits, rows, stride), of which the first columns are read; `codes_ptr`,
# `scales_ptr`, `sums_ptr` the inputs of a product, written if CODES, else `y_ptr`, floats.
# Shapes: B blocks of 256 values, E values of one, G query heads that share keys, R half a head's width,
# T tokens of a tile


@triton.jit
def _begin(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _added(parts_ptr, at, there, splits, split_stride):
    """The sum of all parts at `at`, float32."""
    sum = tl.load(parts_ptr + at, mask=there, other=0).to(tl.float32)
    for split in range(1, splits):
        sum += tl.load(parts_ptr + split * split_stride + at, mask=there, other=0).to(tl.float32)
    return sum


@triton.jit
def _write(
    x_BE, y_ptr, codes_ptr, scales_ptr, sums_ptr, row, columns, block_B, CODES: tl.constexpr
):
    """Blocks of one row: values that are rounded already, float32 of (B, 256)."""
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    if CODES:
        blocks = columns // 256
        write_codes(x_BE, codes_ptr, scales_ptr, sums_ptr, row * blocks + block_B, block_B < blocks)
    else:
        tl.store(
            y_ptr + row * columns + at_BE, x_BE.to(y_ptr.dtype.element_ty), mask=at_BE < columns
        )


@triton.jit
def _norm(
    parts_ptr,
    kept_ptr,  # (rows, columns), read and written
    weight_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    sums_ptr,
    columns,
    splits,
    split_stride,
    eps,
    PARTS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    DTYPE: tl.constexpr = kept_ptr.dtype.element_ty
    row = tl.program_id(0)
    block_B = tl.arange(0, BLOCKS)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < columns
    w_BE = tl.load(weight_ptr + at_BE, mask=there_BE, other=0).to(tl.float32)
    x_BE = tl.load(kept_ptr + row * columns + at_BE, mask=there_BE, other=0).to(tl.float32)
    if PARTS:
        added_BE = _added(parts_ptr, row * columns + at_BE, there_BE, splits, split_stride)
        x_BE = (x_BE + added_BE.to(DTYPE).to(tl.float32)).to(DTYPE)
        tl.store(kept_ptr + row * columns + at_BE, x_BE, mask=there_BE)
        x_BE = x_BE.to(tl.float32)
    mean = tl.sum(tl.sum(x_BE * x_BE, axis=1), axis=0) / columns
    y_BE = (x_BE * tl.rsqrt(mean + eps) * w_BE).to(DTYPE).to(tl.float32)
    _write(y_BE, y_ptr, codes_ptr, scales_ptr, sums_ptr, row, columns, block_B, CODES)


@triton.jit
def _gate(
    gate_ptr,
    up_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    sums_ptr,
    columns,
    row_stride,
    splits,
    split_stride,
    CODES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(1)
    block_B = tl.program_id(0) + tl.arange(0, 1)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < columns
    gate_BE = _added(gate_ptr, row * row_stride + at_BE, there_BE, splits, split_stride)
    up_BE = _added(up_ptr, row * row_stride + at_BE, there_BE, splits, split_stride)
    gate_BE, up_BE = gate_BE.to(DTYPE).to(tl.float32), up_BE.to(DTYPE).to(tl.float32)
    open_BE = (gate_BE / (1.0 + tl.exp(-gate_BE))).to(DTYPE).to(tl.float32)
    y_BE = (open_BE * up_BE).to(DTYPE).to(tl.float32)
    _write(y_BE, y_ptr, codes_ptr, scales_ptr, sums_ptr, row, columns, block_B, CODES)


@triton.jit
def _turned_heads(
    parts_ptr,
    bias_ptr,
    norm_ptr,
    at_GR,
    there_GR,
    bias_at_GR,
    splits,
    split_stride,
    cos_R,
    sin_R,
    eps,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Both halves of some heads, turned by the angle of their position, float32 that is rounded."""
    R: tl.constexpr = at_GR.shape[1]
    left_GR = _added(parts_ptr, at_GR, there_GR, splits, split_stride)
    right_GR = _added(parts_ptr, at_GR + R, there_GR, splits, split_stride)
    if BIAS:
        left_GR += tl.load(bias_ptr + bias_at_GR, mask=there_GR, other=0).to(tl.float32)
        right_GR += tl.load(bias_ptr + R + bias_at_GR, mask=there_GR, other=0).to(tl.float32)
    left_GR, right_GR = left_GR.to(DTYPE).to(tl.float32), right_GR.to(DTYPE).to(tl.float32)
    if NORM:
        r_R = tl.arange(0, R)
        mean_G = tl.sum(left_GR * left_GR + right_GR * right_GR, axis=1) / (2 * R)
        over_G1 = tl.rsqrt(mean_G + eps)[:, None]
        left_GR *= over_G1 * tl.load(norm_ptr + r_R).to(tl.float32)[None, :]
        right_GR *= over_G1 * tl.load(norm_ptr + R + r_R).to(tl.float32)[None, :]
        left_GR, right_GR = left_GR.to(DTYPE).to(tl.float32), right_GR.to(DTYPE).to(tl.float32)
    cos_1R, sin_1R = cos_R[None, :], sin_R[None, :]
    first_GR = (left_GR * cos_1R).to(DTYPE).to(tl.float32)
    first_GR -= (right_GR * sin_1R).to(DTYPE).to(tl.float32)
    second_GR = (right_GR * cos_1R).to(DTYPE).to(tl.float32)
    second_GR += (left_GR * sin_1R).to(DTYPE).to(tl.float32)
    return first_GR.to(DTYPE), second_GR.to(DTYPE)


@triton.jit
def _attend(
    q_ptr,  # parts: of a row of `row_stride`, the query heads, one after the other
    k_ptr,  # the same of `shared_stride`, as v
    v_ptr,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    frequency_ptr,  # *fp32 (R), radians each position
    keys_ptr,  # (rows, slots, shared heads, 2 R), read and written
    values_ptr,
    position_ptr,  # *i32 (rows)
    sums_ptr,  # *fp32 (chunks, rows, heads, 2 R), written: sums of values
    softmax_ptr,  # *fp32 (chunks, rows, heads, 2), written: largest score, sum of exponentials
    rows,
    slots,
    shared,
    row_stride,
    shared_stride,
    splits,
    split_stride,
    eps,
    scale,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    DTYPE: tl.constexpr = keys_ptr.dtype.element_ty
    row = tl.program_id(0) // shared
    head = tl.program_id(0) % shared
    first = tl.program_id(1) * CHUNK
    position = tl.load(position_ptr + row)
    if first <= position:
        # A matrix unit takes 16 rows at least.
        G: tl.constexpr = 16
        g_G, r_R, e_E = tl.arange(0, G), tl.arange(0, R), tl.arange(0, 2 * R)
        angle_R = position.to(tl.float32) * tl.load(frequency_ptr + r_R)
        cos_R = tl.cos(angle_R).to(DTYPE).to(tl.float32)
        sin_R = tl.sin(angle_R).to(DTYPE).to(tl.float32)
        at_GR = ((head * GROUP + g_G) * 2 * R)[:, None] + r_R[None, :]
        there_GR = (g_G < GROUP)[:, None] & (r_R >= 0)[None, :]
        left_GR, right_GR = _turned_heads(
            q_ptr, q_bias_ptr, q_norm_ptr, row * row_stride + at_GR, there_GR, at_GR, splits,
            split_stride, cos_R, sin_R, eps, BIAS, NORM, DTYPE,
        )  # fmt: skip
        slot_stride = shared * 2 * R
        own_ptr = keys_ptr + row.to(tl.int64) * slots * slot_stride + head * 2 * R
        own_values_ptr = values_ptr + row.to(tl.int64) * slots * slot_stride + head * 2 * R
        most_G = tl.full([G], float("-inf"), tl.float32)
        total_G = tl.zeros([G], tl.float32)
        y_GE = tl.zeros([G, 2 * R], tl.float32)
        end = tl.minimum(first + CHUNK, position)
        for start in range(first, end, TILE):
            token_T = start + tl.arange(0, TILE)
            there_T = token_T < end
            at_RT = (token_T * slot_stride)[None, :] + r_R[:, None]
            k_left_RT = tl.load(own_ptr + at_RT, mask=there_T[None, :], other=0)
            k_right_RT = tl.load(own_ptr + R + at_RT, mask=there_T[None, :], other=0)
            s_GT = tl.dot(left_GR, k_left_RT, input_precision="ieee")
            s_GT = tl.dot(right_GR, k_right_RT, s_GT, input_precision="ieee") * scale
            s_GT = tl.where(there_T[None, :], s_GT, float("-inf"))
            larger_G = tl.maximum(most_G, tl.max(s_GT, axis=1))
            p_GT = tl.exp(s_GT - larger_G[:, None])
            kept_G = tl.exp(most_G - larger_G)
            at_TE = (token_T * slot_stride)[:, None] + e_E[None, :]
            v_TE = tl.load(own_values_ptr + at_TE, mask=there_T[:, None], other=0)
            total_G = total_G * kept_G + tl.sum(p_GT, axis=1)
            y_GE = tl.dot(p_GT.to(DTYPE), v_TE, y_GE * kept_G[:, None], input_precision="ieee")
            most_G = larger_G
        if position < first + CHUNK:
            # The token itself, which the chunk ends with.
            at_1R = (head * 2 * R + r_R)[None, :]
            one_1R = at_1R >= 0
            k_left_1R, k_right_1R = _turned_heads(
                k_ptr, k_bias_ptr, k_norm_ptr, row * shared_stride + at_1R, one_1R, at_1R, splits,
                split_stride, cos_R, sin_R, eps, BIAS, NORM, DTYPE,
            )  # fmt: skip
            at_E = head * 2 * R + e_E
            v_E = _added(v_ptr, row * shared_stride + at_E, e_E >= 0, splits, split_stride)
            if BIAS:
                v_E += tl.load(v_bias_ptr + at_E).to(tl.float32)
            v_E = v_E.to(DTYPE)
            here = position * slot_stride
            tl.store(own_ptr + here + r_R[None, :], k_left_1R)
            tl.store(own_ptr + here + R + r_R[None, :], k_right_1R)
            tl.store(own_values_ptr + here + e_E, v_E)
            s_GR = left_GR.to(tl.float32) * k_left_1R.to(tl.float32)
            s_GR += right_GR.to(tl.float32) * k_right_1R.to(tl.float32)
            s_G = tl.sum(s_GR, axis=1) * scale
            larger_G = tl.maximum(most_G, s_G)
            p_G, kept_G = tl.exp(s_G - larger_G), tl.exp(most_G - larger_G)
            total_G = total_G * kept_G + p_G
            y_GE = y_GE * kept_G[:, None]
            y_GE += p_G.to(DTYPE).to(tl.float32)[:, None] * v_E.to(tl.float32)[None, :]
            most_G = larger_G
        heads = shared * GROUP
        at_G = (tl.program_id(1) * rows + row) * heads + head * GROUP + g_G
        tl.store(softmax_ptr + 2 * at_G, most_G, mask=g_G < GROUP)
        tl.store(softmax_ptr + 2 * at_G + 1, total_G, mask=g_G < GROUP)
        at_GE = (at_G * 2 * R)[:, None] + e_E[None, :]
        tl.store(sums_ptr + at_GE, y_GE, mask=(g_G < GROUP)[:, None])


@triton.jit
def _join(
    values_ptr,  # *fp32 (chunks, rows, columns)
    softmax_ptr,  # *fp32 (chunks, rows, heads, 2)
    position_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    sums_ptr,
    rows,
    columns,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(1)
    block_B = tl.program_id(0) + tl.arange(0, 1)
    at_BE = (block_B * 256)[:, None] + tl.arange(0, 256)[None, :]
    there_BE = at_BE < columns
    heads = columns // WIDTH
    head_BE = at_BE // WIDTH
    chunks = tl.load(position_ptr + row) // CHUNK + 1
    most_BE = tl.full([1, 256], float("-inf"), tl.float32)
    total_BE = tl.zeros([1, 256], tl.float32)
    sum_BE = tl.zeros([1, 256], tl.float32)
    for chunk in range(chunks):
        here = chunk * rows + row
        soft_BE = softmax_ptr + 2 * (here * heads + head_BE)
        largest_BE = tl.load(soft_BE, mask=there_BE, other=0)
        larger_BE = tl.maximum(most_BE, largest_BE)
        before_BE, now_BE = tl.exp(most_BE - larger_BE), tl.exp(largest_BE - larger_BE)
        added_BE = tl.load(soft_BE + 1, mask=there_BE, other=1)
        value_BE = tl.load(values_ptr + here * columns + at_BE, mask=there_BE, other=0)
        total_BE = total_BE * before_BE + added_BE * now_BE
        sum_BE = sum_BE * before_BE + value_BE * now_BE
        most_BE = larger_BE
    y_BE = (sum_BE / total_BE).to(DTYPE).to(tl.float32)
    _write(y_BE, y_ptr, codes_ptr, scales_ptr, sums_ptr, row, columns, block_B, CODES)


@triton.jit
def _largest(
    logits_ptr,  # (rows, ids)
    values_ptr,  # *fp32 (rows, parts), written
    ids_ptr,  # *i32 (rows, parts), written
    bad_ptr,  # *i32 (rows, parts), written
    ids,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    id_E = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(1)
    there_E = id_E < ids
    at_E = row.to(tl.int64) * ids + id_E
    x_E = tl.load(logits_ptr + at_E, mask=there_E, other=0).to(tl.float32)
    finite_E = tl.abs(x_E) < float("inf")
    x_E = tl.where(finite_E & there_E, x_E, float("-inf"))
    largest = tl.max(x_E, axis=0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(values_ptr + at, largest)
    tl.store(ids_ptr + at, tl.min(tl.where(x_E == largest, id_E, 0x7FFFFFFF), axis=0))
    tl.store(bad_ptr + at, tl.sum((there_E & (finite_E == 0)).to(tl.int32), axis=0))


@triton.jit
def _choose(
    values_ptr,
    ids_ptr,
    bad_ptr,
    token_ptr,  # *i64 (rows), written: what the next step begins with
    position_ptr,  # *i32 (rows), read and written
    chosen_ptr,  # *i32 (rows), written: the token, or how many logits are not finite, negative
    parts,
    last,  # the last position there is room for
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _begin(DEPENDENT)
    row = tl.program_id(0)
    part_P = tl.arange(0, PARTS)
    there_P = part_P < parts
    value_P = tl.load(values_ptr + row * parts + part_P, mask=there_P, other=float("-inf"))
    id_P = tl.load(ids_ptr + row * parts + part_P, mask=there_P, other=0x7FFFFFFF)
    bad = tl.sum(tl.load(bad_ptr + row * parts + part_P, mask=there_P, other=0), axis=0)
    largest = tl.max(value_P, axis=0)
    token = tl.min(tl.where(value_P == largest, id_P, 0x7FFFFFFF), axis=0)
    tl.store(chosen_ptr + row, tl.where(bad > 0, -bad, token))
    tl.store(token_ptr + row, tl.where(bad > 0, 0, token).to(tl.int64))
    position = tl.load(position_ptr + row)
    tl.store(position_ptr + row, tl.minimum(position + 1, last))
