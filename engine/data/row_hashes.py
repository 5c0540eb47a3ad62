"""Content hashes of rows and of the documents in them, which identify the rows trained on (`engine.log.rows`)."""

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
    """8-byte blake2b of the row's tokens and labels, int32 and little-endian; for a row of several documents, of their
    hashes."""
    documents: tuple[bytes, ...] = ()
    """Hash of the tokens and labels in this row of each document that has a label in it; empty for a row of one
    document. Documents without a label in the row are left out, because padding and the ends of documents are equal in
    many rows."""


def hashes_of(batch: Batch) -> list[RowHash]:
    return row_hashes(batch.tokens_BT, batch.documents_BT, batch.labels_BT)


def row_hashes(
    tokens_BT: Int64Array, documents_BT: Int64Array, labels_BT: Int64Array
) -> list[RowHash]:
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
    hashes = []
    for row, count in enumerate(begins_BT.sum(axis=1).tolist()):
        if count == 1:
            # Its labels follow its tokens in memory, so one call hashes both; that halves the time of a short row.
            row_bytes = numbers[2 * size * row : 2 * size * (row + 1)]
            hashes.append(RowHash(hashlib.blake2b(row_bytes, digest_size=HASH_BYTES).digest()))
            next(documents)
            continue
        digests, with_labels = [], []
        for start, end, has_labels in itertools.islice(documents, count):
            # `start` and `end` count tokens over all rows, and each earlier row also has its labels in `numbers`.
            begin_byte, end_byte = size * row + 4 * start, size * row + 4 * end
            digest = hashlib.blake2b(numbers[begin_byte:end_byte], digest_size=HASH_BYTES)
            digest.update(numbers[begin_byte + size : end_byte + size])
            digests.append(digest.digest())
            if has_labels:
                with_labels.append(digests[-1])
        joined = hashlib.blake2b(b"".join(digests), digest_size=HASH_BYTES)
        hashes.append(RowHash(joined.digest(), tuple(with_labels)))
    return hashes
