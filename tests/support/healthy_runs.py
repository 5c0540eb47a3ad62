"""Healthy runs of different shape, learning rate and precision, drawn from a seed. Nothing is wrong with any of
them, and no check may prevent one from resuming from any of its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checks.artefact import samples_of
from engine.checks.context import Context
from engine.checks.result import Result
from engine.checks.runner import Checks
from engine.data.batches import Batches, heldout_rows
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, new_decoder
from engine.spec import RunSpec, build_spec
from engine.teachers.frozen import DequantizedTeacher
from engine.train import run as trainer_module
from engine.train.checking import context_of
from engine.train.checkpoint import state
from engine.train.checkpoint import write as checkpoint
from engine.train.checkpoint.keeper import Keeper
from engine.train.checkpoint.manifest import verify
from engine.train.trainer import Trainer
from tests.support.checked_runs import Run, World
from tests.support.kit import Kit, tiny_config

STEPS = 20
HIGH_RATE = 4e-3


def drawn(world: World, seed: int, steps: int = STEPS) -> Drawn:
    """Draw the run of a seed. Half of them train at HIGH_RATE or above, a quarter in bf16."""
    rng = random.Random(seed)
    width = rng.choice([16, 32, 64])
    heads = rng.choice([2, 4])
    family = rng.choice(
        [
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
        ]
    )
    student = family | {
        "hidden_size": width,
        "intermediate_size": width * rng.choice([1, 2, 3]),
        "num_hidden_layers": rng.choice([1, 1, 2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    low, high = ((1e-4, HIGH_RATE), (HIGH_RATE, 3e-2))[seed % 2]
    spec = {
        "data": {"seq_len": rng.choice([16, 32, 64])},
        "loss": {
            "alpha": rng.choice([0.0, 0.3, 0.7, 1.0]),
            "temperature": rng.choice([1.0, 2.0, 4.0]),
        },
        "train": {
            "steps": steps,
            "rows": rng.choice([2, 3, 4]),
            "accumulation": rng.choice([1, 1, 2]),
            "lr": low * (high / low) ** rng.random(),
            "warmup_steps": rng.choice([0, 2, 4]),
            "schedule": rng.choice(["cosine", "constant"]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "clip_norm": rng.choice([0.0, 1.0]),
            "seed": seed,
        },
    }
    return Drawn(world, student, spec, "bf16" if seed % 8 > 5 else "fp32")


@dataclass(frozen=True)
class Drawn:
    """A run that can be created repeatedly, each time from its first step."""

    world: World
    student: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    precision: str

    @property
    def seed(self) -> int:
        return int(self.settings["train"]["seed"])

    def make(self) -> Run:
        """Create the run before its first step."""
        teacher_path = (
            {} if self.settings["loss"]["alpha"] == 1.0 else {"path": str(self.world.teacher)}
        )
        tree = self.settings | {
            "teacher": teacher_path,
            "student": {"config": "student.json", "precision": self.precision},
            "compute": {"device": "cpu"},
            # Checks run once, from the checkpoint: repeated checks would give the same results.
            "checks": {"every": -1},
        }
        spec = build_spec(tree, check_paths=False)
        length, seed = spec.data.seq_len, spec.train.seed
        teacher = DequantizedTeacher(load_decoder(self.world.teacher)) if spec.has_teacher else None
        trainer = Trainer(
            student=new_decoder(
                ModelConfig.from_dict(tiny_config(**self.student), "student"), seed=seed
            ),
            teacher=teacher,
            batches=Batches(
                self.world.train, seq_len=length, rows_per_batch=spec.train.rows, seed=seed
            ),
            train=spec.train,
            loss=spec.loss,
            device=torch.device("cpu"),
            precision=self.precision,
        )
        context, samples = self.context(spec, trainer), samples_of(trainer.student)
        return Run(spec, trainer, context, Checks(spec), {}, self.world.train, samples)

    def context(self, spec: RunSpec, trainer: Trainer) -> Context:
        length, teacher = spec.data.seq_len, trainer.teacher
        return context_of(
            trainer,
            spec,
            teacher_decoder=teacher.decoder if isinstance(teacher, DequantizedTeacher) else None,
            train_stream=self.world.train,
            heldout_stream=self.world.heldout,
            heldout=list(heldout_rows(self.world.heldout, length, 4).split(4)),
            tokenizers={"teacher": self.world.tokenizer},
        )

    def train(self, folder: Path) -> tuple[list[Path], float]:
        """Train all steps, with a checkpoint before the first and after each but the last. Returns their paths
        and the largest loss."""
        run = self.make()
        trainer, worst = run.trainer, 0.0
        saved = [_save(run, folder)]
        for step in trainer.steps():
            worst = max(worst, step.loss)
            if trainer.step < trainer.train.steps:
                saved.append(_save(run, folder))
        return saved, worst

    def resume(self, path: Path) -> Run:
        """Resume the run from a checkpoint, up to its first check."""
        run = self.make()
        found = state.unpack(verify(path))
        state.restore_trainer(found, run.trainer)
        return dataclasses.replace(run, context=self.context(run.spec, run.trainer))


def _save(run: Run, folder: Path) -> Path:
    captured = state.capture_trainer(run.trainer, run.spec)
    return checkpoint.save(folder, run.trainer.step, state.pack(captured)).path


def asked(run: Run) -> list[Result]:
    """Return the results of a resumed run's checks before its first step and of that step."""
    run.begin().step(1)
    return list(run.results.values())


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a process that should have taken one step, saved it and been killed."""

    step: int
    """The step it should have taken; from the second on, after a resume."""
    code: int
    """Exit code, or minus the signal."""
    saved: bool
    reason: str
    """In the run's own words, if it recorded any."""


def killed_after_each_step(kit: Kit, run: Drawn, folder: Path, steps: int) -> Iterator[Ended]:
    """Run in `folder` with one process per step, each killed after it has saved; stops at the first process that
    ends otherwise."""
    target = RunFolder(folder / "run")
    folder.mkdir(parents=True)
    (folder / "student.json").write_text(json.dumps(tiny_config(**run.student)))
    tree = run.settings | {
        "train": run.settings["train"] | {"steps": steps + 1},
        "data": run.settings["data"] | {"corpus": str(kit.corpus), "heldout_fraction": 0.2},
        "teacher": {"path": str(kit.teacher)},
        "student": {"config": str(folder / "student.json"), "precision": run.precision},
        "eval": {"rows": 4},
        "checkpoint": {"every": 1, "keep_last": 1},
        "compute": {"device": "cpu", "threads": 1},
    }
    if run.settings["loss"]["alpha"] == 1.0:
        tree["data"] |= {"tokenizer": str(kit.teacher / "tokenizer.json")}
        tree["teacher"] = {}
    spec = build_spec(tree)
    create_run(target.path, "", {"spec": spec.to_dict(), "spec_sha256": spec.sha256})
    for step in range(1, steps + 1):
        code = _one_step_in_a_process(target, resume=step > 1)
        view = Follower(target).read_all()
        saved = code == -signal.SIGKILL and view.last_step == step
        reason = "" if view.finished is None else view.finished.reason
        yield Ended(step=step, code=code, saved=saved, reason=reason)
        if not saved:
            return


def _one_step_in_a_process(target: RunFolder, *, resume: bool) -> int:
    child = os.fork()
    if child == 0:
        save = Keeper.save

        def saves_and_dies(keeper: Keeper, *arguments: Any) -> Path:
            save(keeper, *arguments)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a killed process goes on")

        Keeper.save = saves_and_dies  # type: ignore[method-assign]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 70
        try:
            code = trainer_module.run(
                target.path, resume=resume, allow_fallback=False, keep_alive_fd=None
            )
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
