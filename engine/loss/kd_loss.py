"""The distillation loss: cross entropy and a divergence from the teacher, computed from hidden states in
chunks, with the gradients computed in the forward pass.

Shapes: N tokens, M labelled tokens, C tokens of one chunk, V student vocabulary, W teacher
vocabulary (W >= V), D student width, E teacher width.

The objective, over the n labelled tokens of a whole optimizer step (`alpha` is the weight of the cross
entropy):

    L   = alpha * CE + (1 - alpha) * T^2 * KL
    CE  = (1/n) sum_i -log softmax(z_i)[y_i]                       nats, always at temperature 1
    KL  = (1/n) sum_i sum_v p_iv (log p_iv - log q_iv)             nats, at temperature T
    q   = softmax(z / T)      p = softmax(t[:V] / T)               z, t: student and teacher logits

KL may be replaced by another divergence (`engine/divergences.py`), or be computed from a few target tokens
per position (sparse targets, `eager.py`). A teacher wider than the student is truncated to the student's V columns and
renormalised over them, because two checkpoints of one family may pad the same tokenizer to different
widths. The values in the dropped columns have no effect.

The gradient with respect to the student's logits is

    dL/dz = (1/n) [alpha (softmax(z) - onehot(y)) + (1 - alpha) T (q - p)]          the T is T^2 / T

and needs only values that the forward pass already has. So `distillation_loss` processes chunks of rows:
it turns each chunk's logits into dz while they are in memory, multiplies dz into dH and dW at once, and
frees the chunk. No logits outlive their chunk, and the backward pass only multiplies by the upstream
gradient; a caller who promises that this is 1 gets the final gradients directly. A form may keep dz of
several chunks and multiply them together, so that dW, which is as large as the head, is read and written
less often. All chunks have nearly the same size.

Every call also measures two invariants, at almost no cost because the sums are available: the lowest
divergence of a row, which is at least 0, and the largest |sum of a row of dz|, which is 0. Both hold up
to rounding. With fp32 logits, each normaliser is a sum of exponentials with a relative error of some 3e-6
(an argument of 20 rounded to 24 bits, and a tree sum), and the divergence consists of two logarithms of
those and of a mean of t - z. `LOWEST_DIVERGENCE` and `LARGEST_DZ_SUM` leave a factor of ten. Logits that
were rounded to bf16 violate neither: the invariants test the arithmetic, not the logits.

Invariants: every row of dz sums to zero; a student equal to its teacher has KL and KD gradient exactly 0;
the teacher never gets a gradient; a row whose label is -100 is dropped before any arithmetic; nothing is
clamped, so a non-finite logit reaches the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.loss.chunks import (
    Chunks,
    Job,
    LossKernel,
    SparseTargets,
    TeacherHidden,
    Totals,
    default_chunk_rows,
)
from engine.loss.eager import EagerChunks
from engine.models.head import DenseHead, Head, multiply, operand_dtype, sum_dtype

IGNORE_LABEL = -100
LOWEST_DIVERGENCE = -1e-4
"""Lowest divergence of a row that rounding can cause, in nats."""
LARGEST_DZ_SUM = 1e-4
"""Largest |sum of a row of dz| that rounding can cause, at T <= 1; otherwise times T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The contribution of one call to an optimizer step.

    All are 0-d tensors on the device of the hidden states; reading one is a sync, made by the caller.
    Each is a sum over this call's labelled rows divided by the step's denominator, so the parts of an
    accumulated step add up to the step's mean, and `loss = alpha * ce + (1 - alpha) * kd`.
    """

    loss: Tensor
    """The objective, nats; the only term that carries a gradient."""
    ce: Tensor
    """Cross entropy, nats, at temperature 1."""
    kd: Tensor | None
    """T^2 * KL(teacher || student), or the divergence in its place, with both sides at temperature T;
    None when no teacher was used (alpha = 1).
    """
    agreement: Tensor | None
    """Share of the step's labelled rows, counted in this call, on which teacher and student have the same
    most probable token. None without a teacher, and for draws.
    """
    labelled: Tensor
    """Labelled rows of this call, int64: a count, not divided by the denominator."""
    lowest_kl: Tensor | None = None
    """The lowest divergence of a labelled row, nats, without T^2: at least `LOWEST_DIVERGENCE`. None
    without a teacher in the objective, without a labelled row, and for draws.
    """
    largest_dz_sum: Tensor | None = None
    """The largest |sum_v dz_v| of a labelled row, before dividing by the denominator: at most
    `LARGEST_DZ_SUM`. None without a labelled row.
    """


# contract: kd-loss-v1
def distillation_loss(
    student_hidden_ND: Tensor,
    student_head_VD: Tensor | None,
    teacher_hidden_NE: Tensor | None,
    teacher_head_WE: Head | Tensor | None,
    labels_N: Tensor,
    *,
    alpha: float,
    temperature: float,
    denominator: float | Tensor,
    chunk_rows: int | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    kernel: LossKernel = "eager",
    targets: SparseTargets | None = None,
    backward_from_loss: bool = False,
) -> LossTerms:
    """Return the loss of N tokens and, through autograd, its gradients for the student's hidden states
    and head.

    `labels_N` holds the token that row i should predict (already shifted) or -100. With labels in host
    memory nothing here waits for the device; labels on a GPU cost one sync, because the number of
    labelled rows must be known. `denominator` is the number of labelled tokens of the whole optimizer
    step over all ranks: a float, or a 0-d tensor that is never read on the host. `student_head_VD` may be
    the embedding itself; its gradient is added to the embedding's own. None means that the hidden states are
    the student's logits (D = V). The teacher's head may be a matrix or a `Head` that yields slices of one; only
    its first V rows are read.

    Matmuls run in the dtype of the hidden states, or of autocast when it is on, and give fp32 logits: on
    a CPU the operands are widened to fp32, on a GPU the fp32 accumulator is kept. dW is accumulated over
    chunks in fp32. float64 stays float64.

    `kernel="fused"` runs everything between the matmuls in one kernel of ours, on a GPU
    (`engine.plan.knobs`); it does not support float64. `targets` replace the teacher's hidden
    states and head, for `forward_kl`.

    With `backward_from_loss` the caller promises that backward starts at this call's `loss` itself, with a
    gradient of 1: no factor, no other loss added. This saves a pass over the gradient of the head. If the
    promise is broken, the gradients are NaN.

    With alpha = 1 the teacher is not used and may be None. The arguments fit together: spec, plan and tokenizer
    were checked when the run began (`engine.spec`, `engine.plan.inputs`).
    """
    vocabulary = len(student_head_VD) if student_head_VD is not None else student_hidden_ND.shape[1]

    # The number of labelled rows determines every shape below. On a GPU reading it is the one sync;
    # labels on the host avoid it.
    rows_M = (labels_N != IGNORE_LABEL).nonzero().squeeze(1)
    labelled = rows_M.numel()
    labels_M = labels_N.index_select(0, rows_M)
    device = student_hidden_ND.device
    rows_M, labels_M = (_to_device(index, device) for index in (rows_M, labels_M))

    hidden_MD = _take(student_hidden_ND, rows_M)
    teacher: TeacherHidden | SparseTargets | None = None
    if alpha != 1 and targets is not None:
        log_probs = targets.log_probs_NK
        teacher = SparseTargets(
            ids_NK=_take(targets.ids_NK, rows_M),
            log_probs_NK=None if log_probs is None else _take(log_probs, rows_M),
        )
    elif alpha != 1 and teacher_hidden_NE is not None:
        assert teacher_head_WE is not None, "hidden states come with a head"
        head = (
            DenseHead(teacher_head_WE) if isinstance(teacher_head_WE, Tensor) else teacher_head_WE
        )
        dtype = operand_dtype(teacher_hidden_NE)
        with torch.no_grad():
            teacher = TeacherHidden(
                hidden_ME=_take(teacher_hidden_NE.detach(), rows_M).to(dtype),
                slices=head.slices(vocabulary, dtype),
            )

    wants_gradient = torch.is_grad_enabled()
    # Without labelled rows the sum is exactly 0, and the step's denominator may be 0 too: 0 / 0 would be
    # NaN.
    n = denominator if labelled else 1.0
    job = Job(
        labels_M=labels_M,
        teacher=teacher,
        alpha=alpha,
        # There is no temperature other than 1 without a teacher.
        temperature=1.0 if teacher is None else temperature,
        divergence=divergence,
        beta=beta,
        kernel=kernel,
        chunk_rows=chunk_rows
        or default_chunk_rows(device.type, vocabulary, fused=kernel == "fused"),
        wants_hidden=wants_gradient and student_hidden_ND.requires_grad,
        wants_head=wants_gradient and student_head_VD is not None and student_head_VD.requires_grad,
        divisor=n,
        finished=backward_from_loss and not isinstance(n, Tensor),
    )
    loss, ce, kd, agreeing, lowest, largest = cast(
        tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        _ChunkedLoss.apply(hidden_MD, student_head_VD, job),  # type: ignore[no-untyped-call]
    )
    return LossTerms(
        loss=loss,
        ce=ce / n,
        kd=None if kd is None else kd / n,
        agreement=None if agreeing is None else agreeing / n,
        labelled=torch.full((), labelled, device=device),
        lowest_kl=lowest,
        largest_dz_sum=largest,
    )


def _to_device(index_M: Tensor, device: torch.device) -> Tensor:
    # From memory that is not pinned, CUDA may first wait for all earlier work.
    pinned = device.type == "cuda" and index_M.device.type == "cpu"
    return (index_M.pin_memory() if pinned else index_M).to(device, non_blocking=True)


def _take(hidden_ND: Tensor, rows_M: Tensor) -> Tensor:
    """Return the labelled rows, without a copy when every row is labelled."""
    return hidden_ND if rows_M.numel() == hidden_ND.shape[0] else hidden_ND.index_select(0, rows_M)


class _ChunkedLoss(torch.autograd.Function):
    """The loss and its metrics as one autograd function; forward also computes the gradients of the loss.

    Returns the sums over rows of loss (divided by `job.divisor`), CE, T^2 times the divergence, and
    agreement, and the extremes of `Totals`.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, head_VD: Tensor | None, job: Job) -> Any:
        device = hidden_MD.device
        dtype = operand_dtype(hidden_MD)
        h_MD, w_VD = hidden_MD.to(dtype), None if head_VD is None else head_VD.to(dtype)
        wide = sum_dtype(dtype)
        rows = h_MD.shape[0]
        # Without rows no matmul would fill them.
        make = torch.empty if rows else torch.zeros
        dh_MD = make(h_MD.shape, dtype=wide, device=device) if job.wants_hidden else None
        dw_VD = None
        if w_VD is not None and job.wants_head:
            dw_VD = make(w_VD.shape, dtype=wide, device=device)
        totals = None
        # The operands already have their dtype; autocast would narrow the fp32 matmuls and sums below.
        with torch.autocast(device.type, enabled=False):
            if rows:
                totals = _run_chunks(h_MD, w_VD, dh_MD, dw_VD, job)
        if job.finished:
            # An attribute and not `save_for_backward`, so that backward can return the tensors without a copy.
            ctx.gradients = (dh_MD, dw_VD)
        else:
            ctx.save_for_backward(dh_MD, dw_VD)
        head_dtype = hidden_MD.dtype if head_VD is None else head_VD.dtype
        ctx.dtypes, ctx.job = (hidden_MD.dtype, head_dtype), job
        loss, *metrics = _terms(job, totals, device)
        assert loss is not None
        terms = [loss / job.divisor, *metrics]
        # copied, because autograd would take outputs that share memory for the same tensor
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
        assert ctx.gradients is not None, "one backward pass"
        (dh_MD, dw_VD), ctx.gradients = ctx.gradients, None
        # If the caller breaks the promise of `backward_from_loss`, it must be visible: the gradients of the hidden
        # states, or else of the head, become NaN.
        one_or_nan = torch.where(upstream == 1, upstream, math.nan)
        if dh_MD is None and dw_VD is not None:
            dw_VD.mul_(one_or_nan)
        dw_VD = None if dw_VD is None else dw_VD.to(head_dtype)
        return _scaled(dh_MD, one_or_nan, hidden_dtype), dw_VD, None


def _run_chunks(
    h_MD: Tensor, w_VD: Tensor | None, dh_MD: Tensor | None, dw_VD: Tensor | None, job: Job
) -> Totals:
    rows = len(h_MD)
    count = -(-rows // job.chunk_rows)
    step = -(-rows // count)
    vocabulary = h_MD.shape[1] if w_VD is None else len(w_VD)
    chunks = _form(job, (step, vocabulary), h_MD)
    finished = job.finished and not isinstance(job.divisor, Tensor)
    scale = 1 / float(job.divisor) if finished else 1.0
    for begun in range(0, rows, step * chunks.held):
        group = slice(begun, min(begun + step * chunks.held, rows))
        for start in range(group.start, group.stop, step):
            chunk = slice(start, min(start + step, rows))
            chunks.differentiate(h_MD[chunk], w_VD, chunk)
        dz_GV = chunks.gradient(group)
        if dh_MD is not None:
            if w_VD is None:
                torch.mul(dz_GV.to(dh_MD.dtype), scale, out=dh_MD[group])
            else:
                multiply(dh_MD[group], dz_GV, w_VD, scale=scale)
        if dw_VD is not None:
            multiply(dw_VD, dz_GV.t(), h_MD[group], scale=scale, add=begun > 0)
        del dz_GV  # frees it before the next group's is made
    return chunks.totals()


def _form(job: Job, shape: tuple[int, int], like: Tensor) -> Chunks:
    """Return the form of the loss for chunks whose logits have at most `shape`, (C, V)."""
    if job.kernel == "eager":
        return EagerChunks(job, shape, like)
    # Imported here, so that everything else runs on a machine without Triton.
    from engine.loss.fused import FusedChunks, FusedSparseChunks

    form = FusedSparseChunks if isinstance(job.teacher, SparseTargets) else FusedChunks
    return form(job, shape, like)


def _terms(job: Job, totals: Totals | None, device: torch.device) -> list[Tensor | None]:
    """Return loss, ce, kd, agreeing, lowest and largest sum; sums over no rows are 0."""
    if totals is None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        zero_kd = None if job.teacher is None else zero
        return [zero, zero, zero_kd, zero_kd, None, None]
    loss, kd = totals.ce, None
    if totals.divergence is not None:
        kd = job.temperature**2 * totals.divergence
        loss = job.alpha * totals.ce + (1 - job.alpha) * kd
    return [loss, totals.ce, kd, totals.agreeing, totals.lowest, totals.largest_sum]


def _scaled(gradient: Tensor | None, upstream: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return upstream * gradient, rounded once to `dtype`, in one pass."""
    if gradient is None:
        return None
    return torch.mul(gradient, upstream, out=torch.empty_like(gradient, dtype=dtype))
