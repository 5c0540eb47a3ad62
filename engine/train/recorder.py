"""Record a few numbers of a run's steps, so that a replay of the run can be compared with it (`engine.verify`).

The numbers come from each stage of a step: hidden states of both models at one token, the gradient of one parameter
before the update, and that parameter's moments and weights after the update. Micro-batch, token and parameter are
drawn with the seed and the step, so a replay records the same elements. This module compares nothing.
"""

# Shapes: B rows, T tokens, N = B*T, D student width

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.log.events import Recorded
from engine.runtime.ranks import own_part
from engine.spec import RunSpec
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer

FIRST_STEPS = 32
"""Number of steps at the start of a session, each of which is recorded."""
EVERY_S = 1.0
"""Minimum interval between later recorded steps, in seconds."""
NUMBERS = 4
"""Number of consecutive elements recorded from each tensor."""


@dataclass(slots=True)
class _Step:
    """A step that is being recorded."""

    micro_batch: int
    token: int
    """A random integer until the micro-batch arrives, then the index of one of its tokens."""
    tensor: str = ""
    first: int = 0
    """Index of the first recorded element of the tensor."""
    micro_batches: int = 0
    """Number of the step's micro-batches so far."""
    elements: dict[str, Tensor] = field(default_factory=dict)
    """Recorded elements by stage: `teacher`, `student`, `gradient`, `mean`, `square`, `weight`."""
    on_host: Tensor | None = None
    """Concatenation of `elements` on the CPU, complete once the event `copied` is done."""
    copied: torch.cuda.Event | None = None


class Recorder(StepObserver):
    """Records steps on the first rank; if the student is sharded, elements of that rank's shard."""

    def __init__(
        self, trainer: Trainer, spec: RunSpec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trainer, self._spec, self._clock = trainer, spec, clock
        self._begun_at, self._newest_s = trainer.step, clock()
        self._parameters = dict(trainer.student.named_parameters())
        self._steps: dict[int, _Step] = {}
        """Recorded steps that are not logged yet, by step number."""
        self._now: _Step | None = None
        if trainer.ranks.first and spec.checks.record != "off":
            trainer.observers = (*trainer.observers, self)

    def begun(self, step: int) -> None:
        self._now = None
        now_s = self._clock()
        early = step <= self._begun_at + FIRST_STEPS
        if early or self._spec.checks.record == "all" or now_s - self._newest_s >= EVERY_S:
            self._newest_s = now_s
            micro_batch = self._draw(step, "micro-batch") % self._spec.train.accumulation
            self._now = self._steps[step] = _Step(micro_batch, self._draw(step, "token"))

    def _draw(self, step: int, what: str) -> int:
        text = f"{self._spec.train.seed} {step} {what}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @torch.no_grad()
    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        if (now := self._now) is None:
            return
        now.micro_batches += 1
        if now.micro_batches - 1 != now.micro_batch:
            return
        now.token %= micro.tokens_BT.numel()
        teacher_output = teacher.hidden_NE
        if teacher.targets is not None:
            log_probs = teacher.targets.log_probs_NK
            teacher_output = teacher.targets.ids_NK if log_probs is None else log_probs
        if teacher_output is not None:
            now.elements["teacher"] = _copy(teacher_output[now.token, :NUMBERS])
        hidden_ND = student_hidden_BTD.flatten(0, 1)
        now.elements["student"] = _copy(hidden_ND[now.token, :NUMBERS])

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        if (now := self._now) is None:
            return
        names = [name for name, p in self._parameters.items() if own_part(p).numel()]
        now.tensor = names[self._draw(step, "tensor") % len(names)]
        parameter = self._parameters[now.tensor]
        size = own_part(parameter).numel()
        now.first = self._draw(step, "number") % max(1, size - NUMBERS + 1)
        if parameter.grad is not None:
            now.elements["gradient"] = self._elements(parameter.grad)

    @torch.no_grad()
    def updated(self, step: int) -> None:
        if (now := self._now) is None:
            return
        parameter = self._parameters[now.tensor]
        state = self._trainer.optimizer.state.get(parameter, {})
        for part, key in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
            if key in state:
                now.elements[part] = self._elements(state[key])
        now.elements["weight"] = self._elements(parameter.detach())
        now.on_host = torch.cat(list(now.elements.values())).to("cpu", non_blocking=True)
        if self._trainer.device.type == "cuda":
            now.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            now.copied.record()

    def _elements(self, tensor: Tensor) -> Tensor:
        assert self._now is not None
        first = self._now.first
        return _copy(own_part(tensor).flatten()[first : first + NUMBERS])

    def take(self, step: int) -> Iterator[Recorded]:
        """Yield the event of a finished step, if the step was recorded."""
        if (recorded := self._steps.pop(step, None)) is None or recorded.on_host is None:
            return
        if recorded.copied is not None:
            recorded.copied.synchronize()
        sizes = [len(part) for part in recorded.elements.values()]
        split = torch.split(recorded.on_host, sizes)
        numbers: dict[str, Any] = {
            name: part.tolist() for name, part in zip(recorded.elements, split, strict=True)
        }
        yield Recorded(
            step=step,
            micro_batch=recorded.micro_batch,
            token=recorded.token,
            tensor=recorded.tensor,
            first=recorded.first,
            **numbers,
        )


def _copy(elements: Tensor) -> Tensor:
    # A copy, because a view would change with the tensor and keep all of it in memory.
    return elements.to(torch.float32, copy=True)
