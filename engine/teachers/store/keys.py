"""The key under which a sequence's stored teacher output is looked up, and what is stored there.

A row of the corpus is stored once, under a digest of everything that the teacher's answer depends on:

    key = SHA-256( identity | token ids | document ids )

    identity      form, teacher (SHA-256 of its weights), backend, precision, dtype, temperature, ...
    token ids     int32, little-endian
    document ids  renumbered from 0 by first appearance: where documents begin matters, which they
                  are in the corpus does not

So neither the order of the rows, nor the epoch, nor the batch or the seed they came with has a part
in it: a key that is found is the answer to exactly these tokens by exactly this teacher, and any other
is a miss.

    form       a row holds                                             bytes per token
    hidden     final hidden states (T, E), in the teacher's dtype      E x 2 or 4
    top_k      the K likeliest ids and their log p at temperature T,   K x 8
               likeliest first; the tail's probability is what they leave
    sampled    m ids drawn from p at temperature T, with repeats       m x 4

Hidden states are exact: with the teacher's head they give its whole distribution, at any temperature.
The two others are of the student's vocabulary (the teacher's first ids, renormalised), and of one
temperature. Loads no torch.
"""

# Shapes: B rows, T tokens of a row, E teacher width, K ids of a token

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.batches import Batch, Int64Array
from engine.errors import BadInput

HIDDEN, TOP_K, SAMPLED = FORMS = ("hidden", "top_k", "sampled")

DTYPE_BYTES = {"F32": 4, "BF16": 2, "I32": 4}


class CacheError(BadInput):
    """A store of teacher outputs that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One tensor of a row."""

    name: str
    dtype: str
    """As in a safetensors file."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that a stored answer depends on beside the row itself."""

    form: str
    teacher_sha256: str
    """Of its tensors as they are in memory, of weights in blocks those of the blocks."""
    backend: str
    precision: str
    dtype: str
    """Of its hidden states: F32 or BF16."""
    width: int
    """Of the teacher's hidden states."""
    seq_len: int
    vocabulary: int | None = None
    """Ids that probabilities are over; None for hidden states, which come before any."""
    temperature: float | None = None
    count: int = 0
    """K of top_k, m of sampled."""
    seed: int | None = None
    """Of the draws."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise CacheError(
                f"teacher outputs: expected one of {', '.join(FORMS)}, found {self.form!r}"
            )

    @property
    def fields(self) -> tuple[Field, ...]:
        if self.form == HIDDEN:
            return (Field(name="hidden", dtype=self.dtype, shape=(self.seq_len, self.width)),)
        shape = (self.seq_len, self.count)
        ids = Field(name="ids", dtype="I32", shape=shape)
        if self.form == SAMPLED:
            return (ids,)
        return (ids, Field(name="log_probs", dtype="F32", shape=shape))

    @property
    def row_bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    @property
    def token_bytes(self) -> float:
        return self.row_bytes / self.seq_len

    @property
    def words(self) -> str:
        """The form in a few words, for people."""
        if self.form == HIDDEN:
            return f"hidden states, {self.width} x {self.dtype}"
        what = f"top {self.count}" if self.form == TOP_K else f"{self.count} draws"
        return f"{what} of {self.vocabulary} ids at temperature {self.temperature:g}"

    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    def keys(self, batch: Batch) -> list[bytes]:
        """The key of each row of a batch, 32 bytes."""
        identity = self.digest()
        return [hashlib.sha256(identity + content).digest() for content in row_contents(batch)]


def identity_of(fields: Any) -> Identity:
    """The identity that `asdict` made. Raises CacheError."""
    try:
        return Identity(**fields)
    except TypeError as error:
        raise CacheError(f"teacher outputs: expected an identity, found {error}") from None


# contract: topk-cache-fidelity-v1
def row_contents(batch: Batch) -> list[bytes]:
    """A digest of the tokens and documents of each row: equal for rows that any teacher answers
    alike.
    """
    documents_BT = canonical(batch.documents_BT)
    return [
        hashlib.sha256(tokens_T.tobytes() + documents_T.tobytes()).digest()
        for tokens_T, documents_T in zip(
            batch.tokens_BT.astype("<i4"), documents_BT.astype("<i4"), strict=True
        )
    ]


def canonical(documents_BT: Int64Array) -> Int64Array:
    """Document ids of each row renumbered from 0 in the order in which they appear."""
    out_BT = np.empty_like(documents_BT)
    for row, documents_T in enumerate(documents_BT):
        _, first, place_T = np.unique(documents_T, return_index=True, return_inverse=True)
        rank = np.empty_like(first)
        rank[np.argsort(first)] = np.arange(len(first))
        out_BT[row] = rank[place_T.reshape(-1)]
    return out_BT


def uniforms(seed: int, key: bytes, shape: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1) for the draws of one row: a pure function of seed and key, the same on every
    machine, so that a row that is drawn again is drawn the same.
    """
    words = np.frombuffer(hashlib.sha256(seed.to_bytes(8, "little") + key).digest(), dtype="<u8")
    raw = np.random.Philox(key=words[:2].copy()).random_raw(math.prod(shape))
    # The upper 53 bits, as many as a float64 holds.
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53, dtype=np.float64).reshape(tuple(shape))


def contents_sha256(batches: Sequence[Batch]) -> str:
    """Of the rows of some batches, in order: equal where a teacher is asked the same."""
    digest = hashlib.sha256()
    for batch in batches:
        for content in row_contents(batch):
            digest.update(content)
    return digest.hexdigest()
