"""Check rows and splits with numpy, without running a model.

The rows of the next CHECKED_STEPS steps are taken from the current position, as the trainer will take them.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.checks.context import Context
from engine.data.batches import IGNORED, Batch
from engine.data.overlap import WINDOW, predicted, shared_windows
from engine.data.tokens import READ_AT_ONCE, TokenStream
from engine.verdict import Answer, Numbers, unknown

CHECKED_STEPS = 4
"""Number of steps whose rows are checked."""

MIN_DISTINCT = 8
"""Minimum number of distinct tokens in the checked rows."""
MIN_ENTROPY = 1.0
"""Minimum entropy of the token frequencies, in nats. Python source has 4.5 with a vocabulary of 300 and 7 with one of
150k; one repeated token has 0."""

PADDING_RUN = 8
"""Minimum number of equal tokens at the end of a row that count as padding."""
PADDING_SHARE = 0.02
"""Maximum share of labels on padding, 0 to 1: some rows of text end in a run of spaces or dashes."""

CHECKED_DOCUMENTS = 64
"""Number of documents whose ends are searched for special tokens."""
MIN_SPECIAL_TOKENS = 4
"""Minimum number of special tokens needed for a verdict."""

SHARED_SHARE = 0.5
"""Share of held-out windows found in the training text above which the split leaks, 0 to 1. Source code repeats itself:
for Python's library, split by file, the share is a quarter. For leaked text it is 1.
"""
MAX_ROWS = 512
"""Maximum number of rows that are checked."""


def next_rows(context: Context) -> Batch:
    """Return the rows of the next steps as one batch."""
    train = context.spec.train
    rows = CHECKED_STEPS * train.rows * train.accumulation
    return context.batches.take(context.position, min(rows, max(MAX_ROWS, train.rows)))


def batch_not_degenerate(context: Context) -> Answer:
    batch = next_rows(context)
    tokens_BT = batch.tokens_BT
    _, counts = np.unique(tokens_BT, return_counts=True)
    share = counts / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    repeated = len(tokens_BT) - len(np.unique(tokens_BT, axis=0))
    # A short corpus repeats within the checked steps.
    expected = len(batch.row_ids) - len(np.unique(batch.row_ids))
    numbers = Numbers(
        distinct=len(counts), entropy=entropy, rows=len(tokens_BT), repeated=repeated - expected
    )
    if repeated - expected > len(tokens_BT) // 2:
        return numbers.failed(
            f"{repeated} of {len(tokens_BT)} rows repeat other rows of the next {CHECKED_STEPS} steps"
        )
    if len(counts) < MIN_DISTINCT or entropy < MIN_ENTROPY:
        return numbers.failed(
            f"{len(counts)} distinct tokens in {tokens_BT.size:,} positions with an entropy of {entropy:.2f} nats, "
            f"expected {MIN_DISTINCT} tokens and {MIN_ENTROPY:g} nats: the rows hold hardly any text"
        )
    return numbers.passed(
        f"{len(counts):,} distinct tokens, {entropy:.1f} nats, {repeated - expected} rows repeated"
    )


def padding_not_trained(context: Context) -> Answer:
    """Fail if padding has labels. Padding is a run of one token up to the end of a row."""
    batch = next_rows(context)
    same_BT = batch.tokens_BT == batch.tokens_BT[:, -1:]
    # Number of positions at the end of each row that hold its last token without a gap.
    run_B = np.where(same_BT.all(1), same_BT.shape[1], np.argmin(same_BT[:, ::-1], axis=1))
    place_T = np.arange(same_BT.shape[1])[::-1]
    padding_BT = (place_T < run_B[:, None]) & (run_B[:, None] >= PADDING_RUN)
    labelled_BT = batch.labels_BT != IGNORED
    trained, labelled = int((padding_BT & labelled_BT).sum()), int(labelled_BT.sum())
    numbers = Numbers(padding=int(padding_BT.sum()), padding_labelled=trained, labelled=labelled)
    if trained > PADDING_SHARE * labelled:
        ids = np.unique(batch.tokens_BT[:, -1][run_B >= PADDING_RUN])
        listed = ", ".join(str(int(token)) for token in ids[:3])
        return numbers.failed(
            f"{trained / labelled:.0%} of the labels are in runs of one token at the end of rows (id {listed}), "
            f"expected up to {PADDING_SHARE:.0%}: the run trains on padding"
        )
    return numbers.passed(f"{trained:,} of {labelled:,} labels are on tokens that may be padding")


def end_is_learnt(context: Context) -> Answer:
    """Fail if special tokens follow others of their document, in rows where documents end, and none is a label."""
    tokenizer = context.tokenizer
    if tokenizer is None:
        return unknown("no tokenizer is known, so the special tokens are not known either")
    special = map(tokenizer.id_of, tokenizer.special_tokens)
    ids = [tokenizer.end_of_text_id, *(id_ for id_ in special if id_ is not None)]
    stream, length = context.train_stream, context.spec.data.seq_len
    rows = np.unique((stream.starts[1 : 1 + CHECKED_DOCUMENTS] - 1) // length)
    batch = context.batches.rows(rows[rows < len(stream) // length])
    # The first token of a document follows no other token and is no label.
    follows_BT = batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1]
    special_BT = np.isin(batch.tokens_BT[:, 1:], ids) & follows_BT
    labelled_BT = special_BT & (batch.labels_BT[:, :-1] == batch.tokens_BT[:, 1:])
    count, labelled = int(special_BT.sum()), int(labelled_BT.sum())
    numbers = Numbers(special=count, labelled=labelled, rows=len(batch.row_ids))
    if count < MIN_SPECIAL_TOKENS:
        return unknown(
            f"found {count} special tokens, expected at least {MIN_SPECIAL_TOKENS} for a verdict"
        )
    if labelled:
        return numbers.passed(
            f"{labelled:,} of {count:,} special tokens in {len(batch.row_ids)} rows are labels"
        )
    unlearnt = sorted(set(batch.tokens_BT[:, 1:][special_BT].tolist()))
    names = ", ".join(repr(tokenizer.decode([id_])) for id_ in unlearnt[:4])
    return numbers.failed(
        f"the special tokens {names} occur {count:,} times in {len(batch.row_ids)} rows and are never a label"
    )


def split_disjoint(context: Context, step: object = None) -> Answer:
    """Search the held-out text in the training text. This runs after the session's first step: it stops no run, and a
    large corpus takes seconds."""
    train, held = context.train_stream, context.heldout_stream
    wanted = set(_digests(held, np.ones(len(held.lengths), dtype=bool)))
    # Only documents with the length of a held-out one can be copies of it.
    candidates = np.isin(train.lengths, held.lengths)
    copies = len({digest for digest in _digests(train, candidates) if digest in wanted})
    searched, held_tokens = predicted(train), predicted(held)
    is_shared_W = shared_windows(searched, held_tokens)
    shared, windows = int(is_shared_W.sum()), len(is_shared_W)
    train.release()
    held.release()
    share = shared / windows if windows else 0.0
    numbers = Numbers(
        copied_documents=copies,
        shared_windows=shared,
        windows=windows,
        searched_tokens=len(searched),
    )
    if copies:
        return numbers.failed(
            f"{copies} held-out document{'s are' if copies > 1 else ' is'} in the training text, token by token"
        )
    if share > SHARED_SHARE:
        return numbers.failed(
            f"{share:.0%} of held-out windows of {WINDOW} tokens are in the training text, expected up to "
            f"{SHARED_SHARE:.0%}"
        )
    return numbers.passed(
        f"no held-out document is in the training text; {share:.1%} of held-out windows of {WINDOW} tokens are in it"
    )


def _digests(stream: TokenStream, wanted: NDArray[np.bool_]) -> Iterator[bytes]:
    """Yield a digest of the tokens of each wanted document."""
    # An empty document, which is only its end-of-text token, is no leak, and neither is padding.
    wanted = wanted & (stream.lengths > 1)
    if stream.padding is not None:
        wanted &= ~stream.padding
    read = 0
    for index in np.flatnonzero(wanted):
        tokens = stream.tokens[stream.starts[index] : stream.starts[index + 1]]
        read += len(tokens)
        if read > READ_AT_ONCE:
            stream.release()
            read = 0
        yield hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u4").data).digest()
