"""Predict a run's device memory, item by item, from headers alone.

    MemoryPlan(spec=..., teacher=..., student=..., ...).budget()     a MemoryBudget: items, phases, the peak

A run has phases, and not all items are allocated in each: the teacher's temporaries are freed before the
student's activations are allocated, and the activations are freed before the optimizer steps. So each item lists
the phases in which it is allocated, a phase needs the sum of its items, and the run needs the largest of
these sums. The table marks the items that are allocated in the phase with the largest sum.

    memory on cuda: 24.1 GiB at its peak (loss), of 132.8 GiB available (cudaMemGetInfo free, at most 95% of total)

      item                        GiB  at peak  how
      teacher weights         14.190     *      7.62G numbers of 2 bytes
      ...

A budget that does not fit is refused, and the error lists all changes of settings that reduce it. If the available
memory is unknown, nothing is refused, and the table gives the reason. The available memory must be read after CUDA
was initialised on the device, because the budget has no item for CUDA's context of some hundred MiB.

Letters: P student parameters, V its vocabulary size and D its hidden size, N = B*T tokens of one forward pass, C rows
of one chunk of the loss, R ranks, G = V D for the embedding (2 V D with an untied head). All sizes are in bytes.

Trainer: weights in fp32, 4 P; AdamW's moments, 8 P, from the first step on; gradients, 4 P, from the end of the
backward pass to the start of the next step. So the gradients are allocated during an evaluation, and at the same time
as the activations only with gradient accumulation. A tied embedding has two gradients, of the head and of the lookup,
which are summed at the end of the backward pass: 8 V D more at that time. The fused AdamW step and clipping work in
place. At the end of the run, the gradients and moments are freed, and the saved student is loaded, 4 P, and evaluated.

Loss: two buffers of C x V in fp32, four with a teacher, and one in bf16 for the matmuls. The fused loss has one such
fp32 buffer, two with a teacher, and one in the dtype of the matmuls for each of several chunks. The gradients of the
hidden states take 4 N D. The gradient of the head takes 4 V D and becomes the gradient of its weights.

Several GPUs: each rank keeps 1/R of weights, moments and gradients. In addition:

    forward, loss      the gathered embedding, 4 G, and all gathered layers, or only the running layer and the next
    backward           the gradients of a layer before their reduction, and the copy that is sent
    end of backward    the full gradient of the embedding, which is reduced last
    evaluation         a full copy of the student, gathered for evaluations and files

With a sharded teacher, each rank holds 1/R of its layers, the full embedding, norm and head, and two gathered layers:
the running layer and the next one (`engine.teachers.sharded`). Before the first step, every rank holds the full student
for the first-minute checks, with full gradients. With many ranks this is the peak.

Byte counts are requested sizes: torch rounds each tensor up to 512 bytes, and free memory may be fragmented. Not
covered: host memory of a run on a GPU; on a CPU, the interpreter, the libraries and the corpus (a few hundred MiB); the
one tensor of the file that is read at a time while a model is loaded. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.audit.bounds import (
    REFERENCE_FLOPS,
    layer_bytes,
    logits_bytes,
)
from engine.errors import BadInput
from engine.generation.size import PAGE, pages_for, token_bytes
from engine.loss.chunks import (
    FUSED_HELD,
    SMALLEST_CHUNK_ROWS,
    default_chunk_rows,
    logits_buffers,
)
from engine.machine.reading import Reading
from engine.models.adapter_targets import trained_parameters
from engine.models.config import ModelConfig, count_parameters
from engine.models.packed_size import SCRATCH_LIMIT_BYTES, PackedSize
from engine.models.transformers_config import TransformersConfig
from engine.plan.activations import Forward
from engine.plan.cost import linear_sizes, linear_weights, query_width, shared_width
from engine.spec import RunSpec, parse_set
from engine.teachers.context_passes import pass_tokens
from engine.teachers.store.keys import HIDDEN, Identity
from engine.units import format_bytes, format_count

ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp8": 2}
"""Bytes of a number, by precision. tf32 is stored as fp32. With fp8, all except the weights of the layers is bf16."""

EVAL_ROWS_AT_ONCE = 16
"""Largest number of held-out rows in one forward pass."""

EVAL_CHUNK_ROWS = 2048
"""Largest number of held-out tokens whose logits are in memory at the same time."""
WRITTEN_AT_ONCE = 1024
"""Largest number of rows that are generated in one batch."""
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""Size of the cuBLAS workspace of each thread that launches matmuls, in bytes: the main thread and autograd's."""

_Settings = tuple[str, ...]

MEMORY_PHASES = (
    "teacher evaluation",
    "teacher forward",
    "loss",
    "backward",
    "last gradients",
    "evaluation",
    "step audit",
)
"""Phases of a run, in their order on a GPU. The teacher is evaluated before the first step, but on a CPU after it. An
evaluation or an audit may follow any step. The student's forward pass is left out because it needs the least memory,
and the optimizer step because the evaluation after it needs more.
"""
_TEACHER_EVALUATION, _TEACHER, _LOSS, _BACKWARD, _LAST, _EVALUATION, _AUDIT = MEMORY_PHASES
_STEP = (_TEACHER, _LOSS, _BACKWARD)


@dataclass(frozen=True, slots=True)
class BudgetItem:
    name: str
    bytes: int
    how: str
    """Arithmetic of `bytes`, as text."""
    phases: tuple[str, ...] = MEMORY_PHASES
    """The phases in which it is allocated."""
    lasting: bool = False
    """Whether it stays allocated. Other items are allocated again in each step or evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change of settings, and the memory that the run would need with it."""

    settings: tuple[str, ...]
    """Settings in the form of the command line, such as `train.rows=2`."""
    total_bytes: int
    saved_bytes: int
    fits: bool

    @property
    def text(self) -> str:
        settings = " ".join(f"--set {setting}" for setting in self.settings)
        end = "fits" if self.fits else "not enough alone"
        return (
            f"{settings}: {format_bytes(self.saved_bytes)} less, "
            f"{format_bytes(self.total_bytes)} in all: {end}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    device: str
    items: tuple[BudgetItem, ...]
    available: Reading
    """Bytes that this run may use, read before the run allocated anything on the device."""
    savings: tuple[Saving, ...] = ()
    """Changes with which the run would need less; empty if the budget fits."""

    def bytes_in(self, phase: str) -> int:
        return sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most memory; the earliest if several need the same."""
        return max(MEMORY_PHASES, key=self.bytes_in)

    @property
    def total_bytes(self) -> int:
        return self.bytes_in(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        """Whether the budget fits; None when the available memory is unknown."""
        available = self.available.number
        return None if available is None else self.total_bytes <= available

    def lines(self) -> list[str]:
        """Return the table as text for people."""
        peak = self.peak_phase
        available = (
            f"available: {self.available}"
            if self.available.value is None
            else f"of {format_bytes(self.available.number)} available"
        )
        out = [
            f"memory on {self.device}: {format_bytes(self.total_bytes)} at its peak ({peak}), "
            f"{available} ({self.available.source})",
            "",
        ]
        width = max(len(item.name) for item in self.items)
        out.append(f"  {'item':{width}}  {'size':>10}  at peak  how")
        for item in sorted(self.items, key=lambda item: (not item.lasting, -item.bytes)):
            mark = "*" if peak in item.phases else " "
            size = format_bytes(item.bytes)
            out.append(f"  {item.name:{width}}  {size:>10}     {mark}     {item.how}")
        out += ["", f"  {'phase':{width}}  {'size':>10}"]
        out += [f"  {p:{width}}  {format_bytes(self.bytes_in(p)):>10}" for p in MEMORY_PHASES]
        return out

    def refuse_if_too_big(self) -> None:
        """Raise BadInput, with the table and the savings, if the run needs more memory than is available."""
        if self.fits is not False:
            return
        lines = [*self.lines(), "", "  changes that need less memory:"]
        lines += [f"    {saving.text}" for saving in self.savings] or ["    a smaller model"]
        raise BadInput(
            f"memory: {self.device} — expected a run that fits in "
            f"{format_bytes(self.available.number)}, found one of "
            f"{format_bytes(self.total_bytes)}\n" + "\n".join(lines),
            hint=_hint(self.savings),
        )


def _hint(savings: tuple[Saving, ...]) -> str:
    fitting = [saving for saving in savings if saving.fits]
    if fitting:
        best = " ".join(f"--set {setting}" for setting in fitting[0].settings)
        return f"`{best}` makes it fit"
    return "no setting makes it fit; a smaller teacher or student, or a smaller data.seq_len, needs less"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Inputs of the memory prediction: settings (`auto` counts as off), shapes and available memory."""

    spec: RunSpec
    teacher: ModelConfig | None
    student: ModelConfig
    available: Reading
    """Bytes that the run may use."""
    teacher_packed_bytes: int | None = None
    """Size of the teacher's weights with the quantised backend, without its scratch memory, whichever backend the plan
    has. None if the file has no quantised blocks.
    """
    teacher_packed_layers: tuple[int, ...] = ()
    """Bytes of each layer of the teacher with the quantised backend."""
    shares_heads: bool = True
    """Whether masked bf16 attention on this GPU accepts fewer key/value heads than query heads without
    copying them (`engine.models.decoder`: compute capability 9).
    """
    kept_layers: int = 0
    """Number of the student's last layers that keep their activations despite student.checkpointing."""
    student_blocks: PackedSize | None = None
    """Sizes of a student with adapters whose frozen matrices stay in quantised blocks."""
    is_one_file: bool = False
    """Whether the base of the student's adapters is the teacher's file."""
    context: int = 0
    """Tokens of teacher.context."""
    store: Identity | None = None
    """Identity of the store that the backend `cached` would read."""

    @property
    def adapted(self) -> bool:
        """Whether only adapters of the student are trained."""
        return self.spec.student.adapter != "none"

    @property
    def shares_weights(self) -> bool:
        """Whether teacher and student share one copy of the weights that are the frozen base of the adapters: both have
        the same file, backend and precision."""
        teacher, student = self.spec.teacher, self.spec.student
        in_blocks = self.student_blocks is not None
        return (
            self.is_one_file
            and student.adapter_base != "fp8"
            and teacher.backend == ("quantized" if in_blocks else "dequantized")
            and teacher.precision == student.precision
            and teacher.shard != "on"
        )

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen weights of a student with adapters; 0 without adapters."""
        if not self.adapted:
            return 0
        if self.shares_weights:
            if (size := self.student_blocks) is None:
                return 0
            return self.itemsize * _tables(self.student) + size.scratch_bytes(self.itemsize)
        if self.spec.student.adapter_base == "fp8":
            # The backward pass dequantises one matrix at a time.
            width = max(self.student.intermediate_size, query_width(self.student))
            values = self.itemsize * width * self.student.hidden_size
            return _fp8_bytes(self.student, self.itemsize) + values
        if (size := self.student_blocks) is None:
            return self.itemsize * count_parameters(self.student)
        layers = sum(size.layer_bytes(self.itemsize))
        return layers + self.itemsize * _tables(self.student) + size.scratch_bytes(self.itemsize)

    @property
    def fused_loss(self) -> bool:
        return self.spec.loss.kernel == "fused"

    @property
    def checkpointing(self) -> bool:
        return self.spec.student.checkpointing == "on"

    @property
    def graphs(self) -> bool:
        """Whether the student's layers run as CUDA graphs, which keep their activations and gradients allocated."""
        return self.spec.student.graphs == "on"

    @property
    def reshard(self) -> bool:
        """Whether a rank frees a layer's gathered weights between forward and backward."""
        return self.spec.student.reshard == "on"

    @property
    def teacher_shard(self) -> bool:
        """Whether the teacher's layers are sharded over the ranks."""
        return self.spec.teacher.shard == "on"

    @property
    def stored(self) -> Identity | None:
        """Identity of the stored teacher outputs; None if the run does not read them."""
        return self.store if self.spec.teacher.backend == "cached" else None

    @property
    def quantized(self) -> bool:
        return self.spec.teacher.backend == "quantized"

    @property
    def ranks(self) -> int:
        """Number of GPUs over which the student is sharded; the budget is for one of them."""
        return self.spec.compute.gpus

    @property
    def itemsize(self) -> int:
        """Bytes per element in the student's matmuls."""
        return ITEM_BYTES[self.spec.student.precision]

    @property
    def teacher_itemsize(self) -> int:
        return ITEM_BYTES[self.spec.teacher.precision]

    @property
    def on_gpu(self) -> bool:
        return self.spec.compute.device == "cuda"

    @property
    def teacher_in_loss(self) -> ModelConfig | None:
        """The teacher; None if the objective uses no teacher."""
        return self.teacher if self.spec.taught else None

    def share(self, size: int) -> int:
        """Return one rank's share of a sharded size."""
        return -(-size // self.ranks)

    @property
    def tokens(self) -> int:
        return self.spec.train.rows * self.spec.data.seq_len

    def student_pass(self, rows: int) -> Forward:
        # The residual stream of a student with adapters is in the dtype of its frozen weights.
        forward = self._pass(
            self.student, rows, self.itemsize, self.itemsize if self.adapted else 4
        )
        return replace(
            forward,
            packed=self.spec.student.attention == "packed" and self.itemsize == 2,
            fused=self.spec.kernels.layers == "fused" and self.student.native,
            checkpointing=self.checkpointing,
            kept_layers=self.kept_layers,
        )

    def teacher_pass(self, config: ModelConfig, rows: int) -> Forward:
        forward = self._pass(config, rows, self.teacher_itemsize, self.teacher_itemsize)
        packed = self.spec.teacher.attention == "packed" and self.teacher_itemsize == 2
        if self.context:
            tokens = pass_tokens(rows, self.spec.data.seq_len, self.context)
            forward = replace(forward, rows=1, seq_len=tokens)
        return replace(forward, packed=packed)

    def _pass(
        self, config: ModelConfig, rows: int, matmul_bytes: int, residual_bytes: int
    ) -> Forward:
        return Forward(
            config=config,
            rows=rows,
            seq_len=self.spec.data.seq_len,
            matmul_bytes=matmul_bytes,
            residual_bytes=residual_bytes,
            fused_norms=self.on_gpu,
            # On CUDA no fp32 kernel supports this, and only some bf16 kernels; the CPU kernel does.
            shares_heads=not self.on_gpu or (matmul_bytes == 2 and self.shares_heads),
        )

    @property
    def chunk_rows(self) -> int:
        """Number of tokens whose logits are computed at a time."""
        device, vocabulary = self.spec.compute.device, self.student.vocab_size
        usual = default_chunk_rows(device, vocabulary, fused=self.fused_loss)
        return min(self.spec.loss.chunk_rows or usual, self.tokens)

    def changed(self, settings: Mapping[str, Any]) -> MemoryPlan:
        """Return the plan with changed settings."""
        return replace(self, spec=self.spec.with_values(settings))

    def with_sets(self, settings: _Settings) -> MemoryPlan:
        """Return the plan with changed settings, each in the form of the command line."""
        return self.changed(dict(map(parse_set, settings)))

    def items(self) -> tuple[BudgetItem, ...]:
        """Return every item that is not empty."""
        parts = (
            _teacher_items,
            _student_items,
            _rank_items,
            _loss_items,
            _rollout_items,
            _evaluation_items,
            _audit_items,
            _transformers_items,
        )
        return tuple(item for part in parts for item in part(self) if item.bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the run needs in the phase that needs the most."""
        return self._budget().total_bytes

    def _budget(self) -> MemoryBudget:
        return MemoryBudget(
            device=self.spec.compute.device, items=self.items(), available=self.available
        )

    def budget(self) -> MemoryBudget:
        """Return the memory budget of the run; if it does not fit, with the changes of settings that need less."""
        budget = self._budget()
        if budget.fits is not False or self.available.number is None:
            return budget
        return replace(budget, savings=_savings(self, self.available.number))


def evaluates_late(spec: RunSpec) -> bool:
    """Return whether a run on this device evaluates teacher and untrained student after its first step."""
    return spec.compute.device != "cuda" and spec.compute.gpus == 1


def _teacher_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    config, itemsize = plan.teacher, plan.teacher_itemsize
    if config is None:
        return
    if plan.stored is not None:
        yield from _stored_items(plan, config, plan.stored)
        return
    yield from _shared_teacher(plan, config, _teacher_weights(plan, config))
    if plan.quantized:
        sizes = linear_sizes(config)
        largest = max(sizes["q"] + sizes["k"] + sizes["v"], sizes["gate"] + sizes["up"])
        yield BudgetItem(
            "dequantisation scratch",
            min(itemsize * max(largest, sizes["down"]), SCRATCH_LIMIT_BYTES),
            f"gate and up of a layer, {format_count(largest)} x {itemsize} bytes, at most "
            f"{format_bytes(SCRATCH_LIMIT_BYTES)}",
            lasting=True,
        )
    if plan.teacher_in_loss is None:
        return
    forward = plan.teacher_pass(config, plan.spec.train.rows)
    yield BudgetItem(
        "teacher temporaries",
        forward.without_autograd(),
        f"the peak inside a layer, {format_count(plan.tokens)} tokens",
        phases=(_TEACHER,),
    )
    if plan.context:
        yield BudgetItem(
            "teacher hidden states with contexts",
            itemsize * forward.tokens * config.hidden_size,
            f"a pass of {format_count(forward.tokens)} tokens x {config.hidden_size} x {itemsize} bytes",
            phases=(_TEACHER,),
        )
    yield BudgetItem(
        "teacher hidden states",
        itemsize * plan.tokens * config.hidden_size,
        f"{format_count(plan.tokens)} tokens x {config.hidden_size} x {itemsize} bytes",
        phases=(_LOSS, _BACKWARD, _LAST),
    )


def _teacher_weights(plan: MemoryPlan, config: ModelConfig) -> BudgetItem:
    if plan.quantized:
        assert plan.teacher_packed_bytes is not None
        return BudgetItem(
            "teacher weights",
            plan.teacher_packed_bytes,
            "quantised blocks as in the file, and the rest as floats",
            lasting=True,
        )
    if plan.spec.teacher.precision == "fp8":
        return _fp8_weights(config, plan.teacher_itemsize)
    parameters = count_parameters(config)
    return BudgetItem(
        "teacher weights",
        plan.teacher_itemsize * parameters,
        f"{format_count(parameters)} x {plan.teacher_itemsize} bytes",
        lasting=True,
    )


def _fp8_weights(config: ModelConfig, itemsize: int) -> BudgetItem:
    """Return the item of an fp8 teacher: one byte per weight of the layers and the head, one fp32 scale per row of the
    layers' matrices, and the rest in the teacher's dtype.
    """
    # The head is in fp8 under the same condition as in `engine.models.fp8.round_head`.
    rounds_head = not config.tie_word_embeddings and config.vocab_size % 16 == 0
    head = config.vocab_size * config.hidden_size if rounds_head else 0
    matrices = linear_weights(config) + head
    rest = count_parameters(config) - matrices
    return BudgetItem(
        "teacher weights",
        _fp8_bytes(config, itemsize) - (itemsize - 1) * head,
        f"{format_count(matrices)} x 1 byte in layers and head, with scales, "
        f"{format_count(rest)} x {itemsize} bytes in the rest",
        lasting=True,
    )


def _fp8_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the size of a decoder whose layers' matrices are in fp8, with one fp32 scale per row."""
    query, shared = query_width(config), shared_width(config)
    rows = query + 2 * shared + 2 * config.hidden_size + 2 * config.intermediate_size
    matrices = linear_weights(config)
    rest = count_parameters(config) - matrices
    return matrices + 4 * config.num_hidden_layers * rows + itemsize * rest


def _stored_items(plan: MemoryPlan, config: ModelConfig, stored: Identity) -> Iterator[BudgetItem]:
    """Yield the items of a stored teacher. The plan leaves out the teacher that is loaded if a row is not stored."""
    head = config.vocab_size * config.hidden_size
    if stored.form == HIDDEN:
        yield BudgetItem(
            "teacher head",
            plan.teacher_itemsize * head,
            f"{format_count(head)} x {plan.teacher_itemsize} bytes; less in quantised blocks",
            lasting=True,
        )
    # On a GPU the outputs for the next batch are copied during the step, into memory of their own.
    yield BudgetItem(
        "teacher outputs",
        round(stored.token_bytes * plan.tokens) * (2 if plan.on_gpu else 1),
        f"{format_count(plan.tokens)} tokens x {stored.token_bytes:,.0f} bytes: {stored.words}"
        + (", and the next batch's" if plan.on_gpu else ""),
        phases=MEMORY_PHASES[1:] if plan.on_gpu else (_LOSS, _BACKWARD, _LAST),
        lasting=plan.on_gpu,
    )


def _student_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    parameters = trained_parameters(plan.student, plan.spec.student)
    base = plan.frozen_bytes
    layers = plan.student.num_hidden_layers
    count, tokens = format_count(parameters), plan.tokens
    shared = plan.ranks > 1 and not plan.adapted
    share = plan.share if shared else int
    shared_by = f", sharded over {plan.ranks} GPUs" if shared else ""
    yield BudgetItem(
        "student weights",
        share(base + 4 * parameters),
        f"{format_bytes(base)} frozen, and adapters, {count} x 4 bytes"
        if base
        else f"{count} x 4 bytes{shared_by}",
        lasting=True,
    )
    yield BudgetItem(
        "AdamW moments",
        share(8 * parameters),
        f"{count} x 2 x 4 bytes{shared_by}, from the first step on",
        phases=MEMORY_PHASES if evaluates_late(plan.spec) else MEMORY_PHASES[1:],
        lasting=True,
    )
    accumulated = plan.spec.train.accumulation > 1
    yield BudgetItem(
        "gradients",
        share(4 * parameters),
        f"{count} x 4 bytes{shared_by}, "
        + ("kept between micro-batches" if accumulated else "from the backward pass on"),
        # If the untrained student is evaluated after the first step, it uses the memory of the gradients.
        phases=(*_STEP, _LAST, _EVALUATION, _AUDIT)
        if accumulated
        else (_LAST, _EVALUATION, _AUDIT),
    )
    kept = plan.student_pass(plan.spec.train.rows).kept()
    largest = sorted(kept.items(), key=lambda term: -term[1])[:3]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    yield BudgetItem(
        "student activations",
        sum(kept.values()),
        f"{format_count(tokens)} tokens, {layers} layers: {words}, ...",
        phases=MEMORY_PHASES[1:] if plan.graphs else (_LOSS, _BACKWARD),
        lasting=plan.graphs,
    )
    if plan.graphs:
        inside = parameters - (0 if plan.adapted else _tables(plan.student))
        yield BudgetItem(
            "gradients in the graph",
            4 * inside,
            f"{format_count(inside)} x 4 bytes, kept from step to step",
            phases=_STEP,
        )
    yield BudgetItem(
        "tokens of a micro-batch",
        3 * 8 * tokens,
        f"ids, documents and labels of {format_count(tokens)} tokens, 8 bytes each",
        phases=(*_STEP, _LAST),
    )
    if plan.on_gpu:
        yield BudgetItem(
            "cuBLAS workspaces",
            2 * CUBLAS_WORKSPACE_BYTES,
            f"{format_bytes(CUBLAS_WORKSPACE_BYTES)} for each of the two threads",
            lasting=True,
        )


def _loss_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    student, tokens = plan.student, plan.tokens
    width, head = student.hidden_size, student.vocab_size * student.hidden_size
    # The head of a student with adapters is frozen.
    trained = 0 if plan.adapted else head
    chunk = plan.chunk_rows
    buffers = logits_buffers(
        None if plan.teacher_in_loss is None else plan.spec.loss.divergence,
        sparse=plan.stored is not None and plan.stored.form != HIDDEN,
        fused=plan.fused_loss,
    )
    # For the matmuls: in the eager loss a narrow copy of the logits' gradient, in the fused loss a separate buffer.
    narrow = plan.itemsize if plan.fused_loss or (plan.on_gpu and plan.itemsize == 2) else 0
    kept_rows = min(FUSED_HELD * chunk, tokens) if plan.fused_loss else chunk
    yield BudgetItem(
        "loss workspace",
        student.vocab_size * (4 * buffers * chunk + narrow * kept_rows),
        f"{buffers} x {format_count(chunk)} rows x {student.vocab_size} x 4 bytes"
        + (f", and {format_count(kept_rows)} rows x {narrow} bytes" if narrow else ""),
        phases=(_LOSS,),
    )
    yield BudgetItem(
        "operands of the loss",
        _operands(plan),
        "labelled hidden states and heads in the dtype of the matmuls",
        phases=(_LOSS,),
    )
    yield BudgetItem(
        "student hidden states",
        4 * tokens * width,
        f"{format_count(tokens)} tokens x {width} x 4 bytes",
        phases=(_LOSS, _BACKWARD, _LAST),
    )
    yield BudgetItem(
        "gradients of the loss",
        4 * (trained + tokens * width),
        f"4 bytes x (head {format_count(trained)} + hidden {format_count(tokens * width)})",
        phases=(_LOSS, _BACKWARD),
    )
    narrow_itemsize = plan.itemsize if plan.itemsize < 4 else 0
    scaled = tokens * width * (4 + narrow_itemsize)
    # Of one layer: two gradients of feed-forward width, the gradient of the residual stream, and the gradient of a
    # matrix in both dtypes. The gradient of the hidden states has been freed before.
    matrix = linear_sizes(student)["down"] * (4 + narrow_itemsize)
    forward = plan.student_pass(plan.spec.train.rows)
    inside = 2 * plan.itemsize * tokens * student.intermediate_size + matrix + forward.recomputed()
    yield BudgetItem(
        "backward temporaries",
        max(scaled, inside + plan.itemsize * tokens * width),
        "the larger of a second gradient of the hidden states and a layer's gradients",
        phases=(_BACKWARD,),
    )
    # With a tied embedding, the gradients of the head and of the lookup, in addition to their sum. With accumulation,
    # also the gradient to which the sum is added.
    copies = 2 * student.tie_word_embeddings + (plan.spec.train.accumulation > 1)
    kept = sum(forward.kept().values())
    first = inside + (4 + plan.itemsize) * tokens * width + kept // student.num_hidden_layers
    yield BudgetItem(
        "end of backward",
        max(4 * trained * copies + 4 * tokens * width, first),
        "the larger of the embedding's gradients not yet summed and the first layer's",
        phases=(_LAST,),
    )


def _operands(plan: MemoryPlan) -> int:
    """Return the bytes of the loss's operands: hidden states of all tokens and of the labelled tokens, and copies of
    the heads.

    On a CPU, matmuls run in fp32 whatever the dtype of their operands.
    """
    vocabulary, tokens, width = plan.student.vocab_size, plan.tokens, plan.student.hidden_size
    itemsize = plan.itemsize
    total = tokens * width * (itemsize if itemsize == 4 else 2 * itemsize)
    if plan.on_gpu and itemsize < 4 and not plan.adapted:
        total += itemsize * vocabulary * width
    elif itemsize < 4:
        total += 4 * tokens * width
    if (teacher := plan.teacher_in_loss) is not None:
        total += plan.teacher_itemsize * tokens * teacher.hidden_size
        if not plan.on_gpu and plan.teacher_itemsize < 4:
            total += 4 * (vocabulary + tokens) * teacher.hidden_size
    return total


def written_rows(spec: RunSpec) -> int:
    """Return the largest number of rows that a step generates in one batch, at most WRITTEN_AT_ONCE."""
    passes = math.ceil(spec.rollout.share * spec.train.accumulation)
    return min(WRITTEN_AT_ONCE, spec.train.rows * passes)


def _rollout_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    """Yield the items of generating rows. They stay allocated, because a captured decode step uses fixed addresses."""
    spec, slots = plan.spec, written_rows(plan.spec)
    by_student = spec.rollout.by == "student"
    config = plan.student if by_student else plan.teacher
    if not slots or config is None:
        return
    itemsize = plan.itemsize if by_student else plan.teacher_itemsize
    pages = slots * pages_for(spec.data.seq_len) + 1
    yield BudgetItem(
        "KV cache of generated rows",
        pages * PAGE * token_bytes(config, itemsize),
        f"{slots} rows of {format_count(spec.data.seq_len)} tokens in pages of {PAGE}",
        lasting=True,
    )
    if by_student and spec.compute.gpus > 1:
        yield BudgetItem(
            "gathered weights for generation",
            4 * count_parameters(config),
            f"a full copy of the sharded student, {format_count(count_parameters(config))} x 4 bytes",
            lasting=True,
        )
    if not plan.on_gpu:
        return
    yield BudgetItem(
        "logits of generated rows",
        4 * slots * config.vocab_size,
        f"{slots} rows x {format_count(config.vocab_size)} ids x 4 bytes",
        lasting=True,
    )
    if by_student and itemsize == 2:
        yield BudgetItem(
            "16-bit weights for generation",
            2 * count_parameters(config),
            f"a copy in 16 bits, {format_count(count_parameters(config))} x 2 bytes",
            lasting=True,
        )


def _evaluation_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    rows = min(EVAL_ROWS_AT_ONCE, plan.spec.eval.rows)
    how = f"{rows} rows at once, logits of {EVAL_CHUNK_ROWS} tokens in fp32, twice"
    # Without autograd, autocast does not cache its copies of weights: there is one at a time.
    cast = plan.itemsize * max(linear_sizes(plan.student).values()) if plan.itemsize < 4 else 0
    yield BudgetItem(
        "evaluation workspace",
        _workspace(plan, plan.student_pass(rows)) + cast,
        how,
        phases=(_EVALUATION,),
    )
    if plan.teacher is None or plan.stored is not None:
        return
    yield BudgetItem(
        "teacher evaluation workspace",
        _workspace(plan, plan.teacher_pass(plan.teacher, rows)),
        how,
        phases=(_TEACHER_EVALUATION,),
    )
    if plan.teacher_itemsize < 4 and not plan.on_gpu and not plan.quantized:
        head = plan.teacher.vocab_size * plan.teacher.hidden_size
        yield BudgetItem(
            "teacher head in fp32",
            4 * head,
            f"{format_count(head)} x 4 bytes: a CPU has no bf16 matmul with fp32 accumulation",
            phases=(_TEACHER_EVALUATION,),
        )


def _audit_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    """Yield the memory that the audit of a step needs on a GPU for its reference computations (`engine.audit`)."""
    if not plan.spec.checks.enabled or not plan.on_gpu:
        return
    student, teacher = plan.student, plan.teacher_in_loss
    tokens = plan.tokens * plan.spec.train.accumulation
    models = [model for model in (student, teacher) if model is not None]
    # There is no reference implementation for a model that transformers runs.
    compared = [model for model in models if model.native]
    layer = 4 * max((sum(linear_sizes(model).values()) for model in compared), default=0)

    at_once = max(
        (
            layer_bytes(
                intermediate=model.intermediate_size,
                width=model.hidden_size,
                heads=model.num_attention_heads,
                tokens=plan.tokens,
                row_tokens=plan.spec.data.seq_len,
                backward=model is student,
            )
            for model in compared
        ),
        default=0,
    )
    hidden = (
        sum(plan.itemsize * tokens * model.hidden_size for model in models)
        + 8 * tokens * student.hidden_size
    )
    if student.native and 8 * count_parameters(student) * tokens <= REFERENCE_FLOPS["cuda"]:
        # The input of every layer, for its gradients.
        hidden += 4 * tokens * student.hidden_size * (student.num_hidden_layers + 1)
    logits = logits_bytes(plan.tokens, student.vocab_size)
    # A frozen head has no gradient, and is already in the dtype of the matmul.
    head = 0 if plan.adapted else 6 * student.vocab_size * student.hidden_size
    yield BudgetItem(
        "audit of a step",
        layer + at_once + hidden + logits + head,
        "a layer in fp32 for some tokens, logits in fp32, gradients of the head",
        phases=(_AUDIT,),
    )


def _transformers_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    """Yield estimates of the memory that a model run by transformers needs beyond a native decoder of the same
    shape."""
    student, tokens = plan.student, plan.tokens
    itemsize, vocabulary = plan.itemsize, student.vocab_size
    if isinstance(student, TransformersConfig):
        count = student.num_hidden_layers * tokens
        yield BudgetItem(
            "norms of transformers",
            0 if plan.checkpointing else 8 * count * student.hidden_size,
            f"{format_count(count)} tokens and layers x {student.hidden_size} x 8 bytes, because norms are not fused",
            phases=(_LOSS, _BACKWARD),
        )
        if student.scales_logits:
            yield BudgetItem(
                "logits of the student",
                tokens * vocabulary * (5 * itemsize + 4),
                f"{format_count(tokens)} tokens x {vocabulary}, as the model returns them, and their gradients",
                phases=(_LOSS, _BACKWARD),
            )
    teacher = plan.teacher_in_loss if plan.stored is None else None
    if isinstance(teacher, TransformersConfig) and teacher.scales_logits:
        yield BudgetItem(
            "logits of the teacher",
            3 * tokens * teacher.vocab_size * plan.teacher_itemsize,
            f"{format_count(tokens)} tokens x {teacher.vocab_size}, as the model returns them",
            phases=(_TEACHER, _LOSS),
        )


def _workspace(plan: MemoryPlan, forward: Forward) -> int:
    """Return the bytes of an evaluation: the larger of the forward pass, while the tensors of the previous batch
    exist, and of the computation of logits.
    """
    config = forward.config
    logits = 4 * min(EVAL_CHUNK_ROWS, forward.tokens) * config.vocab_size
    # Hidden states of every token, and of the labelled tokens; on a CPU the latter are in fp32.
    itemsize = forward.residual_bytes
    hidden = forward.tokens * config.hidden_size * (2 * itemsize if plan.on_gpu else itemsize + 4)
    previous = hidden + logits if plan.spec.eval.rows > EVAL_ROWS_AT_ONCE else 0
    return max(forward.without_autograd() + previous, hidden + 2 * logits)


def _rank_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    """Yield the items that sharding adds on a rank; none for a run with a single process."""
    if plan.ranks == 1:
        return
    if plan.adapted:
        trained = trained_parameters(plan.student, plan.spec.student)
        yield BudgetItem(
            "gradients in the all-reduce",
            4 * trained,
            f"{format_count(trained)} x 4 bytes, all adapters in one buffer",
            phases=(_LAST,),
        )
        return
    parameters = count_parameters(plan.student)
    outside = _tables(plan.student)
    layer = (parameters - outside) // plan.student.num_hidden_layers
    layers = "every layer" if not plan.reshard else "two layers and their all-gather buffers"
    yield BudgetItem(
        "gathered weights",
        4 * outside,
        f"embedding and head, {format_count(outside)} x 4 bytes",
        phases=(_TEACHER, _LOSS, _BACKWARD, _LAST),
    )
    yield BudgetItem(
        "gathered layers",
        _gathered(plan, parameters - outside, layer),
        f"{layers}, {format_count(layer)} x 4 bytes each",
        phases=(_LOSS, _BACKWARD) if plan.reshard else (_TEACHER, _LOSS, _BACKWARD),
    )
    yield BudgetItem(
        "gradients being reduced",
        4 * 2 * layer,
        f"of a layer, twice {format_count(layer)} x 4 bytes",
        phases=(_BACKWARD,),
    )
    yield BudgetItem(
        "embedding's gradient",
        4 * outside,
        f"{format_count(outside)} x 4 bytes, until it is reduced",
        phases=(_LAST,),
    )
    yield BudgetItem(
        "whole student",
        4 * parameters,
        f"{format_count(parameters)} x 4 bytes, for evaluations and files",
        phases=(_TEACHER_EVALUATION, _EVALUATION),
    )
    yield from _before_the_first_step(plan, parameters, outside, layer)


def _gathered(plan: MemoryPlan, layers: int, layer: int) -> int:
    """Return the bytes of gathered student layers: of all layers, or of two layers and their all-gather buffers."""
    return 4 * (min(4 * layer, layers) if plan.reshard else layers)


def _shared_teacher(
    plan: MemoryPlan, config: ModelConfig, weights: BudgetItem
) -> Iterator[BudgetItem]:
    """Yield the teacher's weights on one rank, and the layers that the rank gathers."""
    if plan.ranks == 1 or not plan.teacher_shard:
        yield weights
        return
    count = config.num_hidden_layers
    layers = plan.teacher_packed_layers if plan.quantized else ()
    if not layers:
        # Embedding, head and the last norm are outside the layers.
        outside = plan.teacher_itemsize * (_tables(config) + config.hidden_size)
        layers = ((weights.bytes - outside) // count,) * count
    inside = sum(layers)
    yield replace(
        weights,
        bytes=weights.bytes - inside + plan.share(inside),
        how=f"{weights.how}; layers, {format_bytes(inside)}, sharded over {plan.ranks} GPUs",
    )
    gathered = min(2, count)
    yield BudgetItem(
        "gathered teacher layers",
        gathered * max(layers),
        f"{gathered} of at most {format_bytes(max(layers))}: the running layer and the next one",
        lasting=True,
    )


def _tables(config: ModelConfig) -> int:
    """Return the number of elements in embedding and head, which are one matrix if tied."""
    return (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size


def _before_the_first_step(
    plan: MemoryPlan, parameters: int, outside: int, layer: int
) -> Iterator[BudgetItem]:
    """Yield the memory that the full student needs before the first step beyond that of its shards later."""
    later_bytes = plan.share(12 * parameters) + 4 * outside
    inside = _gathered(plan, parameters - outside, layer)
    extra_bytes = {
        _LOSS: 4 * parameters - later_bytes - inside,
        _BACKWARD: 4 * parameters - later_bytes - inside - 8 * layer,
        _LAST: 8 * parameters - later_bytes - plan.share(4 * parameters) - 4 * outside,
    }
    for phase, size in extra_bytes.items():
        if size > 0:
            yield BudgetItem(
                f"whole student, {phase}",
                size,
                "needed by the checks before the first step, beyond what a step needs",
                phases=(phase,),
            )


def _savings(plan: MemoryPlan, available: float) -> tuple[Saving, ...]:
    """Return single changes that need less, those that fit first; if none fits, also a combination.

    For each kind of change there is a list of settings, from the mildest to the strongest. Fewer rows are combined with
    more accumulation, so that the optimizer sees the same batch. Gradients then have to be kept between micro-batches,
    which can need more memory than it saves. No change affects training beyond rounding. `eval.rows` changes how
    precisely the held-out loss is measured.
    """
    total = plan.total_bytes

    def saving(settings: _Settings, needed: int) -> Saving:
        return Saving(
            settings=settings,
            total_bytes=needed,
            saved_bytes=total - needed,
            fits=needed <= available,
        )

    singles = [
        saving(*_mildest(plan, ladder, available)) for ladder in _ladders(plan) if len(ladder)
    ]
    singles = [single for single in singles if single.saved_bytes > 0]
    singles.sort(key=lambda single: (not single.fits, -single.saved_bytes))
    if len(singles) < 2 or singles[0].fits:
        return tuple(singles)
    combined: _Settings = ()
    needed = total
    for ladder in _ladders(plan):
        if needed <= available or not ladder:
            continue
        settings, combined_needed = _mildest(plan.with_sets(combined), ladder, available)
        if combined_needed < needed:
            combined, needed = (*combined, *settings), combined_needed
    return (*singles, saving(combined, needed))


def _mildest(plan: MemoryPlan, ladder: list[_Settings], available: float) -> tuple[_Settings, int]:
    """Return the first of `ladder` that fits and its bytes; if none fits, the one that needs the least."""
    steps = [(settings, plan.with_sets(settings).total_bytes) for settings in ladder]
    smallest = min(steps, key=lambda step: step[1])
    return next((step for step in steps if step[1] <= available), smallest)


def _ladders(plan: MemoryPlan) -> Iterator[list[_Settings]]:
    spec = plan.spec
    loaded = plan.teacher is not None and plan.stored is None
    if loaded and not plan.quantized and plan.spec.teacher.precision != "fp8":
        if plan.teacher_packed_bytes is not None:
            yield [("teacher.backend=quantized",)]
        if plan.spec.teacher.precision != "bf16":
            yield [("teacher.precision=bf16",)]
    if loaded and plan.ranks > 1 and not plan.teacher_shard:
        yield [("teacher.shard=on",)]
    batch = spec.train.rows * spec.train.accumulation
    yield [
        (f"train.rows={rows}", f"train.accumulation={batch // rows}")
        for rows in range(spec.train.rows - 1, 0, -1)
        if batch % rows == 0
    ]
    powers = [1 << power for power in range(plan.chunk_rows.bit_length(), 0, -1)]
    yield [
        (f"loss.chunk_rows={rows}",)
        for rows in powers
        if SMALLEST_CHUNK_ROWS <= rows < plan.chunk_rows
    ]
    if spec.student.precision != "bf16":
        yield [("student.precision=bf16",)]
    if not plan.checkpointing:
        yield [("student.checkpointing=on",)]
    at_once = min(spec.eval.rows, EVAL_ROWS_AT_ONCE)
    yield [(f"eval.rows={rows}",) for rows in (8, 4, 2, 1) if rows < at_once]
