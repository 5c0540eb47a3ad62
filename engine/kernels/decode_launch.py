"""Launches the kernels of `decode.py` and `decode_attend.py`.

    norm, gate           launch one kernel each
    attend               launches two
    variants             what decode steps of 7B and 8B models launch, for ahead-of-time compilation

All functions take the rows of a step, contiguous, in one float dtype. Pointers, rows, slots and
factors are runtime arguments; widths, strides and numbers of parts are constants, of which a model
has few. With `early`, a kernel may start before the previous one has ended (`dependent_launch.py`).

Besides weights and caches, a step reads and writes the following, all on the device:

    Parts       a matmul's output, as partial sums
    Undivided   the pending division of an RMS norm, for the consumer of a matmul (`decode.py`)
    Out         the buffer for the inputs of the next matmul: integers, or floats
    Heads       the parameters of one layer's attention besides queries, keys and values
    Scratch     the partial results of attention, per chunk (`decode_attend.py`)

These are allocated before a graph is captured and kept, because a replay needs fixed addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels import decode_choose
from engine.kernels.compiler import Variant
from engine.kernels.decode import _gate, _norm
from engine.kernels.decode_attend import _attend, _join
from engine.kernels.dependent_launch import EARLY_ARCH
from engine.kernels.registry import REGISTRY, compiled_as, launch
from engine.kernels.small_m_inputs import BLOCK, Inputs, empty_inputs
from engine.kernels.small_m_table import Config, config_for
from engine.quant.blocks import BLOCK_TYPES

# Shapes: M rows of a step, K and N columns or key/value heads, P parts of a sum, C chunks, S slots, H query heads,
# E width of a head, R half of it, B blocks of 256 columns

CHUNK = 128
"""Tokens of a row's KV cache per program. It is one fixed number, because the order of a sum
depends on it.
"""
CHUNKS_AHEAD = 8
"""Number of chunks whose loads the reduction has in flight at once."""


class Parts(NamedTuple):
    """A matmul's output as partial sums; the result is their sum over P."""

    parts_PMN: Tensor
    """Has more rows than the step if the matmul does."""
    first: int = 0
    """Offset of the first column."""

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
    """Return how many parts a matmul with `blocks` blocks per row leaves. All have the same number
    of blocks, except the last.
    """
    each = -(-blocks // config.splits)
    return -(-blocks // each)


class Out(NamedTuple):
    """The buffer for a matmul's input rows."""

    floats_MK: Tensor
    """Has more rows than are written if the matmul does."""
    codes: Inputs | None
    """Written instead of `floats_MK` if the matmul is block-quantised."""

    @property
    def columns(self) -> int:
        return self.floats_MK.shape[1]

    def pointers(self) -> tuple[Tensor, ...]:
        # Without codes, pointers of the right types that are never dereferenced.
        codes = self.codes or empty_inputs(1, BLOCK, self.floats_MK.device)
        return self.floats_MK, *codes


class Undivided(NamedTuple):
    """The pending division of an RMS norm: the consumer of a block-quantised matmul divides by it."""

    squares_MB: Tensor
    """float32, the sum of squares of each block."""
    columns: int
    eps: float


def empty_squares(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, triton.cdiv(columns, BLOCK), dtype=torch.float32, device=device)


class Heads(NamedTuple):
    """The parameters of one layer's attention besides its queries, keys and values."""

    biases: tuple[Tensor, Tensor, Tensor] | None
    """Biases of q, k, v if the matmuls have not added them."""
    norms: tuple[Tensor, Tensor] | None
    """Norm weights of q and k."""
    eps: float
    """Epsilon of these norms."""
    turns_S2R: Tensor
    """Cosines and sines of each position."""


class Scratch(NamedTuple):
    """The partial results of attention for each chunk."""

    sums_CMHE: Tensor
    """float32."""
    softmax_CMH2: Tensor
    """float32."""


def empty_scratch(
    rows: int, capacity: int, shared: int, heads: int, width: int, device: torch.device
) -> Scratch:
    """Allocate the scratch for rows of up to `capacity` tokens."""
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
    """Compute kept += parts and out = RMS norm of kept. With `late` (only for codes) out is not
    divided yet, and the pending division is returned.
    """
    rows, columns = kept_MK.shape
    blocks = 1 if late else triton.next_power_of_2(triton.cdiv(columns, BLOCK))
    source = kept_MK if parts is None else parts.tensor
    grid = (triton.cdiv(triton.cdiv(columns, BLOCK), blocks), rows)
    _launch(
        _norm,
        grid,
        (source, kept_MK, weight_K, *out.pointers(), squares_MB),
        (0 if parts is None else parts.rows, eps),
        # One warp per block, so that reductions over a block need no shared memory.
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
    """Compute out = silu(gate) * up."""
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
    """Store the keys and values of each row's token in its slot `position_M` (int32), attend to the
    slots up to it, and write the result to `out`.
    """
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
    """Launch a kernel. Numbers are passed as fp32 if they are floats, else as i32."""
    types = (
        *(each.dtype for each in pointers),
        *("fp32" if isinstance(each, float) else "i32" for each in numbers),
    )
    made: dict[str, Any] = {**constants, "EARLY": early}
    variant = compiled_as(function, *types, warps=warps, stages=2, early=early, **made)
    launch(variant, grid, *pointers, *numbers)


def variants(arch: int) -> tuple[Variant, ...]:
    """Return what decode steps of Qwen2.5-7B in bf16 launch on `arch`, with block-quantised and
    with dense weights, the attention kernels of Qwen3-8B, and the kernels that choose tokens. The
    launches are recorded from meta tensors of these shapes.
    """
    early, meta = arch >= EARLY_ARCH, torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    def given(rows: int, columns: int, kind: str = "Q4_K") -> Tensor:
        """Return a block-quantised matmul's output, which has the same parts for every number of
        rows of x.
        """
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
    """Return squares, columns and eps; without them, a pointer that is never dereferenced and 0
    columns.
    """
    return undivided or (parts.tensor, 0, 0.0)
