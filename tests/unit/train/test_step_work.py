"""What a step, an evaluation, a save and a receipt compute, counted: no clock is read."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from engine.data import batches as rows_of_text
from engine.data.batches import Batches, heldout_rows, labelled_rows
from engine.data.tokens import TokenStream, starts_of
from engine.log.events import DataReady
from engine.models.config import ModelConfig
from engine.models.load import new_decoder
from engine.models.packed import head_of
from engine.spec import LossSection, TrainSection
from engine.teachers.frozen import DequantizedTeacher
from engine.train import finish
from engine.train.checkpoint import write as checkpoint
from engine.train.checkpoint.write import FileCalls
from engine.train.heldout import heldout_loss
from engine.train.trainer import Trainer
from tests.support.kit import tiny_config
from tests.support.streams import make_stream


def stream_of(tokens: int, document: int = 40) -> TokenStream:
    words = np.random.default_rng(3).integers(1, 300, tokens).astype(np.uint16)
    return make_stream(words, starts_of([document] * (tokens // document)))


def build(
    *,
    rows: int = 2,
    seq_len: int = 24,
    hidden_size: int = 32,
    heads: int = 4,
    accumulation: int = 1,
) -> Any:
    shape = tiny_config(hidden_size=hidden_size, num_attention_heads=heads)
    student = ModelConfig.from_dict(shape, "student")
    teacher = ModelConfig.from_dict(shape, "teacher")
    return Trainer(
        student=new_decoder(student, seed=0),
        teacher=DequantizedTeacher(new_decoder(teacher, seed=1)),
        batches=Batches(stream_of(8000), seq_len=seq_len, rows_per_batch=rows, seed=1),
        train=TrainSection(steps=9, rows=rows, lr=1e-3, warmup_steps=0, accumulation=accumulation),
        loss=LossSection(alpha=0.3),
        device=torch.device("cpu"),
        precision="fp32",
    )


class Operations(TorchDispatchMode):
    """Counts the results of what is launched, and the elements that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.written, self.largest_bytes = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else (found,)
        self.count += len(results)
        for one in results:
            if isinstance(one, Tensor) and not func.is_view:
                self.written += one.numel()
                self.largest_bytes = max(self.largest_bytes, one.numel() * one.element_size())
        return found


def operations(trainer: Trainer) -> Operations:
    """Those of the second step: the first makes the optimizer's state."""
    steps = trainer.steps()
    next(steps)
    with Operations() as found:
        next(steps)
    return found


@pytest.mark.parametrize(
    "larger", [{"rows": 8}, {"seq_len": 96}, {"hidden_size": 64}], ids=lambda one: next(iter(one))
)
def test_a_larger_step_launches_no_more_operations(larger: dict[str, int]) -> None:
    assert operations(build(**larger)).count == operations(build()).count


def test_more_heads_of_the_same_width_write_no_more_numbers() -> None:
    few, many = (operations(build(seq_len=96, heads=heads)).written for heads in (4, 16))
    assert many < 1.02 * few


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_multiplies_by_each_matrix_once_and_three_times_to_train_it(
    accumulation: int,
) -> None:
    trainer = build(rows=4, seq_len=64, accumulation=accumulation)
    weights = sum(p.numel() for p in trainer.student.parameters() if p.ndim == 2)
    with FlopCounterMode(display=False) as counted:
        step = next(trainer.steps())
    # 2 for each number and token: forward in both models, and the student's two products backward. The head is in
    # them: it is the embedding. The counter knows no FLOPs of attention on a CPU.
    expected = (2 + 2 + 4) * weights * step.tokens
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_teacher_s_is_that_of_all_micro_batches() -> None:
    trainer = build(accumulation=3)
    forward_backward, taught_s = trainer._forward_backward, []

    def timed(*arguments: Any) -> Any:
        terms, seconds = forward_backward(*arguments)
        taught_s.append(seconds)
        return terms, seconds

    trainer._forward_backward = timed
    step = next(trainer.steps())
    assert len(taught_s) == 3 and step.teacher_s == sum(taught_s)
    assert step.step_s == sum(step.phases.values()) and "teacher" in step.phases


def test_an_evaluation_runs_its_model_once_and_makes_nothing_larger_than_logits() -> None:
    decoder = new_decoder(ModelConfig.from_dict(tiny_config(), "student"), seed=0).requires_grad_(
        False
    )
    batches = list(heldout_rows(stream_of(2000), 40, 8).split(4))
    asked: list[int] = []

    def hidden(tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        asked.append(len(tokens_BT))
        return decoder.hidden(tokens_BT, documents_BT)

    with Operations() as found:
        _, labelled = heldout_loss(hidden, head_of(decoder), batches, torch.device("cpu"))
    assert asked == [4, 4]
    assert labelled == sum(batch.labelled for batch in batches)
    assert found.largest_bytes <= 4 * 40 * decoder.config.vocab_size * 4


def test_rows_are_gathered_when_they_are_asked_for_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[int] = []
    gather = rows_of_text.gather_rows

    def counted(stream: TokenStream, seq_len: int, row_ids: Any) -> Any:
        gathered.append(len(row_ids))
        return gather(stream, seq_len, row_ids)

    monkeypatch.setattr(rows_of_text, "gather_rows", counted)
    stream = stream_of(2000)
    stream = dataclasses.replace(stream, labelled=np.arange(len(stream)) % 3 == 0)
    assert len(labelled_rows(stream, 40, "train")) == 50
    batches = Batches(stream, seq_len=40, rows_per_batch=4, seed=1)
    for index in range(3):
        batches.batch_at(index)
    assert gathered == [4, 4, 4]


def test_a_batch_of_a_long_text_takes_the_memory_of_its_rows() -> None:
    batches = Batches(stream_of(400_000), seq_len=40, rows_per_batch=4, seed=1)
    batches.batch_at(0)  # which makes the order of the epoch
    tracemalloc.start()
    try:
        batches.batch_at(1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def counted_orders(monkeypatch: pytest.MonkeyPatch, owner: Any) -> list[int]:
    epochs: list[int] = []
    order = rows_of_text.epoch_order

    def counted(rows: int, seed: int, epoch: int) -> Any:
        epochs.append(epoch)
        return order(rows, seed, epoch)

    monkeypatch.setattr(owner, "epoch_order", counted)
    return epochs


def test_the_order_of_an_epoch_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = counted_orders(monkeypatch, rows_of_text)
    batches = Batches(stream_of(2000), seq_len=40, rows_per_batch=10, seed=1)
    for index in range(10):  # two epochs of 50 rows
        batches.batch_at(index)
    assert epochs == [0, 1]


def test_the_hash_of_the_order_makes_each_epoch_once_and_holds_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs = counted_orders(monkeypatch, finish)
    ready = DataReady(
        source="",
        train_files=1,
        train_tokens=1,
        train_sha256="",
        epoch_rows=50,
        heldout_files=1,
        heldout_tokens=1,
        heldout_sha256="",
        skipped_files=0,
    )
    asked: Any = type("Asked", (), {})()
    asked.data, asked.rows = ready, 120
    asked.spec = type("Spec", (), {"train": TrainSection(steps=1, seed=5)})
    whole = [rows_of_text.epoch_order(50, 5, epoch) for epoch in range(3)]
    expected = np.concatenate(whole)[:120].astype("<i8").tobytes()
    assert finish.order_sha256(asked) == hashlib.sha256(expected).hexdigest()
    assert epochs == [0, 1, 2]


class CountedCalls(FileCalls):
    def __init__(self) -> None:
        self.written = 0

    def write(self, descriptor: int, data: memoryview) -> int:
        count = super().write(descriptor, data)
        self.written += count
        return count


def test_a_save_writes_its_files_once(tmp_path: Path) -> None:
    calls = CountedCalls()
    content: dict[str, Any] = {"weights": bytes(3 << 20), "state.json": b"{}\n"}
    saved = checkpoint.save(tmp_path, 1, content, calls=calls)
    assert calls.written == pytest.approx(saved.bytes, rel=0.01)


def test_a_step_collects_no_garbage_and_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda *_: done.append("collect"))
    monkeypatch.setattr(time, "sleep", lambda _: done.append("sleep"))
    next(build().steps())
    assert not done and not torch.is_anomaly_enabled()
