"""Each step carries what must be true of any loss, and says so when it is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from engine.data.batches import Batches
from engine.data.tokens import starts_of
from engine.errors import TrainingFailed
from engine.log.events import StepDone
from engine.log.fold import Follower
from engine.log.folder import create_run
from engine.log.write import LogWriter
from engine.loss.kd_loss import LARGEST_DZ_SUM, LOWEST_DIVERGENCE
from engine.models.config import ModelConfig
from engine.models.load import new_decoder
from engine.runtime.ranks import Ranks
from engine.spec import LossSection, TrainSection
from engine.teachers.frozen import DequantizedTeacher
from engine.train import trainer as trainer_module
from engine.train.loop import log_step
from engine.train.ranks.sharding import check_same_weights
from engine.train.step import broken_invariants
from engine.train.trainer import Trainer
from tests.support.kit import tiny_config
from tests.support.streams import make_stream


def _steps(*, accumulation: int = 2, teacher: bool = True) -> list[StepDone]:
    import numpy as np

    config = ModelConfig.from_dict(tiny_config(), "tiny")
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 300, 2000).astype(np.int32)
    stream = make_stream(tokens, starts_of([2000]))
    trainer = Trainer(
        student=new_decoder(config, seed=0),
        teacher=DequantizedTeacher(new_decoder(config, seed=1)) if teacher else None,
        batches=Batches(stream, seq_len=16, rows_per_batch=2, seed=0),
        train=TrainSection(steps=3, rows=2, accumulation=accumulation, lr=1e-2, warmup_steps=0),
        loss=LossSection(alpha=0.3 if teacher else 1.0),
        device=torch.device("cpu"),
        precision="fp32",
    )
    return list(trainer.steps())


def test_a_sound_step_is_within_rounding() -> None:
    for step in _steps():
        assert step.lowest_kl is not None and 0 < step.lowest_kl < 10
        assert 0 <= step.largest_dz_sum < LARGEST_DZ_SUM
        assert list(broken_invariants(step, temperature=1.0)) == []


def test_without_a_teacher_there_is_no_divergence_but_a_gradient() -> None:
    for step in _steps(teacher=False):
        assert step.lowest_kl is None and 0 <= step.largest_dz_sum < LARGEST_DZ_SUM


def test_the_worst_row_of_any_micro_batch_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = trainer_module.distillation_loss, []

    def spoiled(*arguments: object, **named: object) -> object:

        terms = real(*arguments, **named)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) != 1:  # the first micro-batch of the first step alone
            return terms
        return dataclasses.replace(
            terms,
            lowest_kl=torch.tensor(-0.01),
            largest_dz_sum=torch.tensor(0.5),
        )

    monkeypatch.setattr(trainer_module, "distillation_loss", spoiled)
    first, *others = _steps()
    assert first.lowest_kl == pytest.approx(-0.01) and first.largest_dz_sum == pytest.approx(0.5)
    words = list(broken_invariants(first, temperature=2.0))
    assert len(words) == 2 and "-1.00e-02" in words[0] and "5.00e-01" in words[1]
    assert all(not list(broken_invariants(step, 2.0)) for step in others)


def test_a_broken_invariant_is_an_error_in_the_log(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", "", {})
    sound = _steps()[0]
    broken = msgspec.structs.replace(sound, lowest_kl=2 * LOWEST_DIVERGENCE)
    with LogWriter(run.events, writer="trainer") as log:
        for step in (sound, broken):
            log_step(log.write, step, 1.0)
    view = Follower(run).read_all()
    assert [note.level for note in view.notes] == ["error"]
    assert "divergence" in view.notes[0].text


def test_ranks_that_begin_with_other_weights_are_told_before_they_are_sharded() -> None:
    class Two(Ranks):
        def collect(self, said: Any) -> list[Any]:
            return [first, said]

    model = new_decoder(ModelConfig.from_dict(tiny_config(), "tiny"), seed=0)
    first: Any = None

    def keep(said: Any) -> list[Any]:
        nonlocal first
        first = said
        return [said]

    check_same_weights(model, "student", cast(Ranks, SimpleNamespace(collect=keep)))
    check_same_weights(model, "student", Two())
    with pytest.raises(TrainingFailed, match="rank 1 has another student than the first rank"):
        check_same_weights(new_decoder(model.config, seed=1), "student", Two())
