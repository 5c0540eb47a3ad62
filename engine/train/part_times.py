"""Whether each part of a step takes about what its arithmetic needs on this machine.

    needed = FLOPs / this machine's matmul rate + bytes / its copy rate + launches x LAUNCH_S

The rates are measured, once the run has warmed up, by one large matmul in the run's own dtypes and one large copy. They
are an upper bound of what the parts reach: a part of many small operations takes some times its arithmetic. One that
takes TIMES as long does something else than its arithmetic: another kernel, another device, a loop over rows, a
conversion of all weights.

The machine is measured again before a part is accused, and the lower rates count: where somebody else uses it, the
matmul is as slow as the part.
"""

# Shapes: N tokens of a step

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.log.events import PartsMeasured, StepDone
from engine.models.config import ModelConfig, count_parameters
from engine.plan.activations import linear_weights, query_width
from engine.train.trainer import Trainer

TIMES = 10.0
LEAST_SHARE = 0.2
"""Of the step: a smaller part is not worth fixing."""
LEAST_S = 0.02
WINDOW = 8
"""Steps whose median is taken."""
FIRST = 20
"""The step of a session after which it is looked for the first time; then after ten times as many."""
SIDE = {"cuda": 4096, "cpu": 768}
"""Of the square matrices that are multiplied: 12 ms on a slow GPU, 20 on two slow cores."""
COPIED_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
ROUNDS = 3
LAUNCH_S = {"cuda": 10e-6, "cpu": 20e-6}
LAUNCHES = 40
"""Operations of one layer's forward pass where none are fused, without its matmuls."""
OF_ADAMW = 7
"""Numbers of 4 bytes that an update reads and writes for each parameter."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second."""

    flops: float
    bytes: float

    def seconds(self, flops: float = 0.0, moved: float = 0.0) -> float:
        return flops / self.flops + moved / self.bytes


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure a square matmul, and a copy from memory to memory of the device."""
    side, copied = SIDE[device.type], COPIED_BYTES[device.type]
    left = torch.ones(side, side, device=device, dtype=dtype)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    matmul_s = _shortest(lambda: left @ left, device)
    copy_s = _shortest(lambda: target.copy_(source), device)
    return Rates(2.0 * side**3 / matmul_s, 2.0 * copied / copy_s)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun_s)
    return min(times[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a part needs of a step, at least."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: float = 0.0


def arithmetic(
    student: ModelConfig, teacher: ModelConfig | None, tokens: int, seq_len: int, passes: int
) -> dict[str, Arithmetic]:
    """Return what each part of a step of N tokens needs; a step has `passes` micro-batches."""
    layers = _of_layers(student, tokens, seq_len, passes)
    head = 2.0 * student.vocab_size * student.hidden_size * tokens
    parameters = count_parameters(student)
    found = {
        "student": layers,
        # Two matmuls for each of the forward pass, which is made once more where activations are recomputed.
        "backward": Arithmetic(
            flops=3 * layers.flops,
            moved_bytes=2 * layers.moved_bytes + 4 * parameters,
            launches=3 * layers.launches,
        ),
        "optimizer": Arithmetic(moved_bytes=4.0 * OF_ADAMW * parameters, launches=LAUNCHES),
    }
    if teacher is not None:
        found["teacher"] = _of_layers(teacher, tokens, seq_len, passes)
        head += 2.0 * student.vocab_size * teacher.hidden_size * tokens / 3
    # Logits, and the gradients of hidden states and head; softmaxes of fp32 logits, each read and written.
    logits = 4.0 * tokens * student.vocab_size * (1 if teacher is None else 2)
    found["loss"] = Arithmetic(
        flops=3 * head, moved_bytes=12 * logits, launches=LAUNCHES * passes * 4
    )
    return found


def _of_layers(config: ModelConfig, tokens: int, seq_len: int, passes: int) -> Arithmetic:
    attention = 2.0 * seq_len * query_width(config) * config.num_hidden_layers
    weights = linear_weights(config)
    return Arithmetic(
        flops=tokens * (2.0 * weights + attention),
        moved_bytes=4.0 * weights * passes
        + 4.0 * LAUNCHES * tokens * config.hidden_size * config.num_hidden_layers,
        launches=LAUNCHES * config.num_hidden_layers * passes,
    )


class PartTimes:
    """Compares the parts of the newest steps with what they need."""

    def __init__(
        self, trainer: Trainer, student: ModelConfig, teacher: ModelConfig | None, seq_len: int
    ) -> None:
        self._trainer, self._begun_at = trainer, trainer.step
        self._models, self._seq_len = (student, teacher), seq_len
        self._next = FIRST
        self._steps: deque[StepDone] = deque(maxlen=WINDOW)
        self._kept: Rates | None = None

    def due(self, step: int) -> bool:
        return step - self._begun_at == self._next

    def look(self, step: StepDone) -> PartsMeasured | None:
        """Take note of a step, and after one that is due say what its parts take; None otherwise."""
        self._steps.append(step)
        if not self.due(step.step):
            return None
        self._next *= 10
        seconds = {
            part: statistics.median(one.phases.get(part) or 0.0 for one in self._steps)
            for part in step.phases
        }
        step_s = statistics.median(one.step_s or 0.0 for one in self._steps)
        tokens = step.tokens or 0
        # Ranks wait for one another inside their parts.
        if not seconds or not tokens or self._trainer.ranks.many:
            return None
        passes = self._trainer.train.accumulation
        needs = arithmetic(*self._models, tokens, self._seq_len, passes)
        rates = self._kept = self._kept or self._measured()
        slow = self._slow(needs, seconds, step_s, rates)
        if slow:
            again = self._measured()
            rates = Rates(min(rates.flops, again.flops), min(rates.bytes, again.bytes))
            slow = self._slow(needs, seconds, step_s, rates)
        return PartsMeasured(
            step=step.step,
            seconds={part: seconds[part] for part in needs if part in seconds},
            needed={part: self._needed(need, rates) for part, need in needs.items()},
            slow=slow,
            matmul_flops_per_s=rates.flops,
            copy_bytes_per_s=rates.bytes,
        )

    def _measured(self) -> Rates:
        return measure(self._trainer.device, self._trainer.dtype)

    def _needed(self, need: Arithmetic, rates: Rates) -> float:
        launching_s = need.launches * LAUNCH_S[self._trainer.device.type]
        return rates.seconds(need.flops, need.moved_bytes) + launching_s

    def _slow(
        self,
        needs: dict[str, Arithmetic],
        seconds: dict[str, float],
        step_s: float,
        rates: Rates,
    ) -> list[str]:
        least_s = max(LEAST_S, LEAST_SHARE * step_s)
        return [
            part
            for part, need in needs.items()
            if seconds.get(part, 0.0) >= max(least_s, TIMES * self._needed(need, rates))
        ]
