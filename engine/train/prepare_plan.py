"""What `engine prepare` will ask the teacher for, and the disk that the answers take: known, and refused,
before the teacher is loaded.

Rows are taken in the order in which training takes them, in the batches that it takes them in, each
row of the corpus once: rows are stored under their content, so later epochs find them too. Before them
come the held-out rows, where hidden states are stored: a run evaluates its teacher on them.

Every row is hashed here once, some 10 000 a second, so that rows that are equal, or stored already,
are known and the disk is exact to the byte.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.data.batches import Batch, Batches, heldout_rows
from engine.data.corpus import open_corpus
from engine.data.tokens import tokenize
from engine.decision import Decision
from engine.errors import BadInput, DiskFull
from engine.plan.inputs import Inputs, check_inputs
from engine.plan.memory_plan import EVAL_ROWS_AT_ONCE
from engine.runtime.device import choose_device, choose_precision
from engine.spec import RunSpec
from engine.teachers.choose import choose_teacher_precision
from engine.teachers.store.folder import SHARD_BYTES, Store, disk_bytes, open_store, rows_per_shard
from engine.teachers.store.manifest import (
    HIDDEN,
    MANIFEST,
    SAMPLED,
    CacheError,
    Identity,
    check_teacher_files,
)
from engine.units import format_bytes

ROOM = 64 * 2**20
"""Left on the disk beside what is planned: the log, the manifest, and other people's small files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line of `engine prepare`."""

    out: Path
    form: str = HIDDEN
    count: int = 0
    """K of top_k, m of sampled."""
    rows: int | None = None
    """Training rows, from the first of the run on; None for all that the run will train on."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Batches to ask the teacher about, in order."""

    batches: Batches
    heldout: tuple[Batch, ...]
    rows: int
    """Of the training walk, at most one epoch; whole batches are taken."""

    def __iter__(self) -> Iterator[Batch]:
        yield from self.heldout
        each = self.batches.rows_per_batch
        # Whole batches, as training takes them: the last of an epoch goes on into the next.
        for position in range(0, self.rows, each):
            yield self.batches.take(position, each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    identity: Identity
    """Without the teacher's hash where the teacher was not loaded yet."""
    rows: int
    """Of the walk."""
    repeated: int
    """Of them equal to an earlier one."""
    stored: int
    """Of them in the store already."""
    rows_per_shard: int
    free_bytes: int

    @property
    def missing(self) -> int:
        return self.rows - self.repeated - self.stored

    @property
    def tokens(self) -> int:
        """What the teacher still has to answer."""
        return self.missing * self.identity.seq_len

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.identity, self.missing, self.rows_per_shard)

    def lines(self) -> list[str]:
        """The plan for people."""
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
        """Raises DiskFull."""
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
    """What `engine prepare` was asked for, checked and planned."""

    spec: RunSpec
    wanted: Wanted
    inputs: Inputs
    heldout: list[Batch]
    """The rows that a run evaluates on."""
    walk: Walk
    precision: Decision
    """Of the teacher."""
    identity: Identity
    """Of the rows, of a teacher that was not loaded yet: without its hash, and without a backend where
    none is set and no store is there."""
    plan: Plan


def plan_job(spec: RunSpec, wanted: Wanted) -> Job:
    """What would be done; writes nothing. Raises BadInput for what cannot be."""
    if not spec.has_teacher:
        raise BadInput("teacher.path: expected a teacher to ask, found none")
    inputs = check_inputs(spec)
    data = spec.data
    corpus = open_corpus(
        data.corpus,
        heldout_fraction=data.heldout_fraction,
        include_tests=data.include_tests,
        max_bytes=data.max_bytes or None,
    )
    batches = Batches(
        tokenize(corpus.train.documents, inputs.tokenizer),
        seq_len=data.seq_len,
        rows_per_batch=spec.train.rows,
        seed=spec.train.seed,
    )
    held = tokenize(corpus.heldout.documents, inputs.tokenizer)
    heldout = list(heldout_rows(held, data.seq_len, spec.eval.rows).split(EVAL_ROWS_AT_ONCE))
    walk = Walk(
        batches=batches,
        heldout=tuple(heldout) if wanted.form == HIDDEN else (),
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
        heldout=heldout,
        walk=walk,
        precision=precision,
        identity=identity,
        plan=make_plan(walk, identity, wanted.out, each, store),
    )


def rows_of_run(spec: RunSpec) -> int:
    """Rows that a run takes, over all of its epochs."""
    train = spec.train
    return train.steps * train.rows * train.accumulation * spec.compute.gpus


def same_identity(store: Store, identity: Identity) -> Identity:
    """`identity` with what is open in it taken from the store. Raises CacheError where what is set in it
    differs from the store's.
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
    """`store` is what is in `out` already, of the same identity."""
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
    wanted = spec.teacher.precision
    return choose_teacher_precision(
        wanted, device=device, capability=capability
    ) or choose_precision("teacher.precision", wanted, device)


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
