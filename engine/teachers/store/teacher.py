"""A teacher that ran before: its answers come from a store, and it is asked itself only for what is not
there.

    hidden     hidden states and the head, as from any teacher: the same loss, exactly
    top_k      `targets`, some ids a token, for the loss in the place of hidden states and head
    sampled    the same, of draws

The rows of a batch are all there, or the batch is a miss: then the teacher itself is asked for the
whole batch, the same teacher in the same arithmetic that the store was made with, which is loaded at
the first miss (or the miss is refused, as `teacher.cache_miss` says). Misses are counted and said;
what they cost is seen in the step.

Rows are known by their content (`engine.teachers.store.rows`), which is on the host before it is on
the device. `note` says that two tensors on the device are a batch of the host, and begins to read it;
who asks with these very tensors gets what was read. Tensors that were not noted are read back from the
device, which waits for it: right, and for checks and evaluations only.

On a GPU rows are copied on a stream of their own: they are asked for when the step before is still
computed, and are there when their turn comes.

Goes around every other teacher. It reads ahead by itself, so nothing needs to go around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.errors import TrainingFailed
from engine.models.head import Head
from engine.teachers.protocol import NoHiddenStates, Teacher
from engine.teachers.store.folder import Store
from engine.teachers.store.outputs import SparseOutputs, as_outputs, sparse_parts
from engine.teachers.store.reader import Reader, Reading
from engine.teachers.store.rows import HIDDEN

# Shapes: B rows, T tokens, N = B*T, E teacher width, K ids of a token

REMEMBERED = 4
"""Noted batches at most: those of one step that are under way, and the one ahead of it."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """Two tensors on the device, and the rows that they are."""

    tokens_BT: Tensor
    documents_BT: Tensor
    versions: tuple[int, int]
    keys: list[bytes]
    reading: Reading | None
    """None where a row is not in the store."""

    def is_of(self, tokens_BT: Tensor, documents_BT: Tensor) -> bool:
        return (
            tokens_BT is self.tokens_BT
            and documents_BT is self.documents_BT
            and _versions(tokens_BT, documents_BT) == self.versions
        )


# contract: topk-cache-fidelity-v1
class CachedTeacher:
    """`store`, with `head` where it holds hidden states.

    `online` loads the teacher that the store was made with, cut to the student's ids; None where a
    miss is to be refused. `say` is given a line for each thing that a person should know.
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
        """Rows that came from the store."""
        self.misses = 0
        """Rows of batches that did not."""
        self._device, self._vocab_size = device, vocab_size
        self._head, self._load, self._say = head, online, say
        self._online: Teacher | None = None
        self._reader = Reader(store, device)
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._noted: deque[_Noted] = deque()
        self._said = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def gives_hidden(self) -> bool:
        return self.store.identity.form == HIDDEN

    def holds(self, batch: Batch) -> bool:
        """Whether every row of a batch is stored."""
        return _holds(self.store, batch, self.store.identity.keys(batch))

    def head(self) -> Head:
        if self._head is None:
            raise self._no_hidden_states()
        return self._head

    def note(self, batch: Batch, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Says that the tensors hold the tokens and documents of `batch`, and begins to read it."""
        while len(self._noted) >= REMEMBERED:
            self._drop(self._noted.popleft())
        self._noted.append(self._new(batch, tokens_BT, documents_BT))

    def prefetch(self, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Begins to read a batch, where `note` has not."""
        if not any(noted.is_of(tokens_BT, documents_BT) for noted in self._noted):
            self.note(_read_back(tokens_BT, documents_BT), tokens_BT, documents_BT)

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """As `Teacher.hidden`. Raises NoHiddenStates for a store of another form."""
        if not self.gives_hidden:
            raise self._no_hidden_states()
        stored, keys = self._stored(tokens_BT, documents_BT)
        if stored is None:
            return self._asked(len(keys)).hidden(tokens_BT, documents_BT)
        (hidden_NE,) = stored
        return hidden_NE.view(*tokens_BT.shape, -1)

    def targets(self, tokens_BT: Tensor, documents_BT: Tensor) -> SparseOutputs | None:
        """What the loss takes in the place of hidden states and head; None where those are given."""
        if self.gives_hidden:
            return None
        identity = self.store.identity
        stored, keys = self._stored(tokens_BT, documents_BT)
        if stored is None:
            teacher = self._asked(len(keys))
            hidden_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
            stored = sparse_parts(identity, hidden_NE, teacher.head(), keys)
        return as_outputs(identity, stored)

    @property
    def summary(self) -> str:
        """Hits and misses so far, in words."""
        asked = self.hits + self.misses
        text = f"teacher outputs: {self.hits:,} of {asked:,} rows came from {self.store.path}"
        return f"{text}, {self.misses:,} from the teacher" if self.misses else text

    def close(self) -> None:
        self._reader.close()

    def _new(self, batch: Batch, tokens_BT: Tensor, documents_BT: Tensor) -> _Noted:
        keys = self.store.identity.keys(batch)
        reading = self._reader.begin(keys) if _holds(self.store, batch, keys) else None
        return _Noted(tokens_BT, documents_BT, _versions(tokens_BT, documents_BT), keys, reading)

    def _stored(
        self, tokens_BT: Tensor, documents_BT: Tensor
    ) -> tuple[tuple[Tensor, ...] | None, list[bytes]]:
        """The fields of the rows on the device, None where one of them is missing; and their keys."""
        noted = next((n for n in self._noted if n.is_of(tokens_BT, documents_BT)), None)
        if noted is None:
            noted = self._new(_read_back(tokens_BT, documents_BT), tokens_BT, documents_BT)
        else:
            # By place: comparing two of them would compare tensors.
            self._noted = deque(n for n in self._noted if n is not noted)
        if noted.reading is None:
            return None, noted.keys
        fields = noted.reading.wait()
        self._say_refusals()
        if fields is not None:
            self.hits += len(noted.keys)
            fields = self._on_device(fields, noted.reading)
        return fields, noted.keys

    def _on_device(self, fields: tuple[Tensor, ...], reading: Reading) -> tuple[Tensor, ...]:
        """Copies what was read, for the current stream."""
        if self._stream is None:
            return tuple(field.to(self._device) for field in fields)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = tuple(field.to(self._device, non_blocking=True) for field in fields)
            self._reader.take_back(reading)
        current.wait_stream(self._stream)
        for copy in copies:
            # Its memory is the other stream's, which is not to have it back before this one is done.
            copy.record_stream(current)
        return copies

    def _asked(self, rows: int) -> Teacher:
        """The teacher itself, for a batch of `rows` rows that is a miss."""
        first, self.misses = not self.misses, self.misses + rows
        if self._load is None:
            raise TrainingFailed(
                f"teacher outputs: {self.store.path} — expected every row, found a batch of {rows} "
                "that has one that is missing or damaged",
                hint="`engine prepare` with this spec fills the store; teacher.cache_miss=online asks "
                "the teacher for what is not there",
            )
        if first:
            self._say(
                f"{self.store.path}: a batch of {rows} rows is not all there, so the teacher itself is "
                "asked for it and for any other; their number is in the log at the end"
            )
        if self._online is None:
            self._online = self._load()
        return self._online

    def _drop(self, noted: _Noted) -> None:
        """A batch that nobody asked for."""
        if noted.reading is not None:
            noted.reading.wait()
            self._reader.take_back(noted.reading)

    def _say_refusals(self) -> None:
        for text in self.store.refusals[self._said :]:
            self._say(f"{text}; its rows are not used")
            self._said += 1

    def _no_hidden_states(self) -> NoHiddenStates:
        return NoHiddenStates(
            f"teacher.cache: the store holds {self.store.identity.words}, and no hidden states to ask for"
        )


def _holds(store: Store, batch: Batch, keys: list[bytes]) -> bool:
    return batch.tokens_BT.shape[1] == store.identity.seq_len and all(key in store for key in keys)


def _read_back(tokens_BT: Tensor, documents_BT: Tensor) -> Batch:
    """The batch that two tensors hold; waits for the device. It has no labels."""
    tokens, documents = (np.asarray(t.cpu().numpy()) for t in (tokens_BT, documents_BT))
    return Batch(
        tokens_BT=tokens,
        documents_BT=documents,
        labels_BT=np.full_like(tokens, -100),
        row_ids=np.full(len(tokens), -1, dtype=np.int64),
    )


def _versions(tokens_BT: Tensor, documents_BT: Tensor) -> tuple[int, int]:
    """How often each was written to; what cannot be written to has no count."""
    found = [0 if t.is_inference() else t._version for t in (tokens_BT, documents_BT)]
    return found[0], found[1]
