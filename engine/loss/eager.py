"""The eager form of the loss: plain torch, on any device, in at most six [C, V] buffers.

Each chunk of rows needs a softmax of each side and the row sums; dz overwrites a softmax. Everything is
summed over rows and nothing is averaged here. So dz does not contain the denominator, and keeps its
magnitude in a narrow dtype.

Against a teacher's hidden states, `engine/divergences.py` has the formulas. Against sparse targets, a few
tokens per position as a store of teacher outputs holds them, they are here. With q = softmax(z / T) over the
student's V tokens; the right-hand expressions are gradients with respect to z, divided by (1 - a) T:

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

Not covered for sparse targets: other divergences, which sum over all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.divergences import DIVERGENCES, Logits
from engine.loss.chunks import Job, TeacherHidden, Totals
from engine.models.head import multiply, project, sum_dtype

# Shapes: M labelled tokens, C tokens of one chunk, V student vocabulary, D student width,
# K target tokens per position


class EagerChunks:
    """Cross entropy, and a divergence when there is a teacher, in buffers that every chunk reuses."""

    held = 1

    def __init__(self, job: Job, shape: tuple[int, int], like: Tensor) -> None:
        """`shape` is that of a chunk's logits (C, V); `like` is an operand of the matmul to them."""
        self._job = job
        self._buffers = [
            torch.empty(shape, dtype=sum_dtype(like.dtype), device=like.device)
            for _ in range(job.buffers)
        ]
        self._totals = Totals(ce=torch.zeros((), dtype=torch.float64, device=like.device))
        self._narrow_CV: Tensor | None = None

    def differentiate(self, h_CD: Tensor, w_VD: Tensor | None, chunk: slice) -> None:
        """Each buffer holds several quantities in turn; the most recent name for it is the valid one."""
        self._narrow_CV = None  # frees the previous chunk's dz before this one's is made
        job, T = self._job, self._job.temperature
        z_CV, q_CV, *spare = (buffer[: chunk.stop - chunk.start] for buffer in self._buffers)
        labels_C1 = job.labels_M[chunk].unsqueeze(1)
        # z / T: the division costs nothing inside the matmul
        if w_VD is None:
            torch.mul(h_CD.to(z_CV.dtype), 1 / T, out=z_CV)
        else:
            multiply(z_CV, h_CD, w_VD.t(), scale=1 / T)
        torch.softmax(z_CV, dim=1, out=q_CV)
        log_z_C1 = _log_sum_exp(z_CV, q_CV)
        divergence_C = agree_C1 = slope_CV = None
        if isinstance(job.teacher, TeacherHidden):
            t_CV, p_CV, *spare = spare
            project(t_CV, job.teacher.hidden_ME[chunk], job.teacher.slices, scale=1 / T)
            torch.softmax(t_CV, dim=1, out=p_CV)
            log_t_C1 = _log_sum_exp(t_CV, p_CV)
            agree_C1 = _is_top(z_CV, t_CV.argmax(dim=1, keepdim=True))
            divergence_C, slope_CV = DIVERGENCES[job.divergence].differentiate(
                Logits(z_CV, t_CV, q_CV, p_CV, log_z_C1, log_t_C1, spare), job.beta
            )
        elif job.teacher is not None:
            (slope_CV,) = spare
            slope_CV.copy_(q_CV)
            ids_CK = job.teacher.ids_NK[chunk].long()
            if job.teacher.log_probs_NK is None:
                divergence_C = _drawn(z_CV, slope_CV, log_z_C1, ids_CK)
            else:
                log_p_CK = job.teacher.log_probs_NK[chunk].to(z_CV.dtype)
                agree_C1 = _is_top(z_CV, ids_CK.gather(1, log_p_CK.argmax(dim=1, keepdim=True)))
                divergence_C = _bucketed(z_CV, slope_CV, log_z_C1, ids_CK, log_p_CK)
        if T != 1:  # from here on z and q are at temperature 1
            z_CV.mul_(T)
            torch.softmax(z_CV, dim=1, out=q_CV)
            log_z_C1 = _log_sum_exp(z_CV, q_CV)
        self._totals.add(log_z_C1 - z_CV.gather(1, labels_C1), divergence_C, agree_C1)
        dz_CV = q_CV
        if slope_CV is not None:
            dz_CV.mul_(job.alpha).add_(slope_CV, alpha=(1 - job.alpha) * T)
        dz_CV.scatter_add_(1, labels_C1, dz_CV.new_full((), -job.alpha).expand(labels_C1.shape))
        self._totals.add_gradient(dz_CV.sum(dim=1))
        self._narrow_CV = dz_CV.to(h_CD.dtype)

    def gradient(self, group: slice) -> Tensor:
        assert self._narrow_CV is not None
        return self._narrow_CV

    def totals(self) -> Totals:
        return self._totals


def _log_sum_exp(x_CV: Tensor, softmax_CV: Tensor) -> Tensor:
    """Return log sum_v e^x, [C, 1], from an existing softmax.

    The largest entry of the softmax is e^(max x) / sum, which is at least 1/V.
    """
    return x_CV.amax(dim=1, keepdim=True) - softmax_CV.amax(dim=1, keepdim=True).log()


def _is_top(z_CV: Tensor, ids_C1: Tensor) -> Tensor:
    """Return whether no token is more probable to the student than the row's token, [C, 1]."""
    return z_CV.gather(1, ids_C1) == z_CV.amax(dim=1, keepdim=True)


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
    # A remainder within the rounding error of a sum of K numbers does not count as tail.
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
