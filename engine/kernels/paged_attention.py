"""Compute the attention of one new token of each sequence to a KV cache in pages of 64 tokens.

    place     rotates queries and keys by their position, and stores keys and values in the cache
    attend    softmax(q k^T scale) v over the tokens of each sequence

One program of `attend` takes the query heads that share a key head, of one sequence, and reads its pages
one after the other: each key is read from memory once. The group of query heads is padded to 16 rows, the
minimum of the matmul units. If sequences times key heads are fewer than the GPU's multiprocessors,
a sequence is cut into chunks of a fixed number of pages, and a second kernel combines them. The number of pages
depends only on the number of slots, so that a sequence's sums have the same order whatever else runs.

A sequence with a negative position is idle: nothing is read for it, and its key and value are stored in page 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.registry import compiled_as, launch
from engine.kernels.sizes import cdiv, next_power_of_2

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: B slots, H query heads, K key/value heads, E width of a head, R pairs of it that RoPE rotates,
# P pages, S pages of a sequence, T tokens of a page, C pieces, G query heads of one key head

LEAST_GROUP = 16
FAR = 1 << 30
"""Window of a layer that attends to all tokens."""
PIECE_PAGES = 4
"""Number of pages of a chunk, if sequences are cut into chunks."""
PLACED = 8
"""Number of heads per program of `place`."""
BUSY = 264
"""Number of programs that keep a GPU busy: two for each of 132 multiprocessors."""


@triton.jit
def _place(
    qkv_ptr,  # (B, (H + 2 K) E); the queries are rotated in place
    q_norm_ptr,  # (E)
    k_norm_ptr,
    turns_ptr,  # (positions, 2, R): cosines and sines
    keys_ptr,  # (P, K, T, E)
    values_ptr,
    table_ptr,  # *i32 (B, S)
    position_ptr,  # *i32 (B)
    table_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    EP: tl.constexpr,
    T: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    NORM: tl.constexpr,
    TURN: tl.constexpr,
):
    """Rotate, and store keys and values. Rounds where the decoder rounds."""
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    row = tl.program_id(0)
    position = tl.load(position_ptr + row)
    at = tl.maximum(position, 0)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    e_E = tl.arange(0, EP)
    there_HE = (head_H < H + 2 * K)[:, None] & (e_E < E)[None, :]
    # Index of the other element of each pair that RoPE rotates.
    other_E = tl.where(e_E < R, e_E + R, tl.where(e_E < 2 * R, e_E - R, e_E))
    x_ptr = qkv_ptr + row.to(tl.int64) * ((H + 2 * K) * E) + (head_H * E)[:, None]
    raw_HE = tl.load(x_ptr + e_E[None, :], mask=there_HE, other=0)
    x_HE = raw_HE.to(tl.float32)
    y_HE = tl.load(x_ptr + other_E[None, :], mask=there_HE, other=0).to(tl.float32)
    if NORM:
        over_H1 = tl.rsqrt(tl.sum(x_HE * x_HE, axis=1) / E + eps)[:, None]
        is_q_H1, in_E = (head_H < H)[:, None], e_E < E
        q_E = tl.load(q_norm_ptr + e_E, mask=in_E, other=0).to(tl.float32)
        k_E = tl.load(k_norm_ptr + e_E, mask=in_E, other=0).to(tl.float32)
        x_HE = x_HE * over_H1 * tl.where(is_q_H1, q_E[None, :], k_E[None, :])
        q_E = tl.load(q_norm_ptr + other_E, mask=in_E, other=0).to(tl.float32)
        k_E = tl.load(k_norm_ptr + other_E, mask=in_E, other=0).to(tl.float32)
        y_HE = y_HE * over_H1 * tl.where(is_q_H1, q_E[None, :], k_E[None, :])
        x_HE, y_HE = x_HE.to(DTYPE).to(tl.float32), y_HE.to(DTYPE).to(tl.float32)
    if TURN:
        pair_E, turns_E = tl.where(e_E < R, e_E, e_E - R), e_E < 2 * R
        turns_ptr += at * 2 * R
        cos_E = tl.load(turns_ptr + pair_E, mask=turns_E, other=1).to(tl.float32)
        sin_E = tl.load(turns_ptr + R + pair_E, mask=turns_E, other=0).to(tl.float32)
        sin_E = tl.where(e_E < R, -sin_E, sin_E)
        turned_HE = (x_HE * cos_E[None, :]).to(DTYPE).to(tl.float32)
        turned_HE += (y_HE * sin_E[None, :]).to(DTYPE).to(tl.float32)
        x_HE = tl.where(turns_E[None, :], turned_HE, x_HE)
    # Two threads read each element, and both must have read it before it is overwritten.
    tl.debug_barrier()
    tl.store(x_ptr + e_E[None, :], x_HE.to(DTYPE), mask=there_HE & (head_H < H)[:, None])
    page = tl.load(table_ptr + row * table_stride + at // T)
    page = tl.where(position < 0, 0, page).to(tl.int64)
    is_k_H = (head_H >= H) & (head_H < H + K)
    to_HE = ((page * K + head_H - H) * T + at % T)[:, None] * E + e_E[None, :]
    tl.store(keys_ptr + to_HE, x_HE.to(DTYPE), mask=there_HE & is_k_H[:, None])
    to_HE -= K * T * E
    tl.store(values_ptr + to_HE, raw_HE, mask=there_HE & (head_H >= H + K)[:, None])


@triton.jit
def _attend(
    q_ptr,  # (B, ...) rows of q_stride
    keys_ptr,
    values_ptr,
    table_ptr,
    position_ptr,
    y_ptr,  # (B, H, E), or *fp32 (C, B, H, E)
    sums_ptr,  # *fp32 (C, B, H, 2): the largest score and the sum of exponentials
    slots,
    q_stride,
    table_stride,
    window,
    scale,  # times log2(e)
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    GP: tl.constexpr,
    T: tl.constexpr,
    PIECE: tl.constexpr,  # pages of a piece, 0 if sequences are whole
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = H // K
    row, shared, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_ptr + row)
    if position < 0:
        return
    begin = tl.maximum(position + 1 - window, 0) // T
    end = position // T + 1
    if PIECE > 0:
        begin = tl.maximum(begin, piece * PIECE)
        end = tl.minimum(end, (piece + 1) * PIECE)
    g_G, e_E, t_T = tl.arange(0, GP), tl.arange(0, EP), tl.arange(0, T)
    here_G = g_G < GROUP
    there_GE = here_G[:, None] & (e_E < E)[None, :]
    head_G = shared * GROUP + g_G
    q_at_GE = row.to(tl.int64) * q_stride + head_G[:, None] * E + e_E[None, :]
    q_GE = tl.load(q_ptr + q_at_GE, mask=there_GE, other=0)
    most_G = tl.full([GP], -1e30, tl.float32)
    all_G = tl.zeros([GP], tl.float32)
    y_GE = tl.zeros([GP, EP], tl.float32)
    table_ptr += row * table_stride
    for number in tl.range(begin, end, num_stages=STAGES):
        page = tl.load(table_ptr + number).to(tl.int64)
        at = (page * K + shared) * (T * E)
        token_T = number * T + t_T
        k_at_ET = at + t_T[None, :] * E + e_E[:, None]
        k_ET = tl.load(keys_ptr + k_at_ET, mask=(e_E < E)[:, None], other=0)
        v_at_TE = at + t_T[:, None] * E + e_E[None, :]
        v_TE = tl.load(values_ptr + v_at_TE, mask=(e_E < E)[None, :], other=0)
        score_GT = tl.dot(q_GE, k_ET, input_precision="ieee") * scale
        seen_T = (token_T <= position) & (token_T > position - window)
        score_GT = tl.where(seen_T[None, :], score_GT, -1e30)
        larger_G = tl.maximum(most_G, tl.max(score_GT, axis=1))
        before_G = tl.exp2(most_G - larger_G)
        p_GT = tl.where(seen_T[None, :], tl.exp2(score_GT - larger_G[:, None]), 0.0)
        all_G = all_G * before_G + tl.sum(p_GT, axis=1)
        y_GE = y_GE * before_G[:, None]
        y_GE = tl.dot(p_GT.to(v_TE.dtype), v_TE, y_GE, input_precision="ieee")
        most_G = larger_G
    if PIECE > 0:
        at = piece * slots + row
        sums_at_G = (at.to(tl.int64) * H + head_G) * 2
        tl.store(sums_ptr + sums_at_G, most_G, mask=here_G)
        tl.store(sums_ptr + sums_at_G + 1, all_G, mask=here_G)
        to_GE = (at.to(tl.int64) * H + head_G[:, None]) * E + e_E[None, :]
        tl.store(y_ptr + to_GE, y_GE, mask=there_GE)
    else:
        y_GE = y_GE / tl.where(here_G, all_G, 1.0)[:, None]
        to_GE = (row.to(tl.int64) * H + head_G[:, None]) * E + e_E[None, :]
        tl.store(y_ptr + to_GE, y_GE.to(y_ptr.dtype.element_ty), mask=there_GE)


@triton.jit
def _join(
    parts_ptr,  # *fp32 (C, B, H, E)
    sums_ptr,  # *fp32 (C, B, H, 2)
    position_ptr,
    y_ptr,  # (B, H, E)
    slots,
    H: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    T: tl.constexpr,
    PIECE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + row)
    if position < 0:
        return
    e_E = tl.arange(0, EP)
    most = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    y_E = tl.zeros([EP], tl.float32)
    for piece in range(0, position // (T * PIECE) + 1):
        at = ((piece * slots + row) * H + head).to(tl.int64)
        own = tl.load(sums_ptr + 2 * at + tl.arange(0, 1))
        part = tl.load(sums_ptr + 2 * at + 1 + tl.arange(0, 1))
        part_E = tl.load(parts_ptr + at * E + e_E, mask=e_E < E, other=0)
        larger = tl.maximum(most, own)
        before, now = tl.exp2(most - larger), tl.exp2(own - larger)
        total = total * before + part * now
        y_E = y_E * before + part_E * now
        most = larger
    to_E = (row.to(tl.int64) * H + head) * E + e_E
    tl.store(y_ptr + to_E, (y_E / total).to(y_ptr.dtype.element_ty), mask=e_E < E)


def place(
    qkv_BN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns_S2R: Tensor | None,
    keys_PKTE: Tensor,
    values_PKTE: Tensor,
    table_BS: Tensor,
    position_B: Tensor,
) -> None:
    """Normalise (`norms` of q and k) and rotate (`turns_S2R`: cosines and sines of each position) the queries
    in place. Normalise and rotate the keys too, and store keys and values in their pages.
    """
    _, shared, tokens, width = keys_PKTE.shape
    heads = qkv_BN.shape[1] // width - 2 * shared
    q_norm, k_norm = norms or (qkv_BN, qkv_BN)
    turns = qkv_BN if turns_S2R is None else turns_S2R
    pointers = (qkv_BN, q_norm, k_norm, turns, keys_PKTE, values_PKTE, table_BS, position_B)
    variant = _variant(
        _place,
        *pointers,
        *("i32", "fp32"),
        warps=2,
        H=heads,
        K=shared,
        E=width,
        R=0 if turns_S2R is None else turns_S2R.shape[2],
        EP=next_power_of_2(width),
        T=tokens,
        HEADS=PLACED,
        NORM=norms is not None,
        TURN=turns_S2R is not None,
    )
    grid = (len(qkv_BN), cdiv(heads + 2 * shared, PLACED))
    launch(variant, grid, *pointers, table_BS.shape[1], eps)


def attend(
    q_BN: Tensor,
    keys_PKTE: Tensor,
    values_PKTE: Tensor,
    table_BS: Tensor,
    position_B: Tensor,
    y_BHE: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> None:
    """Compute the attention of each slot's token at `position_B` (int32) to at most `window` tokens, the last of which
    is itself, and write it into `y_BHE`. Each row of `q_BN` begins with the query heads. Scores are multiplied by
    `scale`, or 1/sqrt(E).
    """
    slots, heads, width = y_BHE.shape
    shared, tokens = keys_PKTE.shape[1:3]
    padded = next_power_of_2(width)
    group = max(LEAST_GROUP, next_power_of_2(heads // shared))
    longest = table_BS.shape[1]
    piece = PIECE_PAGES if slots * shared < BUSY and longest > PIECE_PAGES else 0
    pieces = cdiv(longest, piece) if piece else 1
    y = sums = y_BHE
    if piece:
        y = y_BHE.new_empty(pieces, slots, heads, width, dtype=torch.float32)
        sums = y_BHE.new_empty(pieces, slots, heads, 2, dtype=torch.float32)
    pointers = (q_BN, keys_PKTE, values_PKTE, table_BS, position_B, y, sums)
    variant = _variant(
        _attend,
        *pointers,
        *("i32", "i32", "i32", "i32", "fp32"),
        warps=4 if padded > 64 else 2,
        stages=3,
        H=heads,
        K=shared,
        E=width,
        EP=padded,
        GP=group,
        T=tokens,
        PIECE=piece,
        STAGES=2 if padded > 128 else 3,
    )
    factor = (width**-0.5 if scale is None else scale) * 1.4426950408889634
    numbers = (slots, q_BN.stride(0), longest, window or FAR, factor)
    launch(variant, (slots, shared, pieces), *pointers, *numbers)
    if piece:
        joined = (y, sums, position_B, y_BHE)
        variant = _variant(
            _join, *joined, "i32", warps=1, H=heads, E=width, EP=padded, T=tokens, PIECE=piece
        )
        launch(variant, (slots, heads), *joined, slots)


def _variant(function: Any, *arguments: Any, warps: int, stages: int = 2, **constants: Any) -> Any:
    types = (each.dtype if isinstance(each, Tensor) else each for each in arguments)
    return compiled_as(function, *types, warps=warps, stages=stages, **constants)
