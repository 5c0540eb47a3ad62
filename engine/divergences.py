"""Define the divergences that a student can be trained with: their properties, and their formulas over rows of
logits.

With q = softmax(z), p = softmax(t), z and t already divided by T, and m = (1 - b) q + b p:

    forward_kl   KL(p || q)                           q - p
    reverse_kl   KL(q || p)                           q (log q - log p - KL(q || p))
    jsd          b KL(p || m) + (1 - b) KL(q || m)    (1 - b) q (log q - log m - KL(q || m))

The right column is the gradient with respect to z, which is T times the gradient with respect to the
student's logits. Everything is expressed in d = log p - log q = (t - z) - (log S_t - log S_z), so that no
logarithm of a small probability is taken, and equal rows give exactly 0 in both columns. In `jsd`

    log m - log q = log(1 - b + b e^d) = log1p(b (e^d - 1))
                  = d + log1p((1 - b) (e^-d - 1))        for d > 0, where e^d may overflow

Each divergence is implemented twice: for training, in place in few buffers and with its gradient; and
directly from its definition in float64, as the reference for tests. To add one, add a row to the table.

The table is also read without torch: for the spec's allowed values and help, and by the choosers and the memory
budget. So torch is imported inside the functions that need more than a tensor's methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: C rows, M rows of the reference, V vocabulary


class Logits(NamedTuple):
    """Logits of both sides for C rows, divided by T, in the caller's buffers; all but z and q are overwritten."""

    z_CV: Tensor
    t_CV: Tensor
    q_CV: Tensor
    p_CV: Tensor
    log_z_C1: Tensor
    """log sum e^z"""
    log_t_C1: Tensor
    spare: list[Tensor]
    """Additional [C, V] buffers besides z, t, q and p; `Divergence` has the total number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    doc: str
    """Description for the help of `loss.divergence`."""
    differentiate: Callable[[Logits, float], tuple[Tensor, Tensor]]
    """Function of the logits and b that returns the divergence of each row, (C,), and its gradient with respect to z,
    (C, V)."""
    reference: Callable[[Tensor, Tensor, float], Tensor]
    """Function of log p and log q, (M, V), and b that returns the divergence, summed over rows and the vocabulary."""
    buffers: int = 4
    """Logits-sized fp32 buffers of the eager form: both sides' logits and softmaxes, and scratch."""
    mixture: bool = False
    """Whether the divergence compares with a mixture of both distributions, in which `loss.beta` is the teacher's
    weight b."""
    fused: bool = False
    """Whether the engine's kernel (`engine/kernels/dense_loss.py`) implements it."""
    sparse: bool = False
    """Whether it can be computed from a part of the vocabulary at each position, such as a store's top-k outputs."""


def _forward_kl(x: Logits, _beta: float) -> tuple[Tensor, Tensor]:
    import torch

    gap_CV = x.t_CV.sub_(x.z_CV)
    # A sum, not a dot product: torch runs a dot product as a matmul, in which TF32 would round a small KL away.
    kl_C = gap_CV.mul_(x.p_CV).sum(dim=1) + (x.log_z_C1 - x.log_t_C1).squeeze(1)
    return kl_C, torch.sub(x.q_CV, x.p_CV, out=x.p_CV)


def _forward_kl_reference(log_p_MV: Tensor, log_q_MV: Tensor, _beta: float) -> Tensor:
    return (log_p_MV.exp() * (log_p_MV - log_q_MV)).sum()


def _reverse_kl(x: Logits, _beta: float) -> tuple[Tensor, Tensor]:
    import torch

    gap_CV = x.t_CV.sub_(x.z_CV)
    mean_C1 = torch.mul(gap_CV, x.q_CV, out=x.p_CV).sum(dim=1, keepdim=True)
    kl_C = (x.log_t_C1 - x.log_z_C1 - mean_C1).squeeze(1)
    # log q - log p - KL(q || p): the logarithms of the normalisers have cancelled
    return kl_C, torch.sub(mean_C1, gap_CV, out=x.p_CV).mul_(x.q_CV)


def _reverse_kl_reference(log_p_MV: Tensor, log_q_MV: Tensor, _beta: float) -> Tensor:
    return (log_q_MV.exp() * (log_q_MV - log_p_MV)).sum()


def _jsd(x: Logits, beta: float) -> tuple[Tensor, Tensor]:
    import torch

    a_CV, b_CV = x.spare
    d_CV = x.t_CV.sub_(x.z_CV).add_(x.log_z_C1 - x.log_t_C1)
    # beta where d <= 0, 1 - beta where d > 0
    weight_CV = torch.sign(d_CV, out=b_CV).clamp_(min=0).mul_(1 - 2 * beta).add_(beta)
    log_m_CV = torch.abs(d_CV, out=a_CV).neg_().expm1_().mul_(weight_CV).log1p_()
    log_m_CV.add_(torch.clamp(d_CV, min=0, out=b_CV))  # log m - log q
    of_teacher_C = torch.sub(d_CV, log_m_CV, out=b_CV).mul_(x.p_CV).sum(dim=1)
    of_student_C1 = torch.mul(x.q_CV, log_m_CV, out=b_CV).sum(dim=1, keepdim=True).neg()
    jsd_C = beta * of_teacher_C + (1 - beta) * of_student_C1.squeeze(1)
    return jsd_C, log_m_CV.add_(of_student_C1).mul_(x.q_CV).mul_(beta - 1)


def _jsd_reference(log_p_MV: Tensor, log_q_MV: Tensor, beta: float) -> Tensor:
    p_MV, q_MV = log_p_MV.exp(), log_q_MV.exp()
    log_m_MV = ((1 - beta) * q_MV + beta * p_MV).log()
    of_teacher = (p_MV * (log_p_MV - log_m_MV)).sum()
    return beta * of_teacher + (1 - beta) * (q_MV * (log_q_MV - log_m_MV)).sum()


DIVERGENCES = {
    "forward_kl": Divergence(
        doc="KL(teacher || student)",
        differentiate=_forward_kl,
        reference=_forward_kl_reference,
        fused=True,
        sparse=True,
    ),
    "reverse_kl": Divergence(
        doc="KL(student || teacher)",
        differentiate=_reverse_kl,
        reference=_reverse_kl_reference,
        fused=True,
    ),
    "jsd": Divergence(
        doc="Jensen-Shannon's, from both to their mixture",
        differentiate=_jsd,
        reference=_jsd_reference,
        buffers=6,
        mixture=True,
        fused=True,
    ),
}


def fused_divergences() -> list[str]:
    return [name for name, row in DIVERGENCES.items() if row.fused]


def sparse_divergences() -> list[str]:
    return [name for name, row in DIVERGENCES.items() if row.sparse]
