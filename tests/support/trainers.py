"""Trainers of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engine.data.batches import Batches
from engine.data.corpus import open_corpus
from engine.formats.tokenizer import open_tokenizer
from engine.log.events import StepDone
from engine.models.load import load_decoder, new_decoder
from engine.models.read_config import read_config
from engine.spec import LossSection, TrainSection
from engine.teachers.frozen import DequantizedTeacher
from engine.train.trainer import Trainer
from tests.support.kit import Kit
from tests.support.streams import documents_of, tokenize

TRAIN = TrainSection(steps=6, rows=4, warmup_steps=2, lr=1e-3)

LOSS = LossSection(alpha=0.3, temperature=2.0)


def build(kit: Kit, train: TrainSection = TRAIN, loss: LossSection = LOSS) -> Trainer:
    corpus = open_corpus(str(kit.corpus), heldout_fraction=0.2)
    stream = tokenize(documents_of(corpus.train), open_tokenizer(kit.teacher))
    return Trainer(
        student=new_decoder(read_config(kit.student), seed=0),
        teacher=DequantizedTeacher(load_decoder(kit.teacher)),
        batches=Batches(stream, seq_len=32, rows_per_batch=train.rows, seed=train.seed),
        train=train,
        loss=loss,
        device=torch.device("cpu"),
        precision="fp32",
    )


def run_ahead(
    trainer: Trainer, ahead: Callable[[int], bool] = lambda step: True
) -> Iterator[StepDone]:
    """Take every step as the training loop does; after a step for which `ahead` is true, the next is launched
    before it is finished."""
    trainer.student.train()
    launched = None
    while launched is not None or trainer.step < trainer.train.steps:
        launched = launched or trainer.launch()
        goes_on = trainer.step < trainer.train.steps and ahead(launched.step)
        following = trainer.launch(launched) if goes_on else None
        yield trainer.finish(launched)
        launched = following


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.student.named_parameters()}
