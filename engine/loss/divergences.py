"""Divergences of rows of logits with the gradient of each, in plain torch and in place.

With q = softmax(z), p = softmax(t), z and t already divided by T, and m = (1 - b) q + b p:

    forward_kl   KL(p || q)                           q - p
    reverse_kl   KL(q || p)                           q (log q - log p - KL(q || p))
    jsd          b KL(p || m) + (1 - b) KL(q || m)    (1 - b) q (log q - log m - KL(q || m))

The right column is the gradient with respect to z, that is T times the one with respect to the
student's logits. Everything is written in d = log p - log q = (t - z) - (log S_t - log S_z), so that
no logarithm of a small probability is taken, and equal rows give exactly 0 on both sides. In `jsd`

    log m - log q = log(1 - b + b e^d) = log1p(b (e^d - 1))
                  = d + log1p((1 - b) (e^-d - 1))        for d > 0, where e^d may be too large
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.loss.types import Divergence

# Shapes: C rows, V vocabulary

SPARE = {"forward_kl": 0, "reverse_kl": 0, "jsd": 2}
"""Buffers that each needs beside those of z, t, q and p."""


def differentiate(
    name: Divergence,
    beta: float,
    z_CV: Tensor,
    t_CV: Tensor,
    q_CV: Tensor,
    p_CV: Tensor,
    log_z_C1: Tensor,
    log_t_C1: Tensor,
    spare: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The divergence of each row (C) and its gradient with respect to z (C, V). `log_z_C1` and
    `log_t_C1` are log sum e^z and log sum e^t. t, p and `spare` are overwritten, z and q are not.
    """
    gap_CV = t_CV.sub_(z_CV)
    match name:
        case "forward_kl":
            # (a sum, not a dot product: that is a matrix product, and TF32 would round a small KL
            # away)
            kl_C = gap_CV.mul_(p_CV).sum(dim=1) + (log_z_C1 - log_t_C1).squeeze(1)
            return kl_C, torch.sub(q_CV, p_CV, out=p_CV)
        case "reverse_kl":
            mean_C1 = torch.mul(gap_CV, q_CV, out=p_CV).sum(dim=1, keepdim=True)
            kl_C = (log_t_C1 - log_z_C1 - mean_C1).squeeze(1)
            # log q - log p - KL(q || p): the logarithms of the sums have cancelled
            return kl_C, torch.sub(mean_C1, gap_CV, out=p_CV).mul_(q_CV)
        case "jsd":
            d_CV = gap_CV.add_(log_z_C1 - log_t_C1)
            return _jsd(beta, d_CV, q_CV, p_CV, *spare)


def _jsd(
    beta: float, d_CV: Tensor, q_CV: Tensor, p_CV: Tensor, a_CV: Tensor, b_CV: Tensor
) -> tuple[Tensor, Tensor]:
    # beta where d <= 0, 1 - beta where d > 0
    weight_CV = torch.sign(d_CV, out=b_CV).clamp_(min=0).mul_(1 - 2 * beta).add_(beta)
    log_m_CV = torch.abs(d_CV, out=a_CV).neg_().expm1_().mul_(weight_CV).log1p_()
    log_m_CV.add_(torch.clamp(d_CV, min=0, out=b_CV))  # log m - log q
    of_teacher_C = torch.sub(d_CV, log_m_CV, out=b_CV).mul_(p_CV).sum(dim=1)
    of_student_C1 = torch.mul(q_CV, log_m_CV, out=b_CV).sum(dim=1, keepdim=True).neg()
    jsd_C = beta * of_teacher_C + (1 - beta) * of_student_C1.squeeze(1)
    return jsd_C, log_m_CV.add_(of_student_C1).mul_(q_CV).mul_(beta - 1)
