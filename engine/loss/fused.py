"""The fused form of the loss: between the products of a chunk, one kernel (`engine.kernels.kd_loss`).

Two [C, V] buffers of fp32 logits, reused by every chunk, and one of dz in the dtype of the products for
`HELD` chunks, which in bf16 is as large as both: dH and dW are products of so many rows at once. Every
row has a place of its own for its results, so nothing is added up between chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.kd_loss import LossRows, row_buffer
from engine.loss.types import Job, Teaching, Totals
from engine.models.head import project
from engine.models.product import multiply

# Shapes: M labelled tokens, C tokens of one chunk, G of a group of chunks, V student vocabulary,
# D student width

HELD = 4
"""Chunks whose dz is held: of 8192 rows in chunks of 2048, dW in one product takes 3.6 ms and in four 4.0."""


class FusedChunks:
    """Cross entropy, and forward or reverse KL where there is a teacher."""

    def __init__(self, job: Job, rows: int, w_VD: Tensor) -> None:
        teacher = job.teacher
        assert teacher is None or isinstance(teacher, Teaching)
        self._job, self._teacher = job, teacher
        vocabulary, device = len(w_VD), w_VD.device
        self._z_CV = row_buffer(rows, vocabulary, torch.float32, device)
        self._t_CV = (
            None if teacher is None else row_buffer(rows, vocabulary, torch.float32, device)
        )
        held = min(rows * HELD, len(job.labels_M))
        self._dz_GV = row_buffer(held, vocabulary, w_VD.dtype, device)
        self._begun = 0
        self._rows = LossRows.empty(len(job.labels_M), vocabulary, device)

    @property
    def held(self) -> int:
        return HELD

    def differentiate(self, h_CD: Tensor, w_VD: Tensor, chunk: slice) -> None:
        count, place = chunk.stop - chunk.start, chunk.start - self._begun
        z_CV, dz_CV, t_CV = self._z_CV[:count], self._dz_GV[place : place + count], None
        multiply(z_CV, h_CD, w_VD.t())
        if self._teacher is not None and self._t_CV is not None:
            t_CV = self._t_CV[:count]
            project(t_CV, self._teacher.hidden_ME[chunk], self._teacher.slices)
        self._rows.differentiate(
            z_CV,
            t_CV,
            dz_CV,
            self._job.labels_M,
            chunk.start,
            alpha=self._job.alpha,
            temperature=self._job.temperature,
            divergence=self._job.divergence,
        )

    def gradient(self, group: slice) -> Tensor:
        self._begun = group.stop
        return self._dz_GV[: group.stop - group.start]

    def totals(self) -> Totals:
        rows, teaching = self._rows, self._teacher is not None
        return Totals(
            ce=rows.ce_M.sum(dtype=torch.float64),
            divergence=rows.divergence_M.sum(dtype=torch.float64) if teaching else None,
            agreeing=rows.agree_M.sum(dtype=torch.float64) if teaching else None,
            lowest=rows.divergence_M.amin() if teaching else None,
            largest_sum=rows.dz_sums_MS.sum(dim=1).abs().amax(),
        )
