"""How the kernels of `decode.py` are launched: what a step of generation is made of, as functions.

All take the rows of a step, contiguous, in one float dtype, and launch one kernel each (`choose` two).
`Out` is where the inputs of the next product go: whole numbers, or floats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels.decode import _attend, _choose, _gate, _join, _largest, _norm
from engine.kernels.key import Constant, Variant
from engine.kernels.registry import launch, pointer_type
from engine.kernels.small_m_inputs import BLOCK, Inputs, empty_inputs

# Shapes: M rows of a step, K columns, P parts of a sum, C chunks, H query heads, E width of a head

CHUNK = 128
"""Tokens of a row's cache that one program looks at. A sum's order depends on it, so it is one number."""
TILE = 64
IDS = 4096
"""Logits that one program looks at."""


class Parts(NamedTuple):
    """A product's results: their sum over P is what it gave."""

    parts_PMN: Tensor
    first: int = 0
    """The column that is number 0."""

    @property
    def tensor(self) -> Tensor:
        return self.parts_PMN.view(-1)[self.first :]

    @property
    def splits(self) -> int:
        return self.parts_PMN.shape[0]

    @property
    def row_stride(self) -> int:
        return self.parts_PMN.shape[2]

    @property
    def split_stride(self) -> int:
        return self.parts_PMN.shape[1] * self.parts_PMN.shape[2]


class Out(NamedTuple):
    """Rows for a product to multiply."""

    floats_MK: Tensor
    """Of more rows than are written, where a product has more."""
    codes: Inputs | None
    """Written instead, for a product with blocks."""

    @property
    def columns(self) -> int:
        return self.floats_MK.shape[1]

    def pointers(self) -> tuple[Tensor, ...]:
        # Without codes, pointers of their types that nobody follows.
        codes = self.codes or empty_inputs(1, BLOCK, self.floats_MK.device)
        return self.floats_MK, *codes


def norm(
    parts: Parts | None, kept_MK: Tensor, weight_K: Tensor, eps: float, out: Out, *, early: bool
) -> None:
    """kept += parts; out = RMS norm of it."""
    columns = kept_MK.shape[1]
    blocks = triton.next_power_of_2(triton.cdiv(columns, BLOCK))
    source = kept_MK if parts is None else parts.tensor
    dtypes = (source.dtype, kept_MK.dtype, weight_K.dtype)
    variant = _norm_variant(
        dtypes, blocks, early, parts=parts is not None, codes=out.codes is not None
    )
    splits, stride = (0, 0) if parts is None else (parts.splits, parts.split_stride)
    rows = (len(kept_MK),)
    launch(variant, rows, source, kept_MK, weight_K, *out.pointers(), columns, splits, stride, eps)


def gate(gate: Parts, up: Parts, out: Out, rows: int, *, early: bool) -> None:
    """out = silu(gate) * up."""
    pointers = (gate.tensor, up.tensor, *out.pointers())
    variant = _gate_variant(
        gate.tensor.dtype, out.floats_MK.dtype, early, codes=out.codes is not None
    )
    grid = (triton.cdiv(out.columns, BLOCK), rows)
    launch(variant, grid, *pointers, out.columns, gate.row_stride, gate.splits, gate.split_stride)


class Heads(NamedTuple):
    """What attention of one layer needs besides its queries, keys and values."""

    biases: tuple[Tensor, Tensor, Tensor] | None
    """Of q, k, v, where the products have not added them."""
    norms: tuple[Tensor, Tensor] | None
    """Of q and k."""
    frequency_R: Tensor
    """float32: radians each position."""
    eps: float


def attend(
    q: Parts,
    k: Parts,
    v: Parts,
    heads: Heads,
    keys_MSKE: Tensor,
    values_MSKE: Tensor,
    position_M: Tensor,
    sums_CMHE: Tensor,
    softmax_CMH2: Tensor,
    *,
    early: bool,
) -> None:
    """Puts the keys and values of each row's token into its slot `position_M`, int32, and attends to
    the slots up to it, chunk by chunk."""
    rows, slots, shared, width = keys_MSKE.shape
    anything = q.tensor
    biases = heads.biases or (anything, anything, anything)
    norms = heads.norms or (anything, anything)
    pointers = (
        *(q.tensor, k.tensor, v.tensor, *biases, *norms, heads.frequency_R),
        *(keys_MSKE, values_MSKE, position_M, sums_CMHE, softmax_CMH2),
    )
    variant = _attend_variant(
        tuple(each.dtype for each in pointers),
        sums_CMHE.shape[2] // shared,
        width,
        early,
        bias=heads.biases is not None,
        norm=heads.norms is not None,
    )
    launch(
        variant,
        (rows * shared, len(sums_CMHE)),
        *pointers,
        *(rows, slots, shared, q.row_stride, k.row_stride, q.splits, q.split_stride),
        *(heads.eps, width**-0.5),
    )


def join(
    sums_CMHE: Tensor, softmax_CMH2: Tensor, position_M: Tensor, out: Out, *, early: bool
) -> None:
    """out = the attention of each row, from its chunks."""
    rows, width = len(position_M), sums_CMHE.shape[3]
    pointers = (sums_CMHE, softmax_CMH2, position_M, *out.pointers())
    variant = _join_variant(out.floats_MK.dtype, width, early, codes=out.codes is not None)
    launch(variant, (triton.cdiv(out.columns, BLOCK), rows), *pointers, rows, out.columns)


class Best(NamedTuple):
    """What `largest` found in each part of a row's logits."""

    values_MP: Tensor
    ids_MP: Tensor
    bad_MP: Tensor


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
    *,
    early: bool,
) -> None:
    """Each row's likeliest id, the lowest of equals, into `token_M` (int64) and `chosen_M` (int32);
    there, where logits are not finite, how many are, negative. Positions go up by one, to `last`."""
    rows, ids = logits_MV.shape
    parts = best.values_MP.shape[1]
    launch(_largest_variant(logits_MV.dtype, early), (parts, rows), logits_MV, *best, ids)
    written = (*best, token_M, position_M, chosen_M)
    launch(_choose_variant(triton.next_power_of_2(parts), early), (rows,), *written, parts, last)


def variants(arch: int) -> tuple[Variant, ...]:
    """What steps of Qwen2.5-7B and Qwen3 in bf16 launch on `arch`, of weights in blocks and in floats."""
    bf16, fp32, i32 = torch.bfloat16, torch.float32, torch.int32
    found = []
    early = arch >= 90
    for codes, parts in ((True, fp32), (False, bf16)):
        # Of Qwen2, biases of products with blocks; of Qwen3, norms.
        for norm in (False, True) if codes else (False,):
            inputs = (*[parts] * 3, *[bf16 if codes and not norm else parts] * 3)
            norms = [bf16 if norm else parts] * 2
            dtypes = (*inputs, *norms, fp32, bf16, bf16, i32, fp32, fp32)
            found.append(_attend_variant(dtypes, 7, 128, early, bias=codes and not norm, norm=norm))
        found += [
            _norm_variant((bf16, bf16, bf16), 16, early, parts=False, codes=codes),
            _norm_variant((parts, bf16, bf16), 16, early, parts=True, codes=codes),
            _gate_variant(parts, bf16, early, codes=codes),
            _join_variant(bf16, 128, early, codes=codes),
        ]
    found += [_largest_variant(bf16, early), _choose_variant(64, early)]
    return tuple(found)


_OUT = (torch.int8, torch.float32, torch.int32)
"""Whole numbers, their scales and sums."""


def _norm_variant(
    dtypes: tuple[torch.dtype, ...], blocks: int, early: bool, *, parts: bool, codes: bool
) -> Variant:
    return _variant(
        _norm,
        (*dtypes, dtypes[1], *_OUT),
        ("i32", "i32", "i32", "fp32"),
        {"PARTS": parts, "CODES": codes, "BLOCKS": blocks},
        early,
        warps=max(4, min(16, blocks)),
    )


def _gate_variant(parts: torch.dtype, dtype: torch.dtype, early: bool, *, codes: bool) -> Variant:
    pointers = (parts, parts, dtype, *_OUT)
    return _variant(_gate, pointers, ("i32",) * 4, {"CODES": codes}, early, warps=1)


def _attend_variant(
    dtypes: tuple[torch.dtype, ...], group: int, width: int, early: bool, *, bias: bool, norm: bool
) -> Variant:
    constants: dict[str, Constant] = {
        "BIAS": bias,
        "NORM": norm,
        "GROUP": group,
        "R": width // 2,
        "CHUNK": CHUNK,
        "TILE": TILE,
    }
    return _variant(_attend, dtypes, (*["i32"] * 7, "fp32", "fp32"), constants, early)


def _join_variant(dtype: torch.dtype, width: int, early: bool, *, codes: bool) -> Variant:
    pointers = (torch.float32, torch.float32, torch.int32, dtype, *_OUT)
    constants: dict[str, Constant] = {"WIDTH": width, "CHUNK": CHUNK, "CODES": codes}
    return _variant(_join, pointers, ("i32", "i32"), constants, early, warps=1)


def _largest_variant(dtype: torch.dtype, early: bool) -> Variant:
    pointers = (dtype, torch.float32, torch.int32, torch.int32)
    return _variant(_largest, pointers, ("i32",), {"SIZE": IDS}, early)


def _choose_variant(parts: int, early: bool) -> Variant:
    best = (torch.float32, torch.int32, torch.int32)
    pointers = (*best, torch.int64, torch.int32, torch.int32)
    return _variant(_choose, pointers, ("i32", "i32"), {"PARTS": parts}, early, warps=1)


def _variant(
    function: Any,
    pointers: tuple[torch.dtype, ...],
    numbers: tuple[str, ...],
    constants: dict[str, Constant],
    early: bool,
    *,
    warps: int = 4,
) -> Variant:
    return Variant(
        function=function,
        types=(*map(pointer_type, pointers), *numbers),
        constants=(*constants.items(), ("DEPENDENT", early)),
        warps=warps,
        stages=2,
        dependent=early,
    )
