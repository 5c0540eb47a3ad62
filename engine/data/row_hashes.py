"""Hashes of rows and of the documents in them, by content: what trained rows are known by (`engine.log.rows`)."""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

import numpy as np

from engine.data.batches import IGNORED, Batch, Int64Array

HASH_BYTES = 8


class RowHash(NamedTuple):
    row: bytes
    """blake2b of 8 bytes over the tokens and the labels, int32 and little-endian, of its document; of several documents
    blake2b of their hashes."""
    documents: tuple[bytes, ...] = ()
    """Of several documents that of each, as far as it stands in the row, that has a label: padding and what ends a text
    look alike in many rows."""


def hashes_of(batch: Batch) -> list[RowHash]:
    return row_hashes(batch.tokens_BT, batch.documents_BT, batch.labels_BT)


def row_hashes(
    tokens_BT: Int64Array, documents_BT: Int64Array, labels_BT: Int64Array
) -> list[RowHash]:
    """Return the hashes of each row."""
    rows, length = tokens_BT.shape
    both_B2T = np.empty((rows, 2, length), dtype="<i4")
    both_B2T[:, 0], both_B2T[:, 1] = tokens_BT, labels_BT
    numbers = both_B2T.data.cast("B")
    cuts: dict[int, list[int]] = {}
    for row, place in np.argwhere(documents_BT[:, 1:] != documents_BT[:, :-1]).tolist():
        cuts.setdefault(row, [0]).append(place + 1)
    found = []
    for row in range(rows):
        begin, labels = 8 * length * row, 8 * length * row + 4 * length
        if row not in cuts:
            # Its labels stand behind its tokens: one call, which is half of what a short row costs.
            whole = hashlib.blake2b(numbers[begin : labels + 4 * length], digest_size=HASH_BYTES)
            found.append(RowHash(whole.digest()))
            continue
        every, documents = [], []
        for first, end in itertools.pairwise((*cuts[row], length)):
            digest = hashlib.blake2b(
                numbers[begin + 4 * first : begin + 4 * end], digest_size=HASH_BYTES
            )
            digest.update(numbers[labels + 4 * first : labels + 4 * end])
            every.append(digest.digest())
            if (labels_BT[row, first:end] != IGNORED).any():
                documents.append(every[-1])
        joined = hashlib.blake2b(b"".join(every), digest_size=HASH_BYTES)
        found.append(RowHash(joined.digest(), tuple(documents)))
    return found
