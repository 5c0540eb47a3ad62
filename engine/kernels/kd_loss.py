"""Loss and gradient of rows of logits: the fused form of the loss's softmaxes.

    rows = LossRows.empty(...)               results of every row, complete once all chunks are done
    rows.differentiate(z_CV, t_CV, ...)      fills the rows' results, and dz

`kd_loss_rows.py` has the kernel and its formulas, and explains how it reads memory only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
from torch import Tensor

from engine.divergences import DIVERGENCES, fused_divergences
from engine.errors import InternalError
from engine.kernels.kd_loss_rows import FIELDS, UNIT, _kd_rows
from engine.kernels.key import Variant
from engine.kernels.registry import compiled_as, launch

# Shapes: M rows of all chunks, C rows of one, V vocabulary, S segments of a row

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes of dz."""

FAR = 60.0


@dataclass(frozen=True, slots=True)
class Tuning:
    segment: int = 8192
    """Columns per program."""
    deep: int = 4
    """Vectors of four logits that a thread loads from each side at a time."""
    warps: int = 4
    lag: int = 16
    """Number of rows between computing a row's sums and its gradient."""

    @property
    def wide(self) -> int:
        return 4 * 32 * self.warps


TUNING = Tuning()


@cache
def variant(
    *,
    vocabulary: int,
    teacher: bool,
    divergence: str,
    temperature: float,
    dtype: torch.dtype,
    tuning: Tuning = TUNING,
) -> Variant:
    """Return the kernel for rows of `vocabulary` logits; `dtype` is the dtype of dz."""
    if not DIVERGENCES[divergence].fused:
        known = " or ".join(fused_divergences())
        raise InternalError(f"loss kernel: expected {known}, found {divergence}")
    # Without a teacher T is always 1.
    power = 1 if not teacher else int(temperature) if temperature in (1, 2, 4) else 0
    segments = triton.cdiv(vocabulary, tuning.segment)
    return compiled_as(
        _kd_rows,
        *("*fp32", "*fp32", "*i64", dtype, *["*fp32"] * 5, "*i32", "*i32"),
        *(*["i32"] * 7, *["fp32"] * 4),
        warps=tuning.warps,
        stages=1,
        # q - p is exactly 0 for equal rows only if both are rounded alike.
        fp_fusion=False,
        TEACHER=teacher,
        REVERSE=teacher and divergence == "reverse_kl",
        POWER=power,
        SEGMENT=tuning.segment,
        PADDED=triton.next_power_of_2(segments),
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
        segments = triton.cdiv(vocabulary, tuning.segment)
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
        programs = (rows + self.tuning.lag) * 2 * segments
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
            # e^60 times a million columns does not overflow, at T and at 1.
            FAR * min(temperature, 1.0),
        )
        self._tickets += programs


def row_buffer(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate (rows, vocabulary) elements, each row at an aligned address."""
    unit = int(UNIT)
    padded = triton.cdiv(vocabulary, unit) * unit
    return torch.empty(rows, padded, dtype=dtype, device=device)[:, :vocabulary]


def _check(z_CV: Tensor, t_CV: Tensor | None, dz_CV: Tensor, labels_M: Tensor) -> None:
    wanted = (tuple(z_CV.shape), (z_CV.stride(0) // int(UNIT) * int(UNIT), 1))
    for name, x_CV in (("student logits", z_CV), ("teacher logits", t_CV), ("dz", dz_CV)):
        if x_CV is None:
            continue
        found = (tuple(x_CV.shape), x_CV.stride())
        if found != wanted or (x_CV is not dz_CV and x_CV.dtype != torch.float32):
            raise InternalError(
                f"loss kernel: {name} — expected float32 of shape and strides {wanted}, "
                f"found {x_CV.dtype} of {found}"
            )
    if labels_M.dtype != torch.int64:
        raise InternalError(f"loss kernel: labels — expected int64, found {labels_M.dtype}")
