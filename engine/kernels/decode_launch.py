"""How the kernels of `decode.py` and `decode_attend.py` are launched: a step of generation as functions.

    norm, gate           launch one kernel each
    attend               launches two
    variants             what steps of 7B and 8B models launch, to be compiled ahead of time

All take the rows of a step, contiguous, in one float dtype. Pointers, rows, slots and factors are
arguments; widths, strides and numbers of parts are constants: a model has few of them. With `early` they may
begin before the kernel ahead has ended (`dependent_launch.py`).

What a step reads and writes beside weights and caches, all of it on the device:

    Parts       what a matmul gave, in parts to be added
    Undivided   what is left of an RMS norm for whoever reads a matmul (`decode.py`)
    Out         where the inputs of the next matmul go: integers, or floats
    Heads       what attention of one layer has besides queries, keys and values
    Scratch     what attention leaves of each chunk (`decode_attend.py`)

Made before a graph is captured, and kept: a replay is the same work at the same addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels import decode_choose
from engine.kernels.decode import _gate, _norm
from engine.kernels.decode_attend import _attend, _join
from engine.kernels.dependent_launch import EARLY_ARCH
from engine.kernels.key import Variant
from engine.kernels.registry import REGISTRY, compiled_as, launch
from engine.kernels.small_m_inputs import BLOCK, Inputs, empty_inputs
from engine.kernels.small_m_table import Config, config_for
from engine.quant.blocks import BLOCK_TYPES

# Shapes: M rows of a step, K and N columns or key/value heads, P parts of a sum, C chunks, S slots, H query heads,
# E width of a head, R half of it, B blocks of 256 columns

CHUNK = 128
"""Tokens of a row's cache that one program looks at. A sum's order depends on it, so it is one number."""
CHUNKS_AHEAD = 8
"""Chunks that a join has in flight at once."""


class Parts(NamedTuple):
    """A matmul's results: their sum over P is what it gave."""

    parts_PMN: Tensor
    """Of more rows than are run, where a matmul has more."""
    first: int = 0
    """The column that is number 0."""

    @property
    def tensor(self) -> Tensor:
        return self.parts_PMN.view(-1)[self.first :]

    @property
    def splits(self) -> int:
        return self.parts_PMN.shape[0]

    @property
    def rows(self) -> int:
        return self.parts_PMN.shape[1]

    @property
    def row_stride(self) -> int:
        return self.parts_PMN.shape[2]


def parts_of(blocks: int, config: Config) -> int:
    """How many parts a matmul of rows of `blocks` blocks leaves: of as many blocks each, but for the last."""
    each = -(-blocks // config.splits)
    return -(-blocks // each)


class Out(NamedTuple):
    """Rows for a matmul to multiply."""

    floats_MK: Tensor
    """Of more rows than are written, where a matmul has more."""
    codes: Inputs | None
    """Written instead, for a matmul with blocks."""

    @property
    def columns(self) -> int:
        return self.floats_MK.shape[1]

    def pointers(self) -> tuple[Tensor, ...]:
        # Without codes, pointers of their types that nobody follows.
        codes = self.codes or empty_inputs(1, BLOCK, self.floats_MK.device)
        return self.floats_MK, *codes


class Undivided(NamedTuple):
    """What is left to do for whoever reads the matmul of rows in blocks: to divide by the norm."""

    squares_MB: Tensor
    """float32, of each block."""
    columns: int
    eps: float


def empty_squares(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, triton.cdiv(columns, BLOCK), dtype=torch.float32, device=device)


class Heads(NamedTuple):
    """What attention of one layer needs besides its queries, keys and values."""

    biases: tuple[Tensor, Tensor, Tensor] | None
    """Of q, k, v, where the matmuls have not added them."""
    norms: tuple[Tensor, Tensor] | None
    """Of q and k."""
    eps: float
    """Of those."""
    turns_S2R: Tensor
    """Cosines and sines of each position."""


class Scratch(NamedTuple):
    """What attention leaves of each chunk, to be joined."""

    sums_CMHE: Tensor
    """float32."""
    softmax_CMH2: Tensor
    """float32."""


def empty_scratch(
    rows: int, capacity: int, shared: int, heads: int, width: int, device: torch.device
) -> Scratch:
    """For rows of up to `capacity` tokens."""
    shape = (triton.cdiv(capacity, CHUNK), rows, heads)
    return Scratch(
        torch.empty(*shape, width, dtype=torch.float32, device=device),
        torch.empty(*shape, 2, dtype=torch.float32, device=device),
    )


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
    grid = (triton.cdiv(triton.cdiv(columns, BLOCK), blocks), rows)
    _launch(
        _norm,
        grid,
        (source, kept_MK, weight_K, *out.pointers(), squares_MB),
        (0 if parts is None else parts.rows, eps),
        # One warp for each block: what is taken of a block then takes no shared memory.
        warps=min(16, blocks),
        COLUMNS=columns,
        SPLITS=0 if parts is None else parts.splits,
        BLOCKS=blocks,
        LATE=late,
        CODES=out.codes is not None,
        early=early,
    )
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
    _launch(
        _gate,
        (triton.cdiv(out.columns, BLOCK), rows),
        (gate.tensor, up.tensor, squares, *out.pointers()),
        (gate.rows, eps),
        warps=1,
        COLUMNS=out.columns,
        STRIDE=gate.row_stride,
        SPLITS=gate.splits,
        NORMED=normed,
        CODES=out.codes is not None,
        early=early,
    )


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
    heads_of_all = scratch.sums_CMHE.shape[2]
    _launch(
        _attend,
        (rows * shared, len(scratch.sums_CMHE)),
        pointers,
        (rows, slots, q.rows, heads.eps, norm_eps, width**-0.5),
        warps=8,
        BIAS=heads.biases is not None,
        NORM=heads.norms is not None,
        NORMED=normed,
        SHARED=shared,
        GROUP=heads_of_all // shared,
        R=width // 2,
        STRIDE=q.row_stride,
        SHARED_STRIDE=k.row_stride,
        SPLITS=q.splits,
        CHUNK=CHUNK,
        early=early,
    )
    columns = heads_of_all * width
    _launch(
        _join,
        (triton.cdiv(columns, BLOCK), rows),
        (*scratch, position_M, *out.pointers()),
        (rows,),
        warps=4,
        COLUMNS=columns,
        WIDTH=width,
        CHUNK=CHUNK,
        AHEAD=CHUNKS_AHEAD,
        CODES=out.codes is not None,
        early=early,
    )


def _launch(
    function: Any,
    grid: tuple[int, ...],
    pointers: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    *,
    warps: int,
    early: bool,
    **constants: int,
) -> None:
    """Numbers are i32, or fp32 where they are floats."""
    types = (
        *(each.dtype for each in pointers),
        *("fp32" if isinstance(each, float) else "i32" for each in numbers),
    )
    made: dict[str, Any] = {**constants, "EARLY": early}
    variant = compiled_as(function, *types, warps=warps, stages=2, early=early, **made)
    launch(variant, grid, *pointers, *numbers)


def variants(arch: int) -> tuple[Variant, ...]:
    """What steps of Qwen2.5-7B in bf16 launch on `arch`, of weights in blocks and in floats, those of
    Qwen3-8B's attention, and what chooses their tokens: the launches themselves, noted for tensors of
    those shapes that have no memory."""
    early, meta = arch >= EARLY_ARCH, torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    def given(rows: int, columns: int, kind: str = "Q4_K") -> Tensor:
        """What a matmul with blocks leaves, in the same parts for each number of rows of x."""
        type_ = BLOCK_TYPES[kind]
        splits = parts_of(columns // type_.block_size, config_for(type_, rows, columns, 1, arch))
        return empty(splits, 1, rows, dtype=torch.float32)

    def out(columns: int, codes: bool) -> Out:
        return Out(empty(1, columns), empty_inputs(1, columns, meta) if codes else None)

    def squares(columns: int) -> Tensor:
        return empty_squares(1, columns, meta)

    with REGISTRY.noting() as noted:
        o = given(3584, 3584)
        downs = [given(3584, 18944, kind) for kind in ("Q4_K", "Q6_K")]
        for parts, late, codes in (
            *((each, True, True) for each in (None, o, *downs)),
            *((each, False, True) for each in downs),
            *((each, False, False) for each in (None, empty(1, 1, 3584))),
        ):
            before = None if parts is None else Parts(parts)
            rows = (empty(1, 3584), empty(3584), 0.0, out(3584, codes), squares(3584))
            norm(before, *rows, late=late, early=early)
        weight = empty(1)
        for shared, firsts, y, biases, norms, normed in (
            (4, (0, 3584, 4096), given(4608, 3584), (weight, weight, weight), None, 3584),
            (8, (0, 4096, 5120), given(6144, 4096), None, (weight, weight), 4096),
            (4, (0, 0, 0), None, None, None, 0),
        ):
            heads = 28 if shared == 4 else 32
            sums = (y, y, y) if y is not None else (empty(1, 1, 3584), *[empty(1, 1, 512)] * 2)
            undivided = Undivided(squares(normed), normed, 0.0) if normed else None
            q, k, v = map(Parts, sums, firsts)
            attend(
                q,
                k,
                v,
                Heads(biases, norms, 0.0, weight),
                undivided,
                empty(1, CHUNK, shared, 128),
                empty(1, CHUNK, shared, 128),
                empty(1, dtype=torch.int32),
                empty_scratch(1, CHUNK, shared, heads, 128, meta),
                out(heads * 128, undivided is not None),
                early=early,
            )
        both = given(37888, 3584)
        undivided = Undivided(squares(3584), 3584, 0.0)
        gate(Parts(both), Parts(both, 18944), undivided, out(18944, True), 1, early=early)
        plain = Parts(empty(1, 1, 18944))
        gate(plain, plain, None, out(18944, False), 1, early=early)
        best = decode_choose.empty_best(1, 64 * decode_choose.IDS, meta)
        token, position, chosen = (
            empty(1, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int32)
        )
        logits = empty(1, 64 * decode_choose.IDS)
        decode_choose.choose(logits, best, token, position, chosen, 0)
    return tuple(dict.fromkeys(noted))


def _of(undivided: Undivided | None, parts: Parts) -> tuple[Tensor, int, float]:
    """Squares, columns and eps; without, a pointer that nobody follows and 0 columns."""
    return undivided or (parts.tensor, 0, 0.0)
