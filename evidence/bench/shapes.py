"""Configurations of published shapes, by name, without their weights."""

from __future__ import annotations

from engine.models.config import ModelConfig

SHAPES = {
    "qwen2.5-0.5b": dict(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": dict(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False,
    ),
    "tiny": dict(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, vocab_size=4096, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Published shapes, by name."""


def config_named(name: str) -> ModelConfig:
    """Return the configuration of one of `SHAPES`."""
    common = dict(
        model_type="qwen2",
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        hidden_act="silu",
    )
    return ModelConfig.from_dict({**common, **SHAPES[name]}, f"the shape {name}")
