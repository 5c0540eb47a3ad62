"""Which rows of the corpus a step is to train on: other code than the loader's (`engine.data.batches`)."""

# Shapes: B rows, T tokens of a row, S starts of documents in rows

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.data.batches import IGNORED, Int64Array
from engine.data.tokens import READ_AT_ONCE, TokenStream


def next_tokens(tokens_BT: Tensor, documents_BT: Tensor, after_B: Tensor) -> Tensor:
    """Return the label of each position, (B, T): the next token where it is of the same document.

    `after_B` is the label of a row's last position, which depends on the token after the row.
    """
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    same_BT = documents_BT[:, 1:] == documents_BT[:, :-1]
    labels_BT[:, :-1] = torch.where(same_BT, tokens_BT[:, 1:], IGNORED)
    labels_BT[:, -1] = after_B
    return labels_BT


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRows:
    """The rows that the corpus holds for a micro-batch, (B, T) each."""

    row_ids: Sequence[int]
    tokens_BT: Tensor
    documents_BT: Tensor
    predicted_BT: Tensor
    """Whether the token after each position may be a label."""
    after_B: Tensor
    """The label of each row's last position."""

    @property
    def labels_BT(self) -> Tensor:
        labels_BT = next_tokens(self.tokens_BT, self.documents_BT, self.after_B)
        return torch.where(self.predicted_BT, labels_BT, IGNORED)


class PrescribedRows:
    def __init__(self, stream: TokenStream, length: int, seed: int) -> None:
        """`length` is the number of tokens of a row."""
        self._stream, self._length, self._seed = stream, length, seed
        self._rows = _rows_with_labels(stream, length)
        self._order: tuple[int, Int64Array] | None = None

    @property
    def per_epoch(self) -> int:
        return len(self._rows)

    def ids_at(self, position: int, rows: int) -> Int64Array:
        """Return the rows of the corpus whose turn it is: every one with a label once in an epoch, in the order of
        random words of Philox(seed, epoch)."""
        found = []
        for place in range(position, position + rows):
            epoch, index = divmod(place, len(self._rows))
            if self._order is None or self._order[0] != epoch:
                random = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
                words = random.random_raw(len(self._rows))
                self._order = epoch, self._rows[np.argsort(words, kind="stable")]
            found.append(self._order[1][index])
        return np.array(found)

    def rows(self, row_ids: Int64Array) -> CorpusRows:
        """Return what the corpus holds in some rows: row r is the tokens r*T to (r+1)*T of its stream."""
        stream, length = self._stream, self._length
        begin_B = row_ids * length
        places_BT = begin_B[:, None] + np.arange(length)
        exists_BT = places_BT + 1 < len(stream)
        next_BT = np.where(exists_BT, places_BT + 1, 0)
        # The document of the first token, one more at each start of a document behind it; T + 1 tokens of each row.
        first_B, last_B = (
            np.searchsorted(stream.starts, place_B, side="right") - 1
            for place_B in (begin_B, begin_B + length)
        )
        count_B = last_B - first_B
        row_S = np.repeat(np.arange(len(row_ids)), count_B)
        before_S = np.repeat(np.cumsum(count_B) - count_B, count_B)
        starts_S = stream.starts[first_B[row_S] + 1 + np.arange(len(row_S)) - before_S]
        documents_BT = np.zeros((len(row_ids), length + 1), dtype=np.int64)
        documents_BT[:, 0] = first_B
        # Documents without a token begin where the next one does.
        np.add.at(documents_BT, (row_S, starts_S - begin_B[row_S]), 1)
        documents_BT = documents_BT.cumsum(axis=1)
        predicted_BT = exists_BT & (documents_BT[:, 1:] == documents_BT[:, :-1])
        if stream.labelled is not None:
            predicted_BT &= stream.labelled[next_BT]
        after_B = np.where(
            predicted_BT[:, -1], stream.tokens[next_BT[:, -1]].astype(np.int64), IGNORED
        )
        return CorpusRows(
            row_ids=row_ids.tolist(),
            tokens_BT=torch.from_numpy(stream.tokens[places_BT].astype(np.int64)),
            documents_BT=torch.from_numpy(documents_BT[:, :-1].copy()),
            predicted_BT=torch.from_numpy(predicted_BT),
            after_B=torch.from_numpy(after_B),
        )


def _rows_with_labels(stream: TokenStream, length: int) -> Int64Array:
    """Return the rows of which a token has a label: the next one, of the same document, may be predicted."""
    rows = len(stream) // length
    if stream.labelled is None:
        return np.arange(rows)
    has_label = np.zeros(rows, dtype=bool)
    for begin in range(0, len(stream), READ_AT_ONCE):
        predicted = begin + np.flatnonzero(stream.labelled[begin : begin + READ_AT_ONCE])
        low, high = np.searchsorted(stream.starts, (begin, begin + READ_AT_ONCE))
        predicted = np.setdiff1d(predicted, stream.starts[low:high], assume_unique=True)
        # What predicts a token stands before it.
        of_rows = (predicted[predicted > 0] - 1) // length
        has_label[of_rows[of_rows < rows]] = True
        stream.release()
    return np.flatnonzero(has_label)
