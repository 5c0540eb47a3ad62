"""The size of a KV cache. Nothing here imports torch."""

from __future__ import annotations

from engine.models.config import ModelConfig

PAGE = 64
"""Size of a page, in tokens."""


def pages_for(tokens: int) -> int:
    """Return how many pages hold `tokens` tokens."""
    return -(-tokens // PAGE)


def token_bytes(config: ModelConfig, number_bytes: int) -> int:
    """Return the size of the keys and values of one token, in bytes; a number takes `number_bytes` bytes."""
    return (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * number_bytes
    )
