"""The argmax of each row of logits, without synchronising with the host, in two launches.

_largest   per part of the logits: the largest, its lowest id, and the number of non-finite ones
_choose    reduces the parts of a row; the token is the next step's input, at the next position
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.registry import compiled_as, launch

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: M rows of a step, V ids, P parts of them, E logits of one part

IDS = 4096
"""Number of logits per program."""


@triton.jit
def _largest(
    logits_ptr,  # (rows, ids)
    values_ptr,  # *fp32 (rows, parts), written
    ids_ptr,  # *i32 (rows, parts), written
    bad_ptr,  # *i32 (rows, parts), written
    ids,
    SIZE: tl.constexpr,
):
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
    token_ptr,  # *i64 (rows), written: the next step's input
    position_ptr,  # *i32 (rows), read and written
    chosen_ptr,  # *i32 (rows), written: the token, or minus the number of non-finite logits
    parts,
    last,  # the last position in the cache
    PARTS: tl.constexpr,
):
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


class Best(NamedTuple):
    """The results of `_largest` for each part of a row's logits."""

    values_MP: Tensor
    """float32."""
    ids_MP: Tensor
    """int32."""
    bad_MP: Tensor
    """int32: number of NaN or infinite logits."""


def empty_best(rows: int, ids: int, device: torch.device) -> Best:
    parts = triton.cdiv(ids, IDS)
    return Best(
        torch.empty(rows, parts, dtype=torch.float32, device=device),
        torch.empty(rows, parts, dtype=torch.int32, device=device),
        torch.empty(rows, parts, dtype=torch.int32, device=device),
    )


def choose(
    logits_MV: Tensor,
    best: Best,
    token_M: Tensor,
    position_M: Tensor,
    chosen_M: Tensor,
    last: int,
) -> None:
    """Write each row's argmax, the lowest id on ties, to `token_M` (int64) and `chosen_M` (int32).

    If a row has non-finite logits, `chosen_M` gets minus their number instead. Positions increase
    by one, up to `last`.
    """
    rows, ids = logits_MV.shape
    parts = best.values_MP.shape[1]
    read = (logits_MV, *best)
    types = (each.dtype for each in read)
    largest = compiled_as(_largest, *types, "i32", warps=4, stages=2, SIZE=IDS)
    launch(largest, (parts, rows), *read, ids)
    written = (*best, token_M, position_M, chosen_M)
    types = (each.dtype for each in written)
    padded = triton.next_power_of_2(parts)
    chosen = compiled_as(_choose, *types, "i32", "i32", warps=1, stages=2, PARTS=padded)
    launch(chosen, (rows,), *written, parts, last)
