"""What the engine's values look like in the run log: one function for each thing that is logged.

Lower layers return Decisions, Steps and models; this is the only place that turns them into events.
"""

from __future__ import annotations

import platform

import torch

from engine.data.corpus import Corpus
from engine.data.tokens import TokenStream
from engine.decision import Decision
from engine.distill.trainer import Step, Trainer
from engine.formats.safetensors import tensors_sha256
from engine.models.decoder import Decoder
from engine.runlog.events import (
    DataReady,
    DecisionMade,
    ModelReady,
    NonFinite,
    Phase,
    RunStarted,
    StepDone,
    name_of_non_finite,
)
from engine.runlog.write import LogWriter
from engine.spec import RunSpec
from engine.version import VERSION


def decide(log: LogWriter, decision: Decision) -> str:
    """Log a decision and return its choice, so that nothing is chosen without being logged."""
    log.write(
        DecisionMade(
            knob=decision.knob,
            choice=decision.choice,
            reason=decision.reason,
            rejected=list(decision.rejected),
            override=decision.override,
            overridden=decision.overridden,
        )
    )
    return decision.choice


def phase(log: LogWriter, name: str, detail: str = "") -> None:
    """Say what comes next, before it begins: a silent run is stuck in the phase it named last."""
    log.write(Phase(name=name, detail=detail))


def data(
    log: LogWriter, corpus: Corpus, train: TokenStream, held: TokenStream, seq_len: int
) -> DataReady:
    event = DataReady(
        source=corpus.source,
        train_files=corpus.train.document_count,
        train_tokens=len(train),
        train_sha256=train.sha256,
        heldout_files=corpus.heldout.document_count,
        heldout_tokens=len(held),
        heldout_sha256=held.sha256,
        skipped_files=len(corpus.skipped),
        epoch_rows=len(train) // seq_len,
    )
    log.write(event)
    return event


def model(log: LogWriter, role: str, source: str, decoder: Decoder, precision: str) -> str:
    """Log a model as it is in memory; returns the sha256 of its tensors."""
    sha256 = tensors_sha256(dict(decoder.named_parameters()))
    log.write(
        ModelReady(
            role=role,
            source=source,
            parameters=sum(p.numel() for p in decoder.parameters()),
            layers=decoder.config.num_hidden_layers,
            hidden_size=decoder.config.hidden_size,
            vocab_size=decoder.config.vocab_size,
            precision=precision,
            sha256=sha256,
        )
    )
    return sha256


def start(
    log: LogWriter, name: str, spec: RunSpec, trainer: Trainer, resumed_from: int | None
) -> None:
    log.write(
        RunStarted(
            name=name,
            device=str(trainer.device),
            steps=trainer.train.steps,
            resumed_from=resumed_from,
            alpha=trainer.loss.alpha,
            temperature=trainer.loss.temperature,
            peak_lr=trainer.train.lr,
            rows_per_step=trainer.train.rows * trainer.train.accumulation,
            seq_len=spec.data.seq_len,
            trainable_parameters=sum(p.numel() for p in trainer.parameters),
            spec_sha256=spec.sha256,
            engine=VERSION,
            python=platform.python_version(),
            torch=str(torch.__version__),
        )
    )


def step(log: LogWriter, done: Step) -> None:
    """Log a step; every non-finite number of it first, as an event of its own."""
    for name, value in done.non_finite():
        log.write(NonFinite(step=done.step, field=name, value=name_of_non_finite(value)))
    log.write(
        StepDone(
            step=done.step,
            loss=done.loss,
            ce=done.ce,
            kd=done.kd,
            agreement=done.agreement,
            lr=done.lr,
            grad_norm=done.grad_norm,
            rows=done.rows,
            tokens=done.tokens,
            labelled=done.labelled,
            step_s=done.step_s,
            data_s=done.data_s,
            teacher_s=done.teacher_s,
            position=done.position,
        )
    )
