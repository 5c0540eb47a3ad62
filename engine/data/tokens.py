"""A split as one stream of tokens: every document's tokens, each followed by the end-of-text token.

    tokens  h e l l o EOT w o r l d EOT
    starts  0             6             12

The end-of-text token belongs to the document it ends, and every document ends with one, so a document of
n tokens takes n + 1 positions. Boundaries are stored separately from the tokens and never recovered by searching
for end-of-text, which may also occur inside a text.

A conversation is tokenized as its chat template renders it (`engine.data.chat_labels`), without an added end-of-text
token,
and only tokens that the assistant wrote are labels. A conversation that the template cannot render is left out.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.chat_labels import Chat, Turns, encode_chats
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import read_conversation
from engine.data.corpus import Document
from engine.data.left_out import LeftOut, Skipped
from engine.errors import CorpusError
from engine.formats.tokenizer import TextTooLong, Tokenizer

BATCH_BYTES = 1 << 20
"""Text that is tokenized at a time, in bytes; with its tokens as Python integers it needs about 20 times as much."""
READ_AT_ONCE = 1 << 22
"""Tokens or labels that are read before the pages of their file are released."""
_HASHED_AT_ONCE = 1 << 20
"""Tokens that are converted to 32 bits for the hash at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStream:
    """N tokens of D documents. The arrays are read-only and may be mapped files (`engine.data.token_cache`)."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    """Shape (N,); 16 bits if every token id of the tokenizer fits."""
    starts: NDArray[np.int64]
    """First position of each document, and N. Shape (D + 1,); a document that is left out has no tokens."""
    sha256: str
    """Hash of the tokens and of each token's document number as little-endian 32-bit integers, and of `labelled` if it
    is not None: equal for equal streams, whatever the width in memory.
    """
    labelled: NDArray[np.bool_] | None = None
    """Whether each token is a label, shape (N,); None if all are."""
    left_out: tuple[LeftOut, ...] = ()
    """Documents that have no tokens, counted by reason."""
    partly_labelled: int = 0
    """Conversations in which a requested turn has no labels."""
    remarks: tuple[LeftOut, ...] = ()
    """Warnings about parts of conversations that have no labels or are not rendered, each with its count."""
    padding: NDArray[np.bool_] | None = None
    """Whether each document is padding (`engine.data.packing`), shape (D,); None if none is."""
    maps: tuple[mmap.mmap, ...] = ()
    """Memory maps that back the arrays; empty for arrays in memory."""

    def release(self) -> None:
        """Release the pages that were read from mapped files. Without it the whole corpus would count as resident
        after an epoch; the next read gets them from the page cache."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def labelled_count(self) -> int:
        """Number of labels; for text, of all tokens."""
        if self.labelled is None:
            return len(self)
        count = 0
        for start in range(0, len(self), READ_AT_ONCE):
            count += int(np.count_nonzero(self.labelled[start : start + READ_AT_ONCE]))
            self.release()
        return count

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document. Shape (D,)."""
        return np.diff(self.starts)

    @property
    def token_count(self) -> int:
        """Number of tokens that are not padding."""
        return len(self) - (0 if self.padding is None else int(self.lengths[self.padding].sum()))

    def documents_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document number of the token at each position."""
        return np.searchsorted(self.starts, places, side="right").astype(np.int64) - 1

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """The tokens of one document."""

    ids: NDArray[Any]
    labelled: NDArray[np.bool_] | None = None
    """Whether each token is a label; None if all are."""
    left_out: Skipped | None = None
    """Reason why there are no tokens; None if there are."""
    partly_labelled: bool = False
    """Whether a requested turn of a conversation has no labels."""
    remarks: tuple[Skipped, ...] = ()
    """Warnings about parts of a conversation that have no labels or are not rendered."""

    @property
    def labels(self) -> NDArray[np.bool_]:
        return np.ones(len(self.ids), dtype=np.bool_) if self.labelled is None else self.labelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Tokenizes documents."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    """Chat template that renders conversations; None if there is none."""
    turns: Turns = "all"
    """Assistant turns that have labels: all, or the last."""

    @property
    def dtype(self) -> type[np.uint16 | np.uint32]:
        return np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Yield the tokens of each document, in order, with one batch of them in memory.

        Raises TokenizerError if there is a text and the tokenizer has no end-of-text token, CorpusError if there is a
        conversation and no template.
        """
        batch: list[Document] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_BYTES:
                yield from self._encode(batch)
                batch, size = [], 0
        yield from self._encode(batch)

    def _encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        texts = [document for document in documents if not document.is_chat]
        # A chat model's tokenizer may have no end-of-text token, and conversations need none.
        end_of_text_id = self.tokenizer.end_of_text_id if texts else 0
        encoded = iter(self._encode_texts(texts))
        # Records were validated when they were read.
        conversations = [
            replace(
                read_conversation(json.loads(document.text), document.name),
                name=document.place or document.name,
            )
            for document in documents
            if document.is_chat
        ]
        chats = iter(encode_chats(conversations, self.tokenizer, self.template, turns=self.turns))
        for document in documents:
            result = next(chats if document.is_chat else encoded)
            if isinstance(result, Skipped):
                yield Encoded(ids=np.empty(0, self.dtype), left_out=result)
            elif isinstance(result, Chat):
                yield Encoded(
                    ids=result.ids.astype(self.dtype),
                    labelled=result.labelled,
                    partly_labelled=result.reason is not None,
                    remarks=tuple(
                        Skipped(name=result.name, reason=document) for document in result.remarks
                    ),
                )
            else:
                yield Encoded(ids=np.append(result, end_of_text_id).astype(self.dtype))

    def _encode_texts(self, texts: Sequence[Document]) -> list[NDArray[np.uint32] | Skipped]:
        """Return the tokens of each text, or a Skipped for one that cannot be tokenized."""
        try:
            return [*self.tokenizer.encode_documents([document.text for document in texts])]
        except TextTooLong as error:
            if len(texts) == 1:
                return [Skipped(name=texts[0].place or texts[0].name, reason=error.reason)]
        return [found for document in texts for found in self._encode_texts([document])]


def starts_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first position of each of D documents, and the end of the last. Shape (D + 1,)."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def raise_if_no_tokens(left_out: Sequence[LeftOut], tokens: int) -> None:
    """Raise CorpusError if documents were left out and no token remains."""
    if left_out and not tokens:
        first, count = left_out[0], sum(one.count for one in left_out)
        raise CorpusError.expected(
            "corpus",
            f"{count:,} documents",
            "at least one that the chat template can render and the tokenizer can tokenize",
            f"none ({first.example}: {first.reason})",
        )


class StreamDigest:
    """Computes the hash of a stream incrementally."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def tokens(self, part: NDArray[Any]) -> None:
        self._digest.update(np.ascontiguousarray(part, dtype="<u4").data)

    def end(self, starts: NDArray[np.int64], labelled: Iterable[NDArray[np.bool_]]) -> str:
        """Return the hash, once all tokens were added. All parts of the labels except the last must have a multiple of
        8 tokens."""
        for start in range(0, int(starts[-1]), _HASHED_AT_ONCE):
            low, high = np.searchsorted(starts, (start, start + _HASHED_AT_ONCE), side="right")
            near = slice(max(0, int(low) - 1), int(high) + 1)
            cut = np.clip(starts[near], start, start + _HASHED_AT_ONCE)
            documents = np.arange(near.start, near.start + len(cut) - 1, dtype="<u4")
            self._digest.update(np.repeat(documents, np.diff(cut)).data)
        for part in labelled:
            self._digest.update(np.packbits(part).data)
        return self._digest.hexdigest()
