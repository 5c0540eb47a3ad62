"""What the engine's values look like in the run log: one function for each thing that is logged.

Lower layers return Decisions, Steps and models; this is the only place that turns them into events.
"""

from __future__ import annotations

import math
import platform
from typing import NoReturn

import torch

from engine.checks.check import Result
from engine.data.corpus import Corpus
from engine.data.tokens import TokenStream
from engine.decision import Decision
from engine.errors import TrainingFailed
from engine.formats.safetensors import tensors_sha256
from engine.log.events import (
    Checked,
    Compiled,
    DataReady,
    DecisionMade,
    MemoryMeasured,
    MemoryPlanned,
    ModelReady,
    NonFinite,
    Note,
    Phase,
    RunStarted,
    StepDone,
    VocabularyCut,
    name_of_non_finite,
)
from engine.log.held import ALLOCATOR, PROCESS, Held
from engine.log.write import LogWriter
from engine.machine.host import Host
from engine.models.config import count_parameters
from engine.models.decoder import Decoder
from engine.models.tensors import Tensors
from engine.plan.budget import MemoryBudget
from engine.runtime.c_library import CompiledLibrary
from engine.spec import RunSpec
from engine.teachers.truncating import DroppedMass
from engine.train.roofline import Bound
from engine.train.trainer import Step, Trainer
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
    """Log a model as it is in memory; returns the sha256 of its tensors, of weights in blocks those of
    the blocks."""
    sha256 = tensors_sha256(Tensors(decoder))
    log.write(
        ModelReady(
            role=role,
            source=source,
            parameters=count_parameters(decoder.config),
            layers=decoder.config.num_hidden_layers,
            hidden_size=decoder.config.hidden_size,
            vocab_size=decoder.config.vocab_size,
            precision=precision,
            sha256=sha256,
        )
    )
    return sha256


def memory_plan(log: LogWriter, budget: MemoryBudget) -> None:
    available = budget.available
    log.write(
        MemoryPlanned(
            predicted_bytes=budget.total_bytes,
            available_bytes=available.number,
            available_source=available.absent or available.source,
            peak_phase=budget.peak_phase,
            items=[(item.name, float(item.bytes), item.how) for item in budget.items],
        )
    )


def peak_of(device: torch.device) -> tuple[float | None, str]:
    """The allocator's peak so far in bytes, and who says so; torch keeps none for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)), "torch.cuda.max_memory_allocated"
    return None, "torch keeps no peak of CPU memory"


def held_by(device: torch.device) -> Held:
    """What this process holds now; on a GPU from the allocator's own counts, which waits for nothing."""
    if device.type == "cuda":
        counts = torch.cuda.memory_stats_as_nested_dict(device)
        tensors, kept = counts["allocated_bytes"]["all"], counts["reserved_bytes"]["all"]
        return Held(
            source=ALLOCATOR,
            held_bytes=float(tensors["current"]),
            reserved_bytes=float(kept["current"]),
            peak_bytes=float(tensors["peak"]),
        )
    own = Host().own_memory()
    return Held(
        source=PROCESS,
        held_bytes=own[0].number or math.nan,
        reserved_bytes=None,
        peak_bytes=own[1].number or math.nan,
    )


def memory_peak(log: LogWriter, step: int, budget: MemoryBudget, device: torch.device) -> None:
    """The allocator's peak so far."""
    measured, source = peak_of(device)
    log.write(
        MemoryMeasured(
            step=step,
            measured_bytes=measured,
            predicted_bytes=budget.total_bytes,
            source=source,
        )
    )


def compiled_library(log: LogWriter, library: CompiledLibrary) -> None:
    log.write(
        Compiled(
            compiler=library.compiler,
            kernel=library.name,
            key=str(library.path),
            digest="",
            compile_s=library.seconds,
            disk_hit=library.cached,
        )
    )


def vocabulary_cut(
    log: LogWriter, teacher_ids: int, student_ids: int, dropped: DroppedMass
) -> None:
    log.write(
        VocabularyCut(
            teacher_ids=teacher_ids,
            student_ids=student_ids,
            dropped_mass_mean=dropped.mean,
            dropped_mass_max=dropped.largest,
            tokens=dropped.tokens,
        )
    )


def checked(log: LogWriter, result: Result) -> None:
    log.write(
        Checked(
            id=result.id,
            level=result.verdict.level.name.lower(),
            reason=result.verdict.reason,
            numbers=result.numbers,
            cost_s=result.cost_s,
            step=result.step,
        )
    )


def start(
    log: LogWriter,
    name: str,
    spec: RunSpec,
    trainer: Trainer,
    resumed_from: int | None,
    bound: Bound,
) -> RunStarted:
    event = RunStarted(
        name=name,
        device=str(trainer.device),
        steps=trainer.train.steps,
        resumed_from=resumed_from,
        alpha=trainer.loss.alpha,
        temperature=trainer.loss.temperature,
        peak_lr=trainer.train.lr,
        rows_per_step=spec.compute.gpus * trainer.train.rows * trainer.train.accumulation,
        seq_len=spec.data.seq_len,
        trainable_parameters=sum(p.numel() for p in trainer.parameters),
        spec_sha256=spec.sha256,
        engine=VERSION,
        python=platform.python_version(),
        torch=str(torch.__version__),
        flops_per_token=bound.flops_per_token,
        peak_flops_per_s=bound.peak.number,
        peak_source=bound.peak.absent or bound.peak.source,
    )
    log.write(event)
    return event


def step(log: LogWriter, done: Step, temperature: float) -> None:
    """Log a step; what is not finite, or cannot be true, first, as events of their own."""
    for name, value in done.non_finite():
        log.write(NonFinite(step=done.step, field=name, value=name_of_non_finite(value)))
    for text in done.broken_invariants(temperature):
        log.write(Note(level="error", text=text))
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
            lowest_kl=done.lowest_kl,
            largest_dz_sum=done.largest_dz_sum,
            phases=dict(done.phases),
        )
    )


def fail_at(log: LogWriter, step: int, name: str, value: float) -> NoReturn:
    """End a run whose weights give NaN or infinity, before a checkpoint could hold them."""
    found = name_of_non_finite(value)
    log.write(NonFinite(step=step, field=name, value=found))
    raise TrainingFailed(
        f"{name} is {found} at step {step}: the weights are no longer usable, and no checkpoint holds them",
        hint="resume from the last checkpoint with a lower learning rate in a new run",
    )
