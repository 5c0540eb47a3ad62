"""Documents in rows: each token stands once, each document is whole in a row unless it is longer than one, and
padding is neither predicted nor attended to."""

from __future__ import annotations

import numpy as np
import pytest

from engine.data.batches import IGNORED, Batches, gather_rows
from engine.data.packing import WINDOW
from engine.data.tokens import TokenStream, starts_of
from tests.support.streams import make_stream, pack

PADDING = 7
LENGTHS = [
    [1],
    [5],
    [8],
    [9, 1],
    [3, 3, 3, 3],
    [20, 4, 4, 8, 1],
    [16, 16],
    [7, 1, 7, 1, 2, 6, 8, 24, 5],
    [(17 * n) % 23 + 1 for n in range(WINDOW + 50)],
]


def stream_of(lengths: list[int], labelled: bool) -> TokenStream:
    """Documents whose tokens are all different from each other and from padding."""
    count = sum(lengths)
    tokens = np.arange(100, 100 + count, dtype=np.uint32)
    return make_stream(tokens, starts_of(lengths), labelled=tokens % 3 != 0 if labelled else None)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda one: str(one[:5]))
@pytest.mark.parametrize("packing", ["documents", "off"])
@pytest.mark.parametrize("labelled", [False, True])
def test_every_document_is_whole_in_its_row_and_every_token_stands_once(
    lengths: list[int], packing: str, labelled: bool
) -> None:
    seq_len = 8
    before = stream_of(lengths, labelled)
    packed = pack(before, seq_len, packing, PADDING)
    assert len(packed) % seq_len == 0 and packed.padding is not None
    assert packed.labelled is not None
    padding = np.repeat(packed.padding, packed.lengths)
    texts = packed.tokens[~padding]
    assert sorted(texts.tolist()) == before.tokens.tolist()
    assert packed.token_count == len(before)
    assert (packed.tokens[padding] == PADDING).all()
    assert (packed.lengths > 0).all(), "padding is a document of its own"
    wanted = np.ones(len(before), bool) if before.labelled is None else before.labelled
    assert (packed.labelled[~padding] == wanted[texts - 100]).all()
    assert not packed.labelled[padding].any()
    starts = np.cumsum([0, *lengths])
    place = np.empty(len(before), dtype=np.int64)
    place[texts - 100] = np.flatnonzero(~padding)
    for number, length in enumerate(lengths):
        here = place[starts[number] : starts[number + 1]]
        assert (np.diff(here) == 1).all(), "in one piece"
        assert len(set(packed.documents_at(here))) == 1
        rows = set((here // seq_len).tolist())
        assert len(rows) == -(-length // seq_len), "in as few rows as it fits into"
    if packing == "off":
        assert all(place[start] % seq_len == 0 for start in starts[:-1])


@pytest.mark.parametrize("packing", ["documents", "off"])
def test_labels_are_the_next_tokens_of_each_document_and_never_padding(packing: str) -> None:
    before = stream_of([5, 3, 2, 20, 8, 1, 6], labelled=False)
    packed = pack(before, 8, packing, PADDING)
    batch = gather_rows(packed, 8, np.arange(len(packed) // 8))
    has = batch.labels_BT != IGNORED
    assert (batch.labels_BT[has] == batch.tokens_BT[has] + 1).all()
    assert PADDING not in batch.tokens_BT[has]
    # All but the first token of each of seven documents.
    assert has.sum() == len(before) - 7


def test_a_row_of_padding_and_single_tokens_is_not_taken() -> None:
    packed = pack(stream_of([1, 5, 1], labelled=False), 8, "off", PADDING)
    batches = Batches(packed, seq_len=8, rows_per_batch=1, seed=0)
    assert batches.rows_per_epoch == 1 and batches.batch_at(3).row_ids.tolist() == [1]


def test_whole_documents_take_hardly_more_rows_than_their_tokens_need() -> None:
    lengths = [(37 * n) % 61 + 4 for n in range(3000)]
    packed = pack(stream_of(lengths, labelled=False), 64, "documents", PADDING)
    assert 1 - packed.token_count / len(packed) < 0.01
    alone = pack(stream_of(lengths, labelled=False), 64, "off", PADDING)
    assert 1 - alone.token_count / len(alone) > 0.4


def rows_needed(stream: TokenStream, seq_len: int) -> tuple[int, int]:
    """Return how many rows the first documents of a stream take that is packed by whole documents, and how many are
    enough when each document, longest first, goes into the fullest row that has room for it."""
    assert stream.padding is not None
    places = np.flatnonzero(~stream.padding & (stream.lengths > 0))[:WINDOW]
    room = np.zeros(seq_len + 1, np.int64)
    """Number of rows by the tokens that they have room for."""
    needed = 0
    for length in np.sort(stream.lengths[places])[::-1].tolist():
        fits = np.flatnonzero(room[length:])
        if len(fits):
            left = int(fits[0])
            room[length + left] -= 1
        else:
            needed += -(-length // seq_len)
            left = -length % seq_len
        room[left] += left > 0
    taken = -(-int(stream.starts[places[-1] + 1]) // seq_len) if len(places) else 0
    return taken, needed


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda one: str(one[:5]))
def test_whole_documents_take_no_more_rows_than_are_enough(lengths: list[int]) -> None:
    stream = stream_of(lengths, False)
    for seq_len in (8, 24, 64):
        taken, needed = rows_needed(pack(stream, seq_len, "documents", PADDING), seq_len)
        assert taken == needed
    small = stream_of([3] * 200, False)
    assert rows_needed(pack(small, 64, "off", PADDING), 64) == (200, 10)


def test_the_stream_itself_is_the_default_and_unchanged() -> None:
    before = stream_of([3, 9], labelled=False)
    assert pack(before, 8, "stream", PADDING) is before and before.token_count == len(before)


def test_the_digest_tells_packings_apart() -> None:
    before = stream_of([3, 9, 4], labelled=False)
    digests = {pack(before, 8, one, PADDING).sha256 for one in ("stream", "documents", "off")}
    assert len(digests) == 3
