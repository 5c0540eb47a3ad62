"""Compute the distillation loss by a kernel that reads two rows of logits, and writes their loss and one row of
gradients.

    rows = LossRows.empty(...)               results of every row, complete once all chunks are done
    rows.differentiate(z_CV, t_CV, ...)      fills the rows' results, and dz

A gradient needs the sums of its whole row, and a row of 152k logits does not fit in one
multiprocessor. So each row is processed by several sets of programs, its passes, each program with a
segment of its columns:

    sums        z, t of the segment -> maxima and sums of the segment, written into `parts`
    mixture     parts of all segments -> sums of the row;  z, t again, with them -> the segment's divergences from
                the mixture, written into `parts`; only for `jsd`, whose log m needs both normalisers
    gradients   parts of all segments -> sums of the row;  z, t again, with them -> dz

One launch processes all rows, in this order, and each pass over a row comes LAG rows after the one before:

    sums of row 0, 1, ... LAG - 1 | gradients of row 0, sums of LAG | gradients of row 1, sums of LAG + 1 | ...

By then the sums of the row are usually complete and its logits are still in the GPU's cache, so
each logit is read from memory only once: 8 bytes in and 2 out. A program whose row is not ready
waits for it. The position in this order is taken from a ticket counter, so the programs that are
waited for already run, and sums wait for nothing: there is no deadlock, however few programs fit on
the GPU.

With k = log2(e) / T, m_z near the largest z, and sums over columns:

    S_z = sum 2^((z - m_z) k)    S_t likewise    S_1 = sum e^(z - m_z), for T = 1, 2 or 4 a power of that
    forward   G = sum 2^((t - m_t) k) (t - z)    KL(p || q) =  G / (T S_t) + d
    reverse   G = sum 2^((z - m_z) k) (t - z)    KL(q || p) = -G / (T S_z) - d
    d = (m_z - m_t) / T + log(S_z / S_t)         the logarithms of both normalisers, subtracted

and for m = (1 - b) q + b p, with x = log(p / q) and u = log(m / q) = log(1 - b + b e^x)

    jsd       b KL(p || m) + (1 - b) KL(q || m) = b sum p (x - u) - (1 - b) sum q u

Sums are accumulated in lanes, each relative to its own m, and rescaled to a common m by 2^((m_lane
- m) k): first within a segment, then within a row. A lane's m is the largest of the first logits it
reads. It only has to keep exponentials within range, so nothing waits for the true maximum; a
segment with a logit far above its lane's m is summed again, with that logit as m.

Equal rows give exactly 0, in the divergence and in its gradient: both sides go through the same
operations, and no multiply-add is fused.

Columns from V to the stride of a row are padding: they count as -infinity when read, and dz is 0
there. Non-finite logits become NaN in the sums and so reach the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.divergences import DIVERGENCES
from engine.kernels.compiler import Variant
from engine.kernels.registry import compiled_as, launch
from engine.kernels.sizes import cdiv, next_power_of_2

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

# Shapes: M rows of all chunks, C rows of one, V vocabulary, S segments of a row, L lanes of a program

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes of dz."""

FAR = 60.0
"""Maximum distance of a logit above its lane's m without a second sum, times min(T, 1)."""
FIELDS = tl.constexpr(10)
"""Number of fields of a segment in `parts`: m_z, m_t, S_z, S_1, S_t, G, the largest z, the largest t, and of
KL(q || m) and KL(p || m) in bits.
"""
UNIT = tl.constexpr(16)
"""Strides are counted in units of this many columns, so that the compiler knows that rows are
aligned.
"""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LEAST_BITS = tl.constexpr(-126.0)
"""Exponent of the smallest normal float32, a power of two."""
LEAST = tl.constexpr(-1e30)
"""Value below every logit, used for lanes without a column in the vocabulary; not -infinity, which would give NaN."""


@dataclass(frozen=True, slots=True)
class Tuning:
    segment: int = 8192
    """Columns per program."""
    deep: int = 4
    """Vectors of four logits that a thread loads from each side at a time."""
    warps: int = 4
    lag: int = 12
    """Number of rows between two passes over a row."""

    @property
    def wide(self) -> int:
        return 4 * 32 * self.warps


TUNING = Tuning()
WITH_MIXTURE = Tuning(deep=2, warps=8, lag=10)
"""Three passes must share the GPU's cache; measured on an H100 with 151,936 ids."""


def tuning_of(divergence: str) -> Tuning:
    return WITH_MIXTURE if DIVERGENCES[divergence].mixture else TUNING


@cache
def variant(
    *,
    vocabulary: int,
    teacher: bool,
    divergence: str,
    temperature: float,
    dtype: torch.dtype,
    tuning: Tuning | None = None,
) -> Variant:
    """Return the kernel for rows of `vocabulary` logits; `dtype` is the dtype of dz."""
    assert DIVERGENCES[divergence].fused, divergence
    tuning = tuning or tuning_of(divergence)
    # Without a teacher T is always 1.
    power = 1 if not teacher else int(temperature) if temperature in (1, 2, 4) else 0
    segments = cdiv(vocabulary, tuning.segment)
    return compiled_as(
        _kd_rows,
        *("*fp32", "*fp32", "*i64", dtype, *["*fp32"] * 5, "*i32", "*i32"),
        *(*["i32"] * 7, *["fp32"] * 5),
        warps=tuning.warps,
        stages=1,
        # q - p is exactly 0 for equal rows only if both are rounded alike.
        fp_fusion=False,
        TEACHER=teacher,
        REVERSE=teacher and divergence == "reverse_kl",
        MIXTURE=teacher and DIVERGENCES[divergence].mixture,
        POWER=power,
        SEGMENT=tuning.segment,
        PADDED=next_power_of_2(segments),
        DEEP=tuning.deep,
        WIDE=tuning.wide,
    )


def variants(
    vocabulary: int,
    dtypes: Iterable[torch.dtype] = DTYPES,
    *,
    teacher: bool,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
) -> tuple[Variant, ...]:
    """Return what a run launches for a student with this vocabulary size, with matmuls in any of
    `dtypes`.
    """
    return tuple(
        variant(
            vocabulary=vocabulary,
            teacher=teacher,
            divergence=divergence,
            temperature=temperature,
            dtype=dtype,
        )
        for dtype in dict.fromkeys(dtypes)
    )


@dataclass(slots=True, kw_only=True)
class LossRows:
    """Results of every row, and the state through which the programs of a row synchronise."""

    ce_M: Tensor
    divergence_M: Tensor
    """The requested divergence, at temperature T; undefined without a teacher."""
    agree_M: Tensor
    """1.0 if teacher and student have the same top-1 token (some id is a maximum on both sides)."""
    dz_sums_MS: Tensor
    """Sums of dz over the segments of each row, before dz was rounded to its dtype."""
    arrived_M: Tensor
    ticket: Tensor
    tuning: Tuning = TUNING
    _tickets: int = field(default=0, init=False)

    @staticmethod
    def empty(
        rows: int, vocabulary: int, device: torch.device, tuning: Tuning = TUNING
    ) -> LossRows:
        segments = cdiv(vocabulary, tuning.segment)
        return LossRows(
            ce_M=torch.empty(rows, device=device),
            divergence_M=torch.empty(rows, device=device),
            agree_M=torch.zeros(rows, device=device),
            dz_sums_MS=torch.empty(rows, segments, device=device),
            arrived_M=torch.zeros(rows, dtype=torch.int32, device=device),
            ticket=torch.zeros(1, dtype=torch.int32, device=device),
            tuning=tuning,
        )

    def differentiate(
        self,
        z_CV: Tensor,
        t_CV: Tensor | None,
        dz_CV: Tensor,
        labels_M: Tensor,
        first: int,
        *,
        alpha: float,
        temperature: float,
        divergence: str,
        beta: float = 0.5,
    ) -> None:
        """Write dz and fill the results of rows `first` to `first + C`, each row once.

        The three matrices are views of a `row_buffer`; logits are fp32 and not divided by T. dz is
        not divided by the number of rows. `temperature` applies only to the divergence.
        """
        if t_CV is None:
            temperature = 1.0
        rows, vocabulary = z_CV.shape
        _check(z_CV, t_CV, dz_CV, labels_M)
        segments = self.dz_sums_MS.shape[1]
        parts = torch.empty(rows, int(FIELDS), segments, device=z_CV.device)
        passes = 3 if t_CV is not None and DIVERGENCES[divergence].mixture else 2
        programs = (rows + (passes - 1) * self.tuning.lag) * passes * segments
        launch(
            variant(
                vocabulary=vocabulary,
                teacher=t_CV is not None,
                divergence=divergence,
                temperature=temperature,
                dtype=dz_CV.dtype,
                tuning=self.tuning,
            ),
            (programs,),
            z_CV,
            z_CV if t_CV is None else t_CV,
            labels_M,
            dz_CV,
            parts,
            self.ce_M,
            self.divergence_M,
            self.agree_M,
            self.dz_sums_MS,
            self.arrived_M,
            self.ticket,
            first,
            rows,
            self._tickets,
            segments,
            self.tuning.lag,
            vocabulary,
            z_CV.stride(0) // int(UNIT),
            alpha,
            (1 - alpha) * temperature,
            temperature,
            beta,
            # e^60 times a million columns does not overflow, at T and at 1.
            FAR * min(temperature, 1.0),
        )
        self._tickets += programs


def row_buffer(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate (rows, vocabulary) elements, each row at an aligned address."""
    unit = int(UNIT)
    padded = cdiv(vocabulary, unit) * unit
    return torch.empty(rows, padded, dtype=dtype, device=device)[:, :vocabulary]


def _check(z_CV: Tensor, t_CV: Tensor | None, dz_CV: Tensor, labels_M: Tensor) -> None:
    wanted = (tuple(z_CV.shape), (z_CV.stride(0) // int(UNIT) * int(UNIT), 1))
    for x_CV in (z_CV, t_CV, dz_CV):
        assert x_CV is None or (tuple(x_CV.shape), x_CV.stride()) == wanted, "not a row buffer"
        assert x_CV is None or x_CV is dz_CV or x_CV.dtype == torch.float32, x_CV.dtype
    assert labels_M.dtype == torch.int64, labels_M.dtype


@triton.jit
def _power(e, x, POWER: tl.constexpr):
    """Return e^x, computed from e = e^(x / T) if T is POWER, or directly for other T."""
    if POWER == 1:
        return e
    elif POWER == 2:
        return e * e
    elif POWER == 4:
        return (e * e) * (e * e)
    else:
        return tl.exp2(x * LOG2_E)


@triton.jit
def _read(ptr, columns, units, vocabulary, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """Load logits; columns beyond the vocabulary are -infinity. Without KEEP they are marked for
    early eviction.
    """
    policy: tl.constexpr = "" if KEEP else "evict_first"
    if WHOLE:
        return tl.load(ptr + columns, eviction_policy=policy)
    x = tl.load(ptr + columns, mask=columns < units * UNIT, other=0.0, eviction_policy=policy)
    return tl.where(columns < vocabulary, x, -float("inf"))


@triton.jit
def _sum_segment(
    z_ptr, t_ptr, m_z, m_t, begin, units, vocabulary, k,
    TEACHER: tl.constexpr, REVERSE: tl.constexpr, MIXTURE: tl.constexpr, POWER: tl.constexpr, WHOLE: tl.constexpr,
    AGAIN: tl.constexpr, SEGMENT: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the sums of a segment by lanes, each relative to its lane's m, and the lanes' m and
    maxima.
    """
    s_z = tl.zeros([WIDE], tl.float32)
    s_1 = tl.zeros([WIDE], tl.float32)
    s_t = tl.zeros([WIDE], tl.float32)
    g = tl.zeros([WIDE], tl.float32)
    top_z = tl.full([WIDE], LEAST, tl.float32)
    top_t = tl.full([WIDE], LEAST, tl.float32)
    inside = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for start in range(0, SEGMENT, DEEP * WIDE):
        columns = begin + start + inside
        z = _read(z_ptr, columns, units, vocabulary, WHOLE, True)
        if TEACHER:
            t = _read(t_ptr, columns, units, vocabulary, WHOLE, True)
        top_z = tl.maximum(top_z, tl.max(z, axis=0))
        if TEACHER:
            top_t = tl.maximum(top_t, tl.max(t, axis=0))
        if not AGAIN:
            m_z = tl.where(start == 0, top_z, m_z)
            m_t = tl.where(start == 0, top_t, m_t)
        x = z - m_z[None, :]
        e_z = tl.exp2(x * k)
        s_1 += tl.sum(_power(e_z, x, POWER), axis=0)
        if TEACHER:
            e_t = tl.exp2((t - m_t[None, :]) * k)
            s_z += tl.sum(e_z, axis=0)
            s_t += tl.sum(e_t, axis=0)
            if not MIXTURE:
                gap = t - z
                if not WHOLE:
                    gap = tl.where(columns < vocabulary, gap, 0.0)
                if REVERSE:
                    g += tl.sum(e_z * gap, axis=0)
                else:
                    g += tl.sum(e_t * gap, axis=0)
    return m_z, m_t, s_z, s_1, s_t, g, top_z, top_t


@triton.jit
def _field(parts, name: tl.constexpr, places, segments, other: tl.constexpr):
    # Written by other multiprocessors, so this load bypasses the L1 cache.
    at = parts + name * segments + places
    return tl.load(at, mask=places < segments, other=other, cache_modifier=".cg")


@triton.jit
def _against_mixture(x_z, x_t, beta):
    """Return log2 q, log2(p / q), p / q and log2(m / q) from log2 q and log2 p; where p is q they are exactly 0, 1, 0.

    Probabilities below 2^-126 count as that, and those of padding with them.
    """
    x_z = tl.maximum(x_z, LEAST_BITS, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x_t, LEAST_BITS, propagate_nan=tl.PropagateNan.ALL) - x_z
    ratio = tl.exp2(x)
    # b + (1 - b) is 1 however 1 - b was rounded.
    return x_z, x, ratio, tl.log2(tl.fma(ratio, beta, 1 - beta))


@triton.jit
def _sum_mixture(
    z_ptr, t_ptr, begin, units, vocabulary, k, m_z, m_t, l_z, l_t, beta,
    WHOLE: tl.constexpr, SEGMENT: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the sums of q log2(q / m) and of p log2(p / m) over a segment."""
    of_student = tl.zeros([WIDE], tl.float32)
    of_teacher = tl.zeros([WIDE], tl.float32)
    inside = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for start in range(0, SEGMENT, DEEP * WIDE):
        columns = begin + start + inside
        z = _read(z_ptr, columns, units, vocabulary, WHOLE, True)
        t = _read(t_ptr, columns, units, vocabulary, WHOLE, True)
        x_z, x_t = tl.fma(z - m_z, k, -l_z), tl.fma(t - m_t, k, -l_t)
        x_z, x, ratio, u = _against_mixture(x_z, x_t, beta)
        q = tl.exp2(x_z)
        of_student -= tl.sum(q * u, axis=0)
        of_teacher += tl.sum((q * ratio) * (x - u), axis=0)
    return tl.sum(of_student, axis=0), tl.sum(of_teacher, axis=0)


@triton.jit
def _write_gradient(
    z_ptr, t_ptr, dz_ptr, begin, units, vocabulary, k, label, alpha, weight, mean,
    m_z, m_t, a_1, a_z, a_t, temperature, l_z, l_t, beta,
    TEACHER: tl.constexpr, REVERSE: tl.constexpr, MIXTURE: tl.constexpr, POWER: tl.constexpr, WHOLE: tl.constexpr,
    SEGMENT: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write dz of a segment; return its sum."""
    total = tl.zeros([2 * WIDE], tl.float32)
    inside = tl.arange(0, DEEP // 2)[:, None] * (2 * WIDE) + tl.arange(0, 2 * WIDE)[None, :]
    for start in range(0, SEGMENT, DEEP * WIDE):
        columns = begin + start + inside
        z = _read(z_ptr, columns, units, vocabulary, WHOLE, False)
        e_z = tl.exp2((z - m_z) * k)
        dz = _power(e_z, z - m_z, POWER) * a_1
        dz = tl.where(columns == label, dz - alpha, dz)
        if TEACHER:
            t = _read(t_ptr, columns, units, vocabulary, WHOLE, False)
            if MIXTURE:
                x_z, x_t = tl.fma(z - m_z, k, -l_z), tl.fma(t - m_t, k, -l_t)
                _q, _x, _ratio, u = _against_mixture(x_z, x_t, beta)
                # T (1 - b) q (log q - log m - KL(q || m))
                dz -= (weight * (1 - beta) * LN_2 * a_z) * (e_z * (u + mean))
            elif REVERSE:
                # T q (log q - log p - KL) = q (mean - (t - z))
                dz += weight * ((e_z * a_z) * ((mean - (t - z)) / temperature))
            else:
                e_t = tl.exp2((t - m_t) * k)
                dz += weight * (e_z * a_z - e_t * a_t)
        if not WHOLE:
            dz = tl.where(columns < vocabulary, dz, 0.0)
        total += tl.sum(dz, axis=0)
        dz = dz.to(dz_ptr.dtype.element_ty)
        if WHOLE:
            tl.store(dz_ptr + columns, dz, cache_modifier=".cs")
        else:
            tl.store(dz_ptr + columns, dz, mask=columns < units * UNIT, cache_modifier=".cs")
    return tl.sum(total, axis=0)


@triton.jit
def _agrees(
    z_ptr, t_ptr, begin, units, vocabulary, top_z, top_t,
    SEGMENT: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Say whether a column of the segment is the maximum on both sides."""
    agreed = tl.zeros([WIDE], tl.int32)
    inside = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for start in range(0, SEGMENT, DEEP * WIDE):
        columns = begin + start + inside
        z = _read(z_ptr, columns, units, vocabulary, False, True)
        t = _read(t_ptr, columns, units, vocabulary, False, True)
        agreed |= tl.max(((z == top_z) & (t == top_t)).to(tl.int32), axis=0)
    return tl.max(agreed, axis=0) > 0


@triton.jit
def _kd_rows(
    z_ptr,
    t_ptr,
    labels_ptr,
    dz_ptr,
    parts_ptr,
    ce_ptr,
    kl_ptr,
    agree_ptr,
    dz_sums_ptr,
    arrived_ptr,
    ticket_ptr,
    first_row,
    rows,
    tickets_before,
    segments,
    lag,
    vocabulary,
    units,
    alpha,
    weight,
    temperature,
    beta,
    far,
    TEACHER: tl.constexpr,
    REVERSE: tl.constexpr,
    MIXTURE: tl.constexpr,
    POWER: tl.constexpr,
    SEGMENT: tl.constexpr,
    PADDED: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Run one program of the loss kernel.

    `z_ptr`, `t_ptr`, `dz_ptr` and `parts_ptr` point to the chunk of `rows` rows; the others to the
    first of all rows, of which the chunk's first is `first_row`. `weight` is (1 - alpha) T, `beta` the b of a mixture.
    `far` is how far above its m the largest logit of a segment may be.
    """
    passes: tl.constexpr = 3 if MIXTURE else 2
    place = tl.atomic_add(ticket_ptr, 1, sem="relaxed") - tickets_before
    within = place % (passes * segments)
    # The earlier passes over a row have the smaller tickets.
    number = passes - 1 - within // segments
    segment = within % segments
    local = (place // (passes * segments) - number * lag).to(tl.int64)
    if (local < 0) | (local >= rows):
        return
    row = first_row + local
    parts = parts_ptr + local * segments * FIELDS
    z_ptr += local * (units * UNIT)
    t_ptr += local * (units * UNIT)
    begin = segment * SEGMENT
    whole = begin + SEGMENT <= vocabulary
    k = LOG2_E / temperature

    if number == 0:
        none = tl.zeros([WIDE], tl.float32)
        if whole:
            m_z_L, m_t_L, s_z_L, s_1_L, s_t_L, g_L, top_z_L, top_t_L = _sum_segment(
                z_ptr, t_ptr, none, none, begin, units, vocabulary, k,
                TEACHER, REVERSE, MIXTURE, POWER, True, False, SEGMENT, DEEP, WIDE,
            )  # fmt: skip
        else:
            m_z_L, m_t_L, s_z_L, s_1_L, s_t_L, g_L, top_z_L, top_t_L = _sum_segment(
                z_ptr, t_ptr, none, none, begin, units, vocabulary, k,
                TEACHER, REVERSE, MIXTURE, POWER, False, False, SEGMENT, DEEP, WIDE,
            )  # fmt: skip
        above = top_z_L - m_z_L
        if TEACHER:
            above = tl.maximum(above, top_t_L - m_t_L)
        if tl.max(above, axis=0) > far:
            m_z_L, m_t_L, s_z_L, s_1_L, s_t_L, g_L, top_z_L, top_t_L = _sum_segment(
                z_ptr, t_ptr, top_z_L, top_t_L, begin, units, vocabulary, k,
                TEACHER, REVERSE, MIXTURE, POWER, False, True, SEGMENT, DEEP, WIDE,
            )  # fmt: skip
        # The lanes' sums, relative to one m.
        high_z = tl.max(m_z_L, axis=0)
        at = parts + segment
        tl.store(at, high_z)
        tl.store(at + 3 * segments, tl.sum(s_1_L * tl.exp2((m_z_L - high_z) * LOG2_E), axis=0))
        tl.store(at + 6 * segments, tl.max(top_z_L, axis=0))
        if TEACHER:
            high_t = tl.max(m_t_L, axis=0)
            up_z, up_t = tl.exp2((m_z_L - high_z) * k), tl.exp2((m_t_L - high_t) * k)
            tl.store(at + segments, high_t)
            tl.store(at + 2 * segments, tl.sum(s_z_L * up_z, axis=0))
            tl.store(at + 4 * segments, tl.sum(s_t_L * up_t, axis=0))
            if REVERSE:
                tl.store(at + 5 * segments, tl.sum(g_L * up_z, axis=0))
            elif not MIXTURE:
                tl.store(at + 5 * segments, tl.sum(g_L * up_t, axis=0))
            tl.store(at + 7 * segments, tl.max(top_t_L, axis=0))
        # Signals once, after every thread has written.
        tl.debug_barrier()
        tl.atomic_add(arrived_ptr + row, 1, sem="release")
    else:
        while tl.atomic_add(arrived_ptr + row, 0, sem="acquire") < number * segments:
            pass
        tl.debug_barrier()
        places = tl.arange(0, PADDED)
        m_z_S = _field(parts, 0, places, segments, -float("inf"))
        s_1_S = _field(parts, 3, places, segments, 0.0)
        m_z = tl.max(m_z_S, axis=0)
        s_1 = tl.sum(s_1_S * tl.exp2((m_z_S - m_z) * LOG2_E), axis=0)
        m_t, s_z, s_t, apart, mean = m_z, s_1, s_1, s_1, s_1
        if TEACHER:
            m_t_S = _field(parts, 1, places, segments, -float("inf"))
            m_t = tl.max(m_t_S, axis=0)
            up_z_S, up_t_S = tl.exp2((m_z_S - m_z) * k), tl.exp2((m_t_S - m_t) * k)
            s_z = tl.sum(_field(parts, 2, places, segments, 0.0) * up_z_S, axis=0)
            s_t = tl.sum(_field(parts, 4, places, segments, 0.0) * up_t_S, axis=0)
            # Correctly rounded: the GPU's default division of a number by itself may not give 1.
            apart = (m_z - m_t) / temperature + tl.log(tl.div_rn(s_z, s_t))
        if number < passes - 1:
            if MIXTURE:
                if whole:
                    of_student, of_teacher = _sum_mixture(
                        z_ptr, t_ptr, begin, units, vocabulary, k, m_z, m_t, tl.log2(s_z),
                        tl.log2(s_t), beta, True, SEGMENT, DEEP, WIDE,
                    )  # fmt: skip
                else:
                    of_student, of_teacher = _sum_mixture(
                        z_ptr, t_ptr, begin, units, vocabulary, k, m_z, m_t, tl.log2(s_z),
                        tl.log2(s_t), beta, False, SEGMENT, DEEP, WIDE,
                    )  # fmt: skip
                tl.store(parts + 8 * segments + segment, of_student)
                tl.store(parts + 9 * segments + segment, of_teacher)
                tl.debug_barrier()
                tl.atomic_add(arrived_ptr + row, 1, sem="release")
        else:
            label = tl.load(labels_ptr + row)
            if TEACHER:
                top_z_S = _field(parts, 6, places, segments, -float("inf"))
                top_t_S = _field(parts, 7, places, segments, -float("inf"))
                top_z, top_t = tl.max(top_z_S, axis=0), tl.max(top_t_S, axis=0)
                has_both_S = (top_z_S == top_z) & (top_t_S == top_t) & (places == segment)
                if tl.max(has_both_S.to(tl.int32), axis=0) > 0:
                    if _agrees(
                        z_ptr, t_ptr, begin, units, vocabulary, top_z, top_t, SEGMENT, DEEP, WIDE
                    ):  # fmt: skip
                        tl.store(agree_ptr + row, 1.0)
                if MIXTURE:
                    mean = tl.sum(_field(parts, 8, places, segments, 0.0), axis=0)
                    of_teacher = tl.sum(_field(parts, 9, places, segments, 0.0), axis=0)
                    kl = LN_2 * (beta * of_teacher + (1 - beta) * mean)
                else:
                    g_S = _field(parts, 5, places, segments, 0.0)
                    if REVERSE:
                        mean = tl.sum(g_S * up_z_S, axis=0) / s_z
                        kl = -mean / temperature - apart
                    else:
                        mean = tl.sum(g_S * up_t_S, axis=0) / s_t
                        kl = mean / temperature + apart
                if segment == 0:
                    tl.store(kl_ptr + row, kl)
            if segment == 0:
                # A label outside the vocabulary becomes NaN in the loss.
                known = (label >= 0) & (label < vocabulary)
                z_label = tl.load(z_ptr + label, mask=known, other=float("nan"))
                tl.store(ce_ptr + row, (m_z - z_label) + tl.log(s_1))
            dz_ptr += local * (units * UNIT)
            if whole:
                total = _write_gradient(
                    z_ptr, t_ptr, dz_ptr, begin, units, vocabulary, k, label, alpha, weight, mean,
                    m_z, m_t, alpha / s_1, 1 / s_z, 1 / s_t, temperature, tl.log2(s_z),
                    tl.log2(s_t), beta,
                    TEACHER, REVERSE, MIXTURE, POWER, True, SEGMENT, DEEP, WIDE,
                )  # fmt: skip
            else:
                total = _write_gradient(
                    z_ptr, t_ptr, dz_ptr, begin, units, vocabulary, k, label, alpha, weight, mean,
                    m_z, m_t, alpha / s_1, 1 / s_z, 1 / s_t, temperature, tl.log2(s_z),
                    tl.log2(s_t), beta,
                    TEACHER, REVERSE, MIXTURE, POWER, False, SEGMENT, DEEP, WIDE,
                )  # fmt: skip
            tl.store(dz_sums_ptr + row * segments + segment, total)
