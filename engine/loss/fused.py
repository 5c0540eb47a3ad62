"""The fused form of the loss: one kernel between the matmuls of a chunk.

It uses [C, V] buffers of fp32 logits, reused by every chunk, and one buffer of dz in the dtype of the
matmuls for `FUSED_HELD` chunks, which in bf16 is as large as two of the others. The matmuls for dH and dW
then cover all rows of these chunks at once.

With a teacher's hidden states (`engine.kernels.dense_loss`) every row writes its results to its own
location, so nothing is accumulated between chunks. With sparse targets (`engine.kernels.sparse_loss`;
`eager.py` has the formulas and is the oracle) the kernel handles the rest of the vocabulary and torch
the K target tokens of each row. For `top_k`, the K logits are removed from their row before its sums are
computed, so that q_R is a sum over exactly the remaining tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.dense_loss import LossRows, row_buffer, tuning_of
from engine.kernels.sparse_loss import differentiate_rest
from engine.loss.chunks import FUSED_HELD, Job, SparseTargets, TeacherHidden, Totals
from engine.models.head import multiply, project

# Shapes: M labelled tokens, C tokens of one chunk, G of a group of chunks, V student vocabulary,
# D student width, K target tokens per position

NONE = -1e30
"""Number below every logit: the maximum of rows without kept logits."""


class FusedForm:
    """Base of the fused forms: the student's logits, and dz of `FUSED_HELD` chunks."""

    held = FUSED_HELD

    def __init__(self, job: Job, shape: tuple[int, int], like: Tensor) -> None:
        self._job = job
        (rows, vocabulary), device = shape, like.device
        self._buffers = [
            row_buffer(rows, vocabulary, torch.float32, device) for _ in range(job.buffers)
        ]
        kept_rows = min(rows * FUSED_HELD, len(job.labels_M))
        self._dz_GV = row_buffer(kept_rows, vocabulary, like.dtype, device)
        self._begun = 0

    def _student_logits(
        self, h_CD: Tensor, w_VD: Tensor | None, chunk: slice
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's logits, and the location for its dz."""
        count, row = chunk.stop - chunk.start, chunk.start - self._begun
        z_CV, dz_CV = self._buffers[0][:count], self._dz_GV[row : row + count]
        if w_VD is None:
            z_CV.copy_(h_CD)
        else:
            multiply(z_CV, h_CD, w_VD.t())
        return z_CV, dz_CV

    def gradient(self, group: slice) -> Tensor:
        self._begun = group.stop
        return self._dz_GV[: group.stop - group.start]


class FusedChunks(FusedForm):
    """Cross entropy, and a divergence when there is a teacher."""

    def __init__(self, job: Job, shape: tuple[int, int], like: Tensor) -> None:
        super().__init__(job, shape, like)
        tuning = tuning_of(job.divergence)
        self._rows = LossRows.empty(len(job.labels_M), shape[1], like.device, tuning)

    def differentiate(self, h_CD: Tensor, w_VD: Tensor | None, chunk: slice) -> None:
        z_CV, dz_CV = self._student_logits(h_CD, w_VD, chunk)
        job, t_CV = self._job, None
        if isinstance(job.teacher, TeacherHidden):
            t_CV = self._buffers[1][: len(z_CV)]
            project(t_CV, job.teacher.hidden_ME[chunk], job.teacher.slices)
        self._rows.differentiate(
            z_CV,
            t_CV,
            dz_CV,
            job.labels_M,
            chunk.start,
            alpha=job.alpha,
            temperature=job.temperature,
            divergence=job.divergence,
            beta=job.beta,
        )

    def totals(self) -> Totals:
        rows = self._rows
        totals = Totals(ce=rows.ce_M.sum(dtype=torch.float64))
        totals.add_gradient(rows.dz_sums_MS.sum(dim=1))
        if self._job.teacher is not None:
            totals.divergence = rows.divergence_M.sum(dtype=torch.float64)
            totals.agreeing = rows.agree_M.sum(dtype=torch.float64)
            totals.lowest = rows.divergence_M.amin()
        return totals


class FusedSparseChunks(FusedForm):
    """Cross entropy, and the divergence from the sparse targets of `job.teacher`, which has the M
    labelled rows.
    """

    def __init__(self, job: Job, shape: tuple[int, int], like: Tensor) -> None:
        super().__init__(job, shape, like)
        assert isinstance(job.teacher, SparseTargets)
        self._targets = job.teacher
        self._totals = Totals(ce=torch.zeros((), dtype=torch.float64, device=like.device))

    def differentiate(self, h_CD: Tensor, w_VD: Tensor | None, chunk: slice) -> None:
        z_CV, dz_CV = self._student_logits(h_CD, w_VD, chunk)
        job, T = self._job, self._job.temperature
        weight = (1 - job.alpha) * T
        labels_C = job.labels_M[chunk]
        ids_CK = self._targets.ids_NK[chunk].long()
        z_CK, z_label_C1 = z_CV.gather(1, ids_CK), z_CV.gather(1, labels_C[:, None])
        log_probs_NK = self._targets.log_probs_NK
        kept_4C = torch.zeros(4, len(z_CV), device=z_CV.device)
        if log_probs_NK is None:
            kept_4C[0] = NONE
            p_CK = (ids_CK[:, :, None] == ids_CK[:, None, :]).float().mean(2)
        else:
            log_p_CK = log_probs_NK[chunk].float()
            p_CK = log_p_CK.exp()
            tail_C = 1 - p_CK.sum(1)
            # A remainder within the rounding error of a sum of K numbers does not count as tail.
            tail_C = torch.where(tail_C <= p_CK.shape[1] * torch.finfo(p_CK.dtype).eps, 0, tail_C)
            kept_4C[0] = z_CK.amax(1)
            below_CK = z_CK - kept_4C[0][:, None]
            kept_4C[1], kept_4C[2] = (below_CK / T).exp().sum(1), below_CK.exp().sum(1)
            kept_4C[3] = tail_C
            z_CV.scatter_(1, ids_CK, -torch.inf)
        sums = differentiate_rest(
            z_CV, dz_CV, job.labels_M, chunk.start, kept_4C, alpha=job.alpha, temperature=T
        )
        log_q_CK = z_CK / T - sums.log_sum_C[:, None]
        hard_CK = job.alpha * (z_CK - sums.log_sum_one_C[:, None]).exp()
        slope_CK = hard_CK + weight * (log_q_CK.exp() - p_CK)
        agree_C = None
        if log_probs_NK is None:
            divergence_C = -log_q_CK.mean(1)
            # The kernel has added q of every token; each draw subtracts its 1/m.
            dz_C = sums.dz_C - weight
        else:
            kept_CK = torch.where(p_CK == 0, 0, p_CK * (log_p_CK - log_q_CK))
            log_tail_q_C = sums.log_rest_C - sums.log_sum_C
            rest_C = torch.where(tail_C == 0, 0, tail_C * (tail_C.log() - log_tail_q_C))
            divergence_C = kept_CK.sum(1) + rest_C
            first_C1 = log_p_CK.argmax(dim=1, keepdim=True)
            agree_C = z_CK.gather(1, first_C1).squeeze(1) == sums.largest_C
            dz_C = sums.dz_C + slope_CK.sum(1)
        self._totals.add(sums.log_sum_one_C - z_label_C1.squeeze(1), divergence_C, agree_C)
        self._totals.add_gradient(dz_C)
        slope_CK = torch.where(ids_CK == labels_C[:, None], slope_CK - job.alpha, slope_CK)
        dz_CV.scatter_(1, ids_CK, slope_CK.to(dz_CV.dtype))

    def totals(self) -> Totals:
        return self._totals
