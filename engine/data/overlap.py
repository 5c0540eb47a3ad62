"""Overlap of two splits: windows of tokens that occur in both, and near-duplicate documents.

Only labels are compared: a system prompt that all conversations begin with is not a leak.
"""

# Shapes: N tokens, D documents, P permutations of a sketch, W windows

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.tokens import TokenStream, starts_of

WINDOW = 64
"""Tokens of a window that is long enough to be shared only by copying; boilerplate such as a licence is found too."""
MOST_TOKENS = 1 << 26
"""Most tokens of either split whose windows are compared; they take about two seconds."""
MOST_WINDOWS = 1 << 16
"""Most windows that are compared, spread evenly over the held-out split."""

SHINGLE = 8
"""Tokens of a shingle: a document is described by its set of them. One changed token changes this many shingles."""
LEAST_TOKENS = 64
"""Fewest tokens of a document that is compared."""
ALIKE = 0.5
"""Jaccard similarity of shingles from which documents are near copies, 0 to 1: that of one changed token in 20."""
PERMUTATIONS = 128
"""Permutations of a MinHash; the similarity has a standard deviation of at most 0.045."""
MOST_COMPARED = 1 << 24
"""Most tokens of training documents that are compared."""
MOST_OF_ONE = 1 << 18
"""Most tokens of one document that are compared, from its beginning."""
MOST_TRAIN, MOST_HELDOUT = 1 << 15, 1 << 8
"""Most documents of each split that are compared, spread evenly over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearCopies:
    pairs: tuple[tuple[int, int, float], ...]
    """Held-out document, the most similar training document, and their Jaccard similarity, 0 to 1."""
    compared: int
    """Held-out documents that were compared."""
    searched: float
    """Share of the training documents that they were compared with, 0 to 1."""


def near_copies(train: TokenStream, heldout: TokenStream) -> NearCopies:
    """Find held-out documents that differ from a training document in few tokens, by MinHash (Broder 1997) of their
    shingles. If there are too many documents, a sample is compared."""
    chosen_heldout, heldout_DP, _ = _sketches(heldout, MOST_HELDOUT)
    chosen_train, train_DP, searched = _sketches(train, MOST_TRAIN)
    pairs = []
    for number, sketch_P in zip(chosen_heldout, heldout_DP if chosen_train else (), strict=False):
        alike_D = (train_DP == sketch_P).mean(axis=1)
        nearest = int(alike_D.argmax())
        if alike_D[nearest] >= ALIKE:
            pairs.append((number, chosen_train[nearest], float(alike_D[nearest])))
    return NearCopies(pairs=tuple(pairs), compared=len(chosen_heldout), searched=searched)


def _sketches(stream: TokenStream, limit: int) -> tuple[list[int], NDArray[np.uint32], float]:
    """Return a sample spread evenly over the documents that are long enough, their MinHashes, shape (D, P), and the
    share of those documents in the sample, 0 to 1."""
    from rensa import RMinHash

    lengths = np.minimum(stream.lengths, MOST_OF_ONE)
    is_long = lengths >= LEAST_TOKENS
    if stream.padding is not None:
        is_long &= ~stream.padding
    places = np.flatnonzero(is_long)
    room = MOST_COMPARED * len(places) // max(int(lengths[is_long].sum()), 1)
    count = min(len(places), limit, max(room, 1))
    chosen: list[int] = []
    sketches: list[NDArray[np.uint32]] = []
    # In small batches: the rolling hash needs 50 bytes per token.
    for batch in np.array_split(
        places[np.arange(count) * len(places) // max(count, 1)], max(count // 64, 1)
    ):
        texts = [(i, _labels_of(stream, i)) for i in batch.tolist()]
        hashed = [(i, rolling(text, SHINGLE)) for i, text in texts if len(text) >= LEAST_TOKENS]
        if not hashed:
            continue
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.concatenate([hashes for _, hashes in hashed]),
            starts_of([len(hashes) for _, hashes in hashed]).astype(np.uint64),
            PERMUTATIONS,
            0,
        )
        chosen += [i for i, _ in hashed]
        sketches.append(np.array(matrix.to_rows(), dtype=np.uint32))
    stream.release()
    empty = np.empty((0, PERMUTATIONS), dtype=np.uint32)
    return chosen, np.concatenate([empty, *sketches]), count / max(len(places), 1)


def _labels_of(stream: TokenStream, document: int) -> NDArray[np.generic]:
    begin, end = stream.starts[document : document + 2]
    place = slice(begin, min(end, begin + MOST_OF_ONE))
    tokens = stream.tokens[place]
    return tokens if stream.labelled is None else tokens[stream.labelled[place]]


def predicted(stream: TokenStream) -> NDArray[np.generic]:
    """Return the labels among the first MOST_TOKENS tokens, without padding. Shape (N,)."""
    tokens = stream.tokens[:MOST_TOKENS]
    if stream.labelled is not None:
        # Padding has no labels.
        return tokens[stream.labelled[:MOST_TOKENS]]
    if stream.padding is None:
        return tokens
    lengths = np.diff(np.minimum(stream.starts, len(tokens)))
    return tokens[~np.repeat(stream.padding, lengths)]


def shared_windows(
    train: NDArray[np.generic], heldout: NDArray[np.generic], window: int = WINDOW
) -> NDArray[np.bool_]:
    """Return whether each window of `heldout` occurs anywhere in `train`. Shape (W,).

    Windows start at every quarter of a window. They are compared by a rolling hash: with r(t) a random
    64-bit number for token t and an odd base b, h(i) = b^-i * sum_{j < window} r(t_{i+j}) b^{i+j},
    everything modulo 2^64. The probability of a false match is about (windows * positions) / 2^64.
    """
    starts = np.arange(0, len(heldout) - window + 1, max(window // 4, 1))
    if len(starts) > MOST_WINDOWS:
        starts = starts[np.linspace(0, len(starts) - 1, MOST_WINDOWS).astype(np.int64)]
    if len(starts) == 0 or len(train) < window:
        return np.zeros(len(starts), dtype=np.bool_)
    # Only these windows are hashed: hashes at all positions of a large corpus need 50 bytes per token.
    hashes = np.concatenate(
        [
            rolling(heldout[batch[:, None] + np.arange(window)], window)[:, 0]
            for batch in np.array_split(starts, -(-len(starts) // 4096))
        ]
    )
    unique_hashes = np.unique(hashes)
    is_shared = np.zeros(len(unique_hashes), dtype=np.bool_)
    step = 1 << 20
    for start in range(0, len(train) - window + 1, step):
        train_hashes = rolling(train[start : start + step + window - 1], window)
        places = np.minimum(np.searchsorted(unique_hashes, train_hashes), len(unique_hashes) - 1)
        is_shared[places[unique_hashes[places] == train_hashes]] = True
    return is_shared[np.searchsorted(unique_hashes, hashes)]


_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def _mixed(tokens: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each token id (splitmix64)."""
    mixed = tokens.astype(np.uint64) + np.uint64(_BASE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def rolling(tokens: NDArray[np.generic], window: int) -> NDArray[np.uint64]:
    """Return the hash of each window along the last axis."""
    mixed, count = _mixed(tokens), tokens.shape[-1]
    powers = np.full(count, _BASE, dtype=np.uint64)
    inverses = np.full(count, _INVERSE, dtype=np.uint64)
    powers[0] = inverses[0] = 1
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.cumsum(mixed * powers, axis=-1)
    sums = np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)
    hashes: NDArray[np.uint64] = (sums[..., window:] - sums[..., :-window]) * inverses[
        : count - window + 1
    ]
    return hashes
