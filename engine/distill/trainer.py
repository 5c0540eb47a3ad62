"""The training step: rows in, one AdamW update out, and its numbers.

    loss = alpha * CE + (1 - alpha) * T^2 * KL(teacher || student)

as a mean over the labelled tokens of the whole optimizer step.

A step is `accumulation` forward passes that share one denominator, so splitting a batch differently
changes rounding and nothing else. The teacher runs first and keeps no graph. Numbers leave the
device once a step, after the gradients are known and before the weights change, so a NaN is seen
before it can reach them.

Invariants: the rows in the logged loss are exactly the rows of the update; `lr` is what the
optimizer used, read back from it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from engine.data.batches import Batch, Batches
from engine.distill.loss import distillation_loss
from engine.distill.schedule import ScheduleKind, learning_rate
from engine.models.decoder import Decoder
from engine.runtime.device import torch_dtype
from engine.spec import LossSection, TrainSection
from engine.teachers.protocol import Teacher

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step; losses in nats per labelled token. `kd` and `agreement` are None
    without a teacher in the objective.
    """

    step: int
    loss: float
    ce: float
    kd: float | None
    agreement: float | None
    lr: float
    grad_norm: float
    rows: int
    tokens: int
    labelled: int
    step_s: float
    data_s: float
    teacher_s: float | None
    position: int
    updated: bool
    """False when a non-finite number kept the weights as they were."""

    def non_finite(self) -> Iterator[tuple[str, float]]:
        """The fields of this step that are NaN or infinite."""
        for name in ("loss", "ce", "kd", "grad_norm"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                yield name, value


def build_optimizer(
    student: nn.Module, train: TrainSection, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; norms and biases are scales and offsets, which decay
    would bias towards 0.
    """
    matrices = [p for p in student.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in student.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )


class Trainer:
    """Owns the student, its optimizer and the position in the data; yields a Step for each
    update.
    """

    def __init__(
        self,
        *,
        student: Decoder,
        teacher: Teacher | None,
        batches: Batches,
        train: TrainSection,
        loss: LossSection,
        device: torch.device,
        precision: str,
        slow_by: float = 0.0,
    ) -> None:
        self.student, self.teacher, self.batches = student, teacher, batches
        self.train, self.loss = train, loss
        self.device, self.dtype = device, torch_dtype(precision)
        self.slow_by = slow_by
        self.optimizer = build_optimizer(student, train, device)
        self.parameters = [p for p in student.parameters() if p.requires_grad]
        self.step = 0
        self.position = 0
        # With alpha = 1 the teacher has no part in the objective, so it is not asked.
        self.teaching = teacher is not None and loss.alpha < 1.0

    def steps(self) -> Iterator[Step]:
        """Train to the last step of the run, one Step at a time."""
        self.student.train()
        while self.step < self.train.steps:
            # Begun here: what the caller does between two steps (evaluate, save) is not a step's time.
            yield self._one_step(time.perf_counter())

    def _one_step(self, begun: float) -> Step:
        micro_batches = self._take_batches()
        labelled = sum(batch.labelled for batch in micro_batches)
        data_s = time.perf_counter() - begun
        self.optimizer.zero_grad(set_to_none=True)
        totals: list[Tensor] = []
        teacher_s = 0.0
        for batch in micro_batches:
            terms, seconds = self._forward_backward(batch, float(max(labelled, 1)))
            totals.append(terms)
            teacher_s += seconds
        if self.train.clip_norm > 0:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.train.clip_norm)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        # The one device synchronisation of a step: all numbers in one copy, before the weights
        # change.
        *sums, grad_norm = torch.cat(
            [torch.stack(totals).sum(0), norm.detach().float()[None]]
        ).tolist()
        loss, ce, kd, agreement = sums
        lr = self._set_learning_rate()
        finite = all(math.isfinite(x) for x in (loss, grad_norm))
        if finite:
            self.optimizer.step()
            lr = float(self.optimizer.param_groups[0]["lr"])
        self.step += 1
        if self.slow_by:
            self._wait((time.perf_counter() - begun) * self.slow_by)
        return Step(
            step=self.step,
            loss=loss,
            ce=ce,
            kd=kd if self.teaching else None,
            agreement=agreement if self.teaching else None,
            lr=lr,
            grad_norm=grad_norm,
            rows=sum(len(batch.tokens_BT) for batch in micro_batches),
            tokens=sum(batch.tokens_BT.size for batch in micro_batches),
            labelled=labelled,
            step_s=time.perf_counter() - begun,
            data_s=data_s,
            teacher_s=teacher_s if self.teaching else None,
            position=self.position,
            updated=finite,
        )

    def _wait(self, seconds: float) -> None:
        """The control of an experiment: a step that is known to be slower, by the host's clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def _take_batches(self) -> list[Batch]:
        taken = []
        for _ in range(self.train.accumulation):
            taken.append(self.batches.take(self.position, self.train.rows))
            self.position += self.train.rows
        return taken

    def _forward_backward(self, batch: Batch, denominator: float) -> tuple[Tensor, float]:
        """Gradients of one micro-batch; its shares of (loss, ce, kd, agreement) and the host
        seconds of the teacher.
        """
        tokens_BT, documents_BT, _ = batch.to_torch(self.device)
        # Labels stay on the host: how many there are shapes the loss, and reading that from a GPU
        # would wait for it.
        labels_N = torch.from_numpy(batch.labels_BT).flatten()
        teacher_hidden_NE = teacher_head = None
        begun = time.perf_counter()
        if self.teaching and self.teacher is not None:
            teacher_hidden_NE = self.teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
            teacher_head = self.teacher.head()
        teacher_s = time.perf_counter() - begun
        with self.autocast():
            hidden_BTD = self.student.hidden(tokens_BT, documents_BT)
        terms = distillation_loss(
            hidden_BTD.flatten(0, 1).to(self.dtype),
            self.student.head_weight,
            teacher_hidden_NE,
            teacher_head,
            labels_N,
            alpha=self.loss.alpha,
            temperature=self.loss.temperature,
            denominator=denominator,
            chunk_rows=self.loss.chunk_rows or None,
        )
        torch.autograd.backward(terms.loss)
        zero = terms.loss.new_zeros(())
        parts = (terms.loss, terms.ce, terms.kd, terms.agreement)
        return torch.stack([(zero if x is None else x).detach().float() for x in parts]), teacher_s

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """bf16 products over fp32 master weights on a GPU; nothing in fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _set_learning_rate(self) -> float:
        lr = learning_rate(
            self.step,
            peak=self.train.lr,
            warmup_steps=self.train.warmup_steps,
            total_steps=self.train.steps,
            kind=cast(ScheduleKind, self.train.schedule),
            final_ratio=self.train.final_lr_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr
