"""What the log says of data, models, the start and memory is what there is."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.data.batches import gather_rows
from engine.data.tokens import TokenStream, starts_of
from engine.machine.host import Host
from engine.machine.reading import measured
from engine.models.config import ModelConfig
from engine.models.load import new_decoder
from engine.plan.memory import MemoryBudget
from engine.spec import LossSection, TrainSection
from engine.train import to_events
from engine.train.trainer import Trainer
from tests.support.kit import tiny_config
from tests.support.streams import make_stream

SEQ_LEN = 8


def padded_stream() -> TokenStream:
    """Four rows: documents with labels, padding, and a row in which nothing is to be predicted."""
    lengths = [6, 2, 8, 5, 3, 8]
    labelled = np.ones(sum(lengths), dtype=np.bool_)
    labelled[8:16] = labelled[6:8] = labelled[21:24] = False
    words = np.arange(1, 33, dtype=np.uint16)
    padding = np.array([False, True, False, False, True, False])
    stream = make_stream(words, starts_of(lengths))
    return dataclasses.replace(stream, labelled=labelled, padding=padding)


def test_the_data_in_the_log_are_counted_as_rows_show_them() -> None:
    train = padded_stream()
    held = make_stream(np.arange(1, 12, dtype=np.uint16), starts_of([11]))
    tokens: Any = SimpleNamespace(
        train=train,
        heldout=held,
        faults=(),
        documents=(4, 1),
        skipped=0,
        dropped_count=0,
        dropped=(),
        repeated=0,
        beside={},
    )
    found = to_events.data("corpus", tokens, SEQ_LEN)
    rows = gather_rows(train, SEQ_LEN, np.arange(4))
    assert train.padding is not None
    padded = int(train.padding[rows.documents_BT].sum())
    has_label = int((rows.labels_BT >= 0).any(1).sum())
    assert (padded, has_label) == (5, 3)
    assert (found.padding, found.train_tokens) == (padded, 32 - padded)
    assert (found.epoch_rows, found.unlabelled_rows) == (has_label, 4 - has_label)
    assert found.labelled_tokens == train.labelled_count < 32
    assert (found.heldout_tokens, found.heldout_sha256) == (11, held.sha256)
    assert found.train_sha256 == train.sha256


def test_a_model_in_the_log_has_the_counts_of_its_modules() -> None:
    config = ModelConfig.from_dict(tiny_config(), "student")
    decoder = new_decoder(config, seed=0)
    found = to_events.model("student", "here", config, "fp32", "0" * 64)
    assert found.parameters == sum(p.numel() for p in decoder.parameters())
    assert found.layers == len(decoder.layers)
    assert (found.vocab_size, found.hidden_size) == tuple(decoder.embed.weight.shape)


def test_the_start_in_the_log_is_that_of_the_trainer() -> None:
    decoder = new_decoder(ModelConfig.from_dict(tiny_config(), "student"), seed=0)
    trainer: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        train=TrainSection(steps=9, rows=3, accumulation=2, lr=2e-3),
        loss=LossSection(alpha=0.3, temperature=2.0),
        parameters=list(decoder.parameters()),
    )
    spec: Any = SimpleNamespace(
        compute=SimpleNamespace(gpus=1), data=SimpleNamespace(seq_len=SEQ_LEN), sha256="0" * 64
    )
    found = to_events.start("run", spec, trainer, 4, 600.0, measured(1e12, "a datasheet"), {})
    assert (found.resumed_from, found.flops_per_token, found.steps) == (4, 600.0, 9)
    assert (found.rows_per_step, found.seq_len) == (6, SEQ_LEN)
    assert (found.alpha, found.temperature, found.peak_lr) == (0.3, 2.0, 2e-3)
    assert found.trainable_parameters == sum(p.numel() for p in decoder.parameters())


def test_the_peak_of_host_memory_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    of_process = (measured(1.0, "now"), measured(2.0, "peak"))
    monkeypatch.setattr(Host, "own_memory", lambda _: of_process)
    budget = cast(MemoryBudget, SimpleNamespace(total_bytes=3.0))
    trainer = cast(Trainer, SimpleNamespace(device=torch.device("cpu")))
    found = to_events.memory_peak(7, budget, trainer)
    assert (found.step, found.host_peak_bytes, found.predicted_bytes) == (7, 2.0, 3.0)
    assert to_events.trainer_memory(torch.device("cpu")).held_bytes == 1.0
