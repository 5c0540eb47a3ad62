"""Compute the gradient of the loss with sparse targets (K ids for each row) with respect to the logits, by a fused
kernel. `engine.loss.eager` computes the same in torch.

Of `top_k` targets, torch computes the gradient at the K ids that the teacher gave, which is only K numbers per row.
This kernel computes it at all other ids, the rest, with one program per row:

    before   the caller sets z to -infinity at the K ids; their sums are arguments
    first    sums of the rest
    then     dz = alpha e^z / S_1 + weight (1 - p_R / q_R) e^(z/T) / S_T - alpha [v = label]

S_1 and S_T are the sums of e^z and e^(z/T) over the vocabulary, p_R and q_R the probabilities of the rest for the
teacher and for the student, at temperature T, and weight is (1 - alpha) T. If p_R is 0, the factor is 1.

Of `sampled` targets no id is taken out: the kernel computes dz at all ids, with p_R = 0, and the caller then replaces
it at the drawn ids.

The program reads its row twice; the second time some of it is in the cache. Sums are accumulated in
lanes, each relative to the largest logit that it has seen. Columns from V to the stride of a row
are padding: they count as -infinity when read, and dz is 0 there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.compiler import Variant
from engine.kernels.dense_loss import LEAST, LOG2_E, UNIT, _power, _read
from engine.kernels.registry import compiled_as, launch

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: M rows of all chunks, C rows of one, V vocabulary

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes of dz."""
DEEP, WARPS = 4, 16


@triton.jit
def _rest_rows(
    z_ptr,  # *fp32 (C, V)
    dz_ptr,  # *    (C, V)
    labels_ptr,  # *i64 (M), of all rows of all chunks
    kept_ptr,  # *fp32 (4, C): for the K ids the largest z, sums at T and at 1; p_R
    sums_ptr,  # *fp32 (5, C): largest z; log sums at T, at T without the K ids, at 1; sum of dz
    first,
    rows,
    vocabulary,
    units,
    alpha,
    weight,
    temperature,
    POWER: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * (units * UNIT)
    dz_ptr += row.to(tl.int64) * (units * UNIT)
    k = LOG2_E / temperature
    inside = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    m_L = tl.full([WIDE], LEAST, tl.float32)
    s_z_L = tl.zeros([WIDE], tl.float32)
    s_1_L = tl.zeros([WIDE], tl.float32)
    for start in range(0, vocabulary, DEEP * WIDE):
        z = _read(z_ptr, start + inside, units, vocabulary, False, True)
        above_L = tl.maximum(m_L, tl.max(z, axis=0))
        x = z - above_L[None, :]
        e_z = tl.exp2(x * k)
        s_z_L = s_z_L * tl.exp2((m_L - above_L) * k) + tl.sum(e_z, axis=0)
        s_1_L = s_1_L * tl.exp2((m_L - above_L) * LOG2_E) + tl.sum(_power(e_z, x, POWER), axis=0)
        m_L = above_L
    m_k = tl.load(kept_ptr + row)
    m = tl.maximum(tl.max(m_L, axis=0), m_k)
    rest = tl.sum(s_z_L * tl.exp2((m_L - m) * k), axis=0)
    s_z = rest + tl.load(kept_ptr + rows + row) * tl.exp2((m_k - m) * k)
    s_1 = tl.sum(s_1_L * tl.exp2((m_L - m) * LOG2_E), axis=0)
    s_1 += tl.load(kept_ptr + 2 * rows + row) * tl.exp2((m_k - m) * LOG2_E)
    tail = tl.load(kept_ptr + 3 * rows + row)
    factor = tl.where(tail > 0, 1.0 - tail * s_z / rest, 1.0)
    a_1, a_z = alpha / s_1, weight * factor / s_z
    label = tl.load(labels_ptr + first + row)
    total_L = tl.zeros([WIDE], tl.float32)
    for start in range(0, vocabulary, DEEP * WIDE):
        columns = start + inside
        z = _read(z_ptr, columns, units, vocabulary, False, False)
        e_z = tl.exp2((z - m) * k)
        dz = _power(e_z, z - m, POWER) * a_1 + e_z * a_z
        dz = tl.where(columns == label, dz - alpha, dz)
        total_L += tl.sum(dz, axis=0)
        dz = dz.to(dz_ptr.dtype.element_ty)
        tl.store(dz_ptr + columns, dz, mask=columns < units * UNIT, cache_modifier=".cs")
    tl.store(sums_ptr + row, m)
    tl.store(sums_ptr + rows + row, m / temperature + tl.log(s_z))
    tl.store(sums_ptr + 2 * rows + row, m / temperature + tl.log(rest))
    tl.store(sums_ptr + 3 * rows + row, m + tl.log(s_1))
    tl.store(sums_ptr + 4 * rows + row, tl.sum(total_L, axis=0))


@cache
def variant(*, temperature: float, dtype: torch.dtype) -> Variant:
    """Return the kernel that writes dz in `dtype`."""
    return compiled_as(
        _rest_rows,
        *("*fp32", dtype, "*i64", "*fp32", "*fp32", *["i32"] * 4, *["fp32"] * 3),
        warps=WARPS,
        stages=1,
        POWER=int(temperature) if temperature in (1, 2, 4) else 0,
        DEEP=DEEP,
        WIDE=4 * 32 * WARPS,
    )


def variants(dtypes: Iterable[torch.dtype] = DTYPES, *, temperature: float) -> tuple[Variant, ...]:
    """Return the kernel for each dtype of dz in `dtypes`."""
    return tuple(variant(temperature=temperature, dtype=dtype) for dtype in dict.fromkeys(dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """Sums of every row, with the K ids included unless stated otherwise."""

    largest_C: Tensor
    log_sum_C: Tensor
    """log sum e^(z/T)."""
    log_rest_C: Tensor
    """The same without the K ids; -infinity if there are no other ids."""
    log_sum_one_C: Tensor
    """log sum e^z."""
    dz_C: Tensor
    """The sum of dz over the other ids, before rounding, including -alpha at the label wherever it
    is.
    """


def differentiate_rest(
    z_CV: Tensor,
    dz_CV: Tensor,
    labels_M: Tensor,
    first: int,
    kept_4C: Tensor,
    *,
    alpha: float,
    temperature: float,
) -> RowSums:
    """Write dz of rows `first` to `first + C`, which the caller then replaces at the K ids; z and dz are views of a
    `dense_loss.row_buffer`.

    `kept_4C` has, for the K ids of each row, the largest z, the sums of e^((z - largest)/T) and of
    e^(z - largest), and the teacher's p_R, which is 0 if the K ids have all of its mass. For rows without such ids it
    has -1e30, 0, 0, 0.
    """
    rows, vocabulary = z_CV.shape
    wanted = (z_CV.stride(0) // int(UNIT) * int(UNIT), 1)
    assert z_CV.stride() == dz_CV.stride() == wanted and kept_4C.is_contiguous(), z_CV.stride()
    sums_5C = torch.empty(5, rows, device=z_CV.device)
    launch(
        variant(temperature=temperature, dtype=dz_CV.dtype), (rows,),
        z_CV, dz_CV, labels_M, kept_4C, sums_5C, first, rows, vocabulary, z_CV.stride(0) // int(UNIT),
        alpha, (1 - alpha) * temperature, temperature,
    )  # fmt: skip
    return RowSums(
        largest_C=sums_5C[0],
        log_sum_C=sums_5C[1],
        log_rest_C=sums_5C[2],
        log_sum_one_C=sums_5C[3],
        dz_C=sums_5C[4],
    )
