"""What a run needs before its first step: device, memory, arithmetic and data, each logged as it is
chosen or read.

The allocator is chosen from facts that need no CUDA; the memory plan is made from headers, and refused,
before a byte is uploaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.data.batches import Batch, heldout_rows
from engine.data.corpus import open_corpus
from engine.data.tokens import TokenStream, tokenize
from engine.decision import Decision
from engine.device.allocator import choose_allocator
from engine.device.cuda_driver import ask_here
from engine.device.facts import DeviceFacts, read_facts
from engine.device.reading import Reading, absent, measured
from engine.device.threads import choose_thread_wait
from engine.distill import record
from engine.distill.activations import linear_weights
from engine.distill.budget import MemoryBudget
from engine.distill.choices import choose_attention, choose_compile, choose_graphs
from engine.distill.choose_loss import choose_loss_kernel
from engine.distill.choose_ranks import choose_reshard, choose_teacher_shard
from engine.distill.fitting import Fitted, fit
from engine.distill.inputs import Inputs
from engine.distill.loss import default_chunk_rows
from engine.distill.loss_job import LossKernel
from engine.distill.memory_model import predict
from engine.distill.memory_plan import ITEM_BYTES
from engine.distill.optimizer import choose_update
from engine.distill.prepared import Stored
from engine.errors import CorpusError
from engine.kernels.dequantize import has_triton
from engine.kernels.small_m_table import MAX_ROWS, crossover_rows
from engine.models.config import ModelConfig
from engine.models.running import has_compiler
from engine.quant.blocks import BLOCK_TYPES
from engine.runlog.events import DataReady
from engine.runlog.write import LogWriter
from engine.runtime.device import choose_device, choose_precision, choose_threads
from engine.runtime.managed import MemoryScope, memory_scope
from engine.spec import RunSpec
from engine.teachers.choose import (
    choose_kernel,
    choose_prefetch,
    choose_teacher_compile,
)
from engine.units import format_bytes

EVAL_ROWS_AT_ONCE = 16


HOST_RESERVE_BYTES = 512 * 2**20
"""Left to everything else when a run computes on the CPU."""
DEVICE_SHARE = 0.95
"""Of a GPU's own memory; the rest goes to fragments and to what the driver takes later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    device: torch.device
    precision: str
    """Of the student's products."""
    memory: MemoryScope
    """Where weights are made."""
    available: Reading
    """Bytes of the device's memory that this run may take."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    stream: TokenStream
    heldout_stream: TokenStream
    heldout: list[Batch]
    ready: DataReady


def choose_arithmetic(log: LogWriter, spec: RunSpec) -> Arithmetic:
    """Device, allocator, precision and threads, set up and logged."""
    device = torch.device(record.decide(log, choose_device(spec.compute.device)))
    # A process that will compute on the GPU may ask CUDA itself; another leaves it alone.
    facts = read_facts(cuda=ask_here()) if device.type == "cuda" else read_facts()
    allocator = record.decide(log, choose_allocator(spec.memory.allocator, facts, device.type))
    memory = memory_scope(allocator, device)
    if memory.compiled is not None:
        record.compiled_library(log, memory.compiled)
    limit_bytes = round(spec.memory.limit_gib * 2**30)
    if limit_bytes and device.type == "cuda" and allocator == "native":
        limit_allocator(limit_bytes)
    precision = record.decide(
        log, choose_precision("student.precision", spec.student.precision, device.type)
    )
    threads = record.decide(log, choose_threads(spec.compute.threads))
    torch.set_num_threads(int(threads))
    # Set by the supervisor: OpenMP has read its environment before this line can run.
    record.decide(log, choose_thread_wait(spec.compute.thread_wait, os.environ))
    torch.use_deterministic_algorithms(spec.compute.deterministic)
    torch.manual_seed(spec.train.seed)
    return Arithmetic(
        device=device,
        precision=precision,
        memory=memory,
        available=limited(_available(device, facts), limit_bytes),
    )


def _available(device: torch.device, facts: DeviceFacts) -> Reading:
    """What this run may take of the memory that it computes in, now."""
    if device.type != "cuda":
        pools = [facts.memory.available_bytes, facts.cgroup_memory.headroom_bytes]
        known = [pool for pool in pools if pool.number is not None]
        if not known:
            return absent(str(pools[0].absent), pools[0].source)
        least = min(known, key=lambda pool: pool.number or 0)
        room = max(0, int(least.number or 0) - HOST_RESERVE_BYTES)
        return measured(room, f"{least.source} less {format_bytes(HOST_RESERVE_BYTES)}")
    if facts.has_integrated_gpu:
        return facts.memories[0].usable_bytes
    free, total = torch.cuda.mem_get_info(device)
    return measured(min(free, round(DEVICE_SHARE * total)), "cuMemGetInfo")


def limit_allocator(limit_bytes: int) -> None:
    """Has torch's allocator take no more than this of the current GPU, what it keeps for later included."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))


def limited(available: Reading, limit_bytes: int) -> Reading:
    """What is there, and no more than memory.limit_gib; 0 is no limit."""
    there = available.number
    if not limit_bytes or (there is not None and there <= limit_bytes):
        return available
    return measured(limit_bytes, "memory.limit_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How layers are run (`engine.models.running`)."""

    compiled: bool
    packed: bool
    teacher_packed: bool
    teacher_compiled: bool
    prefetches: bool


def choose_running(
    log: LogWriter,
    spec: RunSpec,
    inputs: Inputs,
    arithmetic: Arithmetic,
    precision: str,
    *,
    asks_teacher: bool = True,
) -> Running:
    """Compiled or not, packed or masked. `precision` is the teacher's; where its outputs are stored
    (not `asks_teacher`), nothing of it is compiled or begun ahead.
    """
    device, capability = arithmetic.device.type, arithmetic.capability
    compiled = choose_compile(
        spec.student.compile,
        device=device,
        has_compiler=has_compiler(device),
        steps=spec.train.steps,
        tokens_per_step=spec.train.rows * spec.train.accumulation * spec.data.seq_len,
        layer_weights=linear_weights(inputs.student),
    )

    def packed(knob: str, wanted: str, config: ModelConfig, products: str) -> bool:
        decision = choose_attention(
            knob, wanted, config=config, device=device, precision=products, capability=capability
        )
        return record.decide(log, decision) == "packed"

    teacher = inputs.teacher if spec.has_teacher else None
    return Running(
        compiled=record.decide(log, compiled) == "on",
        packed=packed(
            "student.attention", spec.student.attention, inputs.student, arithmetic.precision
        ),
        teacher_packed=teacher is not None
        and packed(
            "teacher.attention",
            spec.teacher.attention,
            teacher,
            "bf16" if precision == "fp8" else precision,
        ),
        teacher_compiled=teacher is not None
        and asks_teacher
        and record.decide(
            log,
            choose_teacher_compile(
                spec.teacher.compile,
                config=teacher,
                device=device,
                precision=precision,
                has_compiler=has_compiler(device),
                steps=spec.train.steps,
                tokens_per_step=spec.train.rows * spec.train.accumulation * spec.data.seq_len,
            ),
        )
        == "on",
        prefetches=teacher is not None
        and asks_teacher
        and record.decide(log, choose_prefetch(spec.teacher.prefetch, device=device)) == "on",
    )


def loss_kernel(log: LogWriter, spec: RunSpec, arithmetic: Arithmetic) -> LossKernel:
    """How the loss is computed between its products."""
    decision = choose_loss_kernel(
        spec.loss.kernel,
        device=arithmetic.device.type,
        capability=arithmetic.capability,
        has_triton=has_triton(),
        divergence=spec.loss.divergence,
    )
    return "fused" if record.decide(log, decision) == "fused" else "eager"


def updating(log: LogWriter, spec: RunSpec, arithmetic: Arithmetic) -> str:
    """What makes an update of gradients."""
    decision = choose_update(
        spec.train.update,
        device=arithmetic.device.type,
        capability=arithmetic.capability,
        has_triton=has_triton(),
        ranks=spec.compute.gpus,
    )
    return record.decide(log, decision)


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

    available = arithmetic.available.number
    kernel: LossKernel = "fused" if fused_loss else "eager"
    usual = default_chunk_rows(arithmetic.device, inputs.student.vocab_size, kernel)
    fitting = partial(
        fit,
        available_bytes=None if available is None else int(available),
        backend=spec.teacher.backend,
        checkpointing=spec.student.checkpointing,
        chunk_rows=spec.loss.chunk_rows,
        usual_chunk_rows=min(usual, spec.train.rows * spec.data.seq_len),
        teacher=teacher,
        quantised_blocks=packed_bytes is not None,
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
            available_bytes=None if available is None else int(available),
            stored=stored is not None,
        )
        if record.decide(log, choice) == "on":
            fitted = replace(shared, teacher_shard=True)
    for decision in fitted.decisions:
        record.decide(log, decision)
    if spec.compute.gpus > 1:
        chosen = (fitted.backend, fitted.checkpointing, fitted.chunk_rows)
        kept = need(*chosen, reshard=False, shard=fitted.teacher_shard)
        choice = choose_reshard(
            spec.student.reshard,
            kept_bytes=kept.total_bytes,
            given_bytes=fitted.budget.total_bytes,
            available_bytes=None if available is None else int(available),
        )
        if record.decide(log, choice) == "off":
            fitted = replace(fitted, budget=kept, reshard=False)
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
        fitted = replace(fitted, budget=captured, graphs=True)
    record.memory_plan(log, fitted.budget)
    if spec.memory.budget == "enforce":
        fitted.budget.refuse_if_too_big()
    return fitted


def kernel_for(
    wanted: str, teacher: ModelConfig, tokens: int, capability: tuple[int, int] | None
) -> Decision:
    """How a quantized teacher multiplies, said of its largest matrix in Q4_K."""
    major, minor = capability or (0, 0)
    shape = (teacher.intermediate_size, teacher.hidden_size)
    return choose_kernel(
        wanted,
        device="cpu" if capability is None else "cuda",
        tokens=tokens,
        fused_up_to=crossover_rows(BLOCK_TYPES["Q4_K"], *shape, arch=10 * major + minor),
        most=MAX_ROWS,
    )


def prepare_data(log: LogWriter, spec: RunSpec, inputs: Inputs, seen: DataReady | None) -> Data:
    """Corpus, split and tokens. `seen` is what the run began with, when it is resumed: other tokens
    are refused."""
    data = spec.data
    record.phase(log, "reading the corpus", data.corpus)
    corpus = open_corpus(
        data.corpus,
        heldout_fraction=data.heldout_fraction,
        include_tests=data.include_tests,
        max_bytes=data.max_bytes or None,
    )
    count = corpus.train.document_count + corpus.heldout.document_count
    record.phase(log, "tokenizing", f"{count} documents")
    train = tokenize(corpus.train.documents, inputs.tokenizer)
    held = tokenize(corpus.heldout.documents, inputs.tokenizer)
    rows = heldout_rows(held, data.seq_len, spec.eval.rows)
    ready = record.data(log, corpus, train, held, data.seq_len)
    if seen is not None and seen.train_sha256 != ready.train_sha256:
        raise CorpusError(
            f"corpus: {data.corpus} — expected the tokens this run began with "
            f"(sha256 {seen.train_sha256[:12]}), found others ({ready.train_sha256[:12]})",
            hint="restore the files as they were, or start a new run",
        )
    return Data(
        stream=train, heldout_stream=held, heldout=list(rows.split(EVAL_ROWS_AT_ONCE)), ready=ready
    )
