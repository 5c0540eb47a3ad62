"""One arm of `engine bench kd`, in its own process, so that what it imports, patches, compiles or allocates
affects no other.

    python -m engine.bench.kd_arm ARM DEVICE SHAPE-AS-JSON         one JSON value as its last line

    engine          our trainer, with a dense teacher              compiled on a GPU
    engine packed   the same with a block-quantised teacher
    teacher-by-transformers, both-by-transformers                 the same with models that transformers runs
    transformers, liger, trl                                      `engine.bench.kd_rivals`

Times are between the ends of steps, with the device synchronised. The peak is the allocator's, over weights,
steps and optimizer, without the creation of the models.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.bench.kd_rivals import OBJECTIVES, STEPS, Clock, model_of, versions
from engine.bench.kd_shape import (
    KdShape,
    batches_of,
    dense_teacher,
    fresh_student,
    products_dtype,
    weights_of,
)
from engine.kernels.dequantize import has_triton
from engine.log.events import nan_if_absent
from engine.models.config import CONFIG_FILE
from engine.models.decoder import Decoder
from engine.models.load import load_packed_decoder
from engine.models.transformers_config import read_transformers_config
from engine.models.transformers_decoder import TransformersDecoder
from engine.plan.device import has_compiler
from engine.plan.knobs import choose_attention, choose_loss_kernel
from engine.spec import LossSection, TrainSection
from engine.spec.sections import ModelSection
from engine.teachers.compiled import compile_layers, warm_up
from engine.teachers.frozen import DequantizedTeacher, QuantizedTeacher
from engine.teachers.protocol import Teacher
from engine.teachers.truncating import TruncatingTeacher
from engine.train.compile_student import compile_student
from engine.train.trainer import Trainer

OURS = ("engine", "engine packed")
BY_TRANSFORMERS = {"teacher-by-transformers": False, "both-by-transformers": True}
"""Our trainer with a teacher that transformers runs, and whether it runs the student too."""


def measure(arm: str, device: torch.device, shape: KdShape) -> dict[str, Any]:
    """Run the arm. Return the seconds of every step after the warm-up, the first and last loss, and the peak
    in bytes (None on a CPU)."""
    begun = time.perf_counter()
    own = arm in OURS or arm in BY_TRANSFORMERS
    steps = _ours(arm, device, shape) if own else STEPS[arm](shape, device)
    ready_s = time.perf_counter() - begun
    # A rival with a loop of its own is done by now, and has timed itself.
    seconds: list[float] | None = getattr(steps, "seconds", None)
    clock, losses = Clock(device), []
    if seconds is None:
        clock.begin()
        seconds = clock.seconds
    for loss in steps:
        losses.append(loss)
        clock.step()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "arm": arm,
        "state": "measured",
        "objective": OBJECTIVES.get(arm, "CE + T^2 KL"),
        "versions": f"torch {torch.__version__}" + ("" if arm in OURS else f", {versions(arm)}"),
        "ready_s": ready_s,
        "step_s": seconds[shape.warm_up :],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": peak,
    }


def _ours(arm: str, device: torch.device, shape: KdShape) -> Iterator[float]:
    cuda = device.type == "cuda"
    precision = "bf16" if cuda else "fp32"
    capability = torch.cuda.get_device_capability(device) if cuda else None
    batches, student = batches_of(shape), fresh_student(shape, device)
    frozen: DequantizedTeacher | QuantizedTeacher
    if arm == "engine packed":
        decoder = load_packed_decoder(weights_of(shape, device), products_dtype(device), device)
        frozen = QuantizedTeacher(decoder, precision)
    else:
        dense = dense_teacher(shape, device)
        if arm in BY_TRANSFORMERS:
            dense = _by_transformers(dense, device)
        frozen = DequantizedTeacher(dense, precision)
    if BY_TRANSFORMERS.get(arm):
        student = _by_transformers(student, device)
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
    if cuda and has_compiler("cuda") and frozen.decoder.config.native:
        compile_layers(frozen.decoder, shape.seq_len, single=shape.rows == 1)
        warm_up(teacher, frozen.decoder, batches.batch_at(0), shape.rows, precision)
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
        ),
        loss=LossSection(alpha=shape.alpha, temperature=shape.temperature, kernel=kernel),
        device=device,
        precision=precision,
    )
    compile_student(
        trainer,
        length=shape.seq_len,
        compiled=cuda and has_compiler("cuda") and student.config.native,
        packed=packed("student.attention", student.config),
        checkpointing=False,
    )
    # The host does not run ahead of the device: rivals are also synchronised after each step.
    return (nan_if_absent(step.loss) for step in trainer.steps())


def _by_transformers(decoder: Decoder, device: torch.device) -> Decoder:
    """Return the module of transformers with the decoder's tensors, as a decoder."""
    how = ModelSection(engine="transformers")
    raw = decoder.config.to_hf_dict()
    config = read_transformers_config(raw, Path(CONFIG_FILE), how, "the arm runs it so")
    found = TransformersDecoder(config, model_of(decoder, device)).look_at_head()
    found.look("model", 128)
    return found


def main() -> None:
    arm, device, shape = sys.argv[1:]
    print(json.dumps(measure(arm, torch.device(device), KdShape.loads(shape)), allow_nan=False))


if __name__ == "__main__":
    main()
