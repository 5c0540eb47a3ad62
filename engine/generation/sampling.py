"""Choose the next token from logits.

    p = softmax(logits / temperature), then in this order:
    top_k    keep the top_k largest probabilities
    top_p    keep the fewest of these that together reach top_p
    min_p    keep those of these that are at least min_p times the largest

Greedy (temperature 0) takes the largest logit. Equal logits are ordered by id, the lowest first.

A draw takes one uniform number u: the token is the first, in the order of ids, at which the sum of the
kept probabilities exceeds u times their total. u is a function of (seed, key, index of the token), by
SplitMix64 (Steele, Lea, Flood 2014). So a sequence gets the same numbers in any slot and on any device,
without a generator state.

The log-probability of a drawn token is taken from softmax(logits / temperature), before tokens are left out; that of a
greedy token from softmax(logits).

`choose` is the reference, in fp64. On a GPU `engine.kernels.choose` does the same in fp32.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import BadInput

# Shapes: B rows, V vocabulary

LEFT_OUT = -1e30
"""Value that replaces the logit of a token that cannot be drawn; finite, so as not to count as a non-finite logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of the choice of tokens. The default is greedy."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Smallest probability of a kept token, relative to the largest."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
        ):
            if not is_valid:
                raise BadInput.expected("sampling", name, expected, str(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Return whether some tokens cannot be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


GREEDY = Sampling()


class Choice(NamedTuple):
    """The chosen token of each row."""

    token_B: Tensor
    """int64; meaningless where `bad_B` is not 0."""
    log_p_B: Tensor
    """float32, natural logarithm."""
    bad_B: Tensor
    """int64: number of NaN or infinite logits."""


_WORD = (1 << 64) - 1


def row_key(seed: int, key: object) -> int:
    """Return the 64-bit key of a sequence as a signed integer."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def uniform(key: int, number: int) -> float:
    """Return the uniform number in [0, 1) of token `number` (from 0) of the sequence `key`."""
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


# contract: eval-no-fake-pass-v1
def choose(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Choice:
    """Return the token that `sampling` chooses in each row, by the uniform numbers `uniform_B`
    (float64).
    """
    bad_B = (~logits_BV.isfinite()).sum(-1)
    scores_BV = logits_BV.double()
    if not sampling.greedy:
        scores_BV = scores_BV / sampling.temperature
    log_p_BV = scores_BV.log_softmax(-1)
    if sampling.greedy:
        # Take the first of equal maxima: argmax of the scores may return any of them.
        token_B = (scores_BV == scores_BV.amax(-1, keepdim=True)).int().argmax(-1)
    else:
        kept_BV = truncate(scores_BV, sampling).softmax(-1)
        sum_BV = kept_BV.cumsum(-1)
        target_B1 = uniform_B[:, None] * sum_BV[:, -1:]
        token_B = torch.searchsorted(sum_BV, target_B1, right=True)[:, 0]
        # Rounding may put a target at the very end: then take the last token that can be drawn.
        id_V = torch.arange(kept_BV.shape[-1], device=kept_BV.device)
        token_B = torch.minimum(token_B, torch.where(kept_BV > 0, id_V, 0).amax(-1))
    return Choice(token_B, log_p_BV.gather(-1, token_B[:, None])[:, 0].float(), bad_B)


def truncate(scores_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return `scores_BV` (logits over temperature) with `LEFT_OUT` for tokens that cannot be drawn. NaN and
    infinite scores stay.
    """
    if not sampling.truncates:
        return scores_BV
    finite_BV = scores_BV.isfinite()
    if sampling.top_k or sampling.top_p < 1:
        sorted_BV, id_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
        keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
        if sampling.top_k:
            keep_BV[:, sampling.top_k :] = False
        if sampling.top_p < 1:
            p_BV = sorted_BV.masked_fill(~keep_BV, LEFT_OUT).softmax(-1)
            keep_BV &= p_BV.cumsum(-1) - p_BV < sampling.top_p
        keep_BV = torch.empty_like(keep_BV).scatter_(-1, id_BV, keep_BV)
        scores_BV = scores_BV.masked_fill(~keep_BV & finite_BV, LEFT_OUT)
    if sampling.min_p > 0:
        min_score_B1 = scores_BV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores_BV = scores_BV.masked_fill((scores_BV < min_score_B1) & finite_BV, LEFT_OUT)
    return scores_BV
