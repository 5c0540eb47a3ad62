"""The distillation loss: cross entropy and a divergence from the teacher, from hidden states, in
chunks, with the gradient made on the way.

Shapes: N tokens, M labelled tokens, C tokens of one chunk, V student vocabulary, W teacher
vocabulary (W >= V), D student width, E teacher width.

The objective, over the n labelled tokens of a whole optimizer step (`alpha` is the weight of the
cross entropy):

    L   = alpha * CE + (1 - alpha) * T^2 * KL
    CE  = (1/n) sum_i -log softmax(z_i)[y_i]                       nats, always at temperature 1
    KL  = (1/n) sum_i sum_v p_iv (log p_iv - log q_iv)             nats, at temperature T
    q   = softmax(z / T)      p = softmax(t[:V] / T)               z, t: student and teacher logits

KL may be another divergence instead (`divergences.py`), or be of some ids of each token only
(`sparse.py`). A teacher wider than the student is cut to the student's V columns and renormalised over
them, because two checkpoints of one family pad the same tokenizer to different widths. What stands in the
cut columns has no effect.

The gradient with respect to the student's logits is

    dL/dz = (1/n) [alpha (softmax(z) - onehot(y)) + (1 - alpha) T (q - p)]          the T is T^2 / T

and it needs nothing that the forward pass does not already hold. So `distillation_loss` works
through chunks of rows, turns each chunk's logits into dz while they are in memory, multiplies dz at
once into dH and dW, and forgets the chunk. No logits outlive their chunk, and backward is one
multiplication by the upstream gradient; a caller who promises that it is 1 has the gradients finished on
the way. A form that holds dz of some chunks at a time has them multiplied together: dW, as large as the
head, is then read and written so much less often. All chunks are as nearly of one size as their number
allows.

Two invariants are measured in every call and cost nothing to speak of, because their sums are there:
the lowest divergence of a row, which is at least 0, and the largest |sum of a row of dz|, which is 0.
Both hold up to rounding: with fp32 logits, each normaliser is a sum of exponentials good to some
3e-6 (an argument of 20 rounded to 24 bits, and a sum in a tree), and the divergence is made of two
logarithms of those and of a mean of t - z. `LOWEST_DIVERGENCE` and `LARGEST_DZ_SUM` leave a factor of
ten. Logits that were rounded to bf16 break neither: it is the arithmetic that is held to account.

Invariants: every row of dz sums to zero; a student equal to its teacher has KL and KD gradient
exactly 0; the teacher never gets a gradient; a row whose label is -100 is dropped before any
arithmetic; nothing is clamped, so a non-finite logit reaches the loss.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.loss.dense import EagerChunks
from engine.loss.sparse import SparseChunks
from engine.loss.types import (
    IGNORE_LABEL,
    Chunks,
    Job,
    LossKernel,
    LossTerms,
    SparseTargets,
    Teaching,
    Totals,
    check_objective,
    check_widths,
)
from engine.models.head import DenseHead, Head, multiply, operand_dtype, sum_dtype
from engine.spec.divergences import DIVERGENCES, sparse_divergences

# One buffer of fp32 logits per chunk. On a CPU it should stay in the cache between the dozen passes
# over it; on a GPU the chunk must be long enough (about a thousand rows at V = 152k) for the matrix
# products to run at full rate. Four such buffers are alive at once, and half of two more; of the fused
# form's, two and half of one, which may be twice as large: fewer passes over dW and over a head in
# blocks. Beside them the fused form holds as much again of finished gradients.
CPU_CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 640 * 2**20
FUSED_CHUNK_BYTES = 1280 * 2**20

LOWEST_DIVERGENCE = -1e-4
"""Nats: below it, a row's divergence is not what it says."""
LARGEST_DZ_SUM = 1e-4
"""Times max(1, T): above it, the sum of a row of dz is not rounding."""


# contract: kd-loss-v1
def distillation_loss(
    student_hidden_ND: Tensor,
    student_head_VD: Tensor,
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
    undivided: bool = False,
) -> LossTerms:
    """The loss of N tokens and, through autograd, its gradients for the student's hidden states and
    head.

    `labels_N` holds the id that row i should predict (already shifted) or -100. With labels in host
    memory nothing here waits for the device; labels on a GPU cost one sync, because the number of
    labelled rows must be known. `denominator` is the number of labelled tokens of the whole
    optimizer step over all ranks: a float, or a 0-d tensor that is never read on the host.
    `student_head_VD` may be the embedding itself; its gradient is added to the embedding's own. The
    teacher's head may be a matrix or anything that gives one out in slices; only its first V rows
    are read.

    Matrix products run in the dtype of the hidden states, or of autocast where it is on, and give
    fp32 logits: on a CPU the operands are widened to fp32, on a GPU the fp32 accumulator is kept.
    dW is summed over chunks in fp32. float64 stays float64.

    `kernel="fused"` has one kernel of ours do everything between the products, on a GPU
    (`engine.plan.knobs`); it has no `jsd` and no float64. `targets` stand in the place of the
    teacher's hidden states and head, for `forward_kl`.

    `undivided` promises that backward begins at this call's `loss` itself, with a gradient of 1: no
    factor, no other loss added. It saves a pass over the gradient of the head; where the promise is
    broken, gradients are NaN.

    With alpha = 1 the teacher is not touched and may be None. Raises ValueError for anything that
    does not fit together.
    """
    given = teacher_hidden_NE is not None or targets is not None
    check_objective(alpha, temperature, given, divergence, beta)
    if isinstance(denominator, float | int) and not (0 < denominator < math.inf):
        raise ValueError(f"denominator: expected a finite count above 0, found {denominator}")
    _check_projection("student", student_hidden_ND, student_head_VD)
    vocabulary = student_head_VD.shape[0]
    _check_labels(labels_N, student_hidden_ND.shape[0], vocabulary)

    # The number of labelled rows shapes every tensor below. On a GPU this is the one sync, and host
    # labels avoid it.
    rows_M = (labels_N != IGNORE_LABEL).nonzero().squeeze(1)
    labelled = rows_M.numel()
    labels_M = labels_N.index_select(0, rows_M)
    device = student_hidden_ND.device
    rows_M, labels_M = (_to_device(index, device) for index in (rows_M, labels_M))

    hidden_MD = _take(student_hidden_ND, rows_M)
    teacher: Teaching | SparseTargets | None = None
    if alpha != 1 and targets is not None:
        if teacher_hidden_NE is not None or teacher_head_WE is not None:
            raise ValueError("teacher: expected hidden states or targets, found both")
        _check_targets(targets, student_hidden_ND.shape[0], divergence)
        log_probs = targets.log_probs_NK
        teacher = SparseTargets(
            ids_NK=_take(targets.ids_NK, rows_M),
            log_probs_NK=None if log_probs is None else _take(log_probs, rows_M),
            kind=targets.kind,
        )
    elif alpha != 1 and teacher_hidden_NE is not None:
        if teacher_head_WE is None:
            raise ValueError("teacher: expected a head with the hidden states, found none")
        _check_projection("teacher", teacher_hidden_NE, teacher_head_WE)
        head = (
            DenseHead(teacher_head_WE) if isinstance(teacher_head_WE, Tensor) else teacher_head_WE
        )
        check_widths(vocabulary, head.vocab_size)
        if teacher_hidden_NE.shape[0] != student_hidden_ND.shape[0]:
            raise ValueError(
                f"teacher hidden states: expected {student_hidden_ND.shape[0]} rows,"
                f" as the student has, found {teacher_hidden_NE.shape[0]}"
            )
        dtype = operand_dtype(teacher_hidden_NE)
        with torch.no_grad():
            teacher = Teaching(
                hidden_ME=_take(teacher_hidden_NE.detach(), rows_M).to(dtype),
                slices=head.slices(vocabulary, dtype),
            )

    if kernel == "fused":
        _check_fused(divergence, operand_dtype(student_hidden_ND))
    wants_gradient = torch.is_grad_enabled()
    # No labelled row means a sum of exactly 0, and the step's denominator may then be 0 too: 0 / 0
    # would be NaN.
    n = denominator if labelled else 1.0
    job = Job(
        labels_M=labels_M,
        teacher=teacher,
        alpha=alpha,
        # There is no other than 1 without a teacher.
        temperature=1.0 if teacher is None else temperature,
        divergence=divergence,
        beta=beta,
        kernel=kernel,
        chunk_rows=chunk_rows or default_chunk_rows(device, vocabulary, kernel),
        wants_hidden=wants_gradient and student_hidden_ND.requires_grad,
        wants_head=wants_gradient and student_head_VD.requires_grad,
        divisor=n,
        finished=undivided and not isinstance(n, Tensor),
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


def default_chunk_rows(device: torch.device, vocabulary: int, kernel: LossKernel = "eager") -> int:
    """Rows per chunk for `distillation_loss`: one fp32 logits buffer of 4 MiB on a CPU, of 640 MiB
    on a GPU, and of 1280 MiB for the fused form.
    """
    chunk_bytes = GPU_CHUNK_BYTES if device.type == "cuda" else CPU_CHUNK_BYTES
    if kernel == "fused":
        chunk_bytes = FUSED_CHUNK_BYTES
    return max(chunk_bytes // (4 * vocabulary), 16)


def _to_device(index_M: Tensor, device: torch.device) -> Tensor:
    # From memory that is not pinned, CUDA may first wait for everything that was launched before.
    pinned = device.type == "cuda" and index_M.device.type == "cpu"
    return (index_M.pin_memory() if pinned else index_M).to(device, non_blocking=True)


def _take(hidden_ND: Tensor, rows_M: Tensor) -> Tensor:
    """The labelled rows; no copy when every row is labelled."""
    return hidden_ND if rows_M.numel() == hidden_ND.shape[0] else hidden_ND.index_select(0, rows_M)


class _ChunkedLoss(torch.autograd.Function):
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
        from engine.loss.fused import FusedChunks, FusedSparseChunks

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


def _check_fused(divergence: str, dtype: torch.dtype) -> None:
    if not DIVERGENCES[divergence].fused or dtype == torch.float64:
        eager = ", ".join(name for name, row in DIVERGENCES.items() if not row.fused)
        raise ValueError(
            f"kernel: expected eager for {eager} and for float64,"
            f" found fused for {divergence} in {str(dtype).removeprefix('torch.')}"
        )


def _check_targets(targets: SparseTargets, rows: int, divergence: str) -> None:
    if not DIVERGENCES[divergence].sparse:
        known = " or ".join(sparse_divergences())
        raise ValueError(f"targets: expected divergence {known}, found {divergence}")
    ids, log_probs = targets.ids_NK, targets.log_probs_NK
    if ids.dim() != 2 or ids.shape[0] != rows or ids.shape[1] == 0:
        raise ValueError(f"targets: expected ids of {rows} rows, found {list(ids.shape)}")
    if (targets.kind == "top_k") != (log_probs is not None):
        found = "none" if log_probs is None else "some"
        raise ValueError(f"targets: expected log-probabilities with top_k alone, found {found}")
    if log_probs is not None and log_probs.shape != ids.shape:
        raise ValueError(
            f"targets: expected a log-probability for each id, found {list(log_probs.shape)}"
            f" for {list(ids.shape)}"
        )


def _check_projection(side: str, hidden: Tensor, head: Tensor | Head) -> None:
    shape = list(head.shape) if isinstance(head, Tensor) else [head.vocab_size, head.width]
    if hidden.dim() != 2 or len(shape) != 2 or hidden.shape[1] != shape[1]:
        raise ValueError(
            f"{side}: expected hidden states [rows, width] and a head [vocabulary, width]"
            f" of one width, found {list(hidden.shape)} and {shape}"
        )


def _check_labels(labels_N: Tensor, rows: int, vocabulary: int) -> None:
    if labels_N.shape != (rows,) or labels_N.dtype != torch.int64:
        raise ValueError(
            f"labels: expected {rows} int64 values, found {list(labels_N.shape)} {labels_N.dtype}"
        )
    if (
        labels_N.device.type == "cpu" and rows
    ):  # on a GPU the gather's own device assert stands in: no sync
        outside = (labels_N != IGNORE_LABEL) & ((labels_N < 0) | (labels_N >= vocabulary))
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise ValueError(
                f"labels: expected {IGNORE_LABEL} or an id below {vocabulary},"
                f" found {int(labels_N[row])} in row {row}"
            )
