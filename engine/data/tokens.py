"""A split as one stream of tokens: every document's tokens, each followed by the end-of-text token.

    tokens     h e l l o EOT w o r l d EOT
    documents  0 0 0 0 0  0  1 1 1 1 1  1

The end-of-text token belongs to the document it ends, and every document ends with one, so a document of
n tokens takes n + 1 positions. Boundaries are stored beside the tokens and never recovered by searching
for end-of-text, which may also occur inside a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.corpus import Document
from engine.formats.tokenizer import Tokenizer

_HASHED_AT_ONCE = 1 << 20
"""Tokens that are widened for the hash at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStream:
    """Tokens in order, and the document of each. Both arrays are read-only and have the same length."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    """16 bits if every token id of the tokenizer fits."""
    documents: NDArray[np.int32]
    """Index into the documents given to `tokenize`; never decreases."""
    sha256: str
    """Hash of tokens and documents as little-endian 32-bit integers: equal for equal streams, whatever
    the width in memory.
    """

    def __len__(self) -> int:
        return len(self.tokens)


def tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStream:
    """Return the documents as one stream, in their order. `progress(done, total)` counts characters.

    Raises TokenizerError when the tokenizer has no end-of-text token.
    """
    end_of_text_id = tokenizer.end_of_text_id
    encoded = tokenizer.encode_documents([document.text for document in documents], progress)
    width = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    lengths = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
    tokens = np.full(lengths.sum(), end_of_text_id, dtype=width)
    start = 0
    # Each document's ids are dropped when copied: with those, the tokens and the document of each token,
    # a token would take 12 bytes at once.
    encoded.reverse()
    while encoded:
        ids = encoded.pop()
        tokens[start : start + len(ids)] = ids
        start += len(ids) + 1
        del ids
    return make_stream(tokens, np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))


def make_stream(tokens: NDArray[Any], documents: NDArray[np.int32]) -> TokenStream:
    """Make a stream of existing arrays, which become read-only."""
    assert tokens.ndim == 1 and tokens.shape == documents.shape
    digest = hashlib.sha256()
    for values in (tokens, documents):
        for start in range(0, len(values), _HASHED_AT_ONCE):
            part = values[start : start + _HASHED_AT_ONCE]
            digest.update(np.ascontiguousarray(part, dtype="<u4").data)
        values.flags.writeable = False
    return TokenStream(tokens=tokens, documents=documents, sha256=digest.hexdigest())
