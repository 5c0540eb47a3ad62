"""Checks of what an update changed, on a sample of every tensor that is taken before the update.

AdamW moves a weight by

    delta = -lr (m / (sqrt(v) + eps) + decay w),   m, v the bias-corrected moments

so the rate that was really used follows from the weights and the moments in the optimizer. A weight does
not change when its update is too small for its last bit: fp32 numbers near 1 are 1.2e-7 apart. The checks
wait for a visible change in this case, and never call such a tensor frozen.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.checks.check import Answer, Numbers, failed
from engine.checks.context import Context
from engine.log.events import StepDone, nan_if_absent
from engine.models.decoder import Decoder
from engine.runtime.ranks import own_part, own_rows

SAMPLED = 1024
LISTED = 3
PATIENCE = 10
"""Steps after which an undecided result stays unknown."""
RATE_TOLERANCE = 0.02


class Sample:
    """Positions in a tensor (in this rank's part of a sharded one), and their initial values."""

    def __init__(self, tensor: Tensor, rows: Tensor | None = None) -> None:
        count = own_part(tensor).numel()
        if rows is None:
            places = torch.arange(0, count, max(1, count // SAMPLED), device=tensor.device)
        else:
            width = tensor.shape[1]
            columns = torch.arange(0, width, max(1, width // 16), device=tensor.device)
            places = (own_rows(tensor, rows)[:, None] * width + columns).flatten()
        self.places = places
        self.before = self.now(tensor)

    def now(self, tensor: Tensor) -> Tensor:
        return self.of(tensor).clone()

    def of(self, tensor: Tensor) -> Tensor:
        return own_part(tensor.detach()).reshape(-1)[self.places]


def _samples(context: Context) -> dict[str, Sample]:
    """Return a sample of each tensor of the student; for the embedding, of rows that the next step uses."""
    tokens = torch.from_numpy(np.unique(context.micro_batches()[0].tokens_BT)[:64])
    found = {}
    for name, parameter in context.student.named_parameters():
        rows = tokens.to(parameter.device) if name == "embed.weight" else None
        found[name] = Sample(parameter, rows)
    return found


def _tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return the tensors that this rank holds; for sharded layers, its parts.

    Gathering them would be a collective, and the ranks may not all run this check after the same step.
    """
    found = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    if decoder.shards is None:
        return found
    parts = {f"layers.{index}": part for index, part in enumerate(decoder.shards.parts)}
    return {n: t for n, t in found.items() if not n.startswith("layers.")} | parts


class TensorsMoved:
    def __init__(self, context: Context) -> None:
        self.student = _samples(context)
        self.teacher: dict[str, Sample] = {}
        if context.teacher_decoder is not None:
            tensors = _tensors(context.teacher_decoder)
            self.teacher = {name: Sample(tensor) for name, tensor in tensors.items()}
        self.updates = 0

    @torch.no_grad()
    def after(self, context: Context, step: StepDone) -> Answer | None:
        parameters = dict(context.student.named_parameters())
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        if frozen:
            return failed(
                f"{_list(frozen)} frozen, and nothing in the spec says so", frozen=len(frozen)
            )
        if not step.updated:
            return None
        self.updates += 1
        if context.teacher_decoder is not None:
            now = _tensors(context.teacher_decoder)
            learnt = [n for n, s in self.teacher.items() if not torch.equal(s.of(now[n]), s.before)]
            if learnt:
                return failed(f"the teacher's {_list(learnt)} changed", teacher_changed=len(learnt))
        rate = context.learning_rate(step.step - 1)
        still: list[str] = []
        too_small: list[str] = []
        for name, sample in self.student.items():
            # A small tensor may have no part on this rank.
            if len(sample.places) and torch.equal(sample.of(parameters[name]), sample.before):
                visible = rate > 2 * _last_bit(sample.before)
                (still if visible else too_small).append(name)
        numbers = Numbers(
            tensors=len(self.student),
            still=len(still),
            too_small=len(too_small),
            lr=rate,
            teacher_tensors=len(self.teacher),
        )
        if still:
            return numbers.failed(
                f"of {len(self.student)} tensors these did not move at a rate of {rate:.1e}: "
                f"{_list(still)}"
            )
        if too_small:
            if self.updates < PATIENCE:
                return None
            return numbers.unknown(
                f"a rate of {rate:.1e} is below the last bit of {_list(too_small)}: "
                f"{self.updates} updates cannot be seen"
            )
        return numbers.passed(
            f"all {len(self.student)} tensors of the student moved, none of {len(self.teacher)} of "
            "the teacher"
        )


class EffectiveLearningRate:
    def __init__(self, context: Context) -> None:
        self.samples = _samples(context)

    @torch.no_grad()
    def after(self, context: Context, step: StepDone) -> Answer | None:
        wanted = context.learning_rate(step.step - 1)
        groups = context.optimizer.param_groups
        held = {float(group["lr"]) for group in groups}
        logged = nan_if_absent(step.lr)
        numbers = Numbers(step=step.step, wanted=wanted, logged=logged, held=max(held))
        if held != {wanted} or logged != wanted:
            return numbers.failed(
                f"step {step.step}: the spec's rate is {wanted:.3e}, the optimizer holds "
                f"{', '.join(f'{rate:.3e}' for rate in sorted(held))}, {logged:.3e} is logged"
            )
        if not step.updated:
            return None
        used = self._used(context)
        if used is None:
            if step.step < PATIENCE:
                self.samples = _samples(context)
                return None
            return numbers.unknown(f"a rate of {wanted:.1e} is below the last bit of the weights")
        numbers["used"] = used
        if not abs(used / wanted - 1) <= RATE_TOLERANCE:
            return numbers.failed(
                f"step {step.step}: the weights moved as at a rate of {used:.3e}, the spec's is "
                f"{wanted:.3e}"
            )
        return numbers.passed(
            f"{wanted:.3e} at step {step.step}: in the spec, in the optimizer and in the weights"
        )

    def _used(self, context: Context) -> float | None:
        """Return the rate at which the weights moved; None when the change is too small to be seen."""
        decay = {
            id(p): group["weight_decay"]
            for group in context.optimizer.param_groups
            for p in group["params"]
        }
        train = context.spec.train
        along = size = 0.0
        for name, parameter in context.student.named_parameters():
            state = context.optimizer.state.get(parameter)
            if not state or parameter.dtype != torch.float32:
                continue
            sample = self.samples[name]
            count = float(state["step"])
            mean = sample.of(state["exp_avg"]).double() / (1 - train.beta1**count)
            square = sample.of(state["exp_avg_sq"]).double() / (1 - train.beta2**count)
            before = sample.before.double()
            direction = -(mean / (square.sqrt() + train.eps)) - decay[id(parameter)] * before
            delta = sample.of(parameter).double() - before
            # Only where the rounding of the weight is small beside the update.
            seen = direction.abs() * context.optimizer.param_groups[0]["lr"] > 8 * _bits(before)
            along += float((direction * delta)[seen].sum())
            size += float(direction[seen].square().sum())
        return along / size if size else None


def _bits(values: Tensor) -> Tensor:
    """Return the distance between neighbouring fp32 numbers at each value."""
    return values.double().abs().clamp(min=2.0**-126) * 2.0**-23


def _last_bit(values: Tensor) -> float:
    """Return the distance at the smallest value: if that one can move, the tensor can."""
    return float(_bits(values).min()) if values.numel() else math.inf


def _list(found: list[str]) -> str:
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more
