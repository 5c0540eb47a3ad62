"""The passes of a teacher that reads a context before each document (`engine.teachers.in_context`); without torch.

Documents with their contexts are packed into passes of a fixed number of tokens: as many as the batch has, or one
context and one row if these have more. So memory is that of a batch, or of one row with its context if that is longer,
and kernels see one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Shapes: M tokens of a pass, K of them kept

_Pass: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def pass_tokens(rows: int, length: int, context: int) -> int:
    """Return how many tokens a pass has for a batch of `rows` rows of `length` tokens."""
    return max(rows * length, length + context)


def passes(starts: Sequence[int], context: int, size: int) -> Iterator[_Pass]:
    """Yield for each pass the indices of its tokens in the flattened batch followed by the context, [M]; the document
    number of each, [1, M]; and the positions in the pass of tokens of the batch, whose outputs are kept, [K].

    `starts` are the positions of the documents' first tokens, followed by the number of tokens in the batch. The rest
    of a pass is filled with the last token of the context, as a document of its own.
    """
    total = starts[-1]
    context_tokens = np.arange(total, total + context, dtype=np.int64)
    documents: list[NDArray[np.int64]] = []
    used = 0

    def finish_pass() -> _Pass:
        padding = np.full(size - used, total + context - 1, dtype=np.int64)
        parts = [*documents, padding]
        pass_M = np.concatenate(parts)
        documents_M = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        kept_K = np.flatnonzero(pass_M < total)
        return pass_M, documents_M[None], kept_K

    for first, end in pairwise(starts):
        document = np.concatenate([context_tokens, np.arange(first, end, dtype=np.int64)])
        if used + len(document) > size:
            yield finish_pass()
            documents, used = [], 0
        documents.append(document)
        used += len(document)
    yield finish_pass()
