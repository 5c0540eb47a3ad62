"""Batch honesty: rows trained are the rows that were reported (contract distill-batch-honesty-v1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.data.batches import IGNORED, Batches
from engine.data.tokens import starts_of
from engine.models.config import ModelConfig
from engine.models.load import new_decoder
from engine.spec import LossSection, TrainSection
from engine.train.trainer import Trainer
from tests.support.kit import tiny_config
from tests.support.streams import make_stream

SEQ_LEN = 12
TRAIN = TrainSection(
    steps=4, rows=4, lr=3e-4, warmup_steps=0, schedule="constant", weight_decay=0.0
)


def build(train: TrainSection = TRAIN) -> Trainer:
    """Cross entropy alone, on short documents: some positions have no label."""
    config = ModelConfig.from_dict(tiny_config(), "student")
    words = np.random.default_rng(5).integers(1, config.vocab_size, 480).astype(np.uint16)
    stream = make_stream(words, starts_of([8] * 60))
    return Trainer(
        student=new_decoder(config, seed=0),
        teacher=None,
        batches=Batches(stream, seq_len=SEQ_LEN, rows_per_batch=train.rows, seed=1),
        train=train,
        loss=LossSection(alpha=1.0),
        device=torch.device("cpu"),
        precision="fp32",
    )


def gradients_of_a_step(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients that the first update is made of."""
    next(trainer.steps())
    found = {n: p.grad for n, p in trainer.student.named_parameters() if p.grad is not None}
    return {name: gradient.clone() for name, gradient in found.items()}


def test_every_labelled_position_of_every_row_has_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = build()
    held: list[Tensor] = []
    hidden = trainer.student.hidden

    def keep(*arguments: Any) -> Tensor:
        hidden_BTD = hidden(*arguments)
        hidden_BTD.retain_grad()
        held.append(hidden_BTD)
        return hidden_BTD

    monkeypatch.setattr(trainer.student, "hidden", keep)
    batch = trainer.batches.take(0, 4)
    next(trainer.steps())
    (hidden_BTD,) = held
    assert hidden_BTD.grad is not None
    trained_BT = (hidden_BTD.grad != 0).any(-1)
    labelled_BT = torch.from_numpy(batch.labels_BT != IGNORED)
    assert torch.equal(trained_BT, labelled_BT)
    assert labelled_BT.any(1).all() and not labelled_BT.all()


def test_the_logged_loss_is_the_mean_over_all_labelled_tokens() -> None:
    trainer = build(dataclasses.replace(TRAIN, rows=2, accumulation=2))
    batch = trainer.batches.take(0, 4)
    tokens_BT, documents_BT, labels_BT = batch.to_torch("cpu")
    with torch.no_grad():
        logits_BTV = trainer.student(tokens_BT, documents_BT).double()
    # ... over all of them, not of the means of the two passes
    expected = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)
    step = next(trainer.steps())
    assert step.loss == pytest.approx(float(expected), rel=1e-5)
    assert (step.rows, step.labelled) == (4, batch.labelled)


def test_the_first_update_has_the_size_of_the_configured_rate() -> None:
    trainer = build()
    before = trainer.student.embed.weight.detach().clone()
    next(trainer.steps())
    largest = float((trainer.student.embed.weight.detach() - before).abs().max())
    assert largest == pytest.approx(TRAIN.lr, rel=1e-2)


def test_a_gradient_is_gone_before_the_next_step() -> None:
    trainer = build(dataclasses.replace(TRAIN, lr=1e-12))
    norms = []
    for step in trainer.steps():
        norms.append(step.grad_norm)
        trainer.position = 0
    assert len(norms) == 4 and norms == pytest.approx([norms[0]] * 4, rel=1e-5)


def test_passes_of_a_step_add_up_to_the_whole_batch() -> None:
    whole = gradients_of_a_step(build())
    parts = gradients_of_a_step(build(dataclasses.replace(TRAIN, rows=1, accumulation=4)))
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        largest = float(gradient.abs().max())
        assert float((gradient - parts[name]).abs().max()) <= 1e-3 * largest, name
