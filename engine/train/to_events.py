"""Convert the engine's values to events of the run log: one function per event type.

Lower layers receive a function (`Log`), which they call with each value to log: decisions, models, phases. A phase
must be logged before its work begins, because that work may hang. Only three modules hold the log itself: the
composition root `engine.train.run`, its training loop `engine.train.loop`, and `engine.train.prepare`.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch

from engine.checks.result import Result
from engine.data.batches import labelled_rows
from engine.data.token_cache import Tokens, remarks_of
from engine.decision import Decision
from engine.log.events import (
    CHECK,
    Compiled,
    DataReady,
    DecisionMade,
    Event,
    Judged,
    MemoryMeasured,
    MemoryPlanned,
    ModelReady,
    RunStarted,
    VocabularyCut,
    Wrote,
)
from engine.log.held import ALLOCATOR, PROCESS, Held
from engine.log.write import LogWriter
from engine.machine.host import Host
from engine.machine.reading import Reading
from engine.models.config import ModelConfig, count_parameters
from engine.plan.cost import Cost
from engine.plan.memory import MemoryBudget
from engine.runtime.c_library import CompiledLibrary
from engine.runtime.rates import name_here
from engine.spec import RunSpec
from engine.teachers.truncating import DroppedMass
from engine.train.rollout import Turns
from engine.train.step import LaunchedStep
from engine.train.trainer import Trainer
from engine.version import VERSION

Loggable: TypeAlias = Event | Decision | MemoryBudget | CompiledLibrary | Result
Log: TypeAlias = Callable[[Loggable], None]
"""Function that writes one line to the run's log before it returns."""


def discard(value: Loggable) -> None:
    """Discard a value: the `Log` of a command that has no log."""


def write(log: LogWriter, value: Loggable) -> None:
    """Write one line."""
    match value:
        case Decision():
            log.write(_decision(value))
        case MemoryBudget():
            log.write(memory_plan(value))
        case CompiledLibrary():
            log.write(_compiled_library(value))
        case Result():
            log.write(checked(value))
        case _:
            log.write(value)


def _decision(decision: Decision) -> DecisionMade:
    return DecisionMade(
        knob=decision.knob,
        choice=decision.choice,
        reason=decision.reason,
        rejected=list(decision.rejected),
        impossible=list(decision.impossible),
        override=decision.override,
        overridden=decision.overridden,
    )


MAX_REASONS = 10
"""Largest number of logged reasons for leaving conversations out, and of logged remarks; the most frequent first."""


def data(source: str, tokens: Tokens, seq_len: int) -> DataReady:
    train, heldout = tokens.train, tokens.heldout
    rows = len(labelled_rows(train, seq_len, "train"))
    left_out: Counter[str] = Counter()
    for remark in (*tokens.faults, *train.left_out, *heldout.left_out):
        left_out[f"{remark.reason} ({remark.example})"] += remark.count
    return DataReady(
        source=source,
        train_files=tokens.documents[0],
        train_tokens=train.token_count,
        train_sha256=train.sha256,
        heldout_files=tokens.documents[1],
        heldout_tokens=heldout.token_count,
        heldout_sha256=heldout.sha256,
        skipped_files=tokens.skipped,
        copies=tokens.dropped_count,
        copies_named=list(tokens.dropped),
        repeated=tokens.repeated,
        epoch_rows=rows,
        labelled_tokens=None if train.labelled is None else train.labelled_count,
        padding=len(train) - train.token_count,
        left_out=dict(left_out.most_common(MAX_REASONS)),
        partly_labelled=train.partly_labelled + heldout.partly_labelled,
        remarks={
            f"{remark.reason}{f' ({remark.example})' if remark.example else ''}": remark.count
            for remark in remarks_of(tokens)[:MAX_REASONS]
        },
        unlabelled_rows=len(train) // seq_len - rows,
    )


def model(role: str, source: str, config: ModelConfig, precision: str, sha256: str) -> ModelReady:
    """Describe a model; `sha256` is the hash of its tensors in memory, in which quantised blocks stay quantised."""
    return ModelReady(
        role=role,
        source=source,
        parameters=count_parameters(config),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        precision=precision,
        sha256=sha256,
    )


def memory_plan(budget: MemoryBudget) -> MemoryPlanned:
    available = budget.available
    return MemoryPlanned(
        predicted_bytes=budget.total_bytes,
        available_bytes=available.number,
        available_source=available.absent or available.source,
        peak_phase=budget.peak_phase,
        items=[(item.name, float(item.bytes), item.how) for item in budget.items],
    )


def allocator_peak(trainer: Trainer) -> tuple[float | None, str]:
    """Return the allocator's peak memory so far in bytes, and its source; None on a CPU, where torch has no record."""
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        source = "torch.cuda.max_memory_allocated"
        if trainer.graphs is not None:
            return float(peak + trainer.graphs.pool_bytes), f"{source} and the CUDA graphs' pool"
        return float(peak), source
    return None, "torch keeps no peak of CPU memory"


def trainer_memory(device: torch.device) -> Held:
    """Return the memory that this process holds now; on a GPU, from the allocator's counters, without synchronising."""
    if device.type == "cuda":
        counts = torch.cuda.memory_stats_as_nested_dict(device)
        tensors, reserved = counts["allocated_bytes"]["all"], counts["reserved_bytes"]["all"]
        return Held(
            source=ALLOCATOR,
            held_bytes=float(tensors["current"]),
            reserved_bytes=float(reserved["current"]),
            peak_bytes=float(tensors["peak"]),
        )
    current_and_peak = Host().own_memory()
    return Held(
        source=PROCESS,
        held_bytes=current_and_peak[0].number or math.nan,
        reserved_bytes=None,
        peak_bytes=current_and_peak[1].number or math.nan,
    )


def memory_peak(step: int, budget: MemoryBudget, trainer: Trainer) -> MemoryMeasured:
    """Return the event with the allocator's peak memory so far and the predicted peak."""
    measured, source = allocator_peak(trainer)
    return MemoryMeasured(
        step=step,
        measured_bytes=measured,
        predicted_bytes=budget.total_bytes,
        source=source,
        host_peak_bytes=Host().own_memory()[1].number,
    )


def _compiled_library(library: CompiledLibrary) -> Compiled:
    return Compiled(
        compiler=library.compiler,
        kernel=library.name,
        key=str(library.path),
        digest="",
        compile_s=library.seconds,
        disk_hit=library.cached,
    )


def vocabulary_cut(teacher_ids: int, student_ids: int, dropped: DroppedMass) -> VocabularyCut:
    return VocabularyCut(
        teacher_ids=teacher_ids,
        student_ids=student_ids,
        dropped_mass_mean=dropped.mean,
        dropped_mass_max=dropped.largest,
        tokens=dropped.tokens,
    )


def checked(result: Result) -> Judged:
    return Judged(
        by=CHECK,
        id=result.id,
        level=result.verdict.level.name.lower(),
        text=result.verdict.reason,
        numbers=dict(result.numbers),
        cost_s=result.cost_s,
        step=result.step,
    )


def start(
    name: str,
    spec: RunSpec,
    trainer: Trainer,
    resumed_from: int | None,
    flops_per_token: float,
    peak: Reading,
    costs: Mapping[str, Cost],
) -> RunStarted:
    return RunStarted(
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
        flops_per_token=flops_per_token,
        peak_flops_per_s=peak.number,
        peak_source=peak.absent or peak.source,
        costs={part: (cost.flops, cost.moved_bytes, cost.launches) for part, cost in costs.items()},
        machine=name_here(trainer.device, trainer.dtype),
    )


def wrote(
    launched: LaunchedStep,
    spec: RunSpec,
    turns: Turns | None,
    decode: Callable[[Sequence[int]], str],
) -> Wrote:
    """Return the event about the rows that a model generated for a finished step."""
    completions = [
        completion for micro_batch in launched.written for completion in micro_batch.completions
    ]
    prompts = [prompt for micro_batch in launched.written for prompt in micro_batch.prompts]
    ended = [value for micro_batch in launched.written for value in micro_batch.ended]
    tokens = sum(map(len, completions))
    assert launched.written_sums is not None
    cross_entropy, divergence = (launched.written_sums / tokens).tolist()
    return Wrote(
        step=launched.step,
        by=spec.rollout.by,
        temperature=spec.rollout.temperature,
        rows=len(completions),
        tokens=tokens,
        shortest=min(map(len, completions)),
        longest=max(map(len, completions)),
        ended=sum(ended) / len(ended),
        entropy=-sum(value for micro_batch in launched.written for value in micro_batch.log_p)
        / tokens,
        cross_entropy=cross_entropy,
        divergence=divergence / spec.loss.temperature**2,
        repeated=_repeated(completions),
        repeated_in_prompts=_repeated(prompts),
        turn_end=decode([turns.end]) if turns else "",
        turn_tokens=turns.tokens if turns else None,
        write_s=launched.write_s,
        prompt=decode(prompts[0]),
        sample=decode(completions[0]),
    )


def _repeated(sequences: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that equal the token before them."""
    return sum(a == b for tokens in sequences for a, b in pairwise(tokens)) / sum(
        map(len, sequences)
    )
