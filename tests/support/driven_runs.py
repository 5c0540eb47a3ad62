"""Drive two steps of a run with evaluations around them, as the composition root does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.data.batches import Batches, heldout_rows
from engine.models.decoder import Decoder
from engine.models.head import DenseHead
from engine.plan import memory
from engine.spec import RunSpec
from engine.teachers.frozen import DequantizedTeacher
from engine.train.heldout import heldout_loss
from engine.train.trainer import Trainer
from tests.support.budgets import (
    stream_of,
)


def drive(
    spec: RunSpec,
    student: Decoder,
    teacher: Decoder | None,
    device: str,
    precision: str,
) -> None:
    """Drive a run as `run.py` does: two steps with evaluations around them; those of the start come behind the first
    step on a CPU, and at the end a second student takes the memory of gradients and moments."""
    on = torch.device(device)
    seq_len = spec.data.seq_len
    rows = max(2 * spec.train.rows * spec.train.accumulation, spec.eval.rows) + 2
    stream = stream_of(student.config.vocab_size, rows * seq_len)
    held = list(heldout_rows(stream, seq_len, spec.eval.rows).split(memory.EVAL_ROWS_AT_ONCE))
    frozen = None if teacher is None else DequantizedTeacher(teacher)
    trainer = Trainer(
        student=student,
        teacher=frozen,
        batches=Batches(stream, seq_len=seq_len, rows_per_batch=spec.train.rows, seed=0),
        train=replace(spec.train, steps=2, warmup_steps=1),
        loss=spec.loss,
        device=on,
        precision=precision,
    )

    def evaluate(student: Decoder) -> None:
        head = DenseHead(student.head_weight)
        heldout_loss(student.hidden, head, held, on, trainer.autocast)

    def evaluate_start(untrained: Callable[[], Decoder]) -> None:
        if frozen is not None:
            heldout_loss(frozen.hidden, frozen.head(), held, on, trainer.autocast)
        evaluate(untrained())

    if device == "cuda":
        evaluate_start(lambda: student)
    for step in trainer.steps():
        if step.step == 1 and device != "cuda":
            student.zero_grad(set_to_none=True)
            evaluate_start(lambda: copy.deepcopy(student))
        evaluate(student)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.optimizer.state.clear()
    evaluate(copy.deepcopy(student))
