"""The distillation loss: cross entropy and forward KL from hidden states, in chunks, with the
gradient made on the way.

Shapes: N tokens, M labelled tokens, C tokens of one chunk, V student vocabulary, W teacher
vocabulary (W >= V), D student width, E teacher width.

The objective, over the n labelled tokens of a whole optimizer step (`alpha` is the weight of the
cross entropy):

    L   = alpha * CE + (1 - alpha) * T^2 * KL
    CE  = (1/n) sum_i -log softmax(z_i)[y_i]                       nats, always at temperature 1
    KL  = (1/n) sum_i sum_v p_iv (log p_iv - log q_iv)             nats, at temperature T
    q   = softmax(z / T)      p = softmax(t[:V] / T)               z, t: student and teacher logits

A teacher wider than the student is cut to the student's V columns and renormalised over them,
because two checkpoints of one family pad the same tokenizer to different widths. What stands in the
cut columns has no effect.

The gradient with respect to the student's logits is

    dL/dz = (1/n) [alpha (softmax(z) - onehot(y)) + (1 - alpha) T (q - p)]          the T is T^2 / T

and it needs nothing that the forward pass does not already hold. So `distillation_loss` works
through chunks of rows, turns each chunk's logits into dz while they are in memory, multiplies dz at
once into dH and dW, and forgets the chunk. No logits outlive their chunk, and backward is one
multiplication by the upstream gradient.

Invariants: every row of dz sums to zero; a student equal to its teacher has KL and KD gradient
exactly 0; the teacher never gets a gradient; a row whose label is -100 is dropped before any
arithmetic; nothing is clamped, so a non-finite logit reaches the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.distill.chunks import ChunkedLoss, Job, Teaching
from engine.models.head import DenseHead, Head
from engine.models.product import operand_dtype

IGNORE_LABEL = -100

# One buffer of logits per chunk. On a CPU it should stay in the cache between the dozen passes over
# it; on a GPU the chunk must be long enough (about a thousand rows at V = 152k) for the matrix
# products to run at full rate. Four such buffers are alive at once.
CPU_CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 640 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What one call adds to an optimizer step. 0-d tensors on the device of the hidden states;
    reading one is the caller's sync.

    Each is a sum over this call's labelled rows divided by the step's denominator, so the pieces of
    an accumulated step add up to the step's mean, and `loss = alpha * ce + (1 - alpha) * kd`.
    """

    loss: Tensor
    """The objective, nats. The only term that carries a gradient."""
    ce: Tensor
    """Cross entropy, nats, at temperature 1."""
    kd: Tensor | None
    """T^2 * KL(teacher || student) with both sides at temperature T; None when no teacher took part
    (alpha = 1).
    """
    agreement: Tensor | None
    """Share of the step's labelled rows, counted here, on which teacher and student rank the same
    id first.
    """
    labelled: Tensor
    """Labelled rows of this call, int64: a plain count, not divided by the denominator."""


def reference_loss(
    student_logits_NV: Tensor,
    teacher_logits_NW: Tensor | None,
    labels_N: Tensor,
    alpha: float,
    temperature: float,
) -> LossTerms:
    """The same objective written for reading: float64, whole logits, plain autograd, mean over this
    call's labelled rows.

    The oracle of `distillation_loss`. Raises ValueError as that does.
    """
    _check_objective(alpha, temperature, teacher_logits_NW is not None)
    vocabulary = student_logits_NV.shape[1]
    rows_M = (labels_N != IGNORE_LABEL).nonzero().squeeze(1)
    z_MV = student_logits_NV[rows_M].double()
    labels_M = labels_N[rows_M]
    n = max(rows_M.numel(), 1)
    ce = F.cross_entropy(z_MV, labels_M, reduction="sum") / n
    kd = agreement = None
    loss = alpha * ce
    if teacher_logits_NW is not None and alpha != 1:
        _check_widths(vocabulary, teacher_logits_NW.shape[1])
        t_MV = teacher_logits_NW.detach()[rows_M, :vocabulary].double()
        log_p_MV = F.log_softmax(t_MV / temperature, dim=1)
        log_q_MV = F.log_softmax(z_MV / temperature, dim=1)
        kd = temperature**2 * (log_p_MV.exp() * (log_p_MV - log_q_MV)).sum() / n
        agreement = (t_MV.argmax(1) == z_MV.argmax(1)).sum() / n
        loss = loss + (1 - alpha) * kd
        kd = kd.detach()
    labelled = torch.full((), rows_M.numel(), device=z_MV.device)
    return LossTerms(loss=loss, ce=ce.detach(), kd=kd, agreement=agreement, labelled=labelled)


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

    With alpha = 1 the teacher is not touched and may be None. Raises ValueError for anything that
    does not fit together.
    """
    _check_objective(alpha, temperature, teacher_hidden_NE is not None)
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
    rows_M, labels_M = (index.to(device, non_blocking=True) for index in (rows_M, labels_M))

    hidden_MD = _take(student_hidden_ND, rows_M)
    teacher: Teaching | None = None
    if alpha != 1 and teacher_hidden_NE is not None:
        if teacher_head_WE is None:
            raise ValueError("teacher: expected a head with the hidden states, found none")
        _check_projection("teacher", teacher_hidden_NE, teacher_head_WE)
        head = (
            DenseHead(teacher_head_WE) if isinstance(teacher_head_WE, Tensor) else teacher_head_WE
        )
        _check_widths(vocabulary, head.vocab_size)
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

    wants_gradient = torch.is_grad_enabled()
    job = Job(
        labels_M=labels_M,
        teacher=teacher,
        alpha=alpha,
        temperature=temperature,
        chunk_rows=chunk_rows or default_chunk_rows(device, vocabulary),
        wants_hidden=wants_gradient and student_hidden_ND.requires_grad,
        wants_head=wants_gradient and student_head_VD.requires_grad,
    )
    loss, ce, kd, agreeing = cast(
        tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        ChunkedLoss.apply(hidden_MD, student_head_VD, job),  # type: ignore[no-untyped-call]
    )
    # No labelled row means a sum of exactly 0, and the step's denominator may then be 0 too: 0 / 0
    # would be NaN.
    n = denominator if labelled else 1.0
    return LossTerms(
        loss=loss / n,
        ce=ce / n,
        kd=None if kd is None else kd / n,
        agreement=None if agreeing is None else agreeing / n,
        labelled=torch.full((), labelled, device=device),
    )


def default_chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Rows per chunk for `distillation_loss`: one fp32 logits buffer of 4 MiB on a CPU, of 640 MiB
    on a GPU.
    """
    chunk_bytes = GPU_CHUNK_BYTES if device.type == "cuda" else CPU_CHUNK_BYTES
    return max(chunk_bytes // (4 * vocabulary), 16)


def _take(hidden_ND: Tensor, rows_M: Tensor) -> Tensor:
    """The labelled rows; no copy when every row is labelled."""
    return hidden_ND if rows_M.numel() == hidden_ND.shape[0] else hidden_ND.index_select(0, rows_M)


def _check_objective(alpha: float, temperature: float, has_teacher: bool) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1, found {alpha}")
    if not (0 < temperature < math.inf):
        raise ValueError(f"temperature: expected a finite number above 0, found {temperature}")
    if not has_teacher and alpha != 1:
        raise ValueError(f"no teacher: expected alpha 1, cross entropy alone, found {alpha}")


def _check_widths(student_vocabulary: int, teacher_vocabulary: int) -> None:
    if teacher_vocabulary < student_vocabulary:
        raise ValueError(
            "vocabulary: expected a teacher at least as wide as the student's"
            f" {student_vocabulary} ids, found {teacher_vocabulary}"
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
