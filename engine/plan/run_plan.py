"""Plan a run before any of its weights is loaded. Later decisions depend on earlier ones:

    stored teacher outputs  ->  engine that runs the models  ->  teacher precision  ->  kernel of the loss
      ->  kernels and attention of the layers  ->  settings that depend on memory  ->  memory budget
      ->  kernel of the update  ->  sharded checkpoints

The plan needs the spec, the headers of files, the tokenised data, the index of the store and the device. It reads no
weights, except to hash teacher files whose times or inodes differ from those in the store. Each decision, and the
memory budget, is logged as it is made. The result, a `Plan`, has the spec without `auto`, and the inputs, device,
store and budget of the run. The choosers and their reasons are in `engine.plan.knobs`, the memory arithmetic in
`engine.plan.memory`, and the changes that make a run fit in `engine.plan.fit_in_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from engine.data.batches import Batches
from engine.data.tokens import TokenStream
from engine.decision import Decision
from engine.errors import BadInput
from engine.kernels.dequantize import has_triton
from engine.models.config import ModelConfig, count_parameters
from engine.plan.device import ComputeDevice
from engine.plan.fit_in_memory import fit
from engine.plan.inputs import Inputs
from engine.plan.knobs import KNOBS
from engine.plan.memory import ITEM_BYTES, MemoryBudget, MemoryPlan
from engine.spec import RunSpec
from engine.teachers.backend import FP8_CAPABILITY
from engine.teachers.store.folder import Store, open_store
from engine.teachers.store.keys import HIDDEN, Identity
from engine.teachers.store.manifest import check_teacher_files, fitting_manifest, uses_cache
from engine.units import format_capability

SAMPLED_ROWS = 1024
"""Largest number of rows that are looked up in the store before the run begins."""

Log: TypeAlias = Callable[[Decision], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The store that a run reads."""

    store: Store
    config: ModelConfig
    """The teacher's config."""
    teacher_evidence: str
    """Evidence that the store belongs to this teacher, as text for the log."""
    rows: int
    """Number of the run's rows that were looked up in the store."""
    found: int
    """Number of these rows that are stored."""

    @property
    def identity(self) -> Identity:
        return self.store.identity

    @property
    def precision(self) -> Decision:
        return Decision(
            knob="teacher.precision",
            choice=self.identity.precision,
            reason="the outputs in teacher.cache were computed in this precision",
        )

    @property
    def words(self) -> str:
        """The reason for reading the store, with its numbers."""
        where = f"{self.found:,} of {self.rows:,} sampled rows of the run are stored"
        size = f"{self.identity.token_bytes:,.0f} bytes per token"
        return f"the store has {len(self.store):,} rows: {self.identity.words}, {size}; {where}"


def batches_of(spec: RunSpec, stream: TokenStream) -> Batches:
    """Return the batches of training over `stream`."""
    return Batches(
        stream,
        seq_len=spec.data.seq_len,
        rows_per_batch=spec.train.rows,
        seed=spec.train.seed,
    )


def rows_of_run(spec: RunSpec) -> int:
    """Return the number of rows that a run trains on, over all epochs."""
    return spec.train.steps * spec.rows_per_step


def find_stored(spec: RunSpec, inputs: Inputs, stream: TokenStream) -> Stored | None:
    """Open the store that `spec` names; None if it names none.

    Raises CacheError for a store that does not fit this run.
    """
    if not uses_cache(spec):
        return None
    assert inputs.teacher is not None
    fitting_manifest(spec, inputs.teacher, inputs.student)
    store = open_store(spec.teacher.cache)
    evidence = check_teacher_files(spec.teacher.path, store.manifest, store.path)
    batches = batches_of(spec, stream)
    # Rows evenly spaced over the run, or over its first epoch if it has several.
    rows = min(rows_of_run(spec), batches.rows_per_epoch)
    positions = np.unique(np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(np.int64))
    found = sum(
        key in store for at in positions for key in store.identity.keys(batches.take(int(at), 1))
    )
    return Stored(
        store=store,
        config=inputs.teacher,
        teacher_evidence=evidence,
        rows=len(positions),
        found=found,
    )


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """The facts of one run on its device, as the choosers use them."""

    spec: RunSpec
    """The spec, with the values decided so far."""
    inputs: Inputs
    compute: ComputeDevice
    log: Log
    store: Stored | None = None
    """The store from which the run reads the teacher's outputs; None if the teacher is loaded."""

    def take(self, key: str, **computed: Any) -> str:
        """Decide one setting, log the decision and return the choice."""
        decision = KNOBS[key].decide(self, **computed)
        self.log(decision)
        self.settle({key: decision.choice})
        return decision.choice

    def settle(self, values: Mapping[str, Any]) -> None:
        self.spec = self.spec.with_values(values)

    @property
    def capability(self) -> tuple[int, int] | None:
        return self.compute.capability

    @property
    def has_triton(self) -> bool:
        return has_triton()

    @property
    def student(self) -> ModelConfig:
        return self.inputs.student

    @property
    def teacher(self) -> ModelConfig | None:
        return self.inputs.teacher if self.spec.has_teacher else None

    @property
    def available_bytes(self) -> int | None:
        number = self.compute.available.number
        return None if number is None else int(number)

    @property
    def stored_words(self) -> str | None:
        return None if self.store is None else self.store.words

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.spec.train.rows * self.spec.data.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.spec.train.accumulation

    @property
    def layers(self) -> int:
        return self.student.num_hidden_layers


@dataclass(frozen=True, slots=True)
class Plan:
    spec: RunSpec
    """The resolved spec: the user's settings, with a decision for each `auto` and for each 0 that means an automatic
    choice. A setting that has no effect in this run has a fixed value."""
    inputs: Inputs
    compute: ComputeDevice
    store: Stored | None
    """The store from which the run reads the teacher's outputs; None if the teacher is loaded."""
    budget: MemoryBudget
    kept_layers: int
    """Number of the student's last layers that keep their activations despite student.checkpointing."""
    shares_weights: bool = False
    """Whether teacher and student share one copy of the weights that are the frozen base of the adapters."""

    @property
    def sparse(self) -> bool:
        """Whether the teacher gives sparse targets and no hidden states."""
        return self.store is not None and self.store.identity.form != HIDDEN


def plan_run(
    spec: RunSpec,
    inputs: Inputs,
    compute: ComputeDevice,
    stream: TokenStream,
    log: Callable[[Decision | MemoryBudget], None],
) -> Plan:
    """Plan a run; log each decision and the budget.

    `spec` is the result of `set_up_device`; `stream` is the training data, whose rows are looked up in the store.
    Raises CacheError if the store does not fit this run. Raises BadInput if a setting cannot work in this run or on
    this device, and, unless memory.budget is report, if the run does not fit into memory.
    """
    store = find_stored(spec, inputs, stream)
    facts = RunFacts(spec=spec, inputs=inputs, compute=compute, store=store, log=log)
    facts.take("model.engine")
    facts.settle(without_effect(facts))
    if store:
        log(store.precision)
        facts.settle({"teacher.precision": store.precision.choice})
    elif spec.has_teacher:
        facts.take("teacher.precision")
    facts.take("loss.kernel")
    choose_layer_execution(facts)
    memory = plan_memory(facts)
    budget = memory.budget()
    log(budget)
    if spec.memory.budget == "enforce":
        budget.refuse_if_too_big()
    if facts.spec.student.adapter_base == "fp8":
        require_fp8_matmuls(facts.capability)
    facts.take("train.update")
    if facts.spec.compute.gpus > 1 and facts.spec.student.adapter == "none":
        # Weights and two moments, in fp32.
        facts.take("checkpoint.sharded", whole_bytes=12 * count_parameters(facts.student))
    return Plan(
        spec=facts.spec,
        inputs=inputs,
        compute=compute,
        store=store,
        budget=budget,
        kept_layers=memory.kept_layers,
        shares_weights=memory.shares_weights,
    )


def require_fp8_matmuls(capability: tuple[int, int] | None) -> None:
    """Raise BadInput for a GPU without fp8 matmuls. A CPU, with capability None, computes them in fp32."""
    if capability is not None and capability < FP8_CAPABILITY:
        raise BadInput.expected(
            "student.adapter_base",
            "fp8",
            f"a GPU of compute capability {format_capability(FP8_CAPABILITY)}",
            format_capability(capability),
            hint="set student.adapter_base to blocks or floats, which run on any GPU",
        )


def without_effect(facts: RunFacts) -> dict[str, str]:
    """Return the values of settings that have no effect in this run, and so are not decided."""
    settings: dict[str, str] = {}
    if facts.spec.compute.gpus == 1:
        settings |= dict.fromkeys(("teacher.shard", "student.reshard", "checkpoint.sharded"), "off")
    if facts.inputs.context:
        # The number of forward passes differs between ranks, but gathering a layer is a collective.
        settings["teacher.shard"] = "off"
    if facts.spec.student.adapter != "none":
        # Each GPU has a full copy of the frozen student and its small adapters.
        settings |= dict.fromkeys(("student.reshard", "checkpoint.sharded"), "off")
    if facts.teacher is None:
        settings |= {
            "teacher.precision": "fp32",
            "teacher.attention": "masked",
            "teacher.shard": "off",
        }
    return settings


def choose_layer_execution(facts: RunFacts) -> None:
    """Choose the kernels between the matmuls, whether attention is packed, and the kernel of packed attention."""
    facts.take("kernels.layers")
    facts.take("student.attention")
    if facts.teacher is not None:
        facts.take("teacher.attention")
    facts.take("kernels.attention")


def plan_memory(facts: RunFacts) -> MemoryPlan:
    """Decide the settings that affect memory, and return the plan with them.

    These are the teacher's backend, checkpointing, the tokens per chunk of the loss, sharding over ranks, and
    CUDA graphs.
    """
    spec, ranks = facts.spec, facts.spec.compute.gpus
    size = facts.inputs.teacher_size if facts.teacher is not None else None
    packed = size if size is not None and size.matrices else None
    itemsize = ITEM_BYTES[spec.teacher.precision]
    # Settings that are decided last have these values in the first plan; layers are resharded on several GPUs.
    undecided = {"teacher.shard": "off", "student.graphs": "off"}
    initial = MemoryPlan(
        spec=spec.with_values({**undecided, "student.reshard": "on" if ranks > 1 else "off"}),
        teacher=facts.teacher,
        student=facts.student,
        available=facts.compute.available,
        teacher_packed_bytes=packed.weight_bytes(itemsize) if packed else None,
        teacher_packed_layers=packed.layer_bytes(itemsize) if packed else (),
        shares_heads=(facts.capability or (0, 0))[0] == 9,
        student_blocks=facts.inputs.student_blocks,
        is_one_file=facts.inputs.is_one_file,
        context=len(facts.inputs.context),
        store=facts.store.identity if facts.store else None,
    )
    plan, decisions = fit(initial, stored_words=facts.stored_words)
    if ranks > 1 and facts.teacher is not None and not facts.inputs.context:
        shared, shared_decisions = fit(
            initial.changed({"teacher.shard": "on"}), stored_words=facts.stored_words
        )
        needed = {"whole_bytes": plan.total_bytes, "shared_bytes": shared.total_bytes}
        if facts.take("teacher.shard", **needed) == "on":
            plan, decisions = shared, shared_decisions
    for decision in decisions:
        facts.log(decision)
    if ranks > 1 and not plan.adapted:
        kept = plan.changed({"student.reshard": "off"})
        needed = {"kept_bytes": kept.total_bytes, "given_bytes": plan.total_bytes}
        plan = kept if facts.take("student.reshard", **needed) == "off" else plan
    captured = plan.changed({"student.graphs": "on"})
    graphs = facts.take(
        "student.graphs",
        packed=spec.student.attention == "packed",
        checkpointing=plan.checkpointing,
        adapted=plan.adapted,
        tokens=plan.tokens,
        needed_bytes=captured.total_bytes,
        given_bytes=plan.total_bytes,
    )
    plan = captured if graphs == "on" else plan
    facts.spec = plan.spec
    return plan
