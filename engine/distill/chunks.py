"""The chunk loop of the distillation loss: hidden states in, sums and finished gradients out.

Shapes: M labelled tokens, C tokens of one chunk, V student vocabulary (of the teacher's head no more
rows are asked for), D student width, E teacher width.

Each chunk of rows goes through: two matrix products (logits of both sides), the arithmetic between
them (`loss_job.Chunks`, in one of its forms), and two matrix products of dz for dH and dW. All chunks
are as nearly of one size as their number allows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.distill.eager_chunks import EagerChunks
from engine.distill.loss_job import Chunks, Job, SparseTargets, Totals
from engine.distill.sparse_targets import SparseChunks
from engine.models.product import multiply, operand_dtype, sum_dtype


class ChunkedLoss(torch.autograd.Function):
    """Sums over rows of loss, CE, T^2 times the divergence and agreement, and the extremes of
    `Totals`; the gradients of the loss are finished in forward.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, head_VD: Tensor, job: Job) -> Any:
        device = hidden_MD.device
        dtype = operand_dtype(hidden_MD)
        h_MD, w_VD = hidden_MD.to(dtype), head_VD.to(dtype)
        wide = sum_dtype(dtype)
        rows = h_MD.shape[0]
        # Without rows there is no product that would fill them.
        make = torch.empty if rows else torch.zeros
        dh_MD = make(h_MD.shape, dtype=wide, device=device) if job.wants_hidden else None
        dw_VD = make(w_VD.shape, dtype=wide, device=device) if job.wants_head else None
        totals = None
        # The operands already have their dtype; autocast would narrow the fp32 products and sums
        # below.
        with torch.autocast(device.type, enabled=False):
            if rows:
                totals = _all_chunks(h_MD, w_VD, dh_MD, dw_VD, job)
        ctx.save_for_backward(dh_MD, dw_VD)
        ctx.dtypes = (hidden_MD.dtype, head_VD.dtype)
        terms = _terms(job, totals, device)
        # copy: an output must not share memory with another, or autograd would take both for one
        terms = [None if term is None else term.to(wide, copy=True) for term in terms]
        ctx.mark_non_differentiable(*(term for term in terms[1:] if term is not None))
        return tuple(terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_metrics: Tensor | None) -> Any:
        dh_MD, dw_VD = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        return _scaled(dh_MD, upstream, hidden_dtype), _scaled(dw_VD, upstream, head_dtype), None


def _all_chunks(
    h_MD: Tensor, w_VD: Tensor, dh_MD: Tensor | None, dw_VD: Tensor | None, job: Job
) -> Totals:
    rows = len(h_MD)
    count = -(-rows // job.chunk_rows)
    step = -(-rows // count)
    chunks = _form(job, step, w_VD)
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        dz_CV = chunks.differentiate(h_MD[chunk], w_VD, chunk)
        if dh_MD is not None:
            multiply(dh_MD[chunk], dz_CV, w_VD)
        if dw_VD is not None:
            multiply(dw_VD, dz_CV.t(), h_MD[chunk], add=start > 0)
        del dz_CV  # or it would be beside the next chunk's
    return chunks.totals()


def _form(job: Job, rows: int, w_VD: Tensor) -> Chunks:
    if isinstance(job.teacher, SparseTargets):
        return SparseChunks(job, rows, w_VD)
    if job.kernel == "fused":
        # Here, so that a machine without Triton can run everything else.
        from engine.distill.fused_chunks import FusedChunks

        return FusedChunks(job, rows, w_VD)
    return EagerChunks(job, rows, w_VD)


def _terms(job: Job, totals: Totals | None, device: torch.device) -> list[Tensor | None]:
    """loss, ce, kd, agreeing, lowest, largest sum; sums over no rows are 0."""
    if totals is None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        taught = None if job.teacher is None else zero
        return [zero, zero, taught, taught, None, None]
    loss, kd = totals.ce, None
    if totals.divergence is not None:
        kd = job.temperature**2 * totals.divergence
        loss = job.alpha * totals.ce + (1 - job.alpha) * kd
    return [loss, totals.ce, kd, totals.agreeing, totals.lowest, totals.largest_sum]


def _scaled(gradient: Tensor | None, upstream: Tensor, dtype: torch.dtype) -> Tensor | None:
    """upstream * gradient, rounded once to `dtype`, in one pass."""
    if gradient is None:
        return None
    return torch.mul(gradient, upstream, out=torch.empty_like(gradient, dtype=dtype))
