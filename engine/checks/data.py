"""Checks of rows and splits. No model runs: numpy on the rows that the next steps will train on.

The rows of LOOKED_AT steps are taken from the current position, as the trainer will take them.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.checks.check import Answer, Numbers, unknown
from engine.checks.context import Context
from engine.data.batches import IGNORED, Batch, Int64Array
from engine.data.tokens import READ_AT_ONCE, TokenStream

LOOKED_AT = 4
"""Number of steps whose rows are checked."""

SMALLEST_DISTINCT = 8
SMALLEST_ENTROPY = 1.0
"""Nats. Python source has some 4.5 with a vocabulary of 300, and some 7 with 150k; one repeated token has 0."""

PADDING_RUN = 8
"""Number of equal tokens at the end of a row that look like padding and not like text."""
PADDING_SHARE = 0.02
"""Allowed share of the labels: rows of text do end in a run of spaces or dashes now and then."""

ENDS, LEAST_ENDS = 64, 4
"""Ends of documents that are looked for, and special tokens that must be there for a verdict."""

WINDOW = 64
"""Number of tokens that two documents share only if one was copied; this also finds boilerplate, such as
a licence.
"""
SHARED_SHARE = 0.5
"""Share of held-out windows that must be found in the training text to count as a leak. Source code
repeats itself: of Python's library, split by file, a quarter is found, mostly in tables of character
codes. Leaked text is found completely.
"""
LEAST_WINDOWS, NEAR_SHARE = 4, 0.7
"""A held-out document of at least so many windows is a near copy if this share of them is in the training text."""
NEAR_COPIES = 0.2
"""Share of held-out documents that may be near copies."""
MOST_TOKENS = 1 << 26
"""Tokens of either side whose windows are compared: about two seconds."""
MOST_WINDOWS = 1 << 16
MOST_ROWS = 512
"""Largest number of rows that are checked, however many make up one step."""


def next_rows(context: Context) -> Batch:
    """Return the rows of the next steps as one batch."""
    train = context.spec.train
    rows = LOOKED_AT * train.rows * train.accumulation
    return context.batches.take(context.position, min(rows, max(MOST_ROWS, train.rows)))


def batch_not_degenerate(context: Context) -> Answer:
    batch = next_rows(context)
    tokens_BT = batch.tokens_BT
    _, counts = np.unique(tokens_BT, return_counts=True)
    share = counts / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    repeated = len(tokens_BT) - len(np.unique(tokens_BT, axis=0))
    # A short corpus repeats within these steps: such repetitions are expected.
    expected = len(batch.row_ids) - len(np.unique(batch.row_ids))
    numbers = Numbers(
        distinct=len(counts), entropy=entropy, rows=len(tokens_BT), repeated=repeated - expected
    )
    if repeated - expected > len(tokens_BT) // 2:
        return numbers.failed(
            f"{repeated} of {len(tokens_BT)} rows are copies of others in the batch"
        )
    if len(counts) < SMALLEST_DISTINCT or entropy < SMALLEST_ENTROPY:
        return numbers.failed(
            f"{len(counts)} distinct tokens in {tokens_BT.size:,} places, {entropy:.2f} nats of "
            "entropy: hardly any text"
        )
    return numbers.passed(
        f"{len(counts):,} distinct tokens, {entropy:.1f} nats, {repeated - expected} rows repeated"
    )


def labels_are_next_tokens(context: Context) -> Answer:
    """Compare every label with the token after it; a row's last label is of a token that is not in the row."""
    numbers = Numbers(labelled=0)
    for whose, batch in (("training", next_rows(context)), ("held-out", context.heldout[0])):
        labels_BT, next_BT = batch.labels_BT[:, :-1], batch.tokens_BT[:, 1:]
        labelled_BT = labels_BT != IGNORED
        same_BT = batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1]
        wrong = np.argwhere(labelled_BT & ~(same_BT & (labels_BT == next_BT)))
        numbers["labelled"] += int(labelled_BT.sum())
        if len(wrong):
            row, place = wrong[0]
            return numbers.failed(
                f"{whose} row {row + 1}, token {place + 1}: the label is {labels_BT[row, place]}, the token "
                f"{batch.tokens_BT[row, place]} and the next one {next_BT[row, place]}; {len(wrong):,} labels are "
                "not the next token of their document"
            )
    return numbers.passed(
        f"{numbers['labelled']:,.0f} labels are the next tokens of their documents"
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
            f"{trained / labelled:.0%} of the labels stand on runs of one token at the end of rows "
            f"(id {listed}): padding is trained on"
        )
    return numbers.passed(f"{trained:,} of {labelled:,} labels stand on what could be padding")


def end_is_learnt(context: Context) -> Answer:
    """Fail if special tokens follow others of their document, in rows where documents end, and none is a label."""
    tokenizer = next((one for one in context.tokenizers.values() if one is not None), None)
    if tokenizer is None:
        return unknown("no tokenizer is known, so which tokens are special ones is not either")
    special = map(tokenizer.id_of, tokenizer.special_tokens)
    ids = [tokenizer.end_of_text_id, *(one for one in special if one is not None)]
    stream, length = context.train_stream, context.spec.data.seq_len
    rows = np.unique((stream.starts[1 : 1 + ENDS] - 1) // length)
    batch = context.batches.rows(rows[rows < len(stream) // length])
    # What begins a document follows nothing, and is no label.
    follows_BT = batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1]
    special_BT = np.isin(batch.tokens_BT[:, 1:], ids) & follows_BT
    labelled_BT = special_BT & (batch.labels_BT[:, :-1] == batch.tokens_BT[:, 1:])
    count, labelled = int(special_BT.sum()), int(labelled_BT.sum())
    numbers = Numbers(special=count, labelled=labelled, rows=len(batch.row_ids))
    if count < LEAST_ENDS:
        return unknown(f"{count} special tokens were found: too few to tell")
    if labelled:
        return numbers.passed(
            f"of {count:,} special tokens in {len(batch.row_ids)} rows {labelled:,} are labels"
        )
    found = sorted(set(batch.tokens_BT[:, 1:][special_BT].tolist()))
    names = ", ".join(repr(tokenizer.decode([one])) for one in found[:4])
    return numbers.failed(f"{names}: {count:,} times in {len(batch.row_ids)} rows, never a label")


def split_disjoint(context: Context, step: object = None) -> Answer:
    """Asked after the first step, whichever it is: no run ends by it, and a large corpus takes seconds."""
    train, held = context.train_stream, context.heldout_stream
    if other := _other_rows(context):
        return Numbers(other_rows=other).failed(
            f"{other} of the rows that are evaluated are not rows of the held-out text"
        )
    wanted = set(_digests(held, np.ones(len(held.lengths), dtype=bool)))
    # Only documents with the length of a held-out one can be copies of it.
    candidates = np.isin(train.lengths, held.lengths)
    copies = len({one for one in _digests(train, candidates) if one in wanted})
    train_tokens, held_tokens = _texts(train), _texts(held)
    looked_at = len(train_tokens)
    starts, found = shared_windows(train_tokens, held_tokens)
    shared, windows = int(found.sum()), len(found)
    near, compared = _near_copies(held, starts, found)
    train.release()
    held.release()
    share = shared / windows if windows else 0.0
    numbers = Numbers(
        copied_documents=copies,
        near_copies=near,
        compared_documents=compared,
        shared_windows=shared,
        windows=windows,
        searched_tokens=looked_at,
    )
    if copies:
        return numbers.failed(
            f"{copies} held-out document{'s are' if copies > 1 else ' is'} trained on, token by token"
        )
    if share > SHARED_SHARE:
        return numbers.failed(
            f"{share:.0%} of held-out stretches of {WINDOW} tokens are in the training text too"
        )
    if near > NEAR_COPIES * compared:
        return numbers.failed(
            f"{near} of {compared} held-out documents are nearly whole in the training text: copies with few changes"
        )
    searched = (
        "" if looked_at == train.token_count else f", of which {looked_at:,} tokens were searched"
    )
    return numbers.passed(
        f"no held-out document is trained on, {near} of {compared} nearly; {share:.1%} of held-out stretches "
        f"of {WINDOW} tokens are in the training text{searched}"
    )


def _other_rows(context: Context) -> int:
    """Return how many rows that are evaluated are not what the held-out text has in their place."""
    length, tokens = context.spec.data.seq_len, context.heldout_stream.tokens
    other = 0
    for batch in context.heldout:
        places_BT = batch.row_ids[:, None] * length + np.arange(length)
        there_BT = tokens[np.minimum(places_BT, len(tokens) - 1)]
        other += int((batch.tokens_BT != there_BT).any(1).sum())
    return other


def _texts(stream: TokenStream) -> NDArray[np.generic]:
    """Return the first MOST_TOKENS tokens, without padding, which is the same everywhere."""
    tokens = stream.tokens[:MOST_TOKENS]
    if stream.padding is None:
        return tokens
    count = int(np.searchsorted(stream.starts, len(tokens)))
    lengths = np.diff(np.minimum(stream.starts[: count + 1], len(tokens)))
    return tokens[~np.repeat(stream.padding[:count], lengths)]


def _digests(stream: TokenStream, wanted: NDArray[np.bool_]) -> Iterator[bytes]:
    """Yield a digest of the tokens of each wanted document."""
    # An empty document consists only of its end-of-text token and is no leak, and neither is padding.
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


def shared_windows(
    train: NDArray[np.generic], held: NDArray[np.generic], window: int = WINDOW
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Return where windows of `held` begin, and whether each occurs anywhere in `train`.

    Windows start at every quarter of a window. They are compared by a rolling hash: with r(t) a random
    64-bit number for token t and an odd base b, h(i) = b^-i * sum_{j < window} r(t_{i+j}) b^{i+j},
    everything modulo 2^64. The probability of a false match is about (windows * positions) / 2^64.
    """
    starts = np.arange(0, len(held) - window + 1, max(window // 4, 1))
    if len(starts) > MOST_WINDOWS:
        starts = starts[np.linspace(0, len(starts) - 1, MOST_WINDOWS).astype(np.int64)]
    if len(starts) == 0 or len(train) < window:
        return starts, np.zeros(len(starts), dtype=bool)
    # Only those windows: hashes of all places of a large corpus take 50 bytes for each token.
    powers = np.full(window, _BASE, dtype=np.uint64)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    hashes = np.concatenate(
        [
            _mixed(held[part[:, None] + np.arange(window)]) @ powers
            for part in np.array_split(starts, -(-len(starts) // 4096))
        ]
    )
    wanted = np.unique(hashes)
    found = np.zeros(len(wanted), dtype=bool)
    step = 1 << 20
    for first in range(0, len(train) - window + 1, step):
        here = _rolling(train[first : first + step + window - 1], window)
        places = np.minimum(np.searchsorted(wanted, here), len(wanted) - 1)
        found[places[wanted[places] == here]] = True
    return starts, found[np.searchsorted(wanted, hashes)]


def _near_copies(
    held: TokenStream, starts: Int64Array, found: NDArray[np.bool_]
) -> tuple[int, int]:
    """Return of how many held-out documents nearly every window occurs in the training text, and how many documents
    have enough windows to tell."""
    begins = held.starts
    if held.padding is not None:
        # `_texts` left padding out.
        lengths = np.where(held.padding, 0, held.lengths)
        begins = np.concatenate([[0], np.cumsum(lengths)])
    document = np.searchsorted(begins, starts, side="right") - 1
    inside = starts + WINDOW <= begins[document + 1]
    windows = np.bincount(document[inside], minlength=len(begins))
    copied = np.bincount(document[inside], weights=found[inside], minlength=len(begins))
    enough = windows >= LEAST_WINDOWS
    return int((copied[enough] >= NEAR_SHARE * windows[enough]).sum()), int(enough.sum())


_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def _mixed(tokens: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return a number for each token; those of neighbouring ids are unrelated (splitmix64)."""
    mixed = tokens.astype(np.uint64) + np.uint64(_BASE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _rolling(tokens: NDArray[np.generic], window: int) -> NDArray[np.uint64]:
    """Return the hash of each window of `tokens`."""
    mixed, count = _mixed(tokens), len(tokens)
    powers = np.full(count, _BASE, dtype=np.uint64)
    inverses = np.full(count, _INVERSE, dtype=np.uint64)
    powers[0] = inverses[0] = 1
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed * powers)])
    places = count - window + 1
    hashes: NDArray[np.uint64] = (sums[window:] - sums[:places]) * inverses[:places]
    return hashes
