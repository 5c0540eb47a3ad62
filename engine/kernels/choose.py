"""Choose the next token of each row of logits on the device, as `engine.generation.sampling.choose` does in fp64.

    _sums      per chunk of a row: the largest score, the lowest id that has it, the sum of exponentials, and
               the number of logits that are not finite
    _choose    combines the chunks of a row, chooses its token, and writes the state of its slot

To draw a token, `_choose` finds the chunk in which the cumulative probability exceeds the uniform number, and then the
token in it. So logits are read once, and one chunk of them twice. The chunks' sums are added in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.registry import compiled_as, launch
from engine.kernels.sizes import cdiv, next_power_of_2

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: B slots, N rows of logits and slots that get a token, V ids, P parts of them, E ends of text

IDS = 4096
"""Number of logits per program."""


class SlotState(NamedTuple):
    """The state of each slot, which a step reads and writes."""

    token_B: Tensor
    """int64: the last token, the input of the next step."""
    position_B: Tensor
    """int32: position of the last token; negative if the slot is idle."""
    count_B: Tensor
    """int32: number of tokens generated so far."""
    limit_B: Tensor
    """int32: maximum number of tokens to generate."""
    key_B: Tensor
    """int64: key of the sequence for random draws."""
    chosen_B: Tensor
    """int32: the chosen token, or minus the number of logits that are not finite."""
    log_p_B: Tensor
    """float32: log-probability of the chosen token."""


@triton.jit
def _both(most, least, other_most, other_least):
    return tl.maximum(most, other_most), tl.minimum(least, other_least)


@triton.jit
def _sums(
    logits_ptr,  # (rows of logits, V)
    source_ptr,  # *i32 (N): the row of logits
    slot_ptr,  # *i32 (N)
    position_ptr,  # *i32 (B)
    most_ptr,  # *fp32 (N, P), written
    id_ptr,  # *i32 (N, P), written unless DRAW
    sum_ptr,  # *fp32 (N, P), written
    bad_ptr,  # *i32 (N, P), written
    ids,
    over,  # 1 / temperature
    SIZE: tl.constexpr,
    DRAW: tl.constexpr,
):
    row = tl.program_id(1)
    if tl.load(position_ptr + tl.load(slot_ptr + row)) < 0:
        return
    id_E = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there_E = id_E < ids
    at_E = tl.load(source_ptr + row).to(tl.int64) * ids + id_E
    raw_E = tl.load(logits_ptr + at_E, mask=there_E, other=0).to(tl.float32)
    x_E = tl.where(there_E, raw_E * over, float("-inf"))
    largest, least = tl.reduce((x_E, tl.where(there_E, x_E, 0.0)), 0, _both)
    total = tl.sum(tl.exp(x_E - largest), axis=0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    bad = 0
    # NaN is detected by the sum, plus infinity by the largest logit, and minus infinity by the smallest.
    if (least == float("-inf")) | (largest == float("inf")) | (total != total):
        finite_E = tl.abs(x_E) < float("inf")
        bad = tl.sum((there_E & (finite_E == 0)).to(tl.int32), axis=0)
        largest = tl.max(tl.where(finite_E, x_E, float("-inf")), axis=0)
    tl.store(most_ptr + at, largest)
    tl.store(sum_ptr + at, total)
    tl.store(bad_ptr + at, bad)
    if not DRAW:
        tl.store(id_ptr + at, tl.min(tl.where(x_E == largest, id_E, 0x7FFFFFFF), axis=0))


@triton.jit
def _uniform(key, number):
    """Return the uniform number of a token, in fp64 (`engine.generation.sampling.uniform`)."""
    z = key.to(tl.uint64, bitcast=True)
    z += (number + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 11
    return z.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _choose(
    logits_ptr,
    source_ptr,
    slot_ptr,
    most_ptr,
    id_ptr,
    sum_ptr,
    bad_ptr,
    ends_ptr,  # *i32 (E): ids that end a text, the last repeated
    token_ptr,
    position_ptr,
    count_ptr,
    limit_ptr,
    key_ptr,
    chosen_ptr,
    log_p_ptr,
    ids,
    parts,
    over,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ENDS: tl.constexpr,
    DRAW: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    position = tl.load(position_ptr + slot)
    if position < 0:
        return
    part_P = tl.arange(0, PARTS)
    there_P = part_P < parts
    at_P = row * parts + part_P
    most_P = tl.load(most_ptr + at_P, mask=there_P, other=float("-inf"))
    bad = tl.sum(tl.load(bad_ptr + at_P, mask=there_P, other=0), axis=0)
    sum_P = tl.load(sum_ptr + at_P, mask=there_P, other=0.0)
    most = tl.max(most_P, axis=0)
    share_P = tl.where(there_P & (most_P > float("-inf")), tl.exp(most_P - most), 0.0)
    share_P = sum_P.to(tl.float64) * share_P.to(tl.float64)
    total = tl.sum(share_P, axis=0)
    count = tl.load(count_ptr + slot)
    if DRAW:
        target = _uniform(tl.load(key_ptr + slot), count.to(tl.int64)) * total
        upto_P = tl.cumsum(share_P, axis=0)
        part = tl.sum((there_P & (upto_P <= target)).to(tl.int32), axis=0)
        # Rounding may move the target beyond the end: then take the last chunk with any probability.
        part = tl.minimum(part, tl.max(tl.where(share_P > 0, part_P, 0), axis=0))
        before = tl.sum(tl.where(part_P < part, share_P, 0.0), axis=0)
        id_E = part * SIZE + tl.arange(0, SIZE)
        at_E = tl.load(source_ptr + row).to(tl.int64) * ids + id_E
        x_E = tl.load(logits_ptr + at_E, mask=id_E < ids, other=float("-inf")).to(tl.float32) * over
        p_E = tl.exp(x_E - most).to(tl.float64)
        p_E = tl.where((id_E < ids) & (p_E >= 0), p_E, 0.0)
        sum_E = before + tl.cumsum(p_E, axis=0)
        last = tl.max(tl.where(p_E > 0, id_E, part * SIZE), axis=0)
        token = tl.min(tl.where((sum_E > target) & (p_E > 0), id_E, last), axis=0)
        score = tl.load(logits_ptr + tl.load(source_ptr + row).to(tl.int64) * ids + token)
        score = score.to(tl.float32) * over
    else:
        id_P = tl.load(id_ptr + at_P, mask=there_P, other=0x7FFFFFFF)
        token = tl.min(tl.where(most_P == most, id_P, 0x7FFFFFFF), axis=0)
        score = most
    token = tl.where(bad > 0, 0, token)
    end_E = tl.load(ends_ptr + tl.arange(0, ENDS))
    is_end = tl.max((end_E == token).to(tl.int32), axis=0) > 0
    count += 1
    ended = is_end | (count >= tl.load(limit_ptr + slot)) | (bad > 0)
    tl.store(token_ptr + slot, token.to(tl.int64))
    tl.store(position_ptr + slot, tl.where(ended, -1, position + 1))
    tl.store(count_ptr + slot, count)
    tl.store(chosen_ptr + slot, tl.where(bad > 0, -bad, token))
    tl.store(log_p_ptr + slot, score - most - tl.log(total).to(tl.float32))


def choose(
    logits: Tensor,
    source_N: Tensor,
    slot_N: Tensor,
    ends_E: Tensor,
    state: SlotState,
    temperature: float,
) -> None:
    """Choose a token for each slot in `slot_N` (int32) from the row of logits given in `source_N` (int32), and
    write it to `state`. At temperature 0 take the most likely token. Idle slots are unchanged.

    `ends_E` (int32): the ids after which a slot becomes idle; E is a power of two.
    """
    ids, rows = logits.shape[1], len(slot_N)
    parts = cdiv(ids, IDS)
    over = 1 / temperature if temperature else 1.0
    draw = temperature > 0
    f32, i32 = torch.float32, torch.int32
    sums = [
        torch.empty(rows, parts, dtype=dtype, device=logits.device)
        for dtype in (f32, i32, f32, i32)
    ]
    pointers = (logits, source_N, slot_N, state.position_B, *sums)
    types = (pointer.dtype for pointer in pointers)
    variant = compiled_as(_sums, *types, "i32", "fp32", warps=4, stages=1, SIZE=IDS, DRAW=draw)
    launch(variant, (parts, rows), *pointers, ids, over)
    pointers = (logits, source_N, slot_N, *sums, ends_E, *state)
    types = (pointer.dtype for pointer in pointers)
    variant = compiled_as(
        _choose,
        *types,
        *("i32", "i32", "fp32"),
        warps=8,
        stages=1,
        SIZE=IDS,
        PARTS=next_power_of_2(parts),
        ENDS=len(ends_E),
        DRAW=draw,
    )
    launch(variant, (rows,), *pointers, ids, parts, over)
