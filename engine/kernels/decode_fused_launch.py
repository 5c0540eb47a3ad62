"""How the kernels of `decode_fused.py` and `decode_fused_attend.py` are launched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels.decode_fused import _gate_blocks, _norm_blocks
from engine.kernels.decode_fused_attend import _attend_joined
from engine.kernels.decode_launch import CHUNK, Heads, Out, Parts
from engine.kernels.key import Constant, Variant
from engine.kernels.registry import launch, pointer_type
from engine.kernels.small_m_inputs import BLOCK

# Shapes: M rows of a step, K columns, P parts of a sum, C chunks, H query heads, E width of a head,
# B blocks of 256 columns

CHUNKS_AHEAD = 6
"""Chunks that a join has in flight at once."""
MAX_WIDTH = 128
"""Of a head: keys and values of a chunk of wider ones do not fit into the shared memory of all GPUs."""
_OUT = (torch.int8, torch.float32, torch.int32)


class Undivided(NamedTuple):
    """What is left to do for whoever reads the product of rows in blocks: to divide by the norm."""

    squares_MB: Tensor
    """float32, of each block."""
    columns: int
    eps: float


def empty_squares(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, triton.cdiv(columns, BLOCK), dtype=torch.float32, device=device)


def norm(
    parts: Parts | None,
    kept_MK: Tensor,
    weight_K: Tensor,
    eps: float,
    out: Out,
    squares_MB: Tensor,
    *,
    late: bool,
    early: bool,
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
        early,
        late=late,
        codes=out.codes is not None,
    )
    grid = (triton.cdiv(triton.cdiv(columns, BLOCK), blocks), rows)
    part_rows = 0 if parts is None else parts.parts_PMN.shape[1]
    pointers = (source, kept_MK, weight_K, *out.pointers(), squares_MB)
    launch(variant, grid, *pointers, part_rows, eps)
    return Undivided(squares_MB, columns, eps) if late else None


def gate(
    gate: Parts, up: Parts, undivided: Undivided | None, out: Out, rows: int, *, early: bool
) -> None:
    """out = silu(gate) * up."""
    squares, normed, eps = _of(undivided, gate)
    pointers = (gate.tensor, up.tensor, squares, *out.pointers())
    variant = _gate_variant(
        (gate.tensor.dtype, up.tensor.dtype, squares.dtype, out.floats_MK.dtype),
        (out.columns, gate.row_stride, gate.splits, normed),
        early,
        codes=out.codes is not None,
    )
    grid = (triton.cdiv(out.columns, BLOCK), rows)
    launch(variant, grid, *pointers, gate.parts_PMN.shape[1], eps)


class Scratch(NamedTuple):
    """What programs of one attention tell each other."""

    sums_CMHE: Tensor
    """float32."""
    softmax_CMH2: Tensor
    """float32."""
    arrived_MU: Tensor
    """int32, of each unit of shared heads; 0 between launches."""


def empty_scratch(
    rows: int, capacity: int, shared: int, heads: int, width: int, device: torch.device
) -> Scratch:
    """For rows of up to `capacity` tokens."""
    shape = (triton.cdiv(capacity, CHUNK), rows, heads)
    units = triton.cdiv(shared, unit_of(shared, heads // shared * width))
    return Scratch(
        torch.empty(*shape, width, dtype=torch.float32, device=device),
        torch.empty(*shape, 2, dtype=torch.float32, device=device),
        torch.zeros(rows, units, dtype=torch.int32, device=device),
    )


def unit_of(shared: int, columns: int) -> int:
    """How many shared heads, each of so many columns of queries, fill whole blocks; all at most."""
    return min(shared, BLOCK // math.gcd(BLOCK, columns))


def attend(
    q: Parts,
    k: Parts,
    v: Parts,
    heads: Heads,
    turns_S2R: Tensor,
    undivided: Undivided | None,
    keys_MSKE: Tensor,
    values_MSKE: Tensor,
    position_M: Tensor,
    scratch: Scratch,
    out: Out,
    *,
    early: bool,
) -> None:
    """Puts the keys and values of each row's token into its slot `position_M`, int32, attends to the
    slots up to it, and writes what that gives. `turns_S2R` are cosines and sines of each position."""
    rows, slots, shared, width = keys_MSKE.shape
    squares, normed, norm_eps = _of(undivided, q)
    anything = q.tensor
    biases = heads.biases or (anything, anything, anything)
    norms = heads.norms or (anything, anything)
    pointers = (
        *(q.tensor, k.tensor, v.tensor, *biases, *norms, turns_S2R, keys_MSKE, values_MSKE),
        *(position_M, squares, *scratch, *out.pointers()),
    )
    variant = _attend_variant(
        tuple(each.dtype for each in pointers),
        (shared, scratch.sums_CMHE.shape[2] // shared, width),
        (q.row_stride, k.row_stride, q.splits, normed),
        early,
        bias=heads.biases is not None,
        norm=heads.norms is not None,
        codes=out.codes is not None,
    )
    launch(
        variant,
        (rows * shared, len(scratch.sums_CMHE)),
        *pointers,
        *(rows, slots, q.parts_PMN.shape[1], heads.eps, norm_eps, width**-0.5),
    )


def variants(arch: int) -> tuple[Variant, ...]:
    """What steps of Qwen2.5-7B in bf16 launch on `arch`, of weights in blocks and in floats, and those
    of Qwen3-8B's attention."""
    bf16, fp32, i32 = torch.bfloat16, torch.float32, torch.int32
    early = arch >= 90
    ends = (fp32, fp32, i32, bf16, *_OUT)
    packed = (*[fp32] * 3, *[bf16] * 3, fp32, fp32, bf16, bf16, bf16, i32, fp32, *ends)
    normed = (*[fp32] * 6, *[bf16] * 5, i32, fp32, *ends)
    dense = (*[bf16] * 11, i32, bf16, *ends)
    seven, eight = (4, 7, 128), (8, 4, 128)
    # Parts of a product, of q, k and v, of o and of down.
    qkv, o, down = 5, 7, 8
    norms = [
        _norm_variant((source, bf16, bf16), 3584, splits, blocks, early, late=late, codes=codes)
        for source, splits, blocks, late, codes in (
            (bf16, 0, 1, True, True),
            (fp32, o, 1, True, True),
            (fp32, down, 1, True, True),
            (fp32, down, 16, False, True),
            (bf16, 0, 16, False, False),
            (bf16, 1, 16, False, False),
        )
    ]
    return (
        *norms,
        _attend_variant(
            packed, seven, (4608, 4608, qkv, 3584), early, bias=True, norm=False, codes=True
        ),
        _attend_variant(
            normed, eight, (6144, 6144, qkv, 4096), early, bias=False, norm=True, codes=True
        ),
        _attend_variant(
            dense, seven, (3584, 512, 1, 0), early, bias=False, norm=False, codes=False
        ),
        _gate_variant((fp32, fp32, fp32, bf16), (18944, 37888, 1, 3584), early, codes=True),
        _gate_variant((bf16, bf16, bf16, bf16), (18944, 18944, 1, 0), early, codes=False),
    )


def _of(undivided: Undivided | None, parts: Parts) -> tuple[Tensor, int, float]:
    """Squares, columns and eps; without, a pointer that nobody follows and 0 columns."""
    return undivided or (parts.tensor, 0, 0.0)


def _norm_variant(
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    splits: int,
    blocks: int,
    early: bool,
    *,
    late: bool,
    codes: bool,
) -> Variant:
    constants: dict[str, Constant] = {"COLUMNS": columns, "SPLITS": splits, "BLOCKS": blocks}
    constants |= {"LATE": late, "CODES": codes}
    pointers = (*dtypes, dtypes[1], *_OUT, torch.float32)
    # One warp for each block: what is taken of a block then takes no shared memory.
    return _variant(_norm_blocks, pointers, ("i32", "fp32"), constants, early, min(16, blocks))


def _gate_variant(
    dtypes: tuple[torch.dtype, ...], sizes: tuple[int, int, int, int], early: bool, *, codes: bool
) -> Variant:
    columns, stride, splits, normed = sizes
    constants: dict[str, Constant] = {"COLUMNS": columns, "STRIDE": stride, "SPLITS": splits}
    constants |= {"NORMED": normed, "CODES": codes}
    return _variant(_gate_blocks, (*dtypes, *_OUT), ("i32", "fp32"), constants, early, 1)


def _attend_variant(
    dtypes: tuple[torch.dtype, ...],
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    early: bool,
    *,
    bias: bool,
    norm: bool,
    codes: bool,
) -> Variant:
    shared, group, width = heads
    stride, shared_stride, splits, normed = sizes
    unit = unit_of(shared, group * width)
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
        "UNIT": unit,
        "BLOCKS": triton.next_power_of_2(triton.cdiv(unit * group * width, BLOCK)),
        "CHUNK": CHUNK,
        "AHEAD": CHUNKS_AHEAD,
        "CODES": codes,
    }
    numbers = (*["i32"] * 3, *["fp32"] * 3)
    return _variant(_attend_joined, dtypes, numbers, constants, early, 8)


def _variant(
    function: Any,
    pointers: tuple[torch.dtype, ...],
    numbers: tuple[str, ...],
    constants: dict[str, Constant],
    early: bool,
    warps: int,
) -> Variant:
    return Variant(
        function=function,
        types=(*map(pointer_type, pointers), *numbers),
        constants=(*constants.items(), ("DEPENDENT", early)),
        warps=warps,
        stages=2,
        dependent=early,
    )
