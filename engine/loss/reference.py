"""The distillation loss written for reading: what `engine.loss.objective` is held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.loss.arguments import IGNORE_LABEL, check_objective, check_widths
from engine.loss.types import Divergence, LossTerms

# Shapes: N tokens, M labelled tokens, V student vocabulary, W teacher vocabulary


# contract: kd-loss-v1
def reference_loss(
    student_logits_NV: Tensor,
    teacher_logits_NW: Tensor | None,
    labels_N: Tensor,
    alpha: float,
    temperature: float,
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
) -> LossTerms:
    """The same objective written for reading: float64, whole logits, plain autograd, mean over this
    call's labelled rows.

    The oracle of `distillation_loss`. Raises ValueError as that does.
    """
    check_objective(alpha, temperature, teacher_logits_NW is not None, divergence, beta)
    vocabulary = student_logits_NV.shape[1]
    rows_M = (labels_N != IGNORE_LABEL).nonzero().squeeze(1)
    z_MV = student_logits_NV[rows_M].double()
    labels_M = labels_N[rows_M]
    n = max(rows_M.numel(), 1)
    ce = F.cross_entropy(z_MV, labels_M, reduction="sum") / n
    kd = agreement = None
    loss = alpha * ce
    if teacher_logits_NW is not None and alpha != 1:
        check_widths(vocabulary, teacher_logits_NW.shape[1])
        t_MV = teacher_logits_NW.detach()[rows_M, :vocabulary].double()
        log_p_MV = F.log_softmax(t_MV / temperature, dim=1)
        log_q_MV = F.log_softmax(z_MV / temperature, dim=1)
        kd = temperature**2 * _divergence(divergence, beta, log_p_MV, log_q_MV) / n
        agreement = (t_MV.argmax(1) == z_MV.argmax(1)).sum() / n
        loss = loss + (1 - alpha) * kd
        kd = kd.detach()
    labelled = torch.full((), rows_M.numel(), device=z_MV.device)
    return LossTerms(loss=loss, ce=ce.detach(), kd=kd, agreement=agreement, labelled=labelled)


def _divergence(name: Divergence, beta: float, log_p_MV: Tensor, log_q_MV: Tensor) -> Tensor:
    """Summed over rows and ids, straight from the definitions."""
    p_MV, q_MV = log_p_MV.exp(), log_q_MV.exp()
    match name:
        case "forward_kl":
            return (p_MV * (log_p_MV - log_q_MV)).sum()
        case "reverse_kl":
            return (q_MV * (log_q_MV - log_p_MV)).sum()
        case "jsd":
            log_m_MV = ((1 - beta) * q_MV + beta * p_MV).log()
            of_teacher = (p_MV * (log_p_MV - log_m_MV)).sum()
            return beta * of_teacher + (1 - beta) * (q_MV * (log_q_MV - log_m_MV)).sum()
