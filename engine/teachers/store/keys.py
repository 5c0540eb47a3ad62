"""The keys and the forms of stored teacher outputs.

The teacher's output for a row of the corpus is stored once, under a digest of everything that the
output depends on:

    key = SHA-256( identity | token ids | document ids )

    identity      form, teacher (SHA-256 of its weights), backend, precision, dtype, temperature, ...
    token ids     int32, little-endian
    document ids  renumbered from 0 by first appearance: only the document boundaries matter, not
                  which documents of the corpus they are

So the key does not depend on the order of the rows, the epoch, the batch or the seed of the run. A
row that is found is the output of exactly this teacher for exactly these tokens.

    form       a row holds                                                bytes per token
    hidden     final hidden states (T, E), in the teacher's dtype         E x 2 or 4
    top_k      the K most probable ids and their log p at temperature T,  K x 8
               most probable first; the tail has the remaining probability
    sampled    m ids drawn from p at temperature T, with repeats          m x 4

Hidden states are exact: with the teacher's head they give its whole distribution, at any
temperature. The other two forms hold probabilities at one temperature, over the student's
vocabulary (the first ids of the teacher's, renormalised). This module does not import torch.
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
    """A store of teacher outputs cannot be used or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One tensor of a stored row."""

    name: str
    dtype: str
    """Dtype name as in a safetensors file."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that a stored output depends on, except the row itself."""

    form: str
    teacher_sha256: str
    """SHA-256 of the teacher's tensors in memory; of block-quantised weights, of their blocks."""
    backend: str
    precision: str
    dtype: str
    """Dtype of the teacher's hidden states: F32 or BF16."""
    width: int
    """Width of the teacher's hidden states."""
    seq_len: int
    vocabulary: int | None = None
    """Vocabulary size of the stored probabilities; None for hidden states, which do not depend on a
    vocabulary.
    """
    temperature: float | None = None
    count: int = 0
    """K of top_k or m of sampled."""
    seed: int | None = None
    """Seed of the draws."""

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
        """Short description of the form, for messages."""
        if self.form == HIDDEN:
            return f"hidden states, {self.width} x {self.dtype}"
        what = f"top {self.count}" if self.form == TOP_K else f"{self.count} draws"
        return f"{what} of {self.vocabulary} ids at temperature {self.temperature:g}"

    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    def keys(self, batch: Batch) -> list[bytes]:
        """Return the key of each row of a batch, 32 bytes each."""
        identity = self.digest()
        return [hashlib.sha256(identity + content).digest() for content in row_contents(batch)]


def identity_of(fields: Any) -> Identity:
    """Return the identity from its fields, as `asdict` gives them. Raises CacheError."""
    try:
        return Identity(**fields)
    except TypeError as error:
        raise CacheError(f"teacher outputs: expected an identity, found {error}") from None


# contract: topk-cache-fidelity-v1
def row_contents(batch: Batch) -> list[bytes]:
    """Return a digest of the tokens and documents of each row. Rows with equal digests get the same
    output from any teacher.
    """
    documents_BT = canonical(batch.documents_BT)
    return [
        hashlib.sha256(tokens_T.tobytes() + documents_T.tobytes()).digest()
        for tokens_T, documents_T in zip(
            batch.tokens_BT.astype("<i4"), documents_BT.astype("<i4"), strict=True
        )
    ]


def canonical(documents_BT: Int64Array) -> Int64Array:
    """Renumber the document ids of each row from 0 in order of first appearance."""
    out_BT = np.empty_like(documents_BT)
    for row, documents_T in enumerate(documents_BT):
        _, first, place_T = np.unique(documents_T, return_index=True, return_inverse=True)
        rank = np.empty_like(first)
        rank[np.argsort(first)] = np.arange(len(first))
        out_BT[row] = rank[place_T.reshape(-1)]
    return out_BT


def uniforms(seed: int, key: bytes, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return random numbers in [0, 1) for the draws of one row. They depend on seed and key alone, and
    are equal on every machine, so that drawing a row again gives the same ids.
    """
    words = np.frombuffer(hashlib.sha256(seed.to_bytes(8, "little") + key).digest(), dtype="<u8")
    raw = np.random.Philox(key=words[:2].copy()).random_raw(math.prod(shape))
    # The upper 53 bits, because a float64 holds 53.
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53, dtype=np.float64).reshape(tuple(shape))


def contents_sha256(batches: Sequence[Batch]) -> str:
    """Return a digest of the rows of some batches, in order. Equal digests mean that the teacher gets
    the same input.
    """
    digest = hashlib.sha256()
    for batch in batches:
        for content in row_contents(batch):
            digest.update(content)
    return digest.hexdigest()
