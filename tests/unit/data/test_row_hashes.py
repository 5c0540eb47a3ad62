"""Rows and their documents are known by their content: tokens and labels as little-endian numbers of 32 bits."""

from __future__ import annotations

import hashlib

import numpy as np

from engine.data.row_hashes import RowHash, row_hashes


def blake2b(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


def test_a_row_of_one_document_has_its_hash_and_one_of_several_that_of_their_hashes() -> None:
    tokens_BT = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]])
    labels_BT = np.array([[6, 7, 8, 9], [6, -100, 8, -100], [2, 3, 4, -100]])
    documents_BT = np.array([[3, 3, 3, 3], [0, 0, 1, 1], [1, 1, 1, 1]])
    tokens, labels = (array_BT.astype("<i4") for array_BT in (tokens_BT, labels_BT))
    parts = tuple(
        blake2b(tokens[1, part].tobytes(), labels[1, part].tobytes())
        for part in (slice(0, 2), slice(2, 4))
    )
    assert row_hashes(tokens_BT, documents_BT, labels_BT) == [
        RowHash(blake2b(tokens[0].tobytes(), labels[0].tobytes())),
        RowHash(blake2b(*parts), parts),
        RowHash(blake2b(tokens[2].tobytes(), labels[2].tobytes())),
    ]


def test_a_document_without_a_label_is_in_the_hash_of_the_row_alone() -> None:
    documents_BT = np.array([[0, 0, 0, 1, 1, 1]])
    tokens_BT = np.array([[7, 8, 9, 0, 0, 0]])
    labels_BT = np.array([[8, 9, -100, -100, -100, -100]])
    (found,) = row_hashes(tokens_BT, documents_BT, labels_BT)
    tokens, labels = (array_BT[0].astype("<i4") for array_BT in (tokens_BT, labels_BT))
    text, padding = (
        blake2b(tokens[part].tobytes(), labels[part].tobytes())
        for part in (slice(0, 3), slice(3, 6))
    )
    assert found == RowHash(blake2b(text, padding), (text,))


def test_a_document_has_one_hash_wherever_it_stands() -> None:
    documents_BT = np.array([[0, 0, 0, 1, 1, 2], [3, 3, 4, 4, 4, 5]])
    tokens_BT = np.array([[7, 8, 9, 1, 2, 3], [1, 2, 7, 8, 9, 4]])
    labels_BT = np.array([[8, 9, -100, 2, -100, -100], [2, -100, 8, 9, -100, -100]])
    first, second = row_hashes(tokens_BT, documents_BT, labels_BT)
    assert first.row != second.row
    assert first.documents[:2] == (second.documents[1], second.documents[0])
