"""A run that is saved, stopped and resumed takes the steps of one that was never stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.data.batches import Batches
from engine.data.tokens import starts_of
from engine.log.events import CheckpointSaved, StepDone
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.models.config import ModelConfig
from engine.models.load import new_decoder
from engine.spec import RunSpec, build_spec
from engine.train.checkpoint import keeper as keepers
from engine.train.checkpoint.keeper import Keeper
from engine.train.trainer import Trainer
from tests.support.kit import tiny_config
from tests.support.streams import make_stream

ROWS, ROWS_PER_EPOCH = 3, 10


def spec_of(**checkpoint: object) -> RunSpec:
    tree: dict[str, Any] = {
        "student": {"config": "student.json"},
        "data": {"corpus": "python-stdlib", "seq_len": 16},
        "loss": {"alpha": 1.0},
        "train": {"steps": 20, "rows": ROWS, "lr": 1e-2, "warmup_steps": 2, "seed": 5},
        "checkpoint": checkpoint,
    }
    return build_spec(tree, check_paths=False)


def trainer_of(spec: RunSpec, seed: int = 0) -> Trainer:
    words = np.random.default_rng(3).integers(1, 300, 16 * ROWS_PER_EPOCH).astype(np.uint16)
    stream = make_stream(words, starts_of([20] * 8))
    return Trainer(
        student=new_decoder(ModelConfig.from_dict(tiny_config(), "student"), seed=seed),
        teacher=None,
        batches=Batches(stream, seq_len=16, rows_per_batch=ROWS, seed=spec.train.seed),
        train=spec.train,
        loss=spec.loss,
        device=torch.device("cpu"),
        precision="fp32",
    )


def keeper_of(folder: Path, spec: RunSpec, logged: list[Any] | None = None) -> Keeper:
    run = RunFolder(folder)
    run.effective.write_text(json.dumps({"spec": spec.to_dict()}))
    log = (lambda _: None) if logged is None else logged.append
    return Keeper(run, spec, log=log, sync_log=lambda: None)


def take(trainer: Trainer, count: int) -> list[StepDone]:
    steps = trainer.steps()
    return [next(steps) for _ in range(count)]


def numbers(step: StepDone) -> tuple[Any, ...]:
    return step.step, step.position, step.loss, step.grad_norm, step.lr, step.rows, step.labelled


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainer.student.named_parameters():
        held = trainer.optimizer.state[parameter]
        found |= {name: parameter.detach(), **{f"{key}/{name}": held[key] for key in held}}
    return found


def test_a_resume_in_a_later_epoch_takes_the_steps_of_a_run_that_went_on(tmp_path: Path) -> None:
    spec = spec_of()
    alone, stopped, resumed = trainer_of(spec), trainer_of(spec), trainer_of(spec, seed=9)
    before = take(alone, 7)
    assert before[-1].position == 7 * ROWS > 2 * ROWS_PER_EPOCH
    take(stopped, 7)
    keeper_of(tmp_path, spec).save(stopped, 1.5)
    drawn = torch.rand(4)
    keeper = keeper_of(tmp_path, spec)
    keeper.restore(resumed, RunView(), allow_fallback=False)
    assert torch.equal(torch.rand(4), drawn)
    assert keeper.best_loss == 1.5
    went_on, again = take(alone, 6), take(resumed, 6)
    assert [numbers(step) for step in again] == [numbers(step) for step in went_on]
    others = tensors(resumed)
    for name, tensor in tensors(alone).items():
        assert torch.equal(tensor, others[name]), name


def test_a_checkpoint_says_the_seed_and_the_rows_of_its_run(tmp_path: Path) -> None:
    spec = spec_of()
    trainer = trainer_of(spec)
    take(trainer, 4)
    path = keeper_of(tmp_path, spec).save(trainer, None)
    said = json.loads((path / "state.json").read_text())
    assert (said["seed"], said["step"], said["position"]) == (5, 4, {"rows": 4 * ROWS})


def test_the_newest_and_the_best_checkpoint_are_kept_also_after_a_resume(tmp_path: Path) -> None:
    spec = spec_of(keep_last=2)
    logged: list[Any] = []
    trainer, keeper = trainer_of(spec), keeper_of(tmp_path, spec, logged)
    for loss in (3.0, 1.0, 2.0, 2.5, 2.2):
        take(trainer, 1)
        keeper.save(trainer, loss)
        keeper.prune()
    saved = [one for one in logged if isinstance(one, CheckpointSaved)]
    assert [one.best for one in saved] == [True, True, False, False, False]
    assert all(one.save_s > 0 for one in saved)
    assert kept(tmp_path) == [2, 4, 5]
    keeper, resumed = keeper_of(tmp_path, spec), trainer_of(spec)
    keeper.restore(resumed, RunView(checkpoints=tuple(saved)), allow_fallback=False)
    assert (keeper.best_loss, keeper.best_step) == (1.0, 2)
    for loss in (0.5, 0.7, 0.8):
        take(resumed, 1)
        keeper.save(resumed, loss)
        keeper.prune()
    assert kept(tmp_path) == [6, 7, 8]


def kept(folder: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*")
    )


def test_a_save_and_a_resume_run_no_model_and_read_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of()
    trainer, resumed = trainer_of(spec), trainer_of(spec)
    take(trainer, 2)
    done: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda _: done.append("sleep"))
    monkeypatch.setattr(keepers, "verify", lambda path: done.append("verify"))
    monkeypatch.setattr(Tensor, "tolist", lambda _: done.append("tolist") or [])
    keeper_of(tmp_path, spec).save(trainer, None)
    monkeypatch.setattr(type(resumed.student), "hidden", lambda *_: done.append("hidden"))
    keeper_of(tmp_path, spec).restore(resumed, RunView(), allow_fallback=False)
    assert not done


def test_a_save_leaves_what_trains_as_it_was(tmp_path: Path) -> None:
    spec = spec_of()
    trainer = trainer_of(spec)
    take(trainer, 2)
    before = {name: tensor.clone() for name, tensor in tensors(trainer).items()}
    keeper_of(tmp_path, spec).save(trainer, 1.0)
    after = tensors(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
