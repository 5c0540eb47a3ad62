"""Runs a teacher once over the rows of a run and stores what it says: `engine prepare`.

    spec -> rows -> plan (refused here, if it does not fit) -> teacher -> rows in shards

The teacher is the run's: the same file, backend, precision and cut of the vocabulary, asked for the same
batches, so that what a run reads back is bit for bit what it would have computed. A GPU computes batch
k + 1 while batch k is copied to the host, hashed and written by another thread.

A store that is there already is continued: its shards are read and compared, damaged ones are made
again, and only rows that are missing are asked for; a batch with one is asked whole, since other
batches round otherwise. A request to stop ends the shard that is being filled, and loses nothing; a
kill loses at most that shard.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.errors import BadInput, InternalError, TrainingFailed
from engine.log.events import Note
from engine.log.write import LogWriter
from engine.models.config import count_parameters
from engine.plan.choose_running import choose_running, kernel_for
from engine.plan.device import Arithmetic, choose_arithmetic
from engine.plan.memory_plan import ITEM_BYTES
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.teachers.choose import choose_backend
from engine.teachers.protocol import Teacher
from engine.teachers.store.folder import ShardWriter, Store, only_writer, open_store, remove_shard
from engine.teachers.store.manifest import (
    HIDDEN,
    MANIFEST,
    Identity,
    Manifest,
    Measured,
    contents_sha256,
    teacher_files,
    write_manifest,
)
from engine.teachers.store.outputs import TORCH_DTYPES, sparse_parts
from engine.teachers.truncating import TruncatingTeacher
from engine.train import record
from engine.train.compiles import Compiles
from engine.train.heldout import heldout_loss
from engine.train.prepare_plan import Job, Plan, same_identity
from engine.train.stopping import StopRequest
from engine.units import format_bytes
from engine.version import VERSION

# Shapes: B rows, T tokens, N = B*T

LOG = "prepare.jsonl"
AHEAD = 2
"""Batches that may be on their way to the disk while the teacher answers the next."""
WEIGHTS_SHARE = 0.8
"""Of the memory that is there; the rest is for a forward pass."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    plan: Plan
    rows: int
    """Stored by this call."""
    bytes: int
    """Of the shards they are in."""
    seconds: float
    """From the first batch to the last row on the disk."""
    stopped: str | None
    """Who asked to stop before the end; None when every row is stored."""


def prepare(
    job: Job, *, stop: StopRequest, say: Say, progress: Callable[[int, float], None]
) -> Prepared:
    """Does what was planned. `say` is given a line for each thing that a person should know,
    `progress(rows, seconds)` how many rows the teacher has answered.

    Raises DiskFull before anything is written, or when the disk fills up; CacheError for a store that
    is being written by another process, or that is of another teacher; TrainingFailed where memory runs
    out.
    """
    job.plan.refuse_if_too_big(job.wanted.out)
    try:
        return _prepare(job, stop, say, progress)
    except torch.OutOfMemoryError as error:
        raise TrainingFailed(
            f"memory: the device's allocator refused: {error}",
            hint="train.rows=1 asks for less at once, teacher.backend=quantized holds less; finished "
            "shards are kept",
        ) from error


def _prepare(
    job: Job, stop: StopRequest, say: Say, progress: Callable[[int, float], None]
) -> Prepared:
    out = job.wanted.out
    with only_writer(out), LogWriter(out / LOG, writer="prepare") as log:

        def note(text: str) -> None:
            say(text)
            log.write(Note(level="warning", text=text))

        arithmetic = choose_arithmetic(log, job.spec)
        with arithmetic.memory.use():
            built, identity = _load_teacher(log, job, arithmetic, say)
        if (out / MANIFEST).exists():
            store = open_store(out)
            same_identity(store, identity)
        else:
            say("measuring the teacher on held-out rows")
            write_manifest(out, _manifest(job, built, identity, arithmetic.device))
            store = open_store(out)
        if _drop_damaged(store, say, note):
            store = open_store(out)
        writer = ShardWriter(out, identity, job.plan.rows_per_shard, store.shards)
        begun = time.monotonic()
        stop.steps_begin()
        _fill(_Fill(built.teacher, arithmetic.device, store, writer), job, stop, progress)
    return Prepared(
        plan=job.plan,
        rows=writer.rows,
        bytes=writer.bytes,
        seconds=time.monotonic() - begun,
        stopped=stop.reason,
    )


def _load_teacher(
    log: LogWriter, job: Job, arithmetic: Arithmetic, say: Say
) -> tuple[BuiltTeacher, Identity]:
    spec, config = job.spec, job.inputs.teacher
    assert config is not None
    precision = record.decide(log, job.precision)
    each = ITEM_BYTES[precision]
    size = job.inputs.teacher_size
    packed = size.weight_bytes(each) if size is not None and size.matrices else None
    dense = each * count_parameters(config)
    there = arithmetic.available.number
    room = None if there is None else int(WEIGHTS_SHARE * there)
    choice = choose_backend(
        job.identity.backend or "auto",
        config=config,
        quantised_blocks=packed is not None,
        dense_bytes=dense,
        packed_bytes=packed,
        available_bytes=room,
        precision=precision,
    )
    if job.identity.backend and spec.teacher.backend in ("auto", "cached"):
        why = "the store was begun with it"
        choice = dataclasses.replace(choice, reason=why, overridden=False)
    backend = record.decide(log, choice)
    say("\n".join(choice.lines()))
    needed = packed if backend == "quantized" else dense
    if room is not None and needed is not None and needed > room:
        raise BadInput.expected(
            "memory",
            arithmetic.device,
            f"a teacher of at most {format_bytes(room)}",
            format_bytes(needed),
            hint="teacher.precision=bf16 needs half of fp32, and blocks need less again",
        )
    if backend == "quantized":
        tokens = spec.train.rows * spec.data.seq_len
        record.decide(log, kernel_for(spec.teacher.kernel, config, tokens, arithmetic.capability))
    running = choose_running(log, spec, job.inputs, arithmetic, precision)
    say(f"loading the teacher: {spec.teacher.path}")
    built = build_teacher(
        spec.teacher.path,
        backend=backend,
        precision=precision,
        kernel=spec.teacher.kernel,
        device=arithmetic.device,
        student_vocab=job.inputs.student.vocab_size,
        probe=job.heldout[0],
    )
    built.decoder.packed = running.teacher_packed
    sha256 = record.model(log, "teacher", spec.teacher.path, built.decoder, precision)
    compiles = Compiles(log)
    rows = {spec.train.rows} | {len(batch.tokens_BT) for batch in job.heldout}
    compiles.warm_up(
        built.decoder, {count * spec.data.seq_len for count in rows}, arithmetic.device
    )
    if running.teacher_compiled:
        say("compiling the teacher's layers")
        compiles.compile_teacher(
            built.teacher, built.decoder, job.heldout[0], spec.train.rows, precision
        )
    return built, dataclasses.replace(job.identity, backend=backend, teacher_sha256=sha256)


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


def _drop_damaged(store: Store, say: Say, note: Say) -> bool:
    """Removes shards that are not what was written; whether there were any."""
    if store.shards:
        say(f"comparing {len(store.shards)} shards that are there")
    bad = set(store.unreadable) | {shard.path for shard in store.verify()}
    for text in store.refusals:
        note(f"{text}; its rows are made again")
    for path in bad:
        remove_shard(path)
    return bool(bad)


@dataclass(frozen=True, slots=True)
class _Fill:
    """The parts that one row goes through."""

    teacher: Teacher
    device: torch.device
    store: Store
    writer: ShardWriter

    @torch.inference_mode()
    def answers(self, batch: Batch, keys: list[bytes]) -> tuple[Tensor, ...]:
        """The fields of all tokens of a batch, (N, ...), on the device."""
        identity = self.writer.identity
        tokens_BT, documents_BT, _ = batch.to_torch(self.device)
        hidden_NE = self.teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
        if identity.form != HIDDEN:
            return sparse_parts(identity, hidden_NE, self.teacher.head(), keys)
        if hidden_NE.dtype != TORCH_DTYPES[identity.dtype]:
            raise InternalError(
                f"teacher outputs: {hidden_NE.dtype} hidden states, {identity.words}"
            )
        return (hidden_NE,)

    def store_rows(
        self, parts: list[Tensor], copied: torch.cuda.Event | None, rows: dict[int, bytes]
    ) -> None:
        """In the writing thread: hashes and gathers the `rows` of a batch, by their keys."""
        if copied is not None:
            copied.synchronize()
        fields = self.writer.identity.fields
        raw = [part.contiguous().view(-1).view(torch.uint8).numpy().data for part in parts]
        for row, key in rows.items():
            self.writer.add(
                key,
                [
                    view[row * field.bytes : (row + 1) * field.bytes]
                    for view, field in zip(raw, fields, strict=True)
                ],
            )


def _fill(fill: _Fill, job: Job, stop: StopRequest, progress: Callable[[int, float], None]) -> None:
    """Every row that is missing, until there is none or somebody asks to stop."""
    begun, done, seen = time.monotonic(), 0, set[bytes]()
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="shards") as thread:
        for batch in job.walk:
            if stop.reason is not None:
                break
            keys = fill.writer.identity.keys(batch)
            rows = {}
            for row, key in enumerate(keys):
                if key not in seen and key not in fill.store:
                    rows[row] = key
                seen.add(key)
            if not rows:
                continue
            parts, copied = _to_host(fill.answers(batch, keys))
            writing.append(thread.submit(fill.store_rows, parts, copied, rows))
            while len(writing) > AHEAD:
                writing.popleft().result()
            done += len(rows)
            progress(done, time.monotonic() - begun)
        while writing:
            writing.popleft().result()
        thread.submit(fill.writer.finish).result()


def _to_host(parts: tuple[Tensor, ...]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Copies under way to the host, and what says that they are there."""
    if parts[0].device.type != "cuda":
        return list(parts), None
    hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for host, part in zip(hosts, parts, strict=True):
        host.copy_(part, non_blocking=True)
    return hosts, torch.cuda.current_stream(parts[0].device).record_event()
