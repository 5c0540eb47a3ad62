"""The loss against sparse targets: a few tokens per position, as a store of teacher outputs holds them.

With q = softmax(z / T) over the student's V tokens; the right-hand expressions are gradients with respect
to z, divided by (1 - a) T:

    top_k     the K most probable tokens with log p, and the rest as one bucket: p_R = 1 - sum_K p
              KL = sum_K p_v (log p_v - log q_v) + p_R (log p_R - log q_R)          q_R = 1 - sum_K q
              v in K:  q_v - p_v           v not in K:  q_v (1 - p_R / q_R)

    sampled   m tokens drawn from p, each with weight 1/m; t_v is the share of draws that are v
              -sum_v t_v log q_v           q_v - t_v

The bucketed KL is at most the full KL, and is 0 when the student agrees on the K tokens and on the mass
of the rest. Draws are unbiased, E[t] = p, for the gradient of KL(p || q) and for the cross entropy
-sum p log q. `kd` is then this cross entropy times T^2. It exceeds the KL by the teacher's entropy, which cannot
be determined from draws. So draws give no lowest KL of a row, and no most probable token of the teacher.

q_R is summed over the remaining tokens and not computed as a difference from 1. p_R is such a difference,
and a value within its rounding error counts as no tail: it would add -p_R log q_R, which is unbounded.

This form is eager, uses three [C, V] buffers, and is the oracle of the fused one. Not covered: other
divergences, which sum over all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.loss.dense import (
    EagerForm,
    cross_entropy_at_one,
    log_sum_exp,
    total_gradient,
)
from engine.loss.types import Job, SparseTargets
from engine.models.head import multiply

# Shapes: N tokens, M labelled tokens, C tokens of one chunk, V student vocabulary, D student width,
# K target tokens per position


class SparseChunks(EagerForm):
    """Cross entropy, and the divergence from the sparse targets of `job.teacher`, which has the M
    labelled rows.
    """

    def __init__(self, job: Job, rows: int, w_VD: Tensor) -> None:
        assert isinstance(job.teacher, SparseTargets)
        self._targets = job.teacher
        super().__init__(job, rows, w_VD, 3)

    def _rows(
        self, views: list[Tensor], h_CD: Tensor, w_VD: Tensor, chunk: slice, labels_C1: Tensor
    ) -> Tensor:
        z_CV, q_CV, slope_CV = views
        T = self._job.temperature
        multiply(z_CV, h_CD, w_VD.t(), scale=1 / T)
        torch.softmax(z_CV, dim=1, out=q_CV)
        log_z_C1 = log_sum_exp(z_CV, q_CV)
        slope_CV.copy_(q_CV)
        ids_CK = self._targets.ids_NK[chunk].long()
        agree_C = None
        if self._targets.log_probs_NK is not None:
            log_p_CK = self._targets.log_probs_NK[chunk].to(z_CV.dtype)
            first_C1 = ids_CK.gather(1, log_p_CK.argmax(dim=1, keepdim=True))
            agree_C = z_CV.gather(1, first_C1) == z_CV.amax(dim=1, keepdim=True)
            divergence_C = _bucketed(z_CV, slope_CV, log_z_C1, ids_CK, log_p_CK)
        else:
            divergence_C = _drawn(z_CV, slope_CV, log_z_C1, ids_CK)
        ce_C1, soft_CV = cross_entropy_at_one(z_CV, q_CV, log_z_C1, labels_C1, T)
        self._totals.add(ce_C1, divergence_C, agree_C)
        return total_gradient(self._job, soft_CV, slope_CV, labels_C1)


def _bucketed(
    z_CV: Tensor, q_CV: Tensor, log_z_C1: Tensor, ids_CK: Tensor, log_p_CK: Tensor
) -> Tensor:
    """Return the divergence of each row, and overwrite q with its gradient."""
    p_CK = log_p_CK.exp()
    log_q_CK = z_CV.gather(1, ids_CK) - log_z_C1
    tail_p_C1 = 1 - p_CK.sum(dim=1, keepdim=True)
    q_CV.scatter_(1, ids_CK, 0)
    tail_q_C1 = q_CV.sum(dim=1, keepdim=True)
    kept_CK = torch.where(p_CK == 0, 0, p_CK * (log_p_CK - log_q_CK))
    # What rounding leaves of K numbers that sum to 1 is not a tail.
    empty_C1 = tail_p_C1 <= p_CK.shape[1] * torch.finfo(p_CK.dtype).eps
    tail_C1 = torch.where(empty_C1, 0, tail_p_C1 * (tail_p_C1.log() - tail_q_C1.log()))
    q_CV.mul_(1 - torch.where(empty_C1, 0, tail_p_C1 / tail_q_C1))
    q_CV.scatter_(1, ids_CK, log_q_CK.exp() - p_CK)
    return kept_CK.sum(dim=1) + tail_C1.squeeze(1)


def _drawn(z_CV: Tensor, q_CV: Tensor, log_z_C1: Tensor, ids_CK: Tensor) -> Tensor:
    """Return the cross entropy of each row's draws, and overwrite q with its gradient."""
    log_q_CK = z_CV.gather(1, ids_CK) - log_z_C1
    q_CV.scatter_add_(1, ids_CK, torch.full_like(log_q_CK, -1 / ids_CK.shape[1]))
    return -log_q_CK.mean(dim=1)
