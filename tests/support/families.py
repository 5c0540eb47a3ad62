"""For every family, a small configuration in which all that sets it apart shows in the logits."""

from __future__ import annotations

from engine.models.rope import RopeScaling

# Changes to the `make_config` of a test file, whose model width is a multiple of 8 heads.
CHANGES: dict[str, dict[str, object]] = {
    "qwen2": {},
    # Heads of their own width, as in the published models.
    "qwen3": {"num_attention_heads": 4, "head_dim": 32, "rope_theta": 1e6},
    # Of 16 pairs, two are fast, one is blended and thirteen are slow.
    # Scores divided by the root of another number than the width of a head.
    "gemma3_text": {
        "num_attention_heads": 4,
        "head_dim": 24,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_factor": 8.0,
        "sliding_window": 9,
        "layers_without_window": (1,),
        "query_pre_attn_scalar": 40,
    },
    "llama": {
        "num_attention_heads": 4,
        "head_dim": 32,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    },
    # Five heads do not divide the width.
    "mistral": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "sliding_window": 9,
    },
    "olmo2": {"num_attention_heads": 4, "rope_theta": 5e5},
    # 18 of the 24 numbers of a head are rotated.
    "phi3": {
        "num_attention_heads": 4,
        "head_dim": 24,
        "partial_rotary_factor": 0.75,
        "sliding_window": 11,
    },
    "smollm3": {"num_attention_heads": 4, "rope_theta": 2e6, "layers_without_rope": (1,)},
}
