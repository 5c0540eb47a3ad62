"""Overlap of two splits: windows of tokens that occur in both.

Only labels are compared: a system prompt that all conversations begin with is not a leak.
"""

# Shapes: N tokens, W windows

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.data.tokens import TokenStream

WINDOW = 64
"""Tokens of a window: so long that only copied text shares one. Boilerplate such as a licence is found too."""
MOST_TOKENS = 1 << 26
"""Maximum number of tokens of either split whose windows are compared; comparing them takes about two seconds."""
MOST_WINDOWS = 1 << 16
"""Maximum number of windows that are compared, spread evenly over the held-out split."""


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
