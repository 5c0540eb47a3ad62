"""A split as one stream of tokens: every document's tokens, each followed by the end-of-text token.

    tokens     h e l l o EOT w o r l d EOT
    documents  0 0 0 0 0  0  1 1 1 1 1  1

The end-of-text token belongs to the document it ends, and every document ends with one, so a document of
n tokens takes n + 1 positions. Boundaries are stored beside the tokens and never recovered by searching
for end-of-text, which may also occur inside a text.

A conversation is tokenized as its chat template writes it (`engine.data.chat`), without an end-of-text token of ours,
and only what the assistant wrote is to be predicted. One that the template cannot write is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.chat import Turns, encode_chats
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import read_conversation
from engine.data.corpus import Document
from engine.data.sources import Skipped
from engine.errors import CorpusError
from engine.files import parse_json
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
    """Hash of tokens and documents as little-endian 32-bit integers, and of `labelled` where it is not None: equal
    for equal streams, whatever the width in memory.
    """
    labelled: NDArray[np.bool_] | None = None
    """Whether each token is to be predicted from those before it; None: all are."""
    left_out: tuple[Skipped, ...] = ()
    """The conversations that have no tokens, with the reason."""
    last_turn_only: int = 0
    """Conversations of which not all turns could be proved, so that only the last is labelled."""
    padding: NDArray[np.bool_] | None = None
    """Whether each token only fills a row (`engine.data.packing`); None: none does."""

    @property
    def token_count(self) -> int:
        """Tokens that are not padding."""
        return len(self) if self.padding is None else int(np.count_nonzero(~self.padding))

    def __len__(self) -> int:
        return len(self.tokens)


def tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    *,
    template: ChatTemplate | None = None,
    turns: Turns = "all",
) -> TokenStream:
    """Return the documents as one stream, in their order. `progress(done, total)` counts characters of text.

    Conversations are written by `template`, and `turns` of the assistant are labelled. Raises TokenizerError when
    the tokenizer has no end-of-text token for a text, CorpusError where conversations have no template, or none of
    them can be written.
    """
    texts = [document for document in documents if not document.is_chat]
    # A tokenizer of a chat model may have no token that ends a text, and conversations need none.
    end_of_text_id = tokenizer.end_of_text_id if texts or not documents else 0
    encoded = tokenizer.encode_documents([document.text for document in texts], progress)
    width = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    if len(texts) < len(documents):
        return _with_chats(documents, encoded, tokenizer, template, turns, width)
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


def _with_chats(
    documents: Sequence[Document],
    encoded: Sequence[NDArray[Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    turns: Turns,
    width: type[np.uint16 | np.uint32],
) -> TokenStream:
    """`encoded` are the tokens of the documents that are text, in order."""
    conversations = [
        read_conversation(parse_json(document.text, document.name, "conversation"), document.name)
        for document in documents
        if document.is_chat
    ]
    chats = iter(encode_chats(conversations, tokenizer, template, turns=turns))
    texts = iter(encoded)
    tokens: list[NDArray[Any]] = []
    labelled: list[NDArray[np.bool_]] = []
    left_out: list[Skipped] = []
    last_turn_only = 0
    for document in documents:
        if not document.is_chat:
            tokens.append(np.append(next(texts), tokenizer.end_of_text_id).astype(width))
            labelled.append(np.ones(len(tokens[-1]), dtype=np.bool_))
            continue
        chat = next(chats)
        if isinstance(chat, Skipped):
            left_out.append(chat)
            chat_ids, chat_labels = np.empty(0, width), np.empty(0, np.bool_)
        else:
            chat_ids, chat_labels = chat.ids.astype(width), chat.labelled
            last_turn_only += chat.reason is not None
        tokens.append(chat_ids)
        labelled.append(chat_labels)
    if left_out and not any(len(ids) for ids in tokens):
        first = left_out[0]
        raise CorpusError.expected(
            "corpus",
            f"{len(left_out):,} conversations",
            "one that the chat template can write",
            f"none ({first.name}: {first.reason})",
        )
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int64)
    return make_stream(
        np.concatenate(tokens),
        np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        labelled=np.concatenate(labelled),
        left_out=tuple(left_out),
        last_turn_only=last_turn_only,
    )


def make_stream(
    tokens: NDArray[Any],
    documents: NDArray[np.int32],
    *,
    labelled: NDArray[np.bool_] | None = None,
    left_out: tuple[Skipped, ...] = (),
    last_turn_only: int = 0,
) -> TokenStream:
    """Make a stream of existing arrays, which become read-only."""
    assert tokens.ndim == 1 and tokens.shape == documents.shape
    digest = hashlib.sha256()
    for values in (tokens, documents):
        for start in range(0, len(values), _HASHED_AT_ONCE):
            part = values[start : start + _HASHED_AT_ONCE]
            digest.update(np.ascontiguousarray(part, dtype="<u4").data)
        values.flags.writeable = False
    if labelled is not None:
        assert labelled.shape == tokens.shape
        digest.update(np.packbits(labelled).data)
        labelled.flags.writeable = False
    return TokenStream(
        tokens=tokens,
        documents=documents,
        sha256=digest.hexdigest(),
        labelled=labelled,
        left_out=left_out,
        last_turn_only=last_turn_only,
    )
