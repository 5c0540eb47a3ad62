"""Packing of documents into rows of T tokens.

    stream       one after the other, cut wherever a row ends; no padding
    documents    whole documents, as many as fit into a row; only a document longer than a row is cut
    off          each document begins a new row

A packed stream has its rows at r*T to (r+1)*T, and padding fills the rest of each row. Padding has no label, and is a
separate document that no other token attends to. A document longer than a row takes whole rows and the beginning of
the next one.

`documents` takes the documents WINDOW at a time, longest first, and puts each into the fullest row of the window that
it fits into (best fit decreasing). A window then takes at most 11/9 of the smallest possible number of rows, plus 4
(Johnson et al., SIAM J. Comput. 3, 1974).
"""

# Shapes: N tokens of a stream, T tokens of a row

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

STREAM, DOCUMENTS, OFF = PACKINGS = ("stream", "documents", "off")
WINDOW = 4096
"""Number of documents that are packed together, bounded so that the data roughly keep their order."""
PADDING = -1
"""Document number that `packed_lengths` yields for padding."""


def packed_lengths(
    lengths: NDArray[np.int64], seq_len: int, packing: str
) -> Iterator[tuple[int, int]]:
    """Yield (document number or `PADDING`, tokens) in the order of the rows."""
    assert packing in PACKINGS
    if packing == STREAM:
        yield from ((number, int(length)) for number, length in enumerate(lengths))
        return
    nonempty = np.flatnonzero(lengths)
    together = WINDOW if packing == DOCUMENTS else 1
    for start in range(0, len(nonempty), together):
        window = nonempty[start : start + together]
        sizes = lengths[window].tolist()
        for row in _bins(sizes, seq_len):
            for index in row:
                yield int(window[index]), sizes[index]
            if free := -sum(sizes[index] for index in row) % seq_len:
                yield PADDING, free


def _bins(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Return the documents of a window by row, rows ordered by their first document. A document longer than a row and
    the documents that fill its last row count as one row."""
    rows: list[list[int]] = []
    # (free tokens, row), sorted.
    room: list[tuple[int, int]] = []
    for document in sorted(
        range(len(lengths)), key=lambda document: (-lengths[document], document)
    ):
        length = lengths[document]
        place = bisect.bisect_left(room, (length, -1)) if length < seq_len else len(room)
        if place < len(room):
            free, row = room.pop(place)
            rows[row].append(document)
            free -= length
        else:
            row, free = len(rows), -length % seq_len
            rows.append([document])
        if free:
            bisect.insort(room, (free, row))
    # A long document stays first: it begins a row.
    return sorted(([first, *sorted(others)] for first, *others in rows), key=min)
