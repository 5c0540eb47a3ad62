"""The chunk loop of the distillation loss: logits in, sums and finished gradients out.

Shapes: M labelled tokens, C tokens of one chunk, V student vocabulary (of the teacher's head no more
rows are asked for), D student width, E teacher width.

Each chunk of rows goes through: two matrix products (z / T and t / T), two softmaxes, the row sums,
dz written over a softmax, two matrix products for dH and dW. At most four [C, V] buffers are alive,
reused by every chunk. Everything is summed over rows and nothing is averaged here, so dz is free of
the denominator and keeps its size in a narrow dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.models.head import Slices, project
from engine.models.product import multiply, operand_dtype, sum_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The teacher's side: what its logits are made of."""

    hidden_ME: Tensor
    slices: Slices
    """Of its head, the student's V columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the chunk loop needs that autograd need not see."""

    labels_M: Tensor
    teacher: Teaching | None
    alpha: float
    temperature: float
    chunk_rows: int
    wants_hidden: bool
    wants_head: bool


class ChunkedLoss(torch.autograd.Function):
    """Sums over rows of loss, CE, T^2 KL and agreement; the gradients of the loss are finished in
    forward.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, head_VD: Tensor, job: Job) -> Any:
        device = hidden_MD.device
        dtype = operand_dtype(hidden_MD)
        h_MD, w_VD = hidden_MD.to(dtype), head_VD.to(dtype)
        wide = sum_dtype(dtype)
        rows, vocabulary = h_MD.shape[0], w_VD.shape[0]
        chunk_rows = min(job.chunk_rows, max(rows, 1))
        dh_MD = torch.zeros(h_MD.shape, dtype=wide, device=device) if job.wants_hidden else None
        dw_VD = torch.zeros(w_VD.shape, dtype=wide, device=device) if job.wants_head else None
        # float64: the sums are read against finite differences of each other, and a 0-d addition
        # costs nothing.
        ce, kl, agreeing = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        buffers = [
            torch.empty(chunk_rows, vocabulary, dtype=wide, device=device)
            for _ in range(4 if job.teacher else 2)
        ]
        # The operands already have their dtype; autocast would narrow the fp32 products and sums
        # below.
        with torch.autocast(device.type, enabled=False):
            for start in range(0, rows, chunk_rows):
                chunk = slice(start, min(start + chunk_rows, rows))
                views = [buffer[: chunk.stop - start] for buffer in buffers]
                labels_C1 = job.labels_M[chunk].unsqueeze(1)
                if job.teacher is None:
                    ce_C, dz_CV = _ce_chunk(views, h_MD[chunk], w_VD, labels_C1)
                else:
                    ce_C, kl_C, agree_C, dz_CV = _kd_chunk(
                        views, h_MD[chunk], w_VD, job.teacher, chunk, labels_C1, job
                    )
                    kl += kl_C.sum(dtype=torch.float64)
                    agreeing += agree_C.sum()
                ce += ce_C.sum(dtype=torch.float64)
                if dh_MD is None and dw_VD is None:
                    continue
                narrow_CV = dz_CV.to(h_MD.dtype)
                if dh_MD is not None:
                    multiply(dh_MD[chunk], narrow_CV, w_VD)
                if dw_VD is not None:
                    multiply(dw_VD, narrow_CV.t(), h_MD[chunk], add=True)
                del narrow_CV  # or it would be beside the next chunk's
        ctx.save_for_backward(dh_MD, dw_VD)
        ctx.dtypes = (hidden_MD.dtype, head_VD.dtype)
        if job.teacher is None:
            terms = [ce, ce, None, None]
        else:
            kd = job.temperature**2 * kl
            terms = [job.alpha * ce + (1 - job.alpha) * kd, ce, kd, agreeing]
        # copy: an output must not share memory with another, or autograd would take both for one
        terms = [None if term is None else term.to(wide, copy=True) for term in terms]
        ctx.mark_non_differentiable(*(term for term in terms[1:] if term is not None))
        return tuple(terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_metrics: Tensor | None) -> Any:
        dh_MD, dw_VD = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        return (
            None if dh_MD is None else (dh_MD * upstream).to(hidden_dtype),
            None if dw_VD is None else (dw_VD * upstream).to(head_dtype),
            None,
        )


def _ce_chunk(
    buffers: list[Tensor], h_CD: Tensor, w_VD: Tensor, labels_C1: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row and dz, for alpha = 1: without a teacher there is no other."""
    z_CV, q_CV = buffers
    multiply(z_CV, h_CD, w_VD.t())
    torch.softmax(z_CV, dim=1, out=q_CV)
    ce_C = (_log_sum_exp(z_CV, q_CV) - z_CV.gather(1, labels_C1)).squeeze(1)
    return ce_C, _minus_label(q_CV, labels_C1, 1.0)


def _kd_chunk(
    buffers: list[Tensor],
    h_CD: Tensor,
    w_VD: Tensor,
    teacher: Teaching,
    chunk: slice,
    labels_C1: Tensor,
    job: Job,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CE, KL and agreement of each row, and dz. Each buffer holds several things in turn; the last
    name for it is the live one.
    """
    z_CV, t_CV, q_CV, p_CV = buffers
    T = job.temperature
    # z / T and t / T: the division is free inside the product
    multiply(z_CV, h_CD, w_VD.t(), scale=1 / T)
    project(t_CV, teacher.hidden_ME[chunk], teacher.slices, scale=1 / T)
    torch.softmax(z_CV, dim=1, out=q_CV)
    torch.softmax(t_CV, dim=1, out=p_CV)
    log_s_C1 = _log_sum_exp(z_CV, q_CV)
    log_t_C1 = _log_sum_exp(t_CV, p_CV)
    first_C1 = t_CV.argmax(dim=1, keepdim=True)
    agree_C = (z_CV.gather(1, first_C1) == z_CV.amax(dim=1, keepdim=True)).squeeze(1)

    # KL = sum_v p (t - z)/T - log_t + log_s: log p - log q without a logarithm per element
    gap_CV = t_CV.sub_(z_CV)
    # (a sum, not a dot product: that is a matrix product, and TF32 would round a small KL away)
    kl_C = gap_CV.mul_(p_CV).sum(dim=1) + (log_s_C1 - log_t_C1).squeeze(1)

    if T == 1:
        soft_CV = q_CV
        ce_C1 = log_s_C1 - z_CV.gather(1, labels_C1)
        difference_CV = torch.sub(q_CV, p_CV, out=p_CV)
    else:
        difference_CV = torch.sub(q_CV, p_CV, out=p_CV)
        z_CV.mul_(T)
        soft_CV = torch.softmax(z_CV, dim=1, out=q_CV)
        ce_C1 = _log_sum_exp(z_CV, soft_CV) - z_CV.gather(1, labels_C1)
    dz_CV = soft_CV.mul_(job.alpha).add_(difference_CV, alpha=(1 - job.alpha) * T)
    return ce_C1.squeeze(1), kl_C, agree_C, _minus_label(dz_CV, labels_C1, job.alpha)


def _log_sum_exp(x_CV: Tensor, softmax_CV: Tensor) -> Tensor:
    """log sum_v e^x, [C, 1], out of a softmax that is there already: its largest entry is e^(max x)
    / sum, at least 1/V.
    """
    return x_CV.amax(dim=1, keepdim=True) - softmax_CV.amax(dim=1, keepdim=True).log()


def _minus_label(dz_CV: Tensor, labels_C1: Tensor, alpha: float) -> Tensor:
    """dz - alpha * onehot(label), in place."""
    return dz_CV.scatter_add_(1, labels_C1, dz_CV.new_full((), -alpha).expand(labels_C1.shape))
