"""A trainer on a GPU, with the optimizer update by torch or by our kernels."""

from __future__ import annotations

import dataclasses

import torch

from engine.data.batches import Batches
from engine.models.activation_checkpointing import configure_layers
from engine.models.adapter import adapt
from engine.models.load import new_decoder
from engine.spec import TrainSection
from engine.spec.sections import StudentSection
from engine.teachers.frozen import DequantizedTeacher
from engine.train.trainer import Trainer
from tests.support.budgets import config, stream_of
from tests.support.trainers import LOSS


def gpu_trainer(
    update: str,
    *,
    accumulation: int = 1,
    tied: bool = True,
    packed: bool = True,
    adapter: StudentSection | None = None,
) -> Trainer:
    device = torch.device("cuda")
    shape = dataclasses.replace(
        config(width=256, feed_forward=512, vocabulary=1000), tie_word_embeddings=tied
    )
    teacher = DequantizedTeacher(new_decoder(shape, 1).to(device, torch.bfloat16))
    student = new_decoder(shape, 0).to(device)
    if adapter is not None:
        student = adapt(student.to(torch.bfloat16), adapter, seed=1)
        generator = torch.Generator(device).manual_seed(2)
        for name, parameter in student.named_parameters():
            if name.endswith("lora_B"):
                # With the zeros of the start A would have no gradient.
                parameter.data.normal_(std=0.01, generator=generator)
    trainer = Trainer(
        student=student,
        teacher=teacher,
        batches=Batches(stream_of(1000, 64 * 256), seq_len=256, rows_per_batch=4, seed=0),
        train=TrainSection(
            steps=12, rows=4, accumulation=accumulation, warmup_steps=2, update=update
        ),
        loss=LOSS,
        device=device,
        precision="bf16",
    )
    configure_layers(trainer.student, packed=packed, checkpointing=False)
    return trainer
