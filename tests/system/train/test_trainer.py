"""The training step: what it counts, what it changes, and what a bad number may not reach."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from engine.data.batches import Batch
from engine.log.events import HOST_PARTS
from engine.teachers.frozen import DequantizedTeacher
from engine.train.non_finite import non_finite
from engine.train.step import StepObserver
from tests.support.kit import Kit
from tests.support.trainers import LOSS, TRAIN, build, snapshot


def test_every_trainable_tensor_moves_and_the_teacher_does_not(kit: Kit) -> None:
    trainer = build(kit)
    assert isinstance(trainer.teacher, DequantizedTeacher)
    before = snapshot(trainer)
    held = dict(trainer.teacher.decoder.named_buffers())
    frozen = {n: t.clone() for n, t in held.items()}
    assert len(frozen) == len(before) and not list(trainer.teacher.decoder.parameters())
    next(iter(trainer.steps()))
    still = [n for n, p in trainer.student.named_parameters() if torch.equal(p, before[n])]
    assert still == []
    for name, tensor in held.items():
        assert not tensor.requires_grad and tensor.grad is None
        assert torch.equal(tensor, frozen[name]), name


def test_the_logged_rate_is_the_one_the_optimizer_used(kit: Kit) -> None:
    trainer = build(kit)
    for step in trainer.steps():
        assert step.lr == trainer.optimizer.param_groups[0]["lr"]
        assert step.rows == 4 and step.tokens == 4 * 32 and step.position == 4 * step.step


def test_time_between_steps_is_not_counted_as_a_step(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pause = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + pause[0])
    for step in build(kit).steps():
        assert step.step_s < 500 and step.data_s < 500
        pause[0] += 1000.0  # an evaluation that takes a quarter of an hour


def test_rows_that_come_late_are_waited_for_in_the_step_and_observers_outside_of_it(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pause = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + pause[0])
    trainer = build(kit)
    take = trainer.batches.take

    def late(position: int, rows: int) -> Batch:
        pause[0] += 1000.0
        return take(position, rows)

    class Slow(StepObserver):
        def updated(self, step: int) -> None:
            pause[0] += 300.0

    monkeypatch.setattr(trainer.batches, "take", late)
    trainer.observers = (Slow(),)
    for step in trainer.steps():
        # The first step fetches its own batch and the next one, the last step none.
        batches = 2 if step.step == 1 else int(step.step < TRAIN.steps)
        assert step.data_s == pytest.approx(1000.0 * batches, abs=100)
        assert step.host["data"] == pytest.approx(1000.0 * batches, abs=100)
        assert step.outside_s == pytest.approx(300.0, abs=100)
        assert step.host["observers"] == pytest.approx(300.0, abs=100)
        assert step.wall_s == pytest.approx(sum(step.host.values()))
        pause[0] += 50.0  # what nobody gave a name
        assert set(step.host) <= set(HOST_PARTS)


def test_alpha_one_does_not_ask_the_teacher(kit: Kit) -> None:
    trainer = build(kit, loss=dataclasses.replace(LOSS, alpha=1.0))
    trainer.teacher = None
    step = next(iter(trainer.steps()))
    assert step.kd is None and step.teacher_s is None and step.loss == pytest.approx(step.ce)


def test_a_non_finite_gradient_never_reaches_the_weights(kit: Kit) -> None:
    trainer = build(kit)
    with torch.no_grad():
        trainer.student.get_parameter("norm.weight")[0] = float("nan")
    before = snapshot(trainer)
    step = next(iter(trainer.steps()))
    assert not step.updated and {found.id for found in non_finite(step)} >= {"loss", "grad_norm"}
    for name, parameter in trainer.student.named_parameters():
        assert torch.equal(parameter, before[name]) or name == "norm.weight"


def test_one_batch_is_learnt_by_heart(kit: Kit) -> None:
    train = dataclasses.replace(TRAIN, steps=150, lr=1e-2, warmup_steps=5, weight_decay=0.0)
    trainer = build(kit, train, dataclasses.replace(LOSS, alpha=1.0))
    steps = trainer.steps()
    losses = []
    for _ in range(150):
        trainer.position = 0
        losses.append(next(steps).loss)
    assert losses[-1] < 0.05 * losses[0], losses[::30]


def test_the_same_seed_gives_the_same_curve(kit: Kit, tmp_path: Path) -> None:
    first = [step.loss for step in build(kit).steps()]
    assert first == [step.loss for step in build(kit).steps()]
    other = build(kit, dataclasses.replace(TRAIN, seed=1))
    assert [step.loss for step in other.steps()] != first
