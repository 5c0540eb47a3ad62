"""Small real distillations for the tests of `engine.checks`: a trained teacher, a student, a trainer, and
everything that a check may read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checks.artefact import Artefact, Sample, samples_of
from engine.checks.context import Context
from engine.checks.result import Result
from engine.checks.runner import Checks
from engine.data.batches import Batches, heldout_rows
from engine.data.corpus import open_corpus
from engine.data.tokens import TokenStream
from engine.formats.tokenizer import open_tokenizer
from engine.log.events import StepDone
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.spec import RunSpec, build_spec
from engine.teachers.frozen import DequantizedTeacher
from engine.train.auditing import StepAudit
from engine.train.checking import context_of
from engine.train.checkpoint import state
from engine.train.checkpoint import write as checkpoint
from engine.train.checkpoint.manifest import verify
from engine.train.trainer import Trainer
from engine.verdict import Level
from tests.support.kit import Kit, tiny_config
from tests.support.streams import documents_of, tokenize

SEQ_LEN = 48


@dataclass
class World:
    """What the runs share: a trained teacher on disk and tokens."""

    corpus: Path
    teacher: Path
    train: TokenStream
    heldout: TokenStream
    tokenizer: Any


_WORLDS: dict[Path, World] = {}


def make_world(kit: Kit, folder: Path) -> World:
    """Train the teacher for a second or two on the same text; called once in a session."""
    if kit.teacher not in _WORLDS:
        _WORLDS[kit.teacher] = _make_world(kit, folder)
    return _WORLDS[kit.teacher]


def _make_world(kit: Kit, folder: Path) -> World:
    corpus = open_corpus(str(kit.corpus), heldout_fraction=0.2)
    tokenizer = open_tokenizer(kit.teacher)
    world = World(
        teacher=folder / "teacher",
        corpus=kit.corpus,
        train=tokenize(documents_of(corpus.train), tokenizer),
        heldout=tokenize(documents_of(corpus.heldout), tokenizer),
        tokenizer=tokenizer,
    )
    config = ModelConfig.from_dict(tiny_config(hidden_size=48), "teacher")
    spec = make_spec(world, loss__alpha=1.0, train__steps=60, train__lr=1e-2, train__rows=8)
    trainer = Trainer(
        student=new_decoder(config, seed=7),
        teacher=None,
        batches=Batches(world.train, seq_len=SEQ_LEN, rows_per_batch=8, seed=1),
        train=spec.train,
        loss=spec.loss,
        device=torch.device("cpu"),
        precision="fp32",
    )
    for _ in trainer.steps():
        pass
    save_decoder(trainer.student, world.teacher, torch.float32)
    return world


def make_spec(world: World, **changes: object) -> RunSpec:
    settings: dict[str, object] = {
        "teacher__path": str(world.teacher),
        "student__config": "student.json",
        "data__corpus": str(world.corpus),
        "data__heldout_fraction": 0.2,
        "data__seq_len": SEQ_LEN,
        "loss__alpha": 0.3,
        "loss__temperature": 2.0,
        "train__steps": 30,
        "train__rows": 4,
        "train__warmup_steps": 4,
        "train__lr": 3e-3,
        "compute__device": "cpu",
    }
    settings |= changes
    tree: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    if tree["loss"]["alpha"] == 1.0:
        tree["teacher"] = {}
    return build_spec(tree, check_paths=False)


@dataclass
class Run:
    """One small run with its checks."""

    spec: RunSpec
    trainer: Trainer
    context: Context
    checks: Checks
    results: dict[str, Result]
    stream: TokenStream
    untrained: dict[str, Sample]
    audit: StepAudit | None = None
    """From the first step on."""

    def answer(self, results: Iterator[Result]) -> None:
        self.results |= {result.id: result for result in results}

    def begin(self) -> Run:
        self.answer(self.checks.before_training(self.context))
        return self

    def step(self, count: int = 1) -> list[StepDone]:
        done = []
        if self.audit is None:
            decoder = self.context.teacher_decoder
            self.audit = StepAudit(self.trainer, self.spec, decoder)
        steps = self.trainer.steps()
        for _ in range(count):
            step = next(steps)
            done.append(step)
            self.answer(self.audit.after(step))
            self.answer(self.checks.after_step(step))
        return done

    def save(self, folder: Path) -> Path:
        captured = state.capture_trainer(self.trainer, self.spec)
        saved = checkpoint.save(folder, self.trainer.step, state.pack(captured))

        def check_resumable(path: Path) -> None:
            state.check_fits(state.unpack(verify(path), numbers=False), self.trainer)

        self.answer(self.checks.at_checkpoint(saved.path, self.trainer.step, check_resumable))
        return saved.path

    def end(self, folder: Path, dtype: torch.dtype = torch.float32) -> Artefact:
        """Save the student in `folder`, and have it read back."""
        save_decoder(self.trainer.student, folder, dtype)
        how = self.spec.model
        saved = Artefact(folder=folder, dtype=dtype, how=how, start=self.untrained)
        self.read_back(saved)
        return saved

    def read_back(self, saved: Artefact) -> None:
        trainer = self.trainer
        self.answer(self.checks.at_end(saved, trainer.step, trainer.student))

    def failures(self) -> dict[str, str]:
        return {n: str(r.verdict) for n, r in self.results.items() if r.failed}

    def unknowns(self) -> dict[str, str]:
        return {
            n: str(r.verdict) for n, r in self.results.items() if r.verdict.level is Level.UNKNOWN
        }


def make_run(
    world: World,
    *,
    seed: int = 0,
    student: dict[str, object] | None = None,
    change: Callable[[Trainer], None] | None = None,
    precision: str = "fp32",
    **changes: object,
) -> Run:
    spec = make_spec(world, train__seed=seed, **changes)
    config = ModelConfig.from_dict(tiny_config(**(student or {})), "student")
    teacher = None
    if spec.has_teacher:
        teacher = DequantizedTeacher(load_decoder(world.teacher))
    trainer = Trainer(
        student=new_decoder(config, seed=seed),
        teacher=teacher,
        batches=Batches(world.train, seq_len=SEQ_LEN, rows_per_batch=spec.train.rows, seed=seed),
        train=spec.train,
        loss=spec.loss,
        device=torch.device("cpu"),
        precision=precision,
    )
    if change is not None:
        change(trainer)
    samples = samples_of(trainer.student)
    return Run(spec, trainer, context(world, spec, trainer), Checks(spec), {}, world.train, samples)


def context(world: World, spec: RunSpec, trainer: Trainer, **changes: Any) -> Context:
    teacher = trainer.teacher
    decoder = teacher.decoder if isinstance(teacher, DequantizedTeacher) else None
    found = context_of(
        trainer,
        spec,
        teacher_decoder=decoder,
        train_stream=world.train,
        heldout_stream=world.heldout,
        heldout=list(heldout_rows(world.heldout, SEQ_LEN, 16).split(8)),
        tokenizers={"teacher": world.tokenizer},
    )
    return dataclasses.replace(found, **changes)
