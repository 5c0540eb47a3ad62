"""Plan a run before any of its weights is loaded, in the order in which the decisions depend on each
other.

    teacher outputs stored?  ->  its precision  ->  kernel of the loss  ->  how layers run
      ->  what memory allows  ->  kernel of a quantised teacher

Everything follows from the spec, the headers of files and the device, so a run that cannot work is
refused in the first second. Each decision is logged as it is made, and the budget at the end. The
choosers and their reasons are in `engine.plan.knobs`, the memory arithmetic in `engine.plan.memory`, and
what is changed when the run does not fit in `engine.plan.fit_in_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from engine.data.batches import Batches
from engine.data.tokens import TokenStream
from engine.decision import Decision
from engine.kernels.dequantize import has_triton
from engine.kernels.small_m_table import MAX_ROWS, crossover_rows
from engine.loss.chunks import LossKernel, default_chunk_rows
from engine.models.config import ModelConfig
from engine.plan.activations import linear_weights
from engine.plan.device import ComputeDevice, has_compiler
from engine.plan.fit_in_memory import fit
from engine.plan.inputs import Inputs
from engine.plan.knobs import KNOBS
from engine.plan.memory import ITEM_BYTES, MemoryBudget, MemoryPlan
from engine.quant.blocks import BLOCK_TYPES
from engine.spec import RunSpec
from engine.teachers.store.folder import Store, open_store
from engine.teachers.store.keys import HIDDEN, Identity
from engine.teachers.store.manifest import check_teacher_files, fitting_manifest, uses_cache

LOOKED_AT = 1024
"""Rows of the run that are looked up in the store before it begins."""

Log: TypeAlias = Callable[[Decision], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The store that a run reads."""

    store: Store
    config: ModelConfig
    """The teacher's config."""
    teacher_known: str
    """How it is known that the store belongs to this teacher, in words."""
    rows: int
    """Number of rows looked up."""
    found: int

    @property
    def identity(self) -> Identity:
        return self.store.identity

    @property
    def precision(self) -> Decision:
        return Decision(
            knob="teacher.precision",
            choice=self.identity.precision,
            reason="the outputs in teacher.cache were made in it",
        )

    @property
    def words(self) -> str:
        """The reason for reading the store, with its numbers."""
        identity, each = self.identity, self.identity.token_bytes
        where = f"{self.found:,} of {self.rows:,} rows looked for are there"
        return f"{len(self.store):,} rows are stored: {identity.words}, {each:,.0f} bytes per token; {where}"


def batches_of(spec: RunSpec, stream: TokenStream) -> Batches:
    """Return the batches of training over `stream`."""
    return Batches(
        stream,
        seq_len=spec.data.seq_len,
        rows_per_batch=spec.train.rows,
        seed=spec.train.seed,
    )


def rows_of_run(spec: RunSpec) -> int:
    """Return the number of rows that a run takes, over all of its epochs."""
    return spec.train.steps * spec.rows_per_step


def find_stored(spec: RunSpec, inputs: Inputs, stream: TokenStream) -> Stored | None:
    """Open the store that `spec` names; None when it names none.

    Raises CacheError for a store that does not fit this run.
    """
    if not uses_cache(spec):
        return None
    assert inputs.teacher is not None
    fitting_manifest(spec, inputs.teacher, inputs.student)
    store = open_store(spec.teacher.cache)
    known = check_teacher_files(spec.teacher.path, store.manifest, store.path)
    batches = batches_of(spec, stream)
    # Single rows, spread evenly over what the run takes, at most one epoch.
    rows = min(rows_of_run(spec), batches.rows_per_epoch)
    positions = np.unique(np.linspace(0, rows - 1, min(rows, LOOKED_AT)).astype(np.int64))
    found = sum(
        key in store for at in positions for key in store.identity.keys(batches.take(int(at), 1))
    )
    return Stored(
        store=store,
        config=inputs.teacher,
        teacher_known=known,
        rows=len(positions),
        found=found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of one run on its device, as the choosers use them."""

    spec: RunSpec
    inputs: Inputs
    compute: ComputeDevice
    teacher_precision: str = "fp32"
    store: Stored | None = None
    """The store that replaces the teacher when the run reads its outputs."""

    @property
    def device(self) -> str:
        return self.compute.device.type

    @property
    def capability(self) -> tuple[int, int] | None:
        return self.compute.capability

    @property
    def has_triton(self) -> bool:
        return has_triton()

    @property
    def has_compiler(self) -> bool:
        return has_compiler(self.device)

    @property
    def student(self) -> ModelConfig:
        return self.inputs.student

    @property
    def teacher(self) -> ModelConfig | None:
        return self.inputs.teacher if self.spec.has_teacher else None

    @property
    def student_precision(self) -> str:
        return self.compute.precision

    @property
    def allocator(self) -> str:
        return self.compute.memory.choice

    @property
    def available_bytes(self) -> int | None:
        number = self.compute.available.number
        return None if number is None else int(number)

    @property
    def stored(self) -> str | None:
        return None if self.store is None else self.store.words

    @property
    def ranks(self) -> int:
        return self.spec.compute.gpus

    @property
    def steps(self) -> int:
        return self.spec.train.steps

    @property
    def accumulation(self) -> int:
        return self.spec.train.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.spec.train.rows * self.spec.data.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.accumulation

    @property
    def divergence(self) -> str:
        return self.spec.loss.divergence

    @property
    def layers(self) -> int:
        return self.student.num_hidden_layers

    @property
    def layer_weights(self) -> int:
        return linear_weights(self.student)

    @property
    def fused_up_to(self) -> int:
        """Rows up to which fused matmuls are faster, for the teacher's largest matrix in Q4_K."""
        assert self.inputs.teacher is not None
        shape = (self.inputs.teacher.intermediate_size, self.inputs.teacher.hidden_size)
        major, minor = self.capability or (0, 0)
        return crossover_rows(BLOCK_TYPES["Q4_K"], *shape, arch=10 * major + minor)

    @property
    def most(self) -> int:
        return MAX_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExecution:
    """How the layers of student and teacher run: compiled, with packed attention, one batch ahead."""

    compiled: bool
    packed: bool
    teacher_packed: bool = False
    teacher_compiled: bool = False
    prefetches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    facts: RunFacts
    loss_kernel: LossKernel
    execution: LayerExecution
    memory: MemoryPlan
    """The memory plan with the chosen backend, checkpointing, chunk size and sharding."""
    budget: MemoryBudget

    @property
    def sparse(self) -> bool:
        """Whether the teacher gives sparse targets and no hidden states."""
        store = self.facts.store
        return store is not None and store.identity.form != HIDDEN


def plan_run(
    spec: RunSpec,
    inputs: Inputs,
    compute: ComputeDevice,
    stream: TokenStream,
    log: Callable[[Decision | MemoryBudget], None],
) -> Plan:
    """Plan a run; log each decision and the budget.

    `stream` is the training data, whose rows a store should have. Raises CacheError for a store that does
    not fit this run, and BadInput for a run that does not fit into memory, unless memory.budget says to
    only report it.
    """
    store = find_stored(spec, inputs, stream)
    facts = RunFacts(spec=spec, inputs=inputs, compute=compute, store=store)
    log(KNOBS["model.engine"].decide(facts))
    if spec.has_teacher:
        precision = store.precision if store else KNOBS["teacher.precision"].decide(facts)
        log(precision)
        facts = replace(facts, teacher_precision=precision.choice)
    loss_kernel: LossKernel = "fused" if _taken(facts, log, "loss.kernel") == "fused" else "eager"
    execution = choose_layer_execution(facts, log)
    memory = plan_memory(facts, execution, log, fused_loss=loss_kernel == "fused")
    budget = memory.budget()
    log(budget)
    if spec.memory.budget == "enforce":
        budget.refuse_if_too_big()
    if memory.backend == "quantized":
        log(KNOBS["teacher.kernel"].decide(facts))
    return Plan(
        facts=facts, loss_kernel=loss_kernel, execution=execution, memory=memory, budget=budget
    )


def _taken(facts: RunFacts, log: Log, key: str, **computed: Any) -> str:
    """Decide one setting, log the decision and return the choice."""
    decision = KNOBS[key].decide(facts, **computed)
    log(decision)
    return decision.choice


def choose_layer_execution(facts: RunFacts, log: Log) -> LayerExecution:
    """Decide whether layers are compiled and attention is packed.

    With stored teacher outputs, the teacher is neither compiled nor prefetched.
    """
    compiled = _taken(facts, log, "student.compile")
    packed = _taken(facts, log, "student.attention")
    execution = LayerExecution(compiled=compiled == "on", packed=packed == "packed")
    if facts.teacher is None:
        return execution
    packed = _taken(facts, log, "teacher.attention")
    execution = replace(execution, teacher_packed=packed == "packed")
    if facts.store is not None:
        return execution
    compiled = _taken(facts, log, "teacher.compile")
    prefetches = _taken(facts, log, "teacher.prefetch")
    return replace(execution, teacher_compiled=compiled == "on", prefetches=prefetches == "on")


def plan_memory(
    facts: RunFacts, execution: LayerExecution, log: Log, *, fused_loss: bool
) -> MemoryPlan:
    """Decide what memory depends on, and return the plan with those choices.

    These are the teacher's backend, checkpointing, tokens per chunk of the loss, sharding over ranks, and
    CUDA graphs.
    """
    spec, compute = facts.spec, facts.compute
    size = facts.inputs.teacher_size if facts.teacher is not None else None
    packed = size if size is not None and size.matrices else None
    each = ITEM_BYTES[facts.teacher_precision]
    whole = MemoryPlan(
        spec=spec,
        teacher=facts.teacher,
        backend="dequantized",
        teacher_precision=facts.teacher_precision,
        student_precision=facts.student_precision,
        student=facts.student,
        device=facts.device,
        available=compute.available,
        teacher_packed_bytes=packed.weight_bytes(each) if packed else None,
        teacher_packed_layers=packed.layer_bytes(each) if packed else (),
        shares_heads=(facts.capability or (0, 0))[0] == 9,
        compiled=execution.compiled,
        packed=execution.packed,
        teacher_packed=execution.teacher_packed,
        prefetches=execution.prefetches,
        store=facts.store.identity if facts.store else None,
        fused_loss=fused_loss,
    )
    usual = default_chunk_rows(compute.device.type, facts.student.vocab_size, fused=fused_loss)
    usual = min(usual, facts.tokens)
    plan, decisions = fit(whole, usual_chunk_rows=usual, stored=facts.stored)
    if facts.ranks > 1 and facts.teacher is not None:
        shared, theirs = fit(
            replace(whole, teacher_shard=True), usual_chunk_rows=usual, stored=facts.stored
        )
        shard = _taken(
            facts,
            log,
            "teacher.shard",
            whole_bytes=plan.total_bytes,
            shared_bytes=shared.total_bytes,
        )
        if shard == "on":
            plan, decisions = shared, theirs
    for decision in decisions:
        log(decision)
    if facts.ranks > 1:
        kept = replace(plan, reshard=False)
        reshard = _taken(
            facts, log, "student.reshard", kept_bytes=kept.total_bytes, given_bytes=plan.total_bytes
        )
        plan = kept if reshard == "off" else plan
    captured = replace(plan, graphs=True)
    graphs = _taken(
        facts,
        log,
        "student.graphs",
        packed=execution.packed,
        checkpointing=plan.checkpointing,
        needed_bytes=captured.total_bytes,
        given_bytes=plan.total_bytes,
    )
    return captured if graphs == "on" else plan
