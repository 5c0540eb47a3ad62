"""`engine prepare`: run a teacher once over the rows of a run and store its outputs.

    spec -> rows -> plan (refused here, if it does not fit) -> teacher -> rows in shards

The teacher is the run's: same file, backend, precision and truncation of the vocabulary, and it runs on
the same batches. So what a run reads back is bit for bit what it would have computed. A GPU computes batch
k + 1 while batch k is copied to the host, hashed and written by another thread.

An existing store is continued: its shards are read and verified, damaged ones are computed again, and
otherwise only batches with a missing row are run. Such a batch is run as a whole, since other batches
would round differently. A request to stop finishes the current shard and loses nothing; a kill loses at
most that shard.

The rows to compute and the disk space they need are known, and checked, before the teacher is loaded.

Rows are taken in training order and in training batches, each row of the corpus once: rows are stored
under their content, so later epochs find them too. When hidden states are stored, the held-out rows come
first, because a run evaluates its teacher on them.

Every row is hashed here once, at some 10 000 rows a second, to find rows that are equal or already
stored. This makes the planned disk space exact to the byte.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.data.batches import Batch, Batches
from engine.decision import Decision
from engine.errors import BadInput, DiskFull, InternalError, TrainingFailed
from engine.log.events import Note
from engine.log.write import LogWriter
from engine.models.config import count_parameters
from engine.plan.device import ComputeDevice, set_up_device
from engine.plan.inputs import Inputs, check_inputs
from engine.plan.knobs import KNOBS
from engine.plan.memory import ITEM_BYTES
from engine.plan.run_plan import RunFacts, batches_of, choose_layer_execution, rows_of_run
from engine.runtime.device import choose_device
from engine.spec import RunSpec
from engine.teachers.backend import choose_backend, choose_teacher_precision
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.teachers.protocol import Teacher
from engine.teachers.store.folder import (
    SHARD_BYTES,
    ShardWriter,
    Store,
    disk_bytes,
    only_writer,
    open_store,
    remove_shard,
    rows_per_shard,
)
from engine.teachers.store.keys import HIDDEN, SAMPLED, CacheError, Identity, contents_sha256
from engine.teachers.store.manifest import (
    MANIFEST,
    Manifest,
    Measured,
    check_teacher_files,
    teacher_files,
    write_manifest,
)
from engine.teachers.store.outputs import TORCH_DTYPES, sparse_parts
from engine.teachers.truncating import TruncatingTeacher
from engine.train import record
from engine.train.compiles import Compiles
from engine.train.data import prepare_data
from engine.train.heldout import heldout_loss
from engine.train.stopping import StopRequest
from engine.units import format_bytes
from engine.version import VERSION

ROOM = 64 * 2**20
"""Bytes kept free on the disk beyond the plan, for the log, the manifest and other small files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line of `engine prepare`."""

    out: Path
    form: str = HIDDEN
    count: int = 0
    """K of top_k, m of sampled."""
    rows: int | None = None
    """Number of training rows, from the first of the run; None for all that the run will train on."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The batches to run the teacher on, in order."""

    batches: Batches
    heldout: tuple[Batch, ...]
    rows: int
    """Number of training rows, at most one epoch; rounded up to whole batches."""

    def __iter__(self) -> Iterator[Batch]:
        yield from self.heldout
        each = self.batches.rows_per_batch
        # Whole batches, as training takes them: the last of an epoch continues into the next.
        for position in range(0, self.rows, each):
            yield self.batches.take(position, each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    identity: Identity
    """The identity of the rows before the teacher is loaded. Its hash is empty, and so is its backend
    when none is configured and no store exists; an existing store supplies both.
    """
    rows: int
    """Number of rows in the walk."""
    repeated: int
    """How many of the rows equal an earlier one."""
    stored: int
    """How many of the rows are already in the store."""
    rows_per_shard: int
    free_bytes: int

    @property
    def missing(self) -> int:
        return self.rows - self.repeated - self.stored

    @property
    def tokens(self) -> int:
        """The number of tokens that the teacher still has to process."""
        return self.missing * self.identity.seq_len

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.identity, self.missing, self.rows_per_shard)

    def lines(self) -> list[str]:
        """Return the plan as text for people."""
        identity, each = self.identity, self.identity.token_bytes
        shards = -(-self.missing // self.rows_per_shard)
        known = [f"{self.stored:,} stored already"] if self.stored else []
        known += [f"{self.repeated:,} equal to another"] if self.repeated else []
        return [
            f"teacher outputs: {identity.words}",
            f"  rows    {self.missing:,} to do"
            + (f", of {self.rows:,}: {', '.join(known)}" if known else ""),
            f"  tokens  {self.tokens:,}, {each:,.0f} bytes each",
            f"  disk    {format_bytes(self.disk_bytes)} in {shards:,} shards, of "
            f"{format_bytes(self.free_bytes)} that are free",
        ]

    def as_dict(self) -> dict[str, float | int | str]:
        return {
            "form": self.identity.form,
            "rows": self.rows,
            "repeated": self.repeated,
            "stored": self.stored,
            "missing": self.missing,
            "tokens": self.tokens,
            "bytes_per_token": self.identity.token_bytes,
            "disk_bytes": self.disk_bytes,
            "free_bytes": self.free_bytes,
        }

    def refuse_if_too_big(self, out: Path) -> None:
        """Raise DiskFull when the plan does not fit on the disk."""
        if self.disk_bytes + ROOM > self.free_bytes:
            raise DiskFull.expected(
                "teacher outputs",
                out,
                f"{format_bytes(self.disk_bytes)} free and {format_bytes(ROOM)} to spare",
                format_bytes(self.free_bytes),
                hint="--rows does less, --form top_k or sampled needs less a token, --out writes elsewhere",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked and planned command of `engine prepare`."""

    spec: RunSpec
    wanted: Wanted
    inputs: Inputs
    heldout: list[Batch]
    """The rows on which a run evaluates."""
    walk: Walk
    precision: Decision
    """The precision of the teacher."""
    plan: Plan


def plan_job(spec: RunSpec, wanted: Wanted) -> Job:
    """Return what would be done, and write nothing. Raises BadInput when it cannot be done."""
    if not spec.has_teacher:
        raise BadInput("teacher.path: expected a teacher to ask, found none")
    inputs = check_inputs(spec)
    data = record.logged(None, prepare_data(spec, inputs, None))
    batches = batches_of(spec, data.stream)
    walk = Walk(
        batches=batches,
        heldout=tuple(data.heldout) if wanted.form == HIDDEN else (),
        rows=min(wanted.rows or rows_of_run(spec), batches.rows_per_epoch),
    )
    precision = _precision(spec)
    identity = _identity(spec, wanted, inputs, precision.choice)
    store, each = None, rows_per_shard(identity, wanted.shard_bytes)
    if (wanted.out / MANIFEST).exists():
        store = open_store(wanted.out)
        identity, each = same_identity(store, identity), store.manifest.rows_per_shard
        check_teacher_files(spec.teacher.path, store.manifest, wanted.out)
    return Job(
        spec=spec,
        wanted=wanted,
        inputs=inputs,
        heldout=data.heldout,
        walk=walk,
        precision=precision,
        plan=make_plan(walk, identity, wanted.out, each, store),
    )


def same_identity(store: Store, identity: Identity) -> Identity:
    """Return `identity` with its empty fields filled in from the store.

    Raises CacheError when a field that is set differs from the store's.
    """
    theirs = dataclasses.asdict(store.identity)
    ours = dataclasses.asdict(identity)
    differing = [name for name, value in ours.items() if value not in ("", theirs[name])]
    if differing:
        raise CacheError.expected(
            "teacher.cache",
            store.path,
            ", ".join(f"{name} {ours[name]}" for name in differing),
            ", ".join(f"{theirs[name]}" for name in differing),
            hint="a store holds one form of one teacher; give another folder with --out",
        )
    return store.identity


def make_plan(
    walk: Walk, identity: Identity, out: Path, rows_per_shard: int, store: Store | None
) -> Plan:
    """Count the rows to do. `store` is the existing store in `out`, with the same identity."""
    seen: set[bytes] = set()
    rows = stored = 0
    for batch in walk:
        for key in identity.keys(batch):
            rows += 1
            if key in seen:
                continue
            seen.add(key)
            stored += store is not None and key in store
    return Plan(
        identity=identity,
        rows=rows,
        repeated=rows - len(seen),
        stored=stored,
        rows_per_shard=rows_per_shard,
        free_bytes=_free_bytes(out),
    )


def _precision(spec: RunSpec) -> Decision:
    device = choose_device(spec.compute.device).choice
    capability = None
    if device == "cuda":
        import torch

        capability = torch.cuda.get_device_capability()
    return choose_teacher_precision(spec.teacher.precision, device=device, capability=capability)


def _identity(spec: RunSpec, wanted: Wanted, inputs: Inputs, precision: str) -> Identity:
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


def _free_bytes(path: Path) -> int:
    here = path.absolute()
    return shutil.disk_usage(next(p for p in (here, *here.parents) if p.exists())).free


# Shapes: B rows, T tokens, N = B*T

LOG = "prepare.jsonl"
AHEAD = 2
"""Number of batches that may be on their way to the disk while the teacher runs on the next one."""
WEIGHTS_SHARE = 0.8
"""Largest share of the available memory for the teacher's weights; the rest is for a forward pass."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    plan: Plan
    rows: int
    """Number of rows stored by this call."""
    bytes: int
    """Size of the shards that hold them."""
    seconds: float
    """Seconds from the first batch to the last row on disk."""
    stopped: str | None
    """The reason of a stop before the end; None when every row is stored."""


def prepare(
    job: Job, *, stop: StopRequest, say: Say, progress: Callable[[int, float], None]
) -> Prepared:
    """Carry out a plan.

    `say` is called with each line of text for the user, `progress(rows, seconds)` with the number of rows
    that the teacher has processed. Raises DiskFull before anything is written, or when the disk fills up;
    CacheError for a store that another process is writing, or that belongs to another teacher;
    TrainingFailed when memory runs out.
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

        compute = record.logged(log, set_up_device(job.spec))
        with compute.memory.use():
            built, identity = record.logged(log, _load_teacher(job, compute, say))
        if (out / MANIFEST).exists():
            store = open_store(out)
            same_identity(store, identity)
        else:
            say("measuring the teacher on held-out rows")
            write_manifest(out, _manifest(job, built, identity, compute.device))
            store = open_store(out)
        if _drop_damaged(store, say, note):
            store = open_store(out)
        writer = ShardWriter(out, identity, job.plan.rows_per_shard, store.shards)
        begun = time.monotonic()
        stop.steps_begin()
        _fill(_Fill(built.teacher, compute.device, store, writer), job, stop, progress)
    return Prepared(
        plan=job.plan,
        rows=writer.rows,
        bytes=writer.bytes,
        seconds=time.monotonic() - begun,
        stopped=stop.reason,
    )


def _load_teacher(
    job: Job, compute: ComputeDevice, say: Say
) -> record.Logged[tuple[BuiltTeacher, Identity]]:
    spec, config = job.spec, job.inputs.teacher
    assert config is not None
    yield job.precision
    precision = job.precision.choice
    facts = RunFacts(spec=spec, inputs=job.inputs, compute=compute, teacher_precision=precision)
    each = ITEM_BYTES[precision]
    size = job.inputs.teacher_size
    packed = size.weight_bytes(each) if size is not None and size.matrices else None
    dense = each * count_parameters(config)
    there = compute.available.number
    room = None if there is None else int(WEIGHTS_SHARE * there)
    choice = choose_backend(
        job.plan.identity.backend or "auto",
        config=config,
        quantised_blocks=packed is not None,
        dense_bytes=dense,
        packed_bytes=packed,
        available_bytes=room,
        precision=precision,
    )
    if job.plan.identity.backend and spec.teacher.backend in ("auto", "cached"):
        why = "the store was begun with it"
        choice = dataclasses.replace(choice, reason=why, overridden=False)
    yield choice
    backend = choice.choice
    say("\n".join(choice.lines()))
    needed = packed if backend == "quantized" else dense
    if room is not None and needed is not None and needed > room:
        raise BadInput.expected(
            "memory",
            compute.device,
            f"a teacher of at most {format_bytes(room)}",
            format_bytes(needed),
            hint="teacher.precision=bf16 needs half of fp32, and blocks need less again",
        )
    if backend == "quantized":
        yield KNOBS["teacher.kernel"].decide(facts)
    execution = yield from choose_layer_execution(facts)
    say(f"loading the teacher: {spec.teacher.path}")
    built = build_teacher(
        spec.teacher.path,
        backend=backend,
        precision=precision,
        kernel=spec.teacher.kernel,
        device=compute.device,
        student_vocab=job.inputs.student.vocab_size,
        probe=job.heldout[0],
    )
    built.decoder.packed = execution.teacher_packed
    decoder = built.decoder
    model = record.model("teacher", spec.teacher.path, decoder.config, precision, decoder)
    yield model
    compiles = Compiles()
    rows = {spec.train.rows} | {len(batch.tokens_BT) for batch in job.heldout}
    yield from compiles.warm_up(
        built.decoder, {count * spec.data.seq_len for count in rows}, compute.device
    )
    if execution.teacher_compiled:
        say("compiling the teacher's layers")
        yield from compiles.compile_teacher(
            built.teacher, built.decoder, job.heldout[0], spec.train.rows, precision
        )
    return built, dataclasses.replace(
        job.plan.identity, backend=backend, teacher_sha256=model.sha256
    )


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
    """Delete shards that do not verify; return whether there were any."""
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
    """What one row passes through."""

    teacher: Teacher
    device: torch.device
    store: Store
    writer: ShardWriter

    @torch.inference_mode()
    def answers(self, batch: Batch, keys: list[bytes]) -> tuple[Tensor, ...]:
        """Return the stored fields of all tokens of a batch, (N, ...), on the device."""
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
        """Hash and store the `rows` of a batch under their keys. Runs in the writing thread."""
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
    """Compute and store every missing row, until none is left or a stop is requested."""
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
    """Start the copies to the host; also return the event that marks their end."""
    if parts[0].device.type != "cuda":
        return list(parts), None
    hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for host, part in zip(hosts, parts, strict=True):
        host.copy_(part, non_blocking=True)
    return hosts, torch.cuda.current_stream(parts[0].device).record_event()
