"""The eager form of the loss: plain torch, on any device, in at most six [C, V] buffers.

Each chunk of rows needs two softmaxes and the row sums; dz overwrites a softmax. Everything is summed
over rows and nothing is averaged here. So dz does not contain the denominator, and keeps its magnitude in
a narrow dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.divergences import DIVERGENCES, Logits
from engine.loss.types import Job, Teaching, Totals
from engine.models.head import multiply, project, sum_dtype

# Shapes: M labelled tokens, C tokens of one chunk, V student vocabulary, D student width


class EagerForm:
    """Base of the eager forms: buffers that every chunk reuses, and dz of one chunk at a time."""

    held = 1

    def __init__(self, job: Job, rows: int, w_VD: Tensor, buffers: int) -> None:
        self._job = job
        self._buffers = [
            torch.empty(rows, len(w_VD), dtype=sum_dtype(w_VD.dtype), device=w_VD.device)
            for _ in range(buffers)
        ]
        self._totals = Totals.none(w_VD.device)
        self._narrow_CV: Tensor | None = None

    def differentiate(self, h_CD: Tensor, w_VD: Tensor, chunk: slice) -> None:
        self._narrow_CV = None  # frees the previous chunk's dz before this one's is made
        views = [buffer[: chunk.stop - chunk.start] for buffer in self._buffers]
        labels_C1 = self._job.labels_M[chunk].unsqueeze(1)
        dz_CV = self._rows(views, h_CD, w_VD, chunk, labels_C1)
        self._totals.add_gradient(dz_CV)
        self._narrow_CV = dz_CV.to(h_CD.dtype)

    def _rows(
        self, views: list[Tensor], h_CD: Tensor, w_VD: Tensor, chunk: slice, labels_C1: Tensor
    ) -> Tensor:
        """Compute dz of a chunk in one of `views`, and add the sums over its rows to the totals."""
        raise NotImplementedError

    def gradient(self, group: slice) -> Tensor:
        assert self._narrow_CV is not None
        return self._narrow_CV

    def totals(self) -> Totals:
        return self._totals


class EagerChunks(EagerForm):
    """Cross entropy, and a divergence when there is a teacher."""

    def __init__(self, job: Job, rows: int, w_VD: Tensor) -> None:
        teacher = job.teacher
        assert teacher is None or isinstance(teacher, Teaching)
        self._teacher = teacher
        buffers = 2 if teacher is None else DIVERGENCES[job.divergence].buffers
        super().__init__(job, rows, w_VD, buffers)

    def _rows(
        self, views: list[Tensor], h_CD: Tensor, w_VD: Tensor, chunk: slice, labels_C1: Tensor
    ) -> Tensor:
        if self._teacher is None:
            return self._cross_entropy(views, h_CD, w_VD, labels_C1)
        return self._distillation(views, h_CD, w_VD, self._teacher, chunk, labels_C1)

    def _cross_entropy(
        self, views: list[Tensor], h_CD: Tensor, w_VD: Tensor, labels_C1: Tensor
    ) -> Tensor:
        z_CV, q_CV = views
        multiply(z_CV, h_CD, w_VD.t())
        torch.softmax(z_CV, dim=1, out=q_CV)
        ce_C1 = log_sum_exp(z_CV, q_CV) - z_CV.gather(1, labels_C1)
        self._totals.add(ce_C1, None, None)
        return minus_label(q_CV, labels_C1, 1.0)

    def _distillation(
        self,
        views: list[Tensor],
        h_CD: Tensor,
        w_VD: Tensor,
        teacher: Teaching,
        chunk: slice,
        labels_C1: Tensor,
    ) -> Tensor:
        """Each buffer holds several quantities in turn; the most recent name for it is the valid one."""
        z_CV, t_CV, q_CV, p_CV, *spare = views
        job, T = self._job, self._job.temperature
        # z / T and t / T: the division costs nothing inside the matmul
        multiply(z_CV, h_CD, w_VD.t(), scale=1 / T)
        project(t_CV, teacher.hidden_ME[chunk], teacher.slices, scale=1 / T)
        torch.softmax(z_CV, dim=1, out=q_CV)
        torch.softmax(t_CV, dim=1, out=p_CV)
        log_z_C1, log_t_C1 = log_sum_exp(z_CV, q_CV), log_sum_exp(t_CV, p_CV)
        first_C1 = t_CV.argmax(dim=1, keepdim=True)
        agree_C1 = z_CV.gather(1, first_C1) == z_CV.amax(dim=1, keepdim=True)
        divergence_C, slope_CV = DIVERGENCES[job.divergence].differentiate(
            Logits(z_CV, t_CV, q_CV, p_CV, log_z_C1, log_t_C1, spare), job.beta
        )
        ce_C1, soft_CV = cross_entropy_at_one(z_CV, q_CV, log_z_C1, labels_C1, T)
        self._totals.add(ce_C1, divergence_C, agree_C1)
        return total_gradient(job, soft_CV, slope_CV, labels_C1)


def cross_entropy_at_one(
    z_CV: Tensor, q_CV: Tensor, log_z_C1: Tensor, labels_C1: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy [C, 1] and the softmax, both at temperature 1.

    The inputs are logits divided by T, their softmax and their log sum e^z. Logits and softmax are
    overwritten unless T is 1.
    """
    if temperature != 1:
        z_CV.mul_(temperature)
        torch.softmax(z_CV, dim=1, out=q_CV)
        log_z_C1 = log_sum_exp(z_CV, q_CV)
    return log_z_C1 - z_CV.gather(1, labels_C1), q_CV


def log_sum_exp(x_CV: Tensor, softmax_CV: Tensor) -> Tensor:
    """Return log sum_v e^x, [C, 1], from an existing softmax.

    The largest entry of the softmax is e^(max x) / sum, which is at least 1/V.
    """
    return x_CV.amax(dim=1, keepdim=True) - softmax_CV.amax(dim=1, keepdim=True).log()


def total_gradient(job: Job, soft_CV: Tensor, slope_CV: Tensor, labels_C1: Tensor) -> Tensor:
    """Return dz, in place of `soft_CV`.

    `soft_CV` is the softmax at temperature 1 and `slope_CV` the divergence's gradient for z / T.
    """
    dz_CV = soft_CV.mul_(job.alpha).add_(slope_CV, alpha=(1 - job.alpha) * job.temperature)
    return minus_label(dz_CV, labels_C1, job.alpha)


def minus_label(dz_CV: Tensor, labels_C1: Tensor, alpha: float) -> Tensor:
    """Subtract alpha * onehot(label) from dz, in place."""
    return dz_CV.scatter_add_(1, labels_C1, dz_CV.new_full((), -alpha).expand(labels_C1.shape))
