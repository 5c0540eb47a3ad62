"""Compiled layers on a GPU: as near to fp32 as the layers as written, no step that waits for a compiler
whatever documents a batch has, and the memory that was predicted.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.data.batches import Batches
from engine.data.tokens import starts_of
from engine.kernels.inductor import CompileWatch
from engine.models.load import new_decoder
from engine.spec import LossSection, TrainSection
from engine.train.compile_student import compile_student
from engine.train.trainer import Trainer
from tests.support.budgets import config, stream_of
from tests.support.trainers import run_ahead

# The compiler warns of what it imports and looks at itself.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_run_what_was_compiled_before_them(
    family: str, packed: bool, checkpointing: bool
) -> None:
    torch._dynamo.reset()
    device = torch.device("cuda")
    stream = stream_of(1000, 64 * 256)
    # Documents get shorter, so that both their number and the longest differ from batch to batch.
    lengths = torch.linspace(400, 5, 400).long()
    starts = starts_of(lengths.numpy())
    kept = np.append(starts[starts < 64 * 256], 64 * 256)
    stream = dataclasses.replace(stream, starts=kept)
    losses = []
    for compiled in (False, True):
        trainer = Trainer(
            student=new_decoder(
                config(256, 512, 3, heads=4, vocabulary=1000, family=family, head_dim=64), 0
            ).to(device),
            teacher=None,
            batches=Batches(stream, seq_len=256, rows_per_batch=4, seed=0),
            train=TrainSection(steps=10, rows=4, warmup_steps=2),
            loss=LossSection(alpha=1.0),
            device=device,
            precision="bf16",
        )
        with CompileWatch() as watch:
            watch.drain()  # what this process compiled before
            agreement = compile_student(
                trainer,
                length=256,
                compiled=compiled,
                packed=packed,
                checkpointing=checkpointing,
            )
            assert (agreement is not None) == compiled
            warm = watch.drain()
            assert bool(warm) == compiled
            watch.seal()
            losses.append([step.loss for step in run_ahead(trainer)])
            assert watch.drain() == []
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
