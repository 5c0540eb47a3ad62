"""Token streams in memory: the oracle of those that `engine.data.token_cache` makes, and inputs of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.chat_labels import Turns
from engine.data.chat_template import ChatTemplate
from engine.data.corpus import Document, Split
from engine.data.left_out import LeftOut, count_left_out
from engine.data.packing import PADDING, STREAM, packed_lengths
from engine.data.tokens import Encoder, StreamDigest, TokenStream, raise_if_no_tokens, starts_of
from engine.formats.tokenizer import Tokenizer

HASHED_AT_ONCE = 1 << 20
"""Tokens that are converted to 32 bits for the hash at a time."""


def documents_of(split: Split) -> tuple[Document, ...]:
    """Return the documents of a split with their texts, in its order."""
    place = {number: place for place, number in enumerate(split.numbers.tolist())}
    ordered = sorted(
        (place[number], document) for number, document in split.index.read(split.numbers)
    )
    return tuple(document for _, document in ordered)


def tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    turns: Turns = "all",
) -> TokenStream:
    """Return the documents as one stream in memory, in their order.

    `template` renders conversations, and `turns` of the assistant have labels. Raises TokenizerError if there is a text
    and the tokenizer has no end-of-text token, CorpusError if conversations have no template or none can be rendered.
    """
    encoder = Encoder(tokenizer=tokenizer, template=template, turns=turns)
    encoded = list(encoder.encode(documents))
    tokens = [document.ids for document in encoded]
    counts: dict[str, LeftOut] = {}
    remarks: dict[str, LeftOut] = {}
    for document in encoded:
        if document.left_out is not None:
            count_left_out(counts, document.left_out)
        for remark in document.remarks:
            count_left_out(remarks, remark)
    left_out = tuple(counts.values())
    raise_if_no_tokens(left_out, sum(map(len, tokens)))
    labelled = None
    if any(document.is_chat for document in documents):
        labelled = np.concatenate([document.labels for document in encoded])
    return make_stream(
        np.concatenate(tokens) if tokens else np.empty(0, encoder.dtype),
        starts_of([len(ids) for ids in tokens]),
        labelled=labelled,
        left_out=left_out,
        partly_labelled=sum(document.partly_labelled for document in encoded),
        remarks=tuple(remarks.values()),
    )


def make_stream(
    tokens: NDArray[Any],
    starts: NDArray[np.int64],
    *,
    labelled: NDArray[np.bool_] | None = None,
    padding: NDArray[np.bool_] | None = None,
    left_out: tuple[LeftOut, ...] = (),
    partly_labelled: int = 0,
    remarks: tuple[LeftOut, ...] = (),
) -> TokenStream:
    """Make a stream from existing arrays, which become read-only."""
    assert tokens.ndim == 1 and starts[0] == 0 and starts[-1] == len(tokens)
    assert labelled is None or labelled.shape == tokens.shape
    digest = StreamDigest()
    for start in range(0, len(tokens), HASHED_AT_ONCE):
        digest.tokens(tokens[start : start + HASHED_AT_ONCE])
    for values in (tokens, starts, labelled, padding):
        if values is not None:
            values.flags.writeable = False
    return TokenStream(
        tokens=tokens,
        starts=starts,
        sha256=digest.end(starts, () if labelled is None else (labelled,)),
        labelled=labelled,
        padding=padding,
        left_out=left_out,
        partly_labelled=partly_labelled,
        remarks=remarks,
    )


def pack(stream: TokenStream, seq_len: int, packing: str, padding_id: int) -> TokenStream:
    """Return the stream packed into rows of `seq_len` tokens.

    The documents of a packed stream are renumbered in its order, padding included.
    """
    if packing == STREAM:
        return stream
    placed = np.array(list(packed_lengths(stream.lengths, seq_len, packing)), dtype=np.int64)
    numbers, lengths = placed.reshape(-1, 2).T
    starts = starts_of(lengths)
    tokens = np.full(starts[-1], padding_id, dtype=stream.tokens.dtype)
    labelled = np.zeros(starts[-1], dtype=np.bool_)
    for number, begin, length in zip(numbers, starts, lengths, strict=False):
        if number == PADDING:
            continue
        target = slice(begin, begin + length)
        source = slice(stream.starts[number], stream.starts[number + 1])
        tokens[target] = stream.tokens[source]
        labelled[target] = True if stream.labelled is None else stream.labelled[source]
    return make_stream(
        tokens,
        starts,
        labelled=labelled,
        padding=numbers == PADDING,
        left_out=stream.left_out,
        partly_labelled=stream.partly_labelled,
        remarks=stream.remarks,
    )
