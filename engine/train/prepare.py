"""`engine prepare`: run a teacher once over the rows of a run and store its outputs.

    spec -> rows -> plan (refused if it does not fit) -> teacher -> rows in shards

The teacher has the same file, backend, precision and truncated vocabulary as in the run, and runs on the same
batches. So the outputs that a run reads are bit for bit those that it would have computed. This module chooses
and loads the teacher; `engine.teachers.store.write` counts the missing rows and stores them.

The number of rows to compute and the free disk space are checked before the teacher is loaded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.data.batches import Batch
from engine.decision import Decision
from engine.errors import BadInput, TrainingFailed
from engine.formats.safetensors import tensors_sha256
from engine.log.events import Note
from engine.log.write import LogWriter
from engine.models.config import count_parameters
from engine.models.decoder import Tensors
from engine.models.head import LogitsHead
from engine.models.packed import head_of
from engine.plan.device import ComputeDevice, set_up_device
from engine.plan.inputs import Inputs, check_inputs
from engine.plan.memory import ITEM_BYTES
from engine.plan.run_plan import RunFacts, batches_of, choose_layer_execution, rows_of_run
from engine.runtime.device import choose_device
from engine.spec import RunSpec
from engine.teachers.backend import choose_backend, choose_teacher_precision
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.teachers.store.folder import (
    SHARD_BYTES,
    ShardWriter,
    Store,
    only_writer,
    open_store,
    rows_per_shard,
)
from engine.teachers.store.keys import HIDDEN, SAMPLED, Identity, contents_sha256
from engine.teachers.store.manifest import (
    MANIFEST,
    Manifest,
    Measured,
    check_teacher_files,
    teacher_files,
    write_manifest,
)
from engine.teachers.store.write import (
    StorePlan,
    Walk,
    drop_damaged,
    fill_store,
    plan_store,
    same_identity,
)
from engine.teachers.truncating import TruncatingTeacher
from engine.train import to_events
from engine.train.build import examine
from engine.train.data import prepare_data
from engine.train.heldout import heldout_loss
from engine.train.kernel_warm_up import Compiles, build_cudnn_attention
from engine.train.stop_request import StopRequest
from engine.units import format_bytes
from engine.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Options of the command line of `engine prepare`."""

    out: Path
    form: str = HIDDEN
    count: int = 0
    """Number of stored tokens per position: K of top_k, m of sampled."""
    rows: int | None = None
    """Number of training rows, from the run's first row; None for all rows that the run will train on."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked and planned command of `engine prepare`."""

    spec: RunSpec
    wanted: PrepareOptions
    inputs: Inputs
    heldout: list[Batch]
    """The rows on which a run is evaluated."""
    walk: Walk
    precision: Decision
    """The precision of the teacher."""
    plan: StorePlan


def plan_job(spec: RunSpec, wanted: PrepareOptions) -> Job:
    """Check and plan the command without writing anything. Raises BadInput when it cannot be run."""
    if not spec.has_teacher:
        raise BadInput(
            "teacher.path: expected a teacher whose outputs are to be stored, found none"
        )
    if spec.teacher.context:
        raise BadInput.expected(
            "teacher.context",
            "set in the spec",
            "no context, because stored outputs are those of a teacher without context",
            "a context",
        )
    inputs = check_inputs(spec)
    data = prepare_data(spec, inputs, None, to_events.discard)
    batches = batches_of(spec, data.stream)
    walk = Walk(
        batches=batches,
        heldout=tuple(data.heldout) if wanted.form == HIDDEN else (),
        rows=min(wanted.rows or rows_of_run(spec), batches.rows_per_epoch),
    )
    precision = _precision(spec)
    identity = _identity(spec, wanted, inputs, precision.choice)
    store, shard_rows = None, rows_per_shard(identity, wanted.shard_bytes)
    if (wanted.out / MANIFEST).exists():
        store = open_store(wanted.out)
        identity, shard_rows = same_identity(store, identity), store.manifest.rows_per_shard
        check_teacher_files(spec.teacher.path, store.manifest, wanted.out)
    return Job(
        spec=spec,
        wanted=wanted,
        inputs=inputs,
        heldout=data.heldout,
        walk=walk,
        precision=precision,
        plan=plan_store(walk, identity, wanted.out, shard_rows, store),
    )


def _precision(spec: RunSpec) -> Decision:
    device = choose_device(spec.compute.device).choice
    capability = None
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
    return choose_teacher_precision(spec.teacher.precision, device=device, capability=capability)


def _identity(spec: RunSpec, wanted: PrepareOptions, inputs: Inputs, precision: str) -> Identity:
    assert inputs.teacher is not None
    vocabulary, sparse = inputs.student.vocab_size, wanted.form != HIDDEN
    if sparse and not 0 < wanted.count <= vocabulary:
        raise BadInput.expected(
            "teacher outputs", wanted.form, f"1 to {vocabulary} ids a token", str(wanted.count)
        )
    backend = spec.teacher.backend
    return Identity(
        form=wanted.form,
        teacher_sha256="",
        backend="" if backend in ("auto", "cached") else backend,
        precision=precision,
        dtype="F32" if precision in ("fp32", "tf32") else "BF16",
        width=inputs.teacher.hidden_size,
        seq_len=spec.data.seq_len,
        vocabulary=vocabulary if sparse else None,
        temperature=spec.loss.temperature if sparse else None,
        count=wanted.count if sparse else 0,
        seed=spec.train.seed if wanted.form == SAMPLED else None,
    )


LOG = "prepare.jsonl"
"""Name of the log in the folder of the store."""
WEIGHTS_SHARE = 0.8
"""Largest share of the available memory for the teacher's weights, 0 to 1; the rest is for a forward pass."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    plan: StorePlan
    rows: int
    """Number of rows stored by this call."""
    bytes: int
    """Size of the shards that hold them."""
    seconds: float
    """Seconds from the first batch to the last row on disk."""
    stopped: str | None
    """Reason for stopping early; None when every row is stored."""


def prepare(
    job: Job, *, stop: StopRequest, say: Say, progress: Callable[[int, float], None]
) -> Prepared:
    """Run a planned command.

    `say` is called with each line of text for the user, `progress(rows, seconds)` with the number of rows
    that the teacher has processed. Raises DiskFull if the disk is too small, before anything is written, or
    when it fills up; CacheError if another process is writing the store, or if it belongs to another teacher;
    TrainingFailed when memory runs out.
    """
    job.plan.check_disk_space(job.wanted.out)
    try:
        return _prepare(job, stop, say, progress)
    except torch.OutOfMemoryError as error:
        raise TrainingFailed(
            f"memory: the device's allocator refused: {error}",
            hint="train.rows=1 needs less memory for a batch, teacher.backend=quantized less for the weights; "
            "finished shards are kept",
        ) from error


def _prepare(
    job: Job, stop: StopRequest, say: Say, progress: Callable[[int, float], None]
) -> Prepared:
    out = job.wanted.out
    with only_writer(out), LogWriter(out / LOG, writer="prepare") as log:
        write = partial(to_events.write, log)

        def note(text: str) -> None:
            say(text)
            log.write(Note(level="warning", text=text))

        spec, compute = set_up_device(job.spec, write)
        with compute.memory.use():
            built, identity = _load_teacher(job, spec, compute, say, write)
        store = _open_or_create_store(job, built, identity, compute.device, say)
        if drop_damaged(store, say, note):
            store = open_store(out)
        writer = ShardWriter(out, identity, job.plan.rows_per_shard, store.shards)
        begun = time.monotonic()
        stop.steps_begin()
        fill_store(
            built.teacher,
            compute.device,
            store,
            writer,
            job.walk,
            stopped=lambda: stop.reason is not None,
            progress=progress,
        )
    return Prepared(
        plan=job.plan,
        rows=writer.rows,
        bytes=writer.bytes,
        seconds=time.monotonic() - begun,
        stopped=stop.reason,
    )


def _open_or_create_store(
    job: Job, built: BuiltTeacher, identity: Identity, device: torch.device, say: Say
) -> Store:
    """Open the store if it exists, or create it with measurements of the teacher. Raises CacheError for another
    teacher's store."""
    out = job.wanted.out
    if (out / MANIFEST).exists():
        store = open_store(out)
        same_identity(store, identity)
        return store
    say("measuring the teacher on held-out rows")
    write_manifest(out, _manifest(job, built, identity, device))
    return open_store(out)


def _load_teacher(
    job: Job, spec: RunSpec, compute: ComputeDevice, say: Say, log: to_events.Log
) -> tuple[BuiltTeacher, Identity]:
    config = job.inputs.teacher
    assert config is not None
    log(job.precision)
    precision = job.precision.choice
    facts = RunFacts(spec=spec, inputs=job.inputs, compute=compute, log=log)
    facts.settle({"teacher.precision": precision})
    itemsize = ITEM_BYTES[precision]
    size = job.inputs.teacher_size
    packed = size.weight_bytes(itemsize) if size is not None and size.matrices else None
    dense = itemsize * count_parameters(config)
    available = compute.available.number
    max_bytes = None if available is None else int(WEIGHTS_SHARE * available)
    choice = choose_backend(
        job.plan.identity.backend or "auto",
        config=config,
        quantised_blocks=packed is not None,
        dense_bytes=dense,
        packed_bytes=packed,
        available_bytes=max_bytes,
        precision=precision,
    )
    if job.plan.identity.backend and spec.teacher.backend in ("auto", "cached"):
        why = "the rows already in the store were computed with it"
        choice = dataclasses.replace(choice, reason=why, overridden=False)
    log(choice)
    backend = choice.choice
    say("\n".join(choice.lines()))
    needed = packed if backend == "quantized" else dense
    if max_bytes is not None and needed is not None and needed > max_bytes:
        raise BadInput.expected(
            "memory",
            compute.device,
            f"a teacher of at most {format_bytes(max_bytes)}",
            format_bytes(needed),
            hint="teacher.precision=bf16 needs half the memory of fp32, and quantised blocks need less still",
        )
    choose_layer_execution(facts)
    teacher = facts.spec.teacher
    say(f"loading the teacher: {spec.teacher.path}")
    built = build_teacher(
        spec.teacher.path,
        backend=backend,
        precision=precision,
        device=compute.device,
        student_vocab=job.inputs.student.vocab_size,
        probe=job.heldout[0],
        kernels=facts.spec.kernels.layers,
        how=spec.model,
    )
    built.decoder.packed = teacher.attention == "packed"
    built.decoder.cudnn = build_cudnn_attention(
        built.decoder, "teacher", facts.spec, compute.device, log, trained=False
    )
    decoder = built.decoder
    examine(decoder, "teacher", spec.data.seq_len, log)
    if job.wanted.form == HIDDEN and isinstance(head_of(decoder), LogitsHead):
        raise BadInput.expected(
            "teacher outputs",
            spec.teacher.path,
            "top_k or sampled, because this model's logits are not its hidden states times a head",
            HIDDEN,
        )
    sha256 = tensors_sha256(Tensors(decoder))
    model = to_events.model("teacher", spec.teacher.path, decoder.config, precision, sha256)
    log(model)
    compiles = Compiles()
    compiles.warm_up(built.decoder, compute.device, log)
    return built, dataclasses.replace(job.plan.identity, backend=backend, teacher_sha256=sha256)


def _manifest(job: Job, built: BuiltTeacher, identity: Identity, device: torch.device) -> Manifest:
    teacher, temperature = built.teacher, job.spec.loss.temperature
    loss, labelled = heldout_loss(teacher.hidden, teacher.head(), job.heldout, device)
    measured = Measured(heldout_sha256=contents_sha256(job.heldout), loss=loss, labelled=labelled)
    if isinstance(teacher, TruncatingTeacher):
        dropped = teacher.dropped_mass(job.heldout[:1], device, temperature=temperature)
        measured = dataclasses.replace(
            measured,
            dropped_mean=dropped.mean,
            dropped_max=dropped.largest,
            dropped_tokens=dropped.tokens,
            temperature=temperature,
        )
    return Manifest(
        identity=identity,
        teacher_ids=built.decoder.config.vocab_size,
        files=teacher_files(job.spec.teacher.path),
        measured=measured,
        rows_per_shard=job.plan.rows_per_shard,
        engine=VERSION,
    )
