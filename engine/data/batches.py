"""Fixed-length rows of a token stream, and the order in which training reads them.

Packing. Row r is tokens[r*T : (r+1)*T], regardless of document boundaries; a tail shorter than T is dropped. Position t
of a row predicts the next token of the stream; for the last position that is the first token after the row, if there
is one. A position has a label only if that next token belongs to the same document: the end-of-text token predicts
nothing, so no label crosses from one document to another.

    tokens      a  b EOT | c  d  e | EOT ...      T = 3
    document    0  0  0  | 1  1  1 |  1
    labels      b EOT -  | d  e EOT|             - is IGNORED, -100

In a conversation only the tokens that the assistant wrote are labels (`TokenStream.labelled`). Rows without a label
are skipped: there is nothing to learn from them.

Order. One epoch is every row with a label once, in a permutation that depends only on (seed, epoch): a stable sort of
the first `rows` words of the Philox stream with that key. The Philox specification fixes these words, so
the order is the same on every machine and numpy version, which `Generator.permutation` does not promise.

Training reads epoch 0, epoch 1, ... in sequence, and `position`, the number of rows read so far, is its complete
state. A batch that reaches the end of an epoch continues into the next one. Reading resumed at a position yields
exactly the rows that uninterrupted reading yields there, even with a different batch size.
"""

# Shapes: B rows of a batch, T tokens of a row

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.data.tokens import READ_AT_ONCE, TokenStream
from engine.errors import CorpusError

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of a position that predicts nothing, the default `ignore_index` of `cross_entropy`."""

Int64Array = NDArray[np.int64]


class TorchBatch(NamedTuple):
    """A batch on its device, each tensor int64 of shape (B, T)."""

    tokens_BT: torch.Tensor
    documents_BT: torch.Tensor
    labels_BT: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    tokens_BT: Int64Array
    documents_BT: Int64Array
    """Index of each token's document; tokens of different documents must not attend to each other."""
    labels_BT: Int64Array
    """Token to predict at each position, or `IGNORED`."""
    row_ids: Int64Array
    """Indices of these rows in the stream, shape (B,)."""

    @property
    def labelled(self) -> int:
        """Number of positions that have a label."""
        return int(np.count_nonzero(self.labels_BT != IGNORED))

    def split(self, rows: int) -> Iterator[Batch]:
        """Yield the batch as smaller batches of at most `rows` rows, in order."""
        for start in range(0, len(self.row_ids), rows):
            part = slice(start, start + rows)
            yield Batch(
                tokens_BT=self.tokens_BT[part],
                documents_BT=self.documents_BT[part],
                labels_BT=self.labels_BT[part],
                row_ids=self.row_ids[part],
            )

    def to_torch(self, device: torch.device | str) -> TorchBatch:
        """Return the arrays as tensors.

        On the CPU they share the memory of this batch. A copy to CUDA does not wait for the device.
        """
        import torch

        device = torch.device(device)
        on_host = [torch.from_numpy(a) for a in (self.tokens_BT, self.documents_BT, self.labels_BT)]
        if device.type == "cuda":
            # Only a copy from pinned memory is asynchronous; torch keeps the pinned block until the
            # copy is done.
            on_host = [tensor.pin_memory() for tensor in on_host]
        return TorchBatch(*(tensor.to(device, non_blocking=True) for tensor in on_host))


class Batches:
    """The rows of a stream in training order: a pure function of (stream, seq_len, seed, position).

    Raises CorpusError when the stream is shorter than one row.
    """

    def __init__(
        self, stream: TokenStream, *, seq_len: int, rows_per_batch: int, seed: int
    ) -> None:
        assert rows_per_batch >= 1 and 0 <= seed < 1 << 64
        self._labelled_rows = labelled_rows(stream, seq_len, "train")
        self.rows_per_epoch = len(self._labelled_rows)
        self.rows_per_batch = rows_per_batch
        self._stream = stream
        self._seq_len = seq_len
        self._seed = seed
        # The last epoch and its permutation are assigned as one tuple, so that another thread never sees one without
        # the other.
        self._latest: tuple[int, Int64Array] | None = None

    def batch_at(self, index: int) -> Batch:
        """Return batch `index`, which begins at position `index * rows_per_batch`."""
        return self.take(index * self.rows_per_batch, self.rows_per_batch)

    def take(self, position: int, rows: int) -> Batch:
        """Return the next `rows` rows after `position` rows were read."""
        return self.rows(self.row_ids_at(position, rows))

    def rows(self, row_ids: Int64Array) -> Batch:
        """Return the given rows of the stream."""
        return gather_rows(self._stream, self._seq_len, row_ids)

    def row_ids_at(self, position: int, rows: int) -> Int64Array:
        assert position >= 0 and rows >= 1
        parts: list[Int64Array] = []
        while rows:
            epoch, start = divmod(position, self.rows_per_epoch)
            part = self._order(epoch)[start : start + rows]
            parts.append(part)
            position, rows = position + len(part), rows - len(part)
        return np.concatenate(parts)

    def _order(self, epoch: int) -> Int64Array:
        latest = self._latest
        if latest is None or latest[0] != epoch:
            order = epoch_order(self.rows_per_epoch, self._seed, epoch)
            latest = (epoch, self._labelled_rows[order])
            self._latest = latest
        return latest[1]


def epoch_order(rows: int, seed: int, epoch: int) -> Int64Array:
    """Return the permutation of `rows` rows in one epoch."""
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def count_rows(stream: TokenStream, seq_len: int, split: str) -> int:
    """Return the number of full rows in the stream.

    Raises CorpusError when there is none; the message names `split`.
    """
    assert seq_len >= 1
    rows = len(stream) // seq_len
    if rows == 0:
        raise CorpusError.expected(
            "corpus",
            split,
            f"at least {seq_len:,} tokens, which is one row",
            f"{len(stream):,}",
            hint=f"lower seq_len to at most {len(stream)}, or add text" if len(stream) else None,
        )
    return rows


def labelled_rows(stream: TokenStream, seq_len: int, split: str) -> Int64Array:
    """Return the rows that have a label, in order.

    Raises CorpusError when there is none; the message names `split`.
    """
    rows = count_rows(stream, seq_len, split)
    if stream.labelled is None:
        return np.arange(rows, dtype=np.int64)
    parts = []
    at_once = max(1, READ_AT_ONCE // seq_len)
    for first_row in range(0, rows, at_once):
        begin, end = first_row * seq_len, min(rows, first_row + at_once) * seq_len
        has_label = np.zeros(end - begin, dtype=np.bool_)
        following = stream.labelled[begin + 1 : end + 1]
        has_label[: len(following)] = following
        # The last token of a document predicts nothing.
        low, high = np.searchsorted(stream.starts, (begin + 1, end + 1))
        has_label[stream.starts[low:high] - 1 - begin] = False
        parts.append(first_row + np.flatnonzero(has_label.reshape(-1, seq_len).any(1)))
        stream.release()
    labelled = np.concatenate(parts)
    if not len(labelled):
        raise CorpusError.expected(
            "corpus",
            split,
            "a row with something that the assistant wrote",
            f"none of {rows:,}",
            hint="raise data.seq_len, or check the conversations",
        )
    return labelled.astype(np.int64)


def labels_after_a_cut(stream: TokenStream, seq_len: int) -> float:
    """Return the share of labels, 0 to 1, whose document begins in an earlier row: the model predicts them without the
    beginning of the document."""
    after_cut = labels = 0
    at_once = max(1, READ_AT_ONCE // seq_len) * seq_len
    for start in range(0, len(stream) - 1, at_once):
        # A label is predicted from the position before it.
        from_N = np.arange(start, min(start + at_once, len(stream) - 1), dtype=np.int64)
        documents_N = stream.documents_at(from_N)
        labelled_N = from_N + 1 < stream.starts[documents_N + 1]
        if stream.labelled is not None:
            labelled_N &= stream.labelled[from_N + 1]
        row_N = from_N - from_N % seq_len
        after_cut += int(np.count_nonzero(labelled_N & (row_N > stream.starts[documents_N])))
        labels += int(np.count_nonzero(labelled_N))
        stream.release()
    return after_cut / max(labels, 1)


def heldout_rows(stream: TokenStream, seq_len: int, count: int) -> Batch:
    """Return `count` rows spread evenly over the stream, in order; the same at every call.

    Returns all rows when there are fewer than `count`. Raises CorpusError when the stream is shorter than
    one row.
    """
    assert count >= 1
    rows = labelled_rows(stream, seq_len, "held-out")
    count = min(count, len(rows))
    places = np.arange(count, dtype=np.int64) * len(rows) // count
    return gather_rows(stream, seq_len, rows[places])


def gather_rows(stream: TokenStream, seq_len: int, row_ids: Int64Array) -> Batch:
    places_BT = row_ids[:, None] * seq_len + np.arange(seq_len, dtype=np.int64)
    documents_BT = stream.documents_at(places_BT)
    predicts_BT = places_BT + 1 < stream.starts[documents_BT + 1]
    # The last token of the stream has no next one.
    next_BT = np.minimum(places_BT + 1, len(stream) - 1)
    if stream.labelled is not None:
        predicts_BT &= stream.labelled[next_BT]
    batch = Batch(
        tokens_BT=stream.tokens[places_BT].astype(np.int64),
        documents_BT=documents_BT,
        labels_BT=np.where(predicts_BT, stream.tokens[next_BT].astype(np.int64), IGNORED),
        row_ids=row_ids,
    )
    stream.release()
    return batch
