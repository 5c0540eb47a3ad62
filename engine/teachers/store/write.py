"""Write the outputs of a teacher to a store: find the missing rows, and run the teacher on them.

    walk -> plan_store (exact to the byte, before the teacher is loaded) -> fill_store -> shards

An existing store is continued: its shards are read and verified, damaged ones are removed, and the
teacher runs on the batches that have a missing row. It always runs on whole training batches, because
batches of another shape would round differently. A request to stop finishes the current shard and
loses nothing; a kill loses at most that shard.

The walk has the order and the batches of training, with each row of the corpus once: rows are stored
under their content, so later epochs find them too. If hidden states are stored, the held-out rows come
first, because a run evaluates its teacher on them.

The plan hashes every row, at some 10 000 rows a second, to find rows that are equal or already
stored. This makes the planned disk space exact to the byte.

`engine.teachers.store.folder` defines the bytes of a shard; `engine.train.prepare` is the command.
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
from engine.errors import DiskFull
from engine.teachers.protocol import Teacher
from engine.teachers.store.folder import ShardWriter, Store, disk_bytes, remove_shard
from engine.teachers.store.keys import HIDDEN, CacheError, Identity
from engine.teachers.store.outputs import sparse_parts
from engine.units import format_bytes

RESERVE_BYTES = 64 * 2**20
"""Bytes that must be free in addition to the plan, for the log, the manifest and other small files."""
AHEAD = 2
"""Maximum number of batches that wait to be written while the teacher runs on the next one."""

# Shapes: B rows, T tokens, N = B*T


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The batches to run the teacher on, in order."""

    batches: Batches
    heldout: tuple[Batch, ...]
    rows: int
    """Number of training rows, at most one epoch; rounded up to whole batches."""

    def __iter__(self) -> Iterator[Batch]:
        yield from self.heldout
        batch_rows = self.batches.rows_per_batch
        # Whole batches, as in training: the last batch of an epoch ends with rows of the next one.
        for position in range(0, self.rows, batch_rows):
            yield self.batches.take(position, batch_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    identity: Identity
    """Identity of the rows. Before the teacher is loaded its hash is empty, and so is its backend if
    none is configured; an existing store supplies both.
    """
    rows: int
    """Number of rows in the walk."""
    repeated: int
    """Number of rows that equal an earlier one."""
    stored: int
    """Number of rows that are already in the store."""
    rows_per_shard: int
    free_bytes: int

    @property
    def missing(self) -> int:
        return self.rows - self.repeated - self.stored

    @property
    def tokens(self) -> int:
        """Number of tokens in the missing rows."""
        return self.missing * self.identity.seq_len

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.identity, self.missing, self.rows_per_shard)

    def lines(self) -> list[str]:
        """Return the plan as text for people."""
        identity, token_bytes = self.identity, self.identity.token_bytes
        shards = -(-self.missing // self.rows_per_shard)
        not_missing = [f"{self.stored:,} stored already"] if self.stored else []
        not_missing += [f"{self.repeated:,} duplicates"] if self.repeated else []
        return [
            f"teacher outputs: {identity.words}",
            f"  rows    {self.missing:,} to compute"
            + (f", of {self.rows:,}: {', '.join(not_missing)}" if not_missing else ""),
            f"  tokens  {self.tokens:,}, {token_bytes:,.0f} bytes each",
            f"  disk    {format_bytes(self.disk_bytes)} in {shards:,} shards, of "
            f"{format_bytes(self.free_bytes)} free",
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

    def check_disk_space(self, out: Path) -> None:
        """Raise DiskFull if the plan does not fit on the disk."""
        if self.disk_bytes + RESERVE_BYTES > self.free_bytes:
            raise DiskFull.expected(
                "teacher outputs",
                out,
                f"{format_bytes(self.disk_bytes)} of free disk space and {format_bytes(RESERVE_BYTES)} more",
                format_bytes(self.free_bytes),
                hint="store fewer rows (--rows), fewer bytes per token (--form top_k or sampled), or on another "
                "disk (--out)",
            )


def same_identity(store: Store, identity: Identity) -> Identity:
    """Return `identity` with its empty fields filled in from the store.

    Raises CacheError if a field that is not empty differs from the store's.
    """
    stored = dataclasses.asdict(store.identity)
    given = dataclasses.asdict(identity)
    differing = [name for name, value in given.items() if value not in ("", stored[name])]
    if differing:
        raise CacheError.expected(
            "teacher.cache",
            store.path,
            ", ".join(f"{name} {given[name]}" for name in differing),
            ", ".join(f"{stored[name]}" for name in differing),
            hint="a store holds one form of one teacher; choose another folder with --out",
        )
    return store.identity


def plan_store(
    walk: Walk, identity: Identity, out: Path, rows_per_shard: int, store: Store | None
) -> StorePlan:
    """Count the rows to compute. `store` is the existing store in `out`, if any, with the same identity."""
    seen: set[bytes] = set()
    rows = stored = 0
    for batch in walk:
        for key in identity.keys(batch):
            rows += 1
            if key in seen:
                continue
            seen.add(key)
            stored += store is not None and key in store
    return StorePlan(
        identity=identity,
        rows=rows,
        repeated=rows - len(seen),
        stored=stored,
        rows_per_shard=rows_per_shard,
        free_bytes=_free_bytes(out),
    )


def _free_bytes(path: Path) -> int:
    here = path.absolute()
    return shutil.disk_usage(next(p for p in (here, *here.parents) if p.exists())).free


def drop_damaged(store: Store, say: Callable[[str], None], note: Callable[[str], None]) -> bool:
    """Verify all shards and delete those that fail; return whether any failed. `say` gets a line of
    progress, `note` a line for each deleted shard.
    """
    if store.shards:
        say(f"verifying {len(store.shards)} existing shards")
    bad = set(store.unreadable) | {shard.path for shard in store.verify()}
    for text in store.refusals:
        note(f"{text}; its rows are computed again")
    for path in bad:
        remove_shard(path)
    return bool(bad)


def fill_store(
    teacher: Teacher,
    device: torch.device,
    store: Store,
    writer: ShardWriter,
    walk: Walk,
    *,
    stopped: Callable[[], bool],
    progress: Callable[[int, float], None],
) -> None:
    """Compute every row of the walk that is not in the store, and write it.

    A GPU computes batch k + 1 while another thread copies batch k to the host, hashes and writes it.
    `stopped()` is called before each batch; if it returns True, the rows so far are written as a shard and
    the function returns. `progress(rows, seconds)` gets the number of new rows so far.
    """
    pipeline = _RowPipeline(teacher, device, writer)
    begun_s, done, seen = time.monotonic(), 0, set[bytes]()
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="shards") as thread:
        for batch in walk:
            if stopped():
                break
            keys = writer.identity.keys(batch)
            rows = {}
            for row, key in enumerate(keys):
                if key not in seen and key not in store:
                    rows[row] = key
                seen.add(key)
            if not rows:
                continue
            parts, copied = _to_host(pipeline.compute(batch, keys))
            writing.append(thread.submit(pipeline.write, parts, copied, rows))
            while len(writing) > AHEAD:
                writing.popleft().result()
            done += len(rows)
            progress(done, time.monotonic() - begun_s)
        while writing:
            writing.popleft().result()
        thread.submit(writer.finish).result()


@dataclass(frozen=True, slots=True)
class _RowPipeline:
    """Computes the outputs for a batch, and writes its new rows to the store."""

    teacher: Teacher
    device: torch.device
    writer: ShardWriter

    @torch.inference_mode()
    def compute(self, batch: Batch, keys: list[bytes]) -> tuple[Tensor, ...]:
        """Return the stored fields of all tokens of a batch, (N, ...), on the device."""
        identity = self.writer.identity
        tokens_BT, documents_BT, _ = batch.to_torch(self.device)
        hidden_NE = self.teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
        if identity.form != HIDDEN:
            return sparse_parts(identity, hidden_NE, self.teacher.head(), keys)
        return (hidden_NE,)

    def write(
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


def _to_host(parts: tuple[Tensor, ...]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Start copying to the host. Return the host tensors, and the CUDA event that marks the end of the copies;
    None on a CPU, where nothing is copied."""
    if parts[0].device.type != "cuda":
        return list(parts), None
    hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for host, part in zip(hosts, parts, strict=True):
        host.copy_(part, non_blocking=True)
    return hosts, torch.cuda.current_stream(parts[0].device).record_event()
