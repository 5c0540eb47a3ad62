"""A teacher read from stored outputs; the teacher model itself runs only for batches that are not
in the store.

    hidden     `hidden` and `head`, as from any teacher: exactly the same loss
    top_k      `targets`: a few ids per token, which the loss takes instead of hidden states and head
    sampled    `targets`, with drawn ids

If any row of a batch is missing, the whole batch is a miss. The teacher model is then run on the
whole batch, in the same arithmetic that the store was made with; it is loaded at the first miss.
With `teacher.cache_miss=refuse` a miss is an error instead. Misses are counted and reported; their
cost shows in the step time.

Rows are identified by their content (`keys.py`), which is known on the host. `note` records that two
device tensors hold a given host batch, and starts reading its rows; a later call of `hidden` or
`targets` with the same tensor objects, unmodified, gets these rows. Other tensors are copied back
from the device to find their rows. This synchronises and is slow; only checks and evaluations do it.

On a GPU rows are copied on a separate stream: they are requested while the previous step still
computes, and are on the device when they are needed.

The teacher model inside a CachedTeacher already has its wrappers, such as the one that truncates its
vocabulary.

Several threads read rows into host memory ahead of use. At 100k tokens per second, hidden states of
7 KB per token are 0.7 GB/s to read, verify and copy. So the rows of a batch are read as soon as the
batch is known, each directly to its offset in one buffer. On a GPU the buffer is pinned: the copy to
the device is then asynchronous, without another copy on the host. The threads spend their time in
`pread` and SHA-256, both of which release the interpreter's lock.

A pinned buffer is reused once the device has finished copying it. There are as many buffers as
batches in flight: two, if one batch is read ahead.

With stored hidden states a run needs only the teacher's output matrix: 1.1 GB of the 15 GB of a 7B
teacher in bf16. `load_head` reads it as `engine.models.load` does, but only that tensor of the file;
in a tied model it is the embedding.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.errors import TrainingFailed
from engine.formats.open import open_weights
from engine.kernels.linear import Scratch
from engine.loss.chunks import SparseTargets
from engine.models.head import DenseHead, Head, PackedHead
from engine.models.load import as_floats, check_tied, load_decoder, non_finite, refuse_non_finite
from engine.models.names import check_fits, embedding_and_head
from engine.models.packed import reserve
from engine.models.read_config import AUTO, config_of
from engine.quant.planes import PackedMatrix, pack
from engine.quant.tensor import QuantTensor
from engine.spec.sections import ModelSection
from engine.teachers.protocol import NoHiddenStates, Teacher
from engine.teachers.store.folder import ShardDamaged, Store
from engine.teachers.store.keys import HIDDEN
from engine.teachers.store.outputs import TORCH_DTYPES, as_targets, sparse_parts

if TYPE_CHECKING:
    from engine.teachers.store.fidelity import Fidelity

# Shapes: B rows, T tokens, N = B*T, E teacher width, K ids of a token

MAX_NOTED = 4
"""Maximum number of noted batches that wait to be requested."""
THREADS = 4
"""Maximum number of threads that read rows."""


class Reading:
    """A batch of rows that is being read."""

    def __init__(
        self, buffer: Tensor, fields: tuple[Tensor, ...], rows: list[Future[None]]
    ) -> None:
        self.buffer = buffer
        self._fields = fields
        self._rows = rows

    def wait(self) -> tuple[Tensor, ...] | None:
        """Wait until every row is read. Return one host tensor of N tokens for each field, or None
        if a row was missing or damaged.
        """
        problems = [row.exception() for row in self._rows]
        for problem in problems:
            if problem is not None and not isinstance(problem, ShardDamaged | KeyError):
                raise problem
        return None if any(problems) else self._fields


class Reader:
    """Reads rows of `store` into buffers, which are pinned if `device` is a GPU."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._pool = ThreadPoolExecutor(
            min(THREADS, os.cpu_count() or 1), thread_name_prefix="teacher-outputs"
        )
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def begin(self, keys: Sequence[bytes]) -> Reading:
        """Start reading the rows of one batch. A missing row shows in `Reading.wait`."""
        fields = self._store.identity.fields
        buffer = self._buffer(len(keys) * self._store.identity.row_bytes)
        raw, start = buffer.numpy().data, 0
        views: list[memoryview] = []
        tensors: list[Tensor] = []
        for field in fields:
            end = start + len(keys) * field.bytes
            views.append(raw[start:end])
            part = buffer[start:end].view(TORCH_DTYPES[field.dtype])
            tensors.append(part.view(len(keys) * field.shape[0], *field.shape[1:]))
            start = end
        rows = [
            self._pool.submit(
                self._store.read,
                key,
                [
                    view[row * field.bytes : (row + 1) * field.bytes]
                    for field, view in zip(fields, views, strict=True)
                ],
            )
            for row, key in enumerate(keys)
        ]
        return Reading(buffer, tuple(tensors), rows)

    def release(self, reading: Reading) -> None:
        """Make a reading's buffer available for reuse. Call it when the last copy from its tensors has been
        queued on the current stream. On a CPU nothing is reused, because the tensors may be in use.
        """
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            self._free.append((reading.buffer, event))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _buffer(self, size: int) -> Tensor:
        for index, (buffer, event) in enumerate(self._free):
            if buffer.numel() == size and (event is None or event.query()):  # type: ignore[no-untyped-call]
                del self._free[index]
                return buffer
        # Free buffers of other sizes are dropped: they are left from an evaluation or a partial batch.
        self._free = [free for free in self._free if free[0].numel() == size]
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


@dataclass(frozen=True, slots=True)
class _Noted:
    """Two device tensors, and the keys of the rows that they hold."""

    tokens_BT: Tensor
    documents_BT: Tensor
    keys: list[bytes]
    reading: Reading | None
    """The rows being read; None if the store does not hold all of them."""


# contract: topk-cache-fidelity-v1
class CachedTeacher:
    """A teacher that reads its outputs from `store`, with `head` if the store holds hidden states.

    `online` loads the teacher that made the store, truncated to the student's vocabulary; with None a
    miss raises TrainingFailed. `say` receives one line for each event that the user should know of.
    """

    def __init__(
        self,
        store: Store,
        *,
        device: torch.device,
        vocab_size: int,
        head: Head | None,
        online: Callable[[], Teacher] | None,
        say: Callable[[str], None],
    ) -> None:
        assert (head is not None) == (store.identity.form == HIDDEN)
        self.store = store
        self.hits = 0
        """Number of rows that came from the store."""
        self.misses = 0
        """Number of rows in batches that the teacher model computed."""
        self.proof: Fidelity | str = "it was not compared with the teacher"
        """Result of comparing some stored rows with the teacher, or the reason why none were compared."""
        self._device, self._vocab_size = device, vocab_size
        self._head, self._load, self._report = head, online, say
        self._online: Teacher | None = None
        self._reader = Reader(store, device)
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._noted: deque[_Noted] = deque()
        self._reported_refusals = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def gives_hidden(self) -> bool:
        return self.store.identity.form == HIDDEN

    def holds(self, batch: Batch) -> bool:
        """Return whether every row of a batch is stored."""
        return _holds(self.store, batch, self.store.identity.keys(batch))

    def head(self) -> Head:
        if self._head is None:
            raise self._no_hidden_states()
        return self._head

    def note(self, batch: Batch, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Record that the two tensors hold the tokens and documents of `batch`, and start reading its
        stored rows.
        """
        while len(self._noted) >= MAX_NOTED:
            self._drop(self._noted.popleft())
        self._noted.append(self._new(batch, tokens_BT, documents_BT))

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Return the stored hidden states, as `Teacher.hidden` does. Raises NoHiddenStates if none are stored."""
        if not self.gives_hidden:
            raise self._no_hidden_states()
        stored, keys = self._stored(tokens_BT, documents_BT)
        if stored is None:
            return self._online_teacher(len(keys)).hidden(tokens_BT, documents_BT)
        (hidden_NE,) = stored
        return hidden_NE.view(*tokens_BT.shape, -1)

    def targets(self, tokens_BT: Tensor, documents_BT: Tensor) -> SparseTargets | None:
        """Return the stored targets, which the loss uses instead of hidden states and head; None if the store
        holds hidden states.
        """
        if self.gives_hidden:
            return None
        identity = self.store.identity
        stored, keys = self._stored(tokens_BT, documents_BT)
        if stored is None:
            teacher = self._online_teacher(len(keys))
            hidden_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
            stored = sparse_parts(identity, hidden_NE, teacher.head(), keys)
        return as_targets(identity, stored)

    @property
    def summary(self) -> str:
        """Hits and misses so far, as a sentence."""
        rows = self.hits + self.misses
        text = f"teacher outputs: {self.hits:,} of {rows:,} rows came from {self.store.path}"
        return f"{text}, {self.misses:,} from the teacher model" if self.misses else text

    def close(self) -> None:
        self._reader.close()

    def _new(self, batch: Batch, tokens_BT: Tensor, documents_BT: Tensor) -> _Noted:
        keys = self.store.identity.keys(batch)
        reading = self._reader.begin(keys) if _holds(self.store, batch, keys) else None
        return _Noted(tokens_BT, documents_BT, keys, reading)

    def _stored(
        self, tokens_BT: Tensor, documents_BT: Tensor
    ) -> tuple[tuple[Tensor, ...] | None, list[bytes]]:
        """Return the rows' fields on the device (None if a row is missing or damaged), and the rows' keys."""
        noted = next(
            (n for n in self._noted if n.tokens_BT is tokens_BT and n.documents_BT is documents_BT),
            None,
        )
        if noted is None:
            noted = self._new(_copy_to_host(tokens_BT, documents_BT), tokens_BT, documents_BT)
        else:
            # `is not`, because `!=` of two dataclasses would compare their tensors.
            self._noted = deque(n for n in self._noted if n is not noted)
        if noted.reading is None:
            return None, noted.keys
        fields = noted.reading.wait()
        self._report_refusals()
        if fields is not None:
            self.hits += len(noted.keys)
            fields = self._on_device(fields, noted.reading)
        return fields, noted.keys

    def _on_device(self, fields: tuple[Tensor, ...], reading: Reading) -> tuple[Tensor, ...]:
        """Copy the fields to the device, for use on the current stream."""
        if self._stream is None:
            return tuple(field.to(self._device) for field in fields)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = tuple(field.to(self._device, non_blocking=True) for field in fields)
            self._reader.release(reading)
        current.wait_stream(self._stream)
        for copy in copies:
            # The side stream allocated this memory. The allocator must not reuse it while the current
            # stream still reads it.
            copy.record_stream(current)
        return copies

    def _online_teacher(self, rows: int) -> Teacher:
        """Return the teacher model to compute a batch of `rows` rows that is a miss. Load it if necessary."""
        first, self.misses = not self.misses, self.misses + rows
        if self._load is None:
            raise TrainingFailed(
                f"teacher outputs: {self.store.path} — expected every row, found a batch of {rows} rows "
                "with a missing or damaged row",
                hint="`engine prepare` with this spec fills the store; teacher.cache_miss=online computes "
                "missing rows with the teacher",
            )
        if first:
            self._report(
                f"{self.store.path}: the store lacks a row of a batch of {rows} rows. The teacher model computes "
                "this batch, and further incomplete batches; the log reports their rows at the end"
            )
        if self._online is None:
            self._online = self._load()
        return self._online

    def _drop(self, noted: _Noted) -> None:
        """Discard a noted batch that was never requested."""
        if noted.reading is not None:
            noted.reading.wait()
            self._reader.release(noted.reading)

    def _report_refusals(self) -> None:
        for text in self.store.refusals[self._reported_refusals :]:
            self._report(f"{text}; its rows are not used")
            self._reported_refusals += 1

    def _no_hidden_states(self) -> NoHiddenStates:
        return NoHiddenStates(
            f"teacher.cache: expected a store of hidden states, found {self.store.identity.words}"
        )


def _holds(store: Store, batch: Batch, keys: list[bytes]) -> bool:
    return batch.tokens_BT.shape[1] == store.identity.seq_len and all(key in store for key in keys)


def _copy_to_host(tokens_BT: Tensor, documents_BT: Tensor) -> Batch:
    """Return the batch that two tensors hold, without labels. Synchronises with the device."""
    tokens, documents = (np.asarray(t.cpu().numpy()) for t in (tokens_BT, documents_BT))
    return Batch(
        tokens_BT=tokens,
        documents_BT=documents,
        labels_BT=np.full_like(tokens, -100),
        row_ids=np.full(len(tokens), -1, dtype=np.int64),
    )


def load_head(
    path: str | Path,
    *,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
    how: ModelSection = AUTO,
) -> Head:
    """Load the head of the model in `path`. With `packed`, a head that the file stores in quantised
    blocks keeps them.

    Raises WeightsError.
    """
    with open_weights(Path(path)) as weights:
        config = config_of(weights, how)
        if not config.native:
            # transformers knows which tensor is the head only after loading the model; the rest is freed.
            head_VD = load_decoder(weights, dtype, device, how).head_weight
            # `engine prepare` stores no hidden states of models that give only logits.
            assert head_VD is not None
            return DenseHead(head_VD.detach().clone())
        check_fits(config, weights, weights.path, weights.convention)
        check_tied(config, weights)
        embedding, head = embedding_and_head(weights.convention)
        name = embedding if config.tie_word_embeddings else head
        source = weights.get(name)
        if packed and isinstance(source, QuantTensor):
            # `engine prepare` has checked that the scales of these blocks are finite.
            matrix = pack(source.to(device))
            matrix = PackedMatrix(matrix.type, *matrix.shape, matrix.data.clone())
            scratch = Scratch(device, dtype)
            reserve(scratch, matrix, whole=False)
            return PackedHead(matrix, scratch)
        values = as_floats(source, dtype, device)
        refuse_non_finite(weights.path, non_finite(name, source, values))
    return DenseHead(values)
