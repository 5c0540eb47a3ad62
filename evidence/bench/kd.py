"""Whole distillation steps of this trainer, with a dense teacher and with a block-quantised one.

    L = alpha CE + (1 - alpha) T^2 KL(teacher || student)        over the student's vocabulary, mean of all tokens

Weights are random, with the shapes and block types of a Q4_K_M file. Rows are random tokens, and all of them
belong to one document, so that every arm attends over full rows. Such a teacher's outputs are noise; their
cost is real. The same seeds give every arm the same weights and rows, so arms that compute this objective
have the same loss in their first step, up to rounding.

Every arm runs in its own process, one after another on the same device, so that what it compiles or allocates
affects no other. One that broke or timed out has a row with its reason.

    python -m evidence.bench.kd ARM DEVICE SHAPE-AS-JSON         one JSON value as its last line

Times are between the ends of steps, with the device synchronised. The peak is the allocator's, over weights,
steps and optimizer, without the creation of the models.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from engine import child
from engine.data.batches import Batches
from engine.data.tokens import TokenStream, starts_of
from engine.kernels.dequantize import has_triton
from engine.log.events import nan_if_absent
from engine.models.activation_checkpointing import configure_layers
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.fused import use_kernels
from engine.models.load import load_decoder, load_packed_decoder, new_decoder
from engine.plan.cost import flops_per_token
from engine.plan.knobs import (
    choose_attention,
    choose_attention_kernel,
    choose_loss_kernel,
    choose_update,
)
from engine.spec import LossSection, TrainSection
from engine.teachers.frozen import DequantizedTeacher, QuantizedTeacher
from engine.teachers.protocol import Teacher
from engine.teachers.truncating import TruncatingTeacher
from engine.terminal import aligned
from engine.train.trainer import Trainer
from engine.units import format_bytes, format_count
from evidence.bench.random_weights import RandomWeights
from evidence.bench.shapes import config_named

EXTRA_IDS = 128
"""Vocabulary entries that the teacher has beyond the student's, as with Qwen2.5-7B and 0.5B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KdShape:
    """The work that every arm does."""

    teacher: str = "qwen2.5-7b"
    student: str = "qwen2.5-0.5b"
    rows: int = 8
    seq_len: int = 1024
    alpha: float = 0.5
    temperature: float = 2.0
    steps: int = 10
    warm_up: int = 4
    lr: float = 1e-4
    clip_norm: float = 1.0

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    def configs(self) -> tuple[ModelConfig, ModelConfig]:
        """Configurations of the teacher, and of the student, whose vocabulary is at least `EXTRA_IDS`
        smaller."""
        teacher, student = config_named(self.teacher), config_named(self.student)
        ids = min(student.vocab_size, teacher.vocab_size - EXTRA_IDS)
        return teacher, replace(student, vocab_size=ids)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> KdShape:
        return KdShape(**json.loads(text))


Steps = Callable[[KdShape, torch.device], Iterator[float]]
"""Yields the loss of each step; a step runs when its loss is requested."""
Found = dict[str, Any]
"""Result of `measure`."""
Arms = Mapping[str, Callable[[KdShape, torch.device], Found]]


def weights_of(shape: KdShape, device: torch.device) -> RandomWeights:
    """The teacher's weights as in a file, in quantised blocks."""
    return RandomWeights(shape.configs()[0], "q4_k_m", device)


def dense_teacher(shape: KdShape, device: torch.device) -> Decoder:
    return load_decoder(weights_of(shape, device), products_dtype(device), device)


def fresh_student(shape: KdShape, device: torch.device) -> Decoder:
    """A new student in fp32: master weights."""
    return new_decoder(shape.configs()[1], seed=0).to(device)


def products_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def batches_of(shape: KdShape) -> Batches:
    """Rows for every step of an arm; no row is used twice."""
    ids = shape.configs()[1].vocab_size
    # One more token, for the last one to predict.
    count = shape.tokens * (shape.steps + shape.warm_up) + 1
    tokens = np.random.default_rng(0).integers(0, ids, count, dtype=np.uint32)
    # One document for all rows: each label is the next token, across rows too.
    stream = TokenStream(tokens=tokens, starts=starts_of([count]), sha256="")
    return Batches(stream, seq_len=shape.seq_len, rows_per_batch=shape.rows, seed=0)


def dense_steps(shape: KdShape, device: torch.device) -> Iterator[float]:
    teacher = DequantizedTeacher(dense_teacher(shape, device), precision_on(device))
    return own_steps(shape, device, teacher, fresh_student(shape, device))


def packed_steps(shape: KdShape, device: torch.device) -> Iterator[float]:
    decoder = load_packed_decoder(weights_of(shape, device), products_dtype(device), device)
    teacher = QuantizedTeacher(decoder, precision_on(device))
    return own_steps(shape, device, teacher, fresh_student(shape, device))


def precision_on(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def own_steps(
    shape: KdShape,
    device: torch.device,
    frozen: DequantizedTeacher | QuantizedTeacher,
    student: Decoder,
) -> Iterator[float]:
    """The steps of this engine's trainer, with the settings that a run chooses by itself."""
    cuda, precision = device.type == "cuda", precision_on(device)
    capability = torch.cuda.get_device_capability(device) if cuda else None
    batches = batches_of(shape)
    teacher: Teacher = TruncatingTeacher(frozen, student.config.vocab_size)

    def packed(knob: str, config: Any) -> bool:
        decision = choose_attention(
            knob,
            "auto",
            config=config,
            device=device.type,
            precision=precision,
            capability=capability,
        )
        return decision.choice == "packed"

    frozen.decoder.packed = packed("teacher.attention", frozen.decoder.config)
    attention = choose_attention_kernel(
        "auto", device=device.type, capability=capability, deterministic=False
    )
    frozen.decoder.cudnn = attention.choice == "cudnn"
    kernel = choose_loss_kernel(
        "auto",
        device=device.type,
        capability=capability,
        has_triton=has_triton(),
        divergence="forward_kl",
    ).choice
    trainer = Trainer(
        student=student,
        teacher=teacher,
        batches=batches,
        train=TrainSection(
            steps=shape.warm_up + shape.steps,
            rows=shape.rows,
            lr=shape.lr,
            warmup_steps=0,
            schedule="constant",
            weight_decay=0.01,
            beta2=0.999,
            clip_norm=shape.clip_norm,
            update=choose_update(
                "auto",
                device=device.type,
                capability=capability,
                has_triton=has_triton(),
                ranks=1,
            ).choice,
        ),
        loss=LossSection(alpha=shape.alpha, temperature=shape.temperature, kernel=kernel),
        device=device,
        precision=precision,
    )
    configure_layers(
        student,
        packed=packed("student.attention", student.config),
        checkpointing=False,
    )
    student.cudnn = frozen.decoder.cudnn
    use_kernels(student, frozen=False)
    # The host does not run ahead of the device: each step's time ends when its work does.
    return (nan_if_absent(step.loss) for step in trainer.steps())


class Clock:
    """Seconds between the ends of steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, 0.0
        self.seconds: list[float] = []

    def begin(self) -> None:
        self._last = self._now()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._last = self._now()

    def step(self) -> None:
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now

    def peak_bytes(self) -> int | None:
        """The allocator's peak since `begin`; None on a CPU."""
        cuda = self._device.type == "cuda"
        return torch.cuda.max_memory_allocated(self._device) if cuda else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure(steps_of: Steps, shape: KdShape, device: torch.device) -> Found:
    """Return the seconds of every step after the warm-up, the first and last loss, and the peak in bytes
    (None on a CPU)."""
    begun = time.perf_counter()
    steps = steps_of(shape, device)
    ready_s = time.perf_counter() - begun
    clock, losses = Clock(device), []
    clock.begin()
    for loss in steps:
        losses.append(loss)
        clock.step()
    return found_by(clock, losses, ready_s, shape)


def found_by(clock: Clock, losses: list[float], ready_s: float, shape: KdShape) -> Found:
    return {
        "ready_s": ready_s,
        "step_s": clock.seconds[shape.warm_up :],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": clock.peak_bytes(),
    }


ARMS: Arms = {
    "engine": partial(measure, dense_steps),
    "engine packed": partial(measure, packed_steps),
}


def answer(arms: Arms, arguments: Sequence[str]) -> None:
    """Measure one arm in this process, as `run_arm` asks with its arguments, and print what was found."""
    arm, device, shape = arguments
    found = arms[arm](KdShape.loads(shape), torch.device(device))
    print(json.dumps(found, allow_nan=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class KdRow:
    """The result of one arm, as printed and stored."""

    arm: str
    state: str = "measured"
    """measured, failed, or absent: what the arm needs is not installed."""
    why: str | None = None
    step_s: float | None = None
    """Median of the measured steps."""
    spread: float | None = None
    """(largest - smallest) / median of the measured steps."""
    tokens_per_s: float | None = None
    share_of_bound: float | None = None
    """Throughput relative to a bound: the run's own FLOPs at the rate of the largest matmul measured here."""
    peak_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    ready_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_arm(
    arm: str,
    device: str,
    shape: KdShape,
    *,
    flop_per_s: float,
    timeout_s: float,
    module: str = "evidence.bench.kd",
) -> KdRow:
    """Run the arm's process, `python -m MODULE ARM DEVICE SHAPE`, and return its row.

    `flop_per_s` is the rate of the largest matmul, for the bound.
    """
    command = child.command(module, arm, device, shape.dumps())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=child.environment()
        )
    except subprocess.TimeoutExpired:
        return KdRow(arm=arm, state="failed", why=f"no answer in {timeout_s:g} s")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()]
        words = last[-1].strip() if last else "no message on stderr"
        return KdRow(arm=arm, state="failed", why=f"exit code {done.returncode}: {words}")
    return row_of(arm, json.loads(done.stdout.splitlines()[-1]), shape, flop_per_s)


def row_of(arm: str, found: Mapping[str, Any], shape: KdShape, flop_per_s: float) -> KdRow:
    """Turn what `measure` found into a row with its rates."""
    teacher, student = shape.configs()
    times = found["step_s"]
    middle = statistics.median(times)
    bound = flop_per_s / flops_per_token(student, teacher, shape.seq_len)
    return KdRow(
        arm=arm,
        step_s=middle,
        spread=(max(times) - min(times)) / middle,
        tokens_per_s=shape.tokens / middle,
        share_of_bound=shape.tokens / middle / bound,
        **{name: found[name] for name in ("peak_bytes", "first_loss", "last_loss", "ready_s")},
    )


HEADER = ("arm", "tokens/s", "of bound", "ms/step", "+-", "peak", "first loss")


def table(rows: list[KdRow]) -> list[str]:
    """Aligned lines for people, followed by the arms that were not measured, each with its reason."""
    cells: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        if row.state != "measured":
            cells.append((row.arm, *[""] * 5, row.state))
            continue
        assert row.tokens_per_s and row.step_s and row.first_loss is not None
        cells.append(
            (
                row.arm,
                format_count(row.tokens_per_s),
                f"{row.share_of_bound or 0:.0%}",
                f"{row.step_s * 1e3:.1f}",
                f"{row.spread or 0:.0%}",
                "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                f"{row.first_loss:.4f}",
            )
        )
    lines = aligned(cells, right=range(1, 7))
    return lines + [f"{row.arm}: {row.state}: {row.why}" for row in rows if row.state != "measured"]


if __name__ == "__main__":
    answer(ARMS, sys.argv[1:])
