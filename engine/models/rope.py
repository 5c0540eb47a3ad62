"""RoPE frequencies and their scaling: Llama 3.1's (`RopeScaling`), and LongRoPE's factors (`LongRope`).

Pair i of a head of width E rotates by f_i per position. A model trained on `original` positions
reaches `factor` times as many if its slow pairs rotate `factor` times slower. The fast pairs, which
distinguish adjacent positions, are unchanged, and those in between are blended:

    f_i     = theta^(-2i/E)                                  0 <= i < E/2
    turns_i = original f_i / 2 pi                            whole turns within the original length
    keep_i  = clamp((turns_i - low) / (high - low), 0, 1)
    f'_i    = f_i (keep_i + (1 - keep_i) / factor)

A GGUF file has no fields for the four numbers. It stores the divisors f_i / f'_i as the tensor
`rope_freqs.weight`, and `scaling_of_divisors` finds the factor that gives the same divisors with low = 1,
high = 4 and original = 8192, as in all published models.

This module does not import torch, because a configuration is read without it.
`engine.models.decoder` computes the same with tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1e-4
"""Relative tolerance. Divisors are stored in fp32, and files were made entirely with fp32
arithmetic.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`rope_scaling` of type llama3; `ModelConfig` checks the numbers."""

    factor: float
    """Factor by which the slow pairs rotate slower."""
    low_freq_factor: float
    """Pairs with fewer turns than this within the original length are slow."""
    high_freq_factor: float
    """Pairs with more turns than this are fast."""
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """`rope_scaling` of type longrope (Ding et al., 2024); `ModelConfig` checks the numbers."""

    short_factor: tuple[float, ...]
    """Divisor of the frequency of each rotated pair, in documents of up to
    `original_max_position_embeddings` tokens.
    """
    long_factor: tuple[float, ...]
    """Divisor of the frequency of each rotated pair, in longer documents."""
    original_max_position_embeddings: int
    attention_factor: float | None = None
    """Factor of cosines and sines; None computes it from the extension of the positions (`angle_factor`)."""

    def angle_factor(self, positions: int) -> float:
        """Return the factor of cosines and sines in a model of `positions` positions."""
        if self.attention_factor is not None:
            return self.attention_factor
        ratio = positions / self.original_max_position_embeddings
        if ratio <= 1:
            return 1.0
        return math.sqrt(1 + math.log(ratio) / math.log(self.original_max_position_embeddings))


PUBLISHED: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of Llama 3.1 and later, except for its factor."""


def frequencies(theta: float, head_dim: int) -> list[float]:
    """Return the frequency of each pair of a head, in radians per position."""
    return [theta ** (-index / head_dim) for index in range(0, head_dim, 2)]


def divisors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """Return the factor by which each pair is slowed down, from 1 to `factor`, as stored in GGUF."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    result = []
    for frequency in frequencies(theta, head_dim):
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        result.append(1 / (keep + (1 - keep) / scaling.factor))
    return result


def scaling_of_divisors(stored: Sequence[float], theta: float, head_dim: int) -> RopeScaling | None:
    """Return the scaling that has these divisors, of the published form with any factor; None if all divisors are 1.
    Raises `ValueError` if no such scaling fits.
    """
    if all(_near(divisor, 1.0) for divisor in stored):
        return None
    # Authors write 8 or 2.5, and files store them in fp32.
    scaling = RopeScaling(factor=round(max(stored), 3), **PUBLISHED)
    if not same_divisors(stored, divisors(scaling, theta, head_dim)):
        raise ValueError("another scaling has these divisors")
    return scaling


def same_divisors(stored: Sequence[float], expected: Sequence[float]) -> bool:
    return len(stored) == len(expected) and all(map(_near, stored, expected))


def _near(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=TOLERANCE)
