"""Steps that are launched before the numbers of the one before are there: the same steps, in order, with
the same bits; and a non-finite one that no host had seen changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.log.events import STEP_PHASES, StepDone
from engine.models.activation_checkpointing import configure_layers
from engine.models.load import new_decoder
from engine.spec import TrainSection
from engine.train import optimizer as optimizer_module
from engine.train import trainer as subject
from engine.train.non_finite import non_finite
from engine.train.optimizer import build_optimizer
from engine.train.step import PhaseTimer
from engine.train.trainer import Trainer
from tests.support.budgets import config, stream_of
from tests.support.kit import Kit
from tests.support.trainers import LOSS, TRAIN, build, run_ahead

STEPS = TRAIN.steps


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, moments and counts, by name."""
    found = {n: p.detach().clone() for n, p in trainer.student.named_parameters()}
    for name, parameter in trainer.student.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = value.clone()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def numbers(step: StepDone) -> tuple[Any, ...]:
    return (step.step, step.loss, step.ce, step.kd, step.grad_norm, step.lr, step.position)


def walk(
    trainer: Trainer, ahead: Callable[[int], bool]
) -> tuple[list[StepDone], list[int], list[dict[str, Tensor]]]:
    """The steps, which step had been launched at each, and the weights then."""
    done, launched, held = [], [], []
    for step in run_ahead(trainer, ahead):
        done.append(step)
        launched.append(trainer.step)
        held.append(weights(trainer))
    return done, launched, held


@pytest.mark.parametrize("accumulation", [1, 2])
def test_running_ahead_changes_nothing_but_when_numbers_are_seen(
    kit: Kit, accumulation: int
) -> None:
    train = dataclasses.replace(TRAIN, accumulation=accumulation, rows=2)
    plain, at, held = walk(build(kit, train), lambda step: False)
    ahead, ahead_at, ahead_held = walk(build(kit, train), lambda step: True)
    assert at == list(range(1, STEPS + 1))
    assert ahead_at == [*range(2, STEPS + 1), STEPS]
    assert [numbers(s) for s in ahead] == [numbers(s) for s in plain]
    # What is held when step n is seen is what step n + 1 left, and at the end the end.
    assert all(same(ahead_held[n], held[n + 1]) for n in range(STEPS - 1))
    assert same(ahead_held[-1], held[-1])


def test_whoever_looks_after_a_step_finds_the_weights_as_it_left_them(kit: Kit) -> None:
    _, _, held = walk(build(kit), lambda step: False)
    _, at, ahead_held = walk(build(kit), lambda step: step not in (2, 5))
    assert at == [2, 2, 4, 5, 5, 6]
    for step in (2, 5):
        assert same(ahead_held[step - 1], held[step - 1])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_not_finite_leaves_every_weight_and_moment(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    bad, calls = 3, [0]
    real = subject.distillation_loss

    def loss(*tensors: Any, **settings: Any) -> Any:
        calls[0] += 1
        terms = real(*tensors, **settings)
        if calls[0] == bad:
            return dataclasses.replace(terms, loss=terms.loss * math.inf)
        return terms

    monkeypatch.setattr(subject, "distillation_loss", loss)
    trainer = build(kit)
    done, _, held = walk(trainer, lambda step: ahead)
    assert [s.updated for s in done] == [n != bad for n in range(1, STEPS + 1)]
    assert {found.id for found in non_finite(done[bad - 1])} >= {"loss"}
    if not ahead:
        assert same(held[bad - 1], held[bad - 2])
        assert not same(held[bad], held[bad - 1])
    counts = {float(v) for n, v in held[-1].items() if n.startswith("step/")}
    assert counts == {STEPS - 1}
    assert all(torch.isfinite(v).all() for v in held[-1].values())


def test_a_first_step_that_is_not_finite_leaves_moments_of_nothing(kit: Kit) -> None:
    trainer = build(kit)
    parameter = trainer.student.get_parameter("norm.weight")
    with torch.no_grad():
        kept = parameter[0].clone()
        parameter[0] = math.nan
    next(iter(trainer.steps()))
    with torch.no_grad():
        parameter[0] = kept
    fresh = build(kit)
    fresh.step, fresh.position = trainer.step, trainer.position
    assert [s.loss for s in trainer.steps()] == [s.loss for s in fresh.steps()]


@pytest.mark.parametrize("clip_norm", [0.0, 1e-3, 1e3])
def test_clipping_inside_the_update_is_clipping_before_it(clip_norm: float) -> None:
    train = TrainSection(lr=1e-2, clip_norm=clip_norm)
    results = []
    for inside in (False, True):
        model = torch.nn.Linear(7, 5)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        optimizer = build_optimizer(model, train, torch.device("cpu"))
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(2, 7)).square().sum())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            if inside:
                optimizer_module.update_if_finite(optimizer, norm, norm, clip_norm=clip_norm)
                continue
            if clip_norm:
                torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), clip_norm, norm)
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


def test_a_batch_that_was_looked_at_is_not_yet_taken(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(kit)
    taken: list[int] = []
    real = trainer.batches.take

    def take(position: int, rows: int) -> Batch:
        taken.append(position)
        return real(position, rows)

    monkeypatch.setattr(trainer.batches, "take", take)
    steps = trainer.steps()
    losses = [next(steps).loss]
    assert taken == [0, 4] and trainer.position == 4
    losses.append(next(steps).loss)
    assert taken == [0, 4, 8] and trainer.position == 8
    # Elsewhere than it looked: what it looked at is not used.
    trainer.position = 20
    losses.append(next(steps).loss)
    assert taken[3:] == [20, 24]
    losses += [step.loss for step in steps]
    assert max(taken) == 32 and trainer.step == STEPS

    other = build(kit)
    other._fetches_ahead = False
    plain = other.steps()
    expected = [next(plain).loss for _ in range(2)]
    other.position = 20
    assert losses == expected + [step.loss for step in plain]


def test_the_phases_of_a_step_add_up_to_it(kit: Kit) -> None:
    for ahead in (False, True):
        done, _, _ = walk(build(kit, loss=LOSS), lambda step, ahead=ahead: ahead)
        for step in done:
            spent = {n: s for n, s in step.phases.items() if n != "idle"}
            assert set(spent) == set(STEP_PHASES) - {"rollout"} and all(
                s >= 0 for s in spent.values()
            )
            assert sum(spent.values()) > 0
            assert ("idle" in step.phases) == (ahead and step.step > 1)
            if not ahead:
                assert sum(spent.values()) == pytest.approx(step.step_s)


def test_a_timer_adds_up_the_parts_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0, 17.0, 18.0])
    monkeypatch.setattr("engine.train.step.time.perf_counter", lambda: next(clock))
    first = PhaseTimer(torch.device("cpu"), None)
    for phase in ("data", "student", "data", "student"):
        first.mark(phase)
    first.end()
    first.wait()
    assert first.seconds() == {"data": 4.0, "student": 6.0}
    second = PhaseTimer(torch.device("cpu"), first)
    second.mark("data")
    second.end()
    assert second.seconds() == {"data": 1.0, "idle": 7.0}


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_between_two_steps_nothing_waits_for_the_device(packed: bool) -> None:
    from engine.data.batches import Batches
    from engine.teachers.frozen import DequantizedTeacher

    device = torch.device("cuda")
    shape = config(width=256, feed_forward=512, vocabulary=1000)
    teacher = DequantizedTeacher(new_decoder(shape, 1).to(device, torch.bfloat16))
    teacher.decoder.packed = packed
    trainer = Trainer(
        student=new_decoder(shape, 0).to(device),
        teacher=teacher,
        batches=Batches(stream_of(1000, 64 * 256), seq_len=256, rows_per_batch=4, seed=0),
        train=TrainSection(steps=12, rows=4, accumulation=2, warmup_steps=2),
        loss=LOSS,
        device=device,
        precision="bf16",
    )
    configure_layers(trainer.student, packed=packed, checkpointing=False)
    steps = run_ahead(trainer, lambda step: step > 2)
    losses = [next(steps).loss for _ in range(3)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype; said once a process
            torch.cuda.set_sync_debug_mode("error")
        losses += [step.loss for step in steps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == 12 and all(math.isfinite(x) for x in losses)
