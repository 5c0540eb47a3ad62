"""How the kernels of `decode.py` and `decode_attend.py` are launched: a step of generation as functions.

    norm, gate           launch one kernel each
    attend               launches two
    variants             what steps of 7B and 8B models launch, to be compiled ahead of time

All take the rows of a step, contiguous, in one float dtype. Pointers, rows, slots and factors are
arguments; widths, strides and numbers of parts are constants: a model has few of them. With `early` they may
begin before the kernel ahead has ended (`dependent_launch.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from engine.kernels import decode_choose
from engine.kernels.decode import _gate, _norm
from engine.kernels.decode_attend import _attend, _join
from engine.kernels.decode_buffers import (
    CHUNK,
    OUT_TYPES,
    Heads,
    Out,
    Parts,
    Scratch,
    Undivided,
    parts_of,
)
from engine.kernels.dependent_launch import EARLY_ARCH
from engine.kernels.key import Constant, Variant
from engine.kernels.registry import launch, pointer_type
from engine.kernels.small_m_inputs import BLOCK
from engine.kernels.small_m_table import config_for
from engine.quant.blocks import BLOCK_TYPES

# Shapes: M rows of a step, K columns or key/value heads, S slots, E width of a head, B blocks of 256

CHUNKS_AHEAD = 8
"""Chunks that a join has in flight at once."""


def norm(
    parts: Parts | None,
    kept_MK: Tensor,
    weight_K: Tensor,
    eps: float,
    out: Out,
    squares_MB: Tensor,
    *,
    late: bool,
    early: bool = False,
) -> Undivided | None:
    """kept += parts; out = RMS norm of it. With `late`, for codes, out is not yet divided, and what
    that takes is returned."""
    rows, columns = kept_MK.shape
    blocks = 1 if late else triton.next_power_of_2(triton.cdiv(columns, BLOCK))
    source = kept_MK if parts is None else parts.tensor
    variant = _norm_variant(
        (source.dtype, kept_MK.dtype, weight_K.dtype),
        columns,
        0 if parts is None else parts.splits,
        blocks,
        late=late,
        codes=out.codes is not None,
        early=early,
    )
    grid = (triton.cdiv(triton.cdiv(columns, BLOCK), blocks), rows)
    pointers = (source, kept_MK, weight_K, *out.pointers(), squares_MB)
    launch(variant, grid, *pointers, 0 if parts is None else parts.rows, eps)
    return Undivided(squares_MB, columns, eps) if late else None


def gate(
    gate: Parts,
    up: Parts,
    undivided: Undivided | None,
    out: Out,
    rows: int,
    *,
    early: bool = False,
) -> None:
    """out = silu(gate) * up."""
    squares, normed, eps = _of(undivided, gate)
    pointers = (gate.tensor, up.tensor, squares, *out.pointers())
    variant = _gate_variant(
        (gate.tensor.dtype, up.tensor.dtype, squares.dtype, out.floats_MK.dtype),
        (out.columns, gate.row_stride, gate.splits, normed),
        codes=out.codes is not None,
        early=early,
    )
    grid = (triton.cdiv(out.columns, BLOCK), rows)
    launch(variant, grid, *pointers, gate.rows, eps)


def attend(
    q: Parts,
    k: Parts,
    v: Parts,
    heads: Heads,
    undivided: Undivided | None,
    keys_MSKE: Tensor,
    values_MSKE: Tensor,
    position_M: Tensor,
    scratch: Scratch,
    out: Out,
    *,
    early: bool = False,
) -> None:
    """Puts the keys and values of each row's token into its slot `position_M`, int32, attends to the
    slots up to it, and writes what that gives."""
    rows, slots, shared, width = keys_MSKE.shape
    squares, normed, norm_eps = _of(undivided, q)
    anything = q.tensor
    biases = heads.biases or (anything, anything, anything)
    norms = heads.norms or (anything, anything)
    pointers = (
        *(q.tensor, k.tensor, v.tensor, *biases, *norms, heads.turns_S2R),
        *(keys_MSKE, values_MSKE, position_M, squares, *scratch),
    )
    variant = _attend_variant(
        tuple(each.dtype for each in pointers),
        (shared, scratch.sums_CMHE.shape[2] // shared, width),
        (q.row_stride, k.row_stride, q.splits, normed),
        bias=heads.biases is not None,
        norm=heads.norms is not None,
        early=early,
    )
    launch(
        variant,
        (rows * shared, len(scratch.sums_CMHE)),
        *pointers,
        *(rows, slots, q.rows, heads.eps, norm_eps, width**-0.5),
    )
    columns = scratch.sums_CMHE.shape[2] * width
    joining = _join_variant(
        out.floats_MK.dtype, columns, width, codes=out.codes is not None, early=early
    )
    grid = (triton.cdiv(columns, BLOCK), rows)
    launch(joining, grid, *scratch, position_M, *out.pointers(), rows)


def variants(arch: int) -> tuple[Variant, ...]:
    """What steps of Qwen2.5-7B in bf16 launch on `arch`, of weights in blocks and in floats, those of
    Qwen3-8B's attention, and what chooses their tokens."""
    bf16, fp32, i32 = torch.bfloat16, torch.float32, torch.int32
    packed = (*[fp32] * 3, *[bf16] * 3, fp32, fp32, bf16, bf16, bf16, i32, fp32, fp32, fp32)
    normed = (*[fp32] * 6, *[bf16] * 5, i32, fp32, fp32, fp32)
    dense = (*[bf16] * 11, i32, bf16, fp32, fp32)
    seven, eight = (4, 7, 128), (8, 4, 128)
    early = arch >= EARLY_ARCH

    def parts(rows: int, columns: int, kind: str = "Q4_K") -> int:
        # The same for each number of rows of x, as a sum's order is.
        type_ = BLOCK_TYPES[kind]
        config = config_for(type_, rows, columns, 1, arch)
        return parts_of(columns // type_.block_size, config)

    o = parts(3584, 3584)
    downs = sorted({parts(3584, 18944, kind) for kind in ("Q4_K", "Q6_K")})
    norms = [
        _norm_variant(
            (source, bf16, bf16), 3584, splits, blocks, late=late, codes=codes, early=early
        )
        for source, splits, blocks, late, codes in (
            *((bf16, 0, 1, True, True), (fp32, o, 1, True, True)),
            *((fp32, down, 1, True, True) for down in downs),
            *((fp32, down, 16, False, True) for down in downs),
            *((bf16, 0, 16, False, False), (bf16, 1, 16, False, False)),
        )
    ]
    sizes = (4608, 4608, parts(4608, 3584), 3584)
    sizes_eight = (6144, 6144, parts(6144, 4096), 4096)
    gates = (18944, 37888, parts(37888, 3584), 3584)
    return (
        *norms,
        _attend_variant(packed, seven, sizes, bias=True, norm=False, early=early),
        _attend_variant(normed, eight, sizes_eight, bias=False, norm=True, early=early),
        _attend_variant(dense, seven, (3584, 512, 1, 0), bias=False, norm=False, early=early),
        *(_join_variant(bf16, 3584, 128, codes=codes, early=early) for codes in (True, False)),
        _join_variant(bf16, 4096, 128, codes=True, early=early),
        _gate_variant((fp32, fp32, fp32, bf16), gates, codes=True, early=early),
        _gate_variant((bf16, bf16, bf16, bf16), (18944, 18944, 1, 0), codes=False, early=early),
        *decode_choose.variants(),
    )


def _of(undivided: Undivided | None, parts: Parts) -> tuple[Tensor, int, float]:
    """Squares, columns and eps; without, a pointer that nobody follows and 0 columns."""
    return undivided or (parts.tensor, 0, 0.0)


def _norm_variant(
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    splits: int,
    blocks: int,
    *,
    late: bool,
    codes: bool,
    early: bool,
) -> Variant:
    constants: dict[str, Constant] = {"COLUMNS": columns, "SPLITS": splits, "BLOCKS": blocks}
    constants |= {"LATE": late, "CODES": codes}
    pointers = (*dtypes, dtypes[1], *OUT_TYPES, torch.float32)
    # One warp for each block: what is taken of a block then takes no shared memory.
    return _variant(_norm, pointers, ("i32", "fp32"), constants, min(16, blocks), early)


def _gate_variant(
    dtypes: tuple[torch.dtype, ...], sizes: tuple[int, int, int, int], *, codes: bool, early: bool
) -> Variant:
    columns, stride, splits, normed = sizes
    constants: dict[str, Constant] = {"COLUMNS": columns, "STRIDE": stride, "SPLITS": splits}
    constants |= {"NORMED": normed, "CODES": codes}
    return _variant(_gate, (*dtypes, *OUT_TYPES), ("i32", "fp32"), constants, 1, early)


def _attend_variant(
    dtypes: tuple[torch.dtype, ...],
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    *,
    bias: bool,
    norm: bool,
    early: bool,
) -> Variant:
    shared, group, width = heads
    stride, shared_stride, splits, normed = sizes
    constants: dict[str, Constant] = {
        "BIAS": bias,
        "NORM": norm,
        "NORMED": normed,
        "SHARED": shared,
        "GROUP": group,
        "R": width // 2,
        "STRIDE": stride,
        "SHARED_STRIDE": shared_stride,
        "SPLITS": splits,
        "CHUNK": CHUNK,
    }
    return _variant(_attend, dtypes, (*["i32"] * 3, *["fp32"] * 3), constants, 8, early)


def _join_variant(
    dtype: torch.dtype, columns: int, width: int, *, codes: bool, early: bool
) -> Variant:
    constants: dict[str, Constant] = {"COLUMNS": columns, "WIDTH": width, "CHUNK": CHUNK}
    constants |= {"AHEAD": CHUNKS_AHEAD, "CODES": codes}
    dtypes = (torch.float32, torch.float32, torch.int32, dtype, *OUT_TYPES)
    return _variant(_join, dtypes, ("i32",), constants, 4, early)


def _variant(
    function: Any,
    pointers: tuple[torch.dtype, ...],
    numbers: tuple[str, ...],
    constants: dict[str, Constant],
    warps: int,
    early: bool,
) -> Variant:
    return Variant(
        function=function,
        types=(*map(pointer_type, pointers), *numbers),
        constants=(*constants.items(), ("EARLY", early)),
        warps=warps,
        stages=2,
        early=early,
    )
