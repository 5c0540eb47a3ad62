"""Checks of the step: the gradient that the trainer leaves in the student, against the loss that it logs.

`Context.gradients` runs the whole step: batches in, the logged loss and the gradients out. Two
micro-batches of different sizes represent an accumulated step.

    rows        L(all) = sum_r n_r/n L(r)   and   g(all) = sum_r n_r/n g(r),   n_r the labels of row r
    loss        D(h) = (L(x + h u) - L(x - h u)) / 2h = |g| + O(h^2)  for u = g / |g|

Gradients are compared along random directions, so that none need be kept. The finite difference moves at
most MOVED weights, those with the densest gradient, and restores them bit for bit.

If the loss curves sharply, as it does at a high learning rate some steps into training, D(h) is far from
|g| although the gradient is right. So D is evaluated at smaller and smaller steps until it agrees, and
from two steps, h and r h, the term in h^2 is eliminated (Richardson extrapolation):

    R = D(rh) + (D(rh) - D(h)) r^2 / (1 - r^2)

R and |g| are compared with a tolerance that is the sum of three terms: 2 |D(rh) - D(h)|; the rounding of
the loss; and the rounding of the gradient. For the last: a gradient whose error is n times its length
claims a slope that is n^2 too large, and two gradients from either side differ by n sqrt(2). The
tolerance is wide: once D has begun to converge, R is far more accurate. The gradient is called wrong only
when two consecutive pairs of steps exclude it. When they do not, and it agrees with no R that is known to
within a quarter, the result is unknown: a correct run must not be stopped because of its curvature, or
because of rounding, which `gradient_above_rounding` checks.
"""

# Shapes: B rows, T tokens, D student width

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from engine.checks.check import Answer, Numbers, unknown
from engine.checks.context import Context
from engine.checks.objective import function_gradient
from engine.data.batches import IGNORED, Batch
from engine.verdict import Level

ROWS = 3
LENGTH = {True: 64, False: 256}
"""Tokens of a row that are used, by whether matmuls are fp32; more in bf16, where each is less exact."""
DIRECTIONS = 2
MOVED = 1 << 24
"""Largest number of weights that the finite difference moves."""

SAME_ROWS = {True: 1e-3, False: 5e-2}
"""By whether matmuls are fp32: the allowed relative distance between the sum over rows and the step. Rows
that are run one at a time have other shapes, so their matmuls round differently; a
missing row changes the sum by a third.
"""
SAME_LOSS = {True: 2e-2, False: 0.25}
"""Relative to |g|. With bf16 matmuls a loss is known to some 1e-3, and the difference is 2e-2 of it; a
missing T^2 changes |g| by at least a half wherever the KL has any weight.
"""
LOSS_STEP = {True: 5e-3, False: 1e-2}
"""Relative change of the loss that each side of the finite difference aims at."""
SMALLER = {True: 0.25, False: 0.5}
"""Ratio of each finite-difference step to the previous one."""
STEPS = {True: 4, False: 3}
"""Largest number of steps that are tried; below them there is only rounding."""
LOSS_ROUNDING = {True: 5e-7, False: 3e-4}
"""Relative to 1 + loss, in nats: the largest rounding error of a loss. Five times the maximum over 500
measurements.
"""
KNOWN = 0.25
"""Relative to |g|: the widest tolerance at which an agreement counts."""


def _is_fp32(context: Context) -> bool:
    with context.autocast():
        return not torch.is_autocast_enabled(context.device.type)


def _split(context: Context) -> list[Batch]:
    """Return one row, and two more, as two micro-batches with different numbers of labels."""
    batch = context.batches.take(context.position, ROWS)
    length = None if context.whole_rows else LENGTH[_is_fp32(context)]
    labels_BT = batch.labels_BT[:, :length].copy()
    labels_BT[0, labels_BT.shape[1] // 2 :] = IGNORED
    return [
        Batch(
            tokens_BT=batch.tokens_BT[part, :length],
            documents_BT=batch.documents_BT[part, :length],
            labels_BT=labels_BT[part],
            row_ids=batch.row_ids[part],
        )
        for part in (slice(0, 1), slice(1, ROWS))
    ]


def _projections(context: Context) -> list[float]:
    """Project the gradients in `.grad` on DIRECTIONS random directions, the same at every call."""
    found = []
    for direction in range(DIRECTIONS):
        total = 0.0
        for index, parameter in enumerate(context.student.parameters()):
            if parameter.grad is None:
                continue
            generator = torch.Generator(parameter.device)
            generator.manual_seed(1000 * direction + index)
            random = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            total += float((random * parameter.grad).sum(dtype=torch.float64))
        found.append(total)
    return found


@contextmanager
def _hidden_gradients(context: Context) -> Iterator[list[Tensor]]:
    """Collect the gradient of the last hidden states, (B, T, D), of each forward pass."""
    collected: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(collected.append)  # type: ignore[no-untyped-call]

    handle = context.student.norm.register_forward_hook(keep)
    try:
        yield collected
    finally:
        handle.remove()


def rows_in_update(context: Context) -> Answer:
    parts = _split(context)
    with _hidden_gradients(context) as hidden:
        whole_loss = context.gradients(parts)
    whole = _projections(context)
    labelled = [int(n) for part in parts for n in (part.labels_BT != IGNORED).sum(1)]
    total = sum(labelled)
    if not total or not math.isfinite(whole_loss):
        return unknown(f"the step's loss is {whole_loss} with {total} labels", loss=whole_loss)
    idle, leaking = _count(hidden, parts)
    numbers = Numbers(labelled=total, idle=idle, leaking=leaking, loss=whole_loss)
    if idle or leaking:
        return numbers.failed(
            f"{idle} of {total} labelled tokens get no gradient, and {leaking} without a label get one"
        )
    losses, projected = [], []
    for part in parts:
        for row in part.split(1):
            losses.append(context.gradients([row]))
            projected.append(_projections(context))
    weights = [count / total for count in labelled]
    summed = [
        [weight * one[direction] for weight, one in zip(weights, projected, strict=True)]
        for direction in range(DIRECTIONS)
    ]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    size = math.sqrt(sum(x * x for terms in summed for x in terms))
    error = math.dist(whole, [sum(terms) for terms in summed]) / max(size, 1e-300)
    loss_error = abs(whole_loss - expected) / max(abs(expected), 1e-300)
    numbers |= dict(rows=len(losses), gradient_error=error, loss_error=loss_error)
    allowed = SAME_ROWS[_is_fp32(context)]
    if not loss_error <= allowed:
        return numbers.failed(
            f"the loss of a step of {len(losses)} rows is {whole_loss:.5g}, the mean over its rows "
            f"{expected:.5g}"
        )
    if not error <= allowed:
        return numbers.failed(
            f"the gradient of a step of {len(losses)} rows in two passes is off the mean over its "
            f"rows by {error:.0%}: rows are left out, or passes weighted wrongly"
        )
    return numbers.passed(
        f"loss and gradient of {len(losses)} rows in two passes are the mean over rows, and all "
        f"{total} labels take part"
    )


def _count(hidden: Sequence[Tensor], parts: Sequence[Batch]) -> tuple[int, int]:
    """Count labelled tokens without a gradient, and tokens without a label that have one."""
    idle = leaking = 0
    # each forward pass is followed by its backward pass, in order
    for gradient_BTD, part in zip(hidden, parts, strict=True):
        moved_BT = np.asarray((gradient_BTD.float().abs().sum(2) > 0).cpu())
        labelled_BT = part.labels_BT != IGNORED
        idle += int((labelled_BT & ~moved_BT).sum())
        leaking += int((~labelled_BT & moved_BT).sum())
    return idle, leaking


def loss_gradient(context: Context) -> Answer:
    """Check the loss function by itself, then the whole step."""
    function = function_gradient(context)
    if function.verdict.level is not Level.PASS:
        return function
    parts = _split(context)
    loss = context.gradients(parts)
    moved = _densest(context)
    norm = math.sqrt(sum(float(g.double().square().sum()) for _, g in moved))
    numbers = Numbers(**function.numbers, step_loss=loss, step_norm=norm)
    if not math.isfinite(loss) or not norm > 0:
        # The trainer's loss computes its gradient in the forward pass; it gives NaN for a loss that is
        # scaled afterwards.
        changed = math.isfinite(loss) and math.isnan(norm)
        why = ": the loss is divided or multiplied after the loss function" if changed else ""
        return numbers.failed(f"the step's loss is {loss} and its gradient {norm:g}{why}")
    return _against_differences(context, parts, moved, loss, norm, numbers)


def _against_differences(
    context: Context,
    parts: Sequence[Batch],
    moved: Sequence[tuple[Tensor, Tensor]],
    loss: float,
    norm: float,
    numbers: Numbers,
) -> Answer:
    """Compare the norm of the gradient with differences of the loss over smaller and smaller steps."""
    fp32 = _is_fp32(context)
    ratio, allowed = SMALLER[fp32], SAME_LOSS[fp32]
    step = LOSS_STEP[fp32] * loss / norm
    before, excluded = math.nan, 0
    for number in range(STEPS[fp32]):
        found, unlike = _slope(context, parts, moved, step, norm)
        measured, bound = found, KNOWN
        if number:
            measured += (found - before) * ratio**2 / (1 - ratio**2)
            rounding = LOSS_ROUNDING[fp32] * (1 + abs(loss)) / step
            bound = (2 * abs(found - before) + rounding) / norm + unlike
        error = abs(measured - norm) / norm
        numbers |= dict(
            step_measured=measured, step_error=error, step_bound=bound, step_share=ratio**number
        )
        # Every sound run takes the first step, and nearly all agree there, so it needs no second one.
        if error <= allowed and bound <= KNOWN:
            return numbers.passed(
                f"the gradient is the logged loss's: {measured:.4g} measured, {norm:.4g} claimed"
            )
        excluded = excluded + 1 if number and error > max(allowed, bound) else 0
        if excluded == 2:
            return numbers.failed(
                f"along its gradient the logged loss changes by {measured:.4g} (known to "
                f"{bound * norm:.2g}), and by the gradient {norm:.4g}"
            )
        before, step = found, step * ratio
    return numbers.unknown(
        f"along its gradient the logged loss changes by {measured:.4g} (known to {bound * norm:.2g} only, "
        f"because it curves or rounds), and by the gradient {norm:.4g}"
    )


def _slope(
    context: Context,
    parts: Sequence[Batch],
    moved: Sequence[tuple[Tensor, Tensor]],
    step: float,
    norm: float,
) -> tuple[float, float]:
    """Return the slope of the loss along the gradients `moved`, and their squared relative error.

    The gradients have the norm `norm` together, and the slope is measured from `step` to either side. The
    second value is the squared distance of the gradients at both ends, divided by 2 norm^2.
    """
    ends: list[float] = []
    there: list[list[Tensor]] = []
    with _put_back([parameter for parameter, _ in moved]) as originals:
        for sign in (1, -1):
            with torch.no_grad():
                for (parameter, gradient), original in zip(moved, originals, strict=True):
                    parameter.copy_(original + sign * step / norm * gradient)
            ends.append(context.gradients(parts))
            there.append([p.grad.clone() for p, _ in moved if p.grad is not None])
    apart = sum(
        float((one - other).double().square().sum()) for one, other in zip(*there, strict=True)
    )
    return (ends[0] - ends[1]) / (2 * step), apart / (2 * norm**2)


def _densest(context: Context) -> list[tuple[Tensor, Tensor]]:
    """Return tensors and copies of their gradients, densest gradient first, with at most MOVED elements."""
    having = [(p, p.grad) for p in context.student.parameters() if p.grad is not None]
    having.sort(key=lambda pair: -float(pair[1].norm()) / math.sqrt(pair[1].numel()))
    found: list[tuple[Tensor, Tensor]] = []
    room = MOVED
    for parameter, gradient in having:
        if parameter.numel() <= room:
            found.append((parameter, gradient.clone()))
            room -= parameter.numel()
    return found


@contextmanager
def _put_back(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    originals = [tensor.detach().clone() for tensor in tensors]
    try:
        yield originals
    finally:
        with torch.no_grad():
            for tensor, original in zip(tensors, originals, strict=True):
                tensor.copy_(original)


def nan_not_masked(context: Context) -> Answer:
    """Put a NaN into the last hidden states of each model, and run the whole step."""
    first = _split(context)[:1]
    loss = context.gradients(first)
    numbers = Numbers(loss=loss)
    labelled = np.flatnonzero(first[0].labels_BT[0] != IGNORED)
    if not math.isfinite(loss) or not len(labelled):
        return numbers.unknown(f"the loss is {loss} of {len(labelled)} labels without a NaN put in")
    # A token that ends its document has no label, and its hidden states do not enter the loss.
    spoilt_token = int(labelled[0])
    models = {"student": context.student}
    if context.teacher is not None and context.teacher_decoder is not None:
        models["teacher"] = context.teacher_decoder
    for whose, decoder in models.items():

        def spoil(_module: object, _inputs: object, output: Tensor) -> Tensor:
            spoilt = output.clone()
            spoilt[:, spoilt_token] = math.nan
            return spoilt

        handle = decoder.norm.register_forward_hook(spoil)
        try:
            found = context.gradients(first)
        finally:
            handle.remove()
        numbers[f"with_{whose}_nan"] = found
        if math.isfinite(found):
            return numbers.failed(
                f"with NaN in the {whose}'s hidden states the loss is {found:.4g} and not NaN"
            )
    return numbers.passed(f"a NaN in the {' or the '.join(models)} makes the loss NaN")
