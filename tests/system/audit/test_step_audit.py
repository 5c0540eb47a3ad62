"""The audit of a real step: healthy steps pass at every stage, and what goes wrong between the parts is named."""

from __future__ import annotations

import pytest
import torch

from engine.audit import bounds, judge
from engine.catalogue import STAGES
from engine.models.load import load_decoder
from engine.teachers.frozen import DequantizedTeacher
from engine.train import auditing
from engine.train.auditing import StepAudit
from engine.train.trainer import Trainer
from engine.verdict import Level
from tests.support.checked_runs import Run, World, make_run, make_world
from tests.support.defects import BETWEEN_PARTS, Defect
from tests.support.kit import Kit

IDS = [about.id for about in STAGES]


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def judged(run: Run) -> dict[str, str]:
    return {id: str(run.results[id].verdict) for id in IDS if id in run.results}


@pytest.mark.parametrize("planted", BETWEEN_PARTS.values(), ids=BETWEEN_PARTS)
def test_a_defect_between_the_parts_is_named_by_its_stage(world: World, planted: Defect) -> None:
    with planted.plant():
        run = make_run(world, train__accumulation=2, checks__every=1)
        run.step(1)
        if not run.failures():
            # Some begin with what the first step leaves.
            run.step(1)
    failed = [id for id in IDS if id in run.failures()]
    assert failed[:1] == [planted.named_by], judged(run)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss__alpha": 1.0},
        {"loss__alpha": 0.0, "loss__temperature": 8.0},
        {"loss__temperature": 0.5, "loss__divergence": "jsd", "loss__beta": 0.2},
        {"loss__divergence": "reverse_kl", "train__accumulation": 3, "train__rows": 1},
        {"train__clip_norm": 0.0, "train__weight_decay": 0.0, "train__warmup_steps": 0},
        {"train__clip_norm": 0.01, "train__schedule": "constant"},
    ],
    ids=str,
)
def test_every_stage_of_a_healthy_step_passes(world: World, changes: dict[str, object]) -> None:
    run = make_run(world, **{"checks__every": 2} | changes)
    run.step(4)
    assert all(run.results[id].verdict.level is Level.PASS for id in IDS), judged(run)
    assert {run.results[id].step for id in IDS} == {4}


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_word_embeddings": False},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    ],
    ids=["untied", "qwen3", "llama"],
)
def test_the_reference_knows_every_family(world: World, shape: dict[str, object]) -> None:
    run = make_run(world, student=shape)
    run.step(1)
    assert all(run.results[id].verdict.level is Level.PASS for id in IDS), judged(run)


def test_a_step_that_was_launched_ahead_is_audited(world: World) -> None:
    run = make_run(world, checks__every=3)
    trainer = run.trainer
    audit = StepAudit(trainer, run.spec, run.context.teacher_decoder)
    first = trainer.launch()
    run.answer(audit.after(trainer.finish(first)))
    second = trainer.launch()
    third = trainer.launch(second)
    assert list(audit.after(trainer.finish(second))) == []
    run.answer(audit.after(trainer.finish(third)))
    assert {run.results[id].step for id in IDS} == {3} and run.failures() == {}


def test_an_audited_run_is_bit_for_bit_the_run_without(world: World) -> None:
    def train(every: int, enabled: bool) -> tuple[list[float | None], torch.Tensor, Run]:
        torch.manual_seed(5)
        run = make_run(world, train__accumulation=2, checks__every=every, checks__enabled=enabled)
        losses = [step.loss for step in run.step(5)]
        return losses, torch.rand(4), run

    losses, random, plain = train(-1, False)
    assert not plain.results
    for every in (1, 3):
        audited_losses, audited_random, audited = train(every, True)
        assert audited_losses == losses and torch.equal(audited_random, random)
        for name, parameter in audited.trainer.student.named_parameters():
            assert torch.equal(parameter, plain.trainer.student.get_parameter(name)), name


def test_memory_that_the_step_took_makes_the_references_larger_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "GROUP_NUMBERS", 1 << 13)
    monkeypatch.setitem(judge.LOGITS, "cpu", 1 << 14)
    found = []
    for room in (0, 1 << 50):
        monkeypatch.setattr(auditing, "_free_bytes", lambda _device, room=room: room)
        run = make_run(world)
        run.step(1)
        assert not run.failures()
        found.append([dict(run.results[id].numbers) for id in IDS])
    assert found[0] != found[1], "sums are made in another order"
    for small, large in zip(*found, strict=True):
        assert small == pytest.approx(large, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    ("room", "times"), [(0, 1), (100, 1), (200, 2), (799, 4), (800, 8), (1 << 60, 8)]
)
def test_what_is_in_memory_at_a_time_stays_within_the_room(room: int, times: int) -> None:
    assert bounds.memory_scale(100, room) == times


def test_a_gradient_that_is_mostly_rounding_is_unknown_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "MOSTLY_ROUNDING", 1e-12)
    run = make_run(world)
    run.step(1)
    verdict = run.results["step_gradients"].verdict
    assert verdict.level is Level.UNKNOWN and "is rounding" in verdict.reason


def test_a_step_whose_gradient_norm_is_not_finite_names_no_gradient(world: World) -> None:
    run = make_run(world, train__on_non_finite="skip")
    overflowed = run.trainer.student.get_parameter("layers.1.attention.o.weight")
    overflowed.register_hook(lambda gradient: gradient * float("nan"))
    run.step(1)
    assert "step_gradients" not in run.failures()
    verdict = run.results["step_gradients"].verdict
    assert verdict.level is Level.UNKNOWN and "norm" in verdict.reason, verdict


def with_sharp_attention(trainer: Trainer) -> None:
    """Scores so large that their rounding chooses the tokens that are attended to: in fp32 those of a run that
    diverged.
    """
    factor = 128 if trainer.dtype is torch.bfloat16 else 8192
    with torch.no_grad():
        for name, parameter in trainer.student.named_parameters():
            if name.endswith(("attention.q.weight", "attention.k.weight")):
                parameter.mul_(factor)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradients_that_rounding_decides_are_set_aside(world: World, precision: str) -> None:
    run = make_run(world, precision=precision, change=with_sharp_attention)
    run.step(1)
    assert run.failures() == {}
    verdict = run.results["step_gradients"].verdict
    assert "rounding" in verdict.reason and verdict.level in (Level.PASS, Level.UNKNOWN), verdict


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_wrong_gradient_is_named_among_those_that_rounding_decides(
    world: World, precision: str
) -> None:
    run = make_run(world, precision=precision, change=with_sharp_attention)
    wrong = run.trainer.student.get_parameter("layers.1.attention.o.weight")
    wrong.register_hook(lambda gradient: 4 * gradient)
    run.step(1)
    assert "layers.1.attention.o.weight" in run.failures()["step_gradients"]


def test_a_student_in_32_bits_may_follow_the_rounding_of_its_teacher_in_16(world: World) -> None:
    def near_its_teacher(trainer: Trainer) -> None:
        there = load_decoder(world.teacher).state_dict()
        with torch.no_grad():
            for name, parameter in trainer.student.named_parameters():
                parameter.lerp_(there[name].float(), 0.99)
        assert isinstance(trainer.teacher, DequantizedTeacher)
        trainer.teacher.decoder.to(torch.bfloat16)

    run = make_run(world, student={"hidden_size": 48}, change=near_its_teacher, loss__alpha=0.0)
    run.step(1)
    assert run.failures() == {}
    assert run.results["step_gradients"].verdict.level is Level.PASS, judged(run)
