"""What a run needs before its first step: device, memory, arithmetic and data, each logged as it is
chosen or read.

The allocator is chosen from facts that need no CUDA; the memory plan is made from headers, and refused,
before a byte is uploaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

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
from engine.distill.budget import MemoryBudget
from engine.distill.inputs import Inputs
from engine.distill.memory_model import predict
from engine.errors import CorpusError
from engine.kernels.small_m_table import MAX_ROWS, crossover_rows
from engine.models.config import ModelConfig
from engine.quant.blocks import BLOCK_TYPES
from engine.runlog.events import DataReady
from engine.runlog.write import LogWriter
from engine.runtime.device import choose_device, choose_precision, choose_threads, torch_dtype
from engine.runtime.managed import MemoryScope, memory_scope
from engine.spec import RunSpec
from engine.teachers.choose import choose_backend, choose_kernel
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
        available=_available(device, facts),
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


def plan_memory(
    log: LogWriter, spec: RunSpec, inputs: Inputs, arithmetic: Arithmetic, precision: str
) -> tuple[str, MemoryBudget]:
    """The teacher's backend and what the run will need with it. `precision` is the teacher's. Raises
    BadInput for a run that does not fit, unless memory.budget says to report it only."""
    teacher = inputs.teacher if spec.has_teacher else None
    size = inputs.teacher_size if teacher is not None else None
    packed_bytes = None
    if size is not None and size.matrices:
        packed_bytes = size.weight_bytes(torch_dtype(precision).itemsize)

    def budget(backend: str) -> MemoryBudget:
        return predict(
            spec,
            teacher=teacher,
            teacher_packed_bytes=packed_bytes,
            backend=backend,
            teacher_precision=precision,
            student_precision=arithmetic.precision,
            student=inputs.student,
            device=arithmetic.device.type,
            available=arithmetic.available,
            shares_heads=(arithmetic.capability or (0, 0))[0] == 9,
        )

    available = arithmetic.available.number
    backend = record.decide(
        log,
        choose_backend(
            spec.teacher.backend,
            config=teacher,
            quantised_blocks=packed_bytes is not None,
            dense_bytes=budget("dequantized").total_bytes,
            packed_bytes=budget("quantized").total_bytes if packed_bytes is not None else None,
            available_bytes=None if available is None else int(available),
        ),
    )
    chosen = budget(backend)
    record.memory_plan(log, chosen)
    if spec.memory.budget == "enforce":
        chosen.refuse_if_too_big()
    return backend, chosen


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
