"""How documents stand in rows of T tokens.

    stream       one after the other, cut wherever a row ends; no token is padding
    documents    whole, as many as fit into a row; only a document longer than a row is cut
    off          each begins a row of its own

A packed stream is one whose rows r*T to (r+1)*T are as asked for: padding fills what is left of a row. Padding has no
label, and is a document of its own that no other token attends to. A document longer than a row takes whole rows and
the beginning of another.

`documents` takes the documents WINDOW at a time, longest first, and puts each into the fullest row of the window that
it fits into (best fit decreasing; Johnson et al., SIAM J. Comput. 3, 1974: at most 11/9 of the fewest rows, and 4 more
of one length, in a window).
"""

# Shapes: N tokens of a stream, T tokens of a row

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.data.tokens import TokenStream, make_stream

STREAM, DOCUMENTS, OFF = PACKINGS = ("stream", "documents", "off")
WINDOW = 4096
"""Documents that are packed together: the order of the data is kept in the large."""


def pack(stream: TokenStream, seq_len: int, packing: str, padding_id: int) -> TokenStream:
    """Return the stream with its documents in rows of `seq_len` tokens as `packing` says, and padding between.

    In a packed stream documents are numbered in its own order, padding included.
    """
    assert packing in PACKINGS
    if packing == STREAM:
        return stream
    starts = np.flatnonzero(np.diff(stream.documents, prepend=-1))
    lengths = np.diff(starts, append=len(stream)).tolist()
    together = WINDOW if packing == DOCUMENTS else 1
    rows: list[list[int]] = []
    for first in range(0, len(lengths), together):
        rows += _bins(lengths, range(first, min(first + together, len(lengths))), seq_len)
    whole = sum(_rows_of(sum(lengths[one] for one in row), seq_len) for row in rows)
    tokens = np.full(whole * seq_len, padding_id, dtype=stream.tokens.dtype)
    documents = np.empty(whole * seq_len, dtype=np.int32)
    labelled = np.zeros(whole * seq_len, dtype=np.bool_)
    padding = np.ones(whole * seq_len, dtype=np.bool_)
    end = number = 0
    for begin, source, length in _places(rows, starts.tolist(), lengths, seq_len):
        if begin > end:
            documents[end:begin] = number
            number += 1
        end = begin + length
        tokens[begin:end] = stream.tokens[source : source + length]
        documents[begin:end] = number
        labelled[begin:end] = (
            True if stream.labelled is None else stream.labelled[source : source + length]
        )
        padding[begin:end] = False
        number += 1
    documents[end:] = number
    packed = make_stream(
        tokens,
        documents,
        labelled=labelled,
        left_out=stream.left_out,
        last_turn_only=stream.last_turn_only,
    )
    padding.flags.writeable = False
    return replace(packed, padding=padding)


def _rows_of(tokens: int, seq_len: int) -> int:
    return -(-tokens // seq_len)


def _bins(lengths: list[int], window: range, seq_len: int) -> list[list[int]]:
    """Return the documents of a window by row, in the order of the first document of each; a long document and what
    stands behind it count as one row."""
    rows: list[list[int]] = []
    # Rows with room, by the room that they have.
    room: list[tuple[int, int]] = []
    for one in sorted(window, key=lambda one: (-lengths[one], one)):
        length = lengths[one]
        at = bisect.bisect_left(room, (length, -1)) if length < seq_len else len(room)
        if at < len(room):
            left, row = room.pop(at)
            rows[row].append(one)
            left -= length
        else:
            row, left = len(rows), -length % seq_len
            rows.append([one])
        if left:
            bisect.insort(room, (left, row))
    # A long document stays first: it begins a row.
    return sorted(([first, *sorted(others)] for first, *others in rows), key=min)


def _places(
    rows: list[list[int]], starts: list[int], lengths: list[int], seq_len: int
) -> Iterator[tuple[int, int, int]]:
    """Yield of each document where it begins in the packed stream and in the other one, and its length."""
    begin = 0
    for row in rows:
        place = begin
        for one in row:
            yield place, starts[one], lengths[one]
            place += lengths[one]
        begin += _rows_of(place - begin, seq_len) * seq_len
