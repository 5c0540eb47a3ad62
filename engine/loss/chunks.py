"""The chunk loop of the distillation loss: hidden states in, sums and finished gradients out.

Shapes: M labelled tokens, C tokens of one chunk, G of a group of chunks, V student vocabulary (of the
teacher's head no more rows are asked for), D student width, E teacher width.

Each chunk of rows goes through: two matrix products (logits of both sides), the arithmetic between
them (`loss_job.Chunks`, in one of its forms), and two matrix products of dz for dH and dW. A form that
holds dz of some chunks at a time has them multiplied together: dW, as large as the head, is then read
and written so much less often. All chunks are as nearly of one size as their number allows.

A caller who promises to multiply the loss by nothing has the gradients finished here, divided by the
denominator inside their products; else backward takes one more pass over them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.loss.dense import EagerChunks
from engine.loss.sparse import SparseChunks
from engine.loss.types import Chunks, Job, SparseTargets, Totals
from engine.models.product import multiply, operand_dtype, sum_dtype


class ChunkedLoss(torch.autograd.Function):
    """Sums over rows of loss, CE, T^2 times the divergence and agreement, and the extremes of
    `Totals`; the gradients of the loss are made in forward. The loss is divided by `job.divisor`.
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
        if job.finished:
            # Not saved but given away, so that nobody has to copy what it may keep.
            ctx.gradients = (dh_MD, dw_VD)
        else:
            ctx.save_for_backward(dh_MD, dw_VD)
        ctx.dtypes, ctx.job = (hidden_MD.dtype, head_VD.dtype), job
        loss, *metrics = _terms(job, totals, device)
        assert loss is not None
        terms = [loss / job.divisor, *metrics]
        # copy: an output must not share memory with another, or autograd would take both for one
        terms = [None if term is None else term.to(wide, copy=True) for term in terms]
        ctx.mark_non_differentiable(*(term for term in terms[1:] if term is not None))
        return tuple(terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_metrics: Tensor | None) -> Any:
        hidden_dtype, head_dtype = ctx.dtypes
        if not ctx.job.finished:
            dh_MD, dw_VD = ctx.saved_tensors
            factor = upstream / ctx.job.divisor
            return _scaled(dh_MD, factor, hidden_dtype), _scaled(dw_VD, factor, head_dtype), None
        if ctx.gradients is None:
            raise RuntimeError("undivided loss: expected one backward pass, found a second")
        (dh_MD, dw_VD), ctx.gradients = ctx.gradients, None
        # A promise that was broken must not go unseen: what goes through the hidden states is NaN then.
        one = torch.where(upstream == 1, upstream, math.nan)
        if dh_MD is None and dw_VD is not None:
            dw_VD.mul_(one)
        dw_VD = None if dw_VD is None else dw_VD.to(head_dtype)
        return _scaled(dh_MD, one, hidden_dtype), dw_VD, None


def _all_chunks(
    h_MD: Tensor, w_VD: Tensor, dh_MD: Tensor | None, dw_VD: Tensor | None, job: Job
) -> Totals:
    rows = len(h_MD)
    count = -(-rows // job.chunk_rows)
    step = -(-rows // count)
    chunks = _form(job, step, w_VD)
    finished = job.finished and not isinstance(job.divisor, Tensor)
    scale = 1 / float(job.divisor) if finished else 1.0
    for begun in range(0, rows, step * chunks.held):
        group = slice(begun, min(begun + step * chunks.held, rows))
        for start in range(group.start, group.stop, step):
            chunk = slice(start, min(start + step, rows))
            chunks.differentiate(h_MD[chunk], w_VD, chunk)
        dz_GV = chunks.gradient(group)
        if dh_MD is not None:
            multiply(dh_MD[group], dz_GV, w_VD, scale=scale)
        if dw_VD is not None:
            multiply(dw_VD, dz_GV.t(), h_MD[group], scale=scale, add=begun > 0)
        del dz_GV  # or it would be beside the next group's
    return chunks.totals()


def _form(job: Job, rows: int, w_VD: Tensor) -> Chunks:
    sparse = isinstance(job.teacher, SparseTargets)
    if job.kernel == "fused":
        # Here, so that a machine without Triton can run everything else.
        from engine.loss.fused import FusedChunks
        from engine.loss.fused_sparse import FusedSparseChunks

        return FusedSparseChunks(job, rows, w_VD) if sparse else FusedChunks(job, rows, w_VD)
    if sparse:
        return SparseChunks(job, rows, w_VD)
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
