"""What of a run is decided by memory, from the headers of its files: nothing is loaded before it is known to
fit.

    need(choices)  ->  the teacher shared by the ranks, or whole       several GPUs
                   ->  its backend, activations made again, chunks     `engine.plan.fitting`
                   ->  gathered layers kept, or given back             several GPUs
                   ->  layers captured as CUDA graphs                  what that needs on top
                   ->  the budget, logged, and enforced

`need` is the budget that the run has with some choices (`engine.plan.memory_model`); each decision is
the one that this arithmetic allows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from engine.log.write import LogWriter
from engine.loss.objective import default_chunk_rows
from engine.loss.types import LossKernel
from engine.plan.budget import MemoryBudget
from engine.plan.choices import choose_graphs
from engine.plan.choose_ranks import choose_reshard, choose_teacher_shard
from engine.plan.choose_running import Running
from engine.plan.device import Arithmetic
from engine.plan.fitting import Fitted, fit
from engine.plan.inputs import Inputs
from engine.plan.memory_model import predict
from engine.plan.memory_plan import ITEM_BYTES
from engine.spec import RunSpec
from engine.train import record
from engine.train.prepared import Stored


class _Need(Protocol):
    """The budget with a backend, with activations made again or not, and with some tokens in a chunk."""

    def __call__(
        self,
        backend: str,
        again: bool,
        chunk_rows: int,
        *,
        reshard: bool = True,
        shard: bool = False,
        graphs: bool = False,
    ) -> MemoryBudget: ...


def plan_memory(
    log: LogWriter,
    spec: RunSpec,
    inputs: Inputs,
    arithmetic: Arithmetic,
    precision: str,
    running: Running,
    stored: Stored | None = None,
    *,
    fused_loss: bool,
) -> Fitted:
    """The teacher's backend, whether activations are made again, how many tokens a chunk of the loss
    has, and what the run will need so. `precision` is the teacher's, `stored` what there is of its
    outputs. Raises BadInput for a run that does not fit, unless memory.budget says to report it only.
    """
    need = _need_of(spec, inputs, arithmetic, precision, running, stored, fused_loss=fused_loss)
    teacher = inputs.teacher if spec.has_teacher else None
    size = inputs.teacher_size if teacher is not None else None
    there = arithmetic.available.number
    available_bytes = None if there is None else int(there)
    kernel: LossKernel = "fused" if fused_loss else "eager"
    usual = default_chunk_rows(arithmetic.device, inputs.student.vocab_size, kernel)
    fitting = partial(
        fit,
        available_bytes=available_bytes,
        backend=spec.teacher.backend,
        checkpointing=spec.student.checkpointing,
        chunk_rows=spec.loss.chunk_rows,
        usual_chunk_rows=min(usual, spec.train.rows * spec.data.seq_len),
        teacher=teacher,
        quantised_blocks=size is not None and bool(size.matrices),
        precision=precision,
        stored=None if stored is None else stored.words,
    )
    fitted = fitting(need)
    if spec.compute.gpus > 1 and teacher is not None:
        shared = fitting(partial(need, shard=True))
        choice = choose_teacher_shard(
            spec.teacher.shard,
            ranks=spec.compute.gpus,
            whole_bytes=fitted.budget.total_bytes,
            shared_bytes=shared.budget.total_bytes,
            available_bytes=available_bytes,
            stored=stored is not None,
        )
        if record.decide(log, choice) == "on":
            fitted = replace(shared, teacher_shard=True)
    for decision in fitted.decisions:
        record.decide(log, decision)
    if spec.compute.gpus > 1:
        fitted = _gathered(log, spec, need, fitted, available_bytes)
    fitted = _captured(log, spec, inputs, arithmetic, running, need, fitted)
    record.memory_plan(log, fitted.budget)
    if spec.memory.budget == "enforce":
        fitted.budget.refuse_if_too_big()
    return fitted


def _need_of(
    spec: RunSpec,
    inputs: Inputs,
    arithmetic: Arithmetic,
    precision: str,
    running: Running,
    stored: Stored | None,
    *,
    fused_loss: bool,
) -> _Need:
    """The budget of this run, as a function of what is still to be chosen."""
    teacher = inputs.teacher if spec.has_teacher else None
    size = inputs.teacher_size if teacher is not None else None
    packed_bytes, packed_layers = None, tuple[int, ...]()
    if size is not None and size.matrices:
        packed_bytes = size.weight_bytes(ITEM_BYTES[precision])
        packed_layers = size.layer_bytes(ITEM_BYTES[precision])

    def need(
        backend: str,
        again: bool,
        chunk_rows: int,
        *,
        reshard: bool = True,
        shard: bool = False,
        graphs: bool = False,
    ) -> MemoryBudget:
        return predict(
            replace(spec, loss=replace(spec.loss, chunk_rows=chunk_rows)),
            teacher=teacher,
            teacher_packed_bytes=packed_bytes,
            teacher_packed_layers=packed_layers,
            teacher_shard=shard,
            backend=backend,
            teacher_precision=precision,
            student_precision=arithmetic.precision,
            student=inputs.student,
            device=arithmetic.device.type,
            available=arithmetic.available,
            shares_heads=(arithmetic.capability or (0, 0))[0] == 9,
            compiled=running.compiled,
            packed=running.packed,
            teacher_packed=running.teacher_packed,
            prefetches=running.prefetches,
            reshard=reshard,
            checkpointing=again,
            graphs=graphs,
            stored=None if stored is None else stored.identity,
            fused_loss=fused_loss,
        )

    return need


def _gathered(
    log: LogWriter, spec: RunSpec, need: _Need, fitted: Fitted, available_bytes: int | None
) -> Fitted:
    """Whether ranks keep a layer's gathered weights from its forward to its backward pass."""
    chosen = (fitted.backend, fitted.checkpointing, fitted.chunk_rows)
    kept = need(*chosen, reshard=False, shard=fitted.teacher_shard)
    choice = choose_reshard(
        spec.student.reshard,
        kept_bytes=kept.total_bytes,
        given_bytes=fitted.budget.total_bytes,
        available_bytes=available_bytes,
    )
    if record.decide(log, choice) == "off":
        return replace(fitted, budget=kept, reshard=False)
    return fitted


def _captured(
    log: LogWriter,
    spec: RunSpec,
    inputs: Inputs,
    arithmetic: Arithmetic,
    running: Running,
    need: _Need,
    fitted: Fitted,
) -> Fitted:
    """Whether the student's layers are launched as CUDA graphs, whose memory is theirs for the whole run."""
    captured = need(fitted.backend, fitted.checkpointing, fitted.chunk_rows, graphs=True)
    choice = choose_graphs(
        spec.student.graphs,
        device=arithmetic.device.type,
        packed=running.packed,
        checkpointing=fitted.checkpointing,
        accumulation=spec.train.accumulation,
        ranks=spec.compute.gpus,
        allocator=arithmetic.memory.choice,
        layers=inputs.student.num_hidden_layers,
        needed_bytes=captured.total_bytes,
        given_bytes=fitted.budget.total_bytes,
    )
    if record.decide(log, choice) == "on":
        return replace(fitted, budget=captured, graphs=True)
    return fitted
