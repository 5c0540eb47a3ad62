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
    begins_BT = np.ones((rows, length), dtype=bool)
    np.not_equal(documents_BT[:, 1:], documents_BT[:, :-1], out=begins_BT[:, 1:])
    places = np.flatnonzero(begins_BT)
    labelled = np.logical_or.reduceat((labels_BT != IGNORED).ravel(), places)
    ends = [*places[1:].tolist(), rows * length]
    documents = zip(places.tolist(), ends, labelled.tolist(), strict=True)
    size = 4 * length
    found = []
    for row, count in enumerate(begins_BT.sum(axis=1).tolist()):
        if count == 1:
            # Its labels stand behind its tokens: one call, which is half of what a short row costs.
            whole = numbers[2 * size * row : 2 * size * (row + 1)]
            found.append(RowHash(hashlib.blake2b(whole, digest_size=HASH_BYTES).digest()))
            next(documents)
            continue
        every, with_labels = [], []
        for first, end, has_labels in itertools.islice(documents, count):
            # Places count over all rows; each row before has labels, too, in `numbers`.
            begin, behind = size * row + 4 * first, size * row + 4 * end
            digest = hashlib.blake2b(numbers[begin:behind], digest_size=HASH_BYTES)
            digest.update(numbers[begin + size : behind + size])
            every.append(digest.digest())
            if has_labels:
                with_labels.append(every[-1])
        joined = hashlib.blake2b(b"".join(every), digest_size=HASH_BYTES)
        found.append(RowHash(joined.digest(), tuple(with_labels)))
    return found
