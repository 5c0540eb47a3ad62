"""Checks of the loss function by itself, on real hidden states: its invariants, and its gradient.

The function is the run's, with its alpha and temperature. It is evaluated in float64 if the models are
small, and otherwise with the student in fp32: in float64 the heads of a 7B run would take six gigabytes.

Finite differences: with d a direction and h a step,

    (L(x + h d) - L(x - h d)) / 2h  =  <dL/dx, d> + O(h^2)

The direction d is random, because one made from the gradient itself would not show the rows that the
gradient omits. Each row of d is as long as that of x, so h is relative. The difference of the two sides
is compared with |g| |d| / sqrt(n), the typical size of <g, d> for a random d in n dimensions: a <g, d>
that happens to be small proves nothing.
"""

# Shapes: N tokens, D student width, E teacher width, V vocabulary

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checks.check import Answer, Numbers, unknown
from engine.checks.context import Context
from engine.checks.data import next_rows
from engine.checks.logits import few_rows, hidden_of, student_hidden
from engine.data.batches import IGNORED
from engine.loss.objective import LossTerms
from engine.models.head import DenseHead, Head

TOKENS = 64
WIDE_NUMBERS = 1 << 24
"""Largest number of elements in both heads together for which float64 is used."""

STEP = {torch.float64: 1e-4, torch.float32: 2e-2}
GRADIENT_TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-2}
"""Relative to the typical <g, d>. In fp32 a loss of 10 nats is known to 1e-6, so a difference over 2h to
3e-5, where <g, d> is some 5e-2 over 64 tokens; the rest is the curvature of the loss over h.
"""
ROUNDED = 0.1
"""Largest share of the gradient that may be rounding: a bf16 head that accumulates in fp32 has 2e-3, one
that rounds its logits to bf16 has a tenth of the gradient at a KL of 0.01 and all of it at 1e-4.
"""
SAME = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Nats, relative to 1 + loss: the allowed change where the loss must not change."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of the next step with their hidden states; a quarter of them have no label."""

    hidden_ND: Tensor
    head_VD: Tensor
    teacher_hidden_NE: Tensor | None
    teacher_head: Head | None
    labels_N: Tensor
    teacher_dtype: torch.dtype | None
    """dtype of the teacher's hidden states as the loss gets them."""

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_ND.dtype

    @property
    def labelled(self) -> int:
        return int((self.labels_N != IGNORED).sum())


def take_sample(context: Context) -> Sample:
    batch = few_rows(next_rows(context), TOKENS)
    labels_N = torch.from_numpy(batch.labels_BT).flatten()[:TOKENS].clone()
    labels_N[::4] = IGNORED
    hidden_ND = hidden_of(student_hidden(context), batch, context.device).flatten(0, 1)[:TOKENS]
    head_VD = context.student.head_weight.detach()
    numbers, teacher = head_VD.numel(), context.teacher
    teacher_hidden_NE = teacher_head = teacher_dtype = None
    if teacher is not None:
        teacher_hidden_NE = hidden_of(teacher.hidden, batch, context.device).flatten(0, 1)
        # Cloned, so that it is no longer an inference-mode tensor.
        teacher_hidden_NE = teacher_hidden_NE[:TOKENS].clone()
        teacher_head, teacher_dtype = teacher.head(), teacher_hidden_NE.dtype
        numbers += teacher_head.vocab_size * teacher_head.width
    dtype = torch.float64 if numbers <= WIDE_NUMBERS else torch.float32
    if teacher_hidden_NE is not None and dtype == torch.float64:
        teacher_hidden_NE = teacher_hidden_NE.double()
    return Sample(
        hidden_ND.to(dtype),
        head_VD.to(dtype),
        teacher_hidden_NE,
        teacher_head,
        labels_N,
        teacher_dtype,
    )


def ask(context: Context, sample: Sample) -> LossTerms:
    return context.objective(
        sample.hidden_ND,
        sample.head_VD,
        sample.teacher_hidden_NE,
        sample.teacher_head,
        sample.labels_N,
        denominator=float(max(sample.labelled, 1)),
    )


@torch.no_grad()
def value(context: Context, sample: Sample) -> float:
    return float(ask(context, sample).loss)


def ignored_rows_have_no_part(context: Context) -> Answer:
    sample = take_sample(context)
    ignored_N = sample.labels_N == IGNORED
    before = value(context, sample)
    noisy_ND = sample.hidden_ND.clone()
    noisy_ND[ignored_N.to(noisy_ND.device)] *= -100
    after = value(context, replace(sample, hidden_ND=noisy_ND))
    hidden_ND = sample.hidden_ND.clone().requires_grad_()
    with torch.enable_grad():
        torch.autograd.backward(ask(context, replace(sample, hidden_ND=hidden_ND)).loss)
    assert hidden_ND.grad is not None
    moved_N = hidden_ND.grad.abs().sum(1).cpu() > 0
    leaking = int((moved_N & ignored_N).sum())
    idle = int((~moved_N & ~ignored_N).sum())
    numbers = Numbers(
        ignored=float(ignored_N.sum()),
        labelled=sample.labelled,
        leaking=leaking,
        idle=idle,
        change=after - before,
    )
    if after != before:
        return numbers.failed(f"rows without a label change the loss by {after - before:.2e} nats")
    if leaking:
        return numbers.failed(f"{leaking} rows without a label get a gradient")
    if idle:
        return numbers.failed(f"{idle} of {sample.labelled} labelled rows get no gradient")
    return numbers.passed(
        f"{sample.labelled} labelled rows have a gradient, {int(ignored_N.sum())} others no part"
    )


@torch.no_grad()
def loss_invariants(context: Context) -> Answer:
    sample = take_sample(context)
    terms = ask(context, sample)
    loss, ce = float(terms.loss), float(terms.ce)
    numbers = Numbers(loss=loss, ce=ce)
    close = SAME[sample.dtype] * (1 + abs(loss))
    # h . c is the same number for all tokens of the vocabulary, and of the size of a logit.
    mean_D = sample.hidden_ND.mean(0)
    shift_D = 5 * mean_D / mean_D.square().sum().clamp(min=1e-6).sqrt()
    shifted = value(context, replace(sample, head_VD=sample.head_VD + shift_D))
    numbers["shifted"] = shifted
    if not abs(shifted - loss) <= close:
        return numbers.failed(
            f"a constant on all of the student's logits moves the loss from {loss:.6g} to {shifted:.6g}"
        )
    alpha = context.spec.loss.alpha
    if terms.kd is None:
        if alpha < 1 and context.teacher is not None:
            return numbers.failed("a teacher is in the objective, and the loss has no KL")
        return numbers.passed("a constant on all logits leaves the loss as it is")
    kd = float(terms.kd)
    itself = ask(
        context,
        replace(
            sample,
            teacher_hidden_NE=sample.hidden_ND,
            teacher_head=DenseHead(sample.head_VD),
        ),
    )
    own = float(itself.kd) if itself.kd is not None else math.nan
    numbers |= dict(kd=kd, kd_with_itself=own)
    if not kd >= -close:
        return numbers.failed(f"T^2 KL is {kd:.3g}, and no KL is negative")
    if not abs(own) <= close:
        return numbers.failed(f"T^2 KL of the student with itself is {own:.3g}, and is 0")
    parts = alpha * ce + (1 - alpha) * kd
    if not abs(parts - loss) <= close:
        return numbers.failed(
            f"the loss is {loss:.6g}, alpha CE + (1 - alpha) T^2 KL is {parts:.6g}"
        )
    return numbers.passed("KL is at least 0, is 0 with itself, and ignores constants")


def function_gradient(context: Context) -> Answer:
    """Check the gradients for hidden states and head along random directions, through the loss function alone."""
    sample = take_sample(context)
    if not sample.labelled:
        return unknown("the next rows have no label")
    hidden_ND = sample.hidden_ND.clone().requires_grad_()
    head_VD = sample.head_VD.clone().requires_grad_()
    with torch.enable_grad():
        terms = ask(context, replace(sample, hidden_ND=hidden_ND, head_VD=head_VD))
        torch.autograd.backward(terms.loss)
    numbers = Numbers(loss=float(terms.loss.detach()))
    for what, leaf in (("hidden", hidden_ND), ("head", head_VD)):
        gradient = leaf.grad
        if gradient is None or not bool(gradient.any()):
            return numbers.failed(f"the loss has no gradient for the {what}")
        generator = torch.Generator(leaf.device).manual_seed(1)
        direction = torch.randn(
            leaf.shape, generator=generator, device=leaf.device, dtype=leaf.dtype
        )
        direction *= leaf.detach().norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
        step = STEP[sample.dtype]
        ends = []
        for sign in (1, -1):
            moved = leaf.detach() + sign * step * direction
            changed = (
                replace(sample, hidden_ND=moved)
                if what == "hidden"
                else replace(sample, head_VD=moved)
            )
            ends.append(value(context, changed))
        measured = (ends[0] - ends[1]) / (2 * step)
        claimed = float((gradient * direction).sum(dtype=torch.float64))
        # |g| |d| / sqrt(n), row by row, because rows differ in both.
        rows = (gradient.norm(dim=1) * direction.norm(dim=1)).double()
        typical = float(rows.norm()) / math.sqrt(leaf.shape[1])
        error = abs(measured - claimed) / max(typical, abs(measured), 1e-300)
        numbers |= {
            f"{what}_measured": measured,
            f"{what}_claimed": claimed,
            f"{what}_error": error,
        }
        if not error <= GRADIENT_TOLERANCE[sample.dtype]:
            return numbers.failed(
                f"along a random direction of the {what} the loss changes by {measured:.4g}, its "
                f"gradient says {claimed:.4g}"
            )
    return numbers.passed("the loss function's gradient is its own")


def gradient_above_rounding(context: Context) -> Answer:
    """Measure how much of the gradient of the hidden states is rounding, beside the KL.

    The gradient in the run's precision is compared with the exact one of the same values.
    """
    sample = take_sample(context)
    if not sample.labelled:
        return unknown("the next rows have no label")
    with context.autocast():
        kind = context.device.type
        low = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if low else torch.float32
    taken_ND, teacher_NE = sample.hidden_ND.to(dtype), sample.teacher_hidden_NE
    if teacher_NE is not None:
        teacher_NE = teacher_NE.to(sample.teacher_dtype)
    as_trained = replace(
        sample, hidden_ND=taken_ND, head_VD=sample.head_VD.float(), teacher_hidden_NE=teacher_NE
    )
    exact_ND, terms = _hidden_gradient(
        context, replace(sample, hidden_ND=taken_ND.to(sample.dtype))
    )
    found_ND, _ = _hidden_gradient(context, as_trained)
    size = float(exact_ND.norm())
    kd = math.nan if terms.kd is None else float(terms.kd)
    share = float((found_ND.to(sample.dtype) - exact_ND).norm()) / max(size, 1e-300)
    numbers = Numbers(rounding=share, gradient=size, kd=kd, limit=ROUNDED)
    arithmetic = str(dtype).removeprefix("torch.")
    text = f"{share:.1e} of the gradient of the hidden states is rounding in {arithmetic}"
    if terms.kd is not None:
        text += f", at T^2 KL {kd:.3g} nats"
    # This form makes NaN fail.
    if not share <= ROUNDED:
        return numbers.failed(text)
    return numbers.passed(text)


def _hidden_gradient(context: Context, sample: Sample) -> tuple[Tensor, LossTerms]:
    hidden_ND = sample.hidden_ND.clone().requires_grad_()
    with torch.enable_grad():
        terms = ask(context, replace(sample, hidden_ND=hidden_ND))
        torch.autograd.backward(terms.loss)
    assert hidden_ND.grad is not None
    return hidden_ND.grad, terms
