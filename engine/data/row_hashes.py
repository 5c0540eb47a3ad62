"""Hashes of rows and of the documents in them, by content: what trained rows are known by (`engine.log.rows`)."""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from engine.data.batches import Int64Array

HASH_BYTES = 8


class RowHash(NamedTuple):
    row: bytes
    """That of its document; of several documents, blake2b of their hashes."""
    documents: tuple[bytes, ...] = ()
    """blake2b of 8 bytes over the tokens and the labels of each, as far as it stands in the row: int32 and
    little-endian. Empty where there is only one."""


def row_hashes(
    tokens_BT: Int64Array, documents_BT: Int64Array, labels_BT: Int64Array
) -> list[RowHash]:
    """Return the hashes of each row."""
    rows, length = tokens_BT.shape
    begins_BT = np.ones((rows, length), dtype=np.bool_)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    tokens, labels = (
        np.ascontiguousarray(array_BT, dtype="<i4").data.cast("B")
        for array_BT in (tokens_BT, labels_BT)
    )
    places = (4 * np.flatnonzero(begins_BT)).tolist()
    found: list[RowHash] = []
    place = 0
    for count in begins_BT.sum(axis=1).tolist():
        documents = []
        for begin, end in zip(
            places[place : place + count],
            [*places[place + 1 : place + count], 4 * length * (len(found) + 1)],
            strict=True,
        ):
            digest = hashlib.blake2b(tokens[begin:end], digest_size=HASH_BYTES)
            digest.update(labels[begin:end])
            documents.append(digest.digest())
        place += count
        if count == 1:
            found.append(RowHash(documents[0]))
        else:
            row = hashlib.blake2b(b"".join(documents), digest_size=HASH_BYTES).digest()
            found.append(RowHash(row, tuple(documents)))
    return found
