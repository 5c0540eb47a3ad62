"""The distillation loss in its simplest form: the reference for `engine.loss.kd_loss`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.divergences import DIVERGENCES
from engine.loss.kd_loss import IGNORE_LABEL, LossTerms

# Shapes: N tokens, M labelled tokens, V student vocabulary, W teacher vocabulary


def reference_loss(
    student_logits_NV: Tensor,
    teacher_logits_NW: Tensor | None,
    labels_N: Tensor,
    alpha: float,
    temperature: float,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
) -> LossTerms:
    """Compute the same objective directly: float64, full logits, autograd, mean over this call's labelled
    rows.

    This is the oracle of `distillation_loss`.
    """
    vocabulary = student_logits_NV.shape[1]
    rows_M = (labels_N != IGNORE_LABEL).nonzero().squeeze(1)
    z_MV = student_logits_NV[rows_M].double()
    labels_M = labels_N[rows_M]
    n = max(rows_M.numel(), 1)
    ce = F.cross_entropy(z_MV, labels_M, reduction="sum") / n
    kd = agreement = None
    loss = alpha * ce
    if teacher_logits_NW is not None and alpha != 1:
        t_MV = teacher_logits_NW.detach()[rows_M, :vocabulary].double()
        log_p_MV = F.log_softmax(t_MV / temperature, dim=1)
        log_q_MV = F.log_softmax(z_MV / temperature, dim=1)
        kd = temperature**2 * DIVERGENCES[divergence].reference(log_p_MV, log_q_MV, beta) / n
        agreement = (t_MV.argmax(1) == z_MV.argmax(1)).sum() / n
        loss = loss + (1 - alpha) * kd
        kd = kd.detach()
    labelled = torch.full((), rows_M.numel(), device=z_MV.device)
    return LossTerms(loss=loss, ce=ce.detach(), kd=kd, agreement=agreement, labelled=labelled)
