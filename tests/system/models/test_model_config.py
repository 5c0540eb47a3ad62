"""The model configuration: what is read, what is refused, and that transformers agrees."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WeightsError
from engine.model_families import FAMILIES
from engine.models.config import ModelConfig, count_parameters
from engine.models.read_config import read_config
from engine.models.rope import RopeScaling, divisors, scaling_of_divisors

QWEN_05B: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


QWEN3_06B: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SCALING: dict[str, object] = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA32_1B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SMOLLM3_3B: dict[str, object] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
MISTRAL_7B: dict[str, object] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}


PHI3_MINI: dict[str, object] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32064,
}


# Made up but for its form: the published ones have 48 numbers each too.
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + pair / 100 for pair in range(48)],
    "long_factor": [1.0 + pair for pair in range(48)],
}
PHI3_128K: dict[str, object] = {
    **PHI3_MINI,
    "max_position_embeddings": 131072,
    "rope_scaling": LONGROPE,
    "sliding_window": 262144,
}
GEMMA3_1B: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
NEWER_ROPE: dict[str, object] = {
    "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
}
# As transformers 5 writes it.
GEMMA3_NEWER = {
    **{
        key: value
        for key, value in GEMMA3_1B.items()
        if key not in ("rope_theta", "rope_local_base_freq", "rope_scaling")
    },
    "rope_parameters": NEWER_ROPE,
    "layer_types": [
        "full_attention" if number % 6 == 0 else "sliding_attention" for number in range(1, 27)
    ],
}


def without(raw: Mapping[str, object], **changes: object) -> dict[str, object]:
    """`raw` with some values changed; the value `...` removes its key."""
    return {key: value for key, value in {**raw, **changes}.items() if value is not ...}


def changed(**changes: object) -> dict[str, object]:
    return without(QWEN_05B, **changes)


def test_parameter_counts_are_those_of_the_published_models() -> None:
    half = ModelConfig.from_dict(QWEN_05B, "0.5B")
    assert half.head_dim == 64
    assert half.eos_token_ids == (151645, 151643)
    assert count_parameters(half) == 494_032_768
    seven = ModelConfig.from_dict(
        changed(
            hidden_size=3584,
            intermediate_size=18944,
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            vocab_size=152064,
        ),
        "7B",
    )
    assert count_parameters(seven) == 7_615_616_512
    qwen3 = ModelConfig.from_dict(QWEN3_06B, "Qwen3-0.6B")
    assert count_parameters(qwen3) == 596_049_920
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.attention_bias) == (128, True, False)
    llama = ModelConfig.from_dict(LLAMA32_1B, "Llama-3.2-1B")
    assert count_parameters(llama) == 1_235_814_400
    assert llama.eos_token_ids == (128001, 128008, 128009)
    assert (llama.qk_norm, llama.attention_bias) == (False, False)
    smollm3 = ModelConfig.from_dict(SMOLLM3_3B, "SmolLM3-3B")
    assert count_parameters(smollm3) == 3_075_098_624
    assert smollm3.tie_word_embeddings and smollm3.layers_without_rope[:2] == (3, 7)
    mistral = ModelConfig.from_dict(MISTRAL_7B, "Mistral-7B-v0.1")
    assert count_parameters(mistral) == 7_241_732_096
    assert (mistral.sliding_window, mistral.head_dim) == (4096, 128)
    phi3 = ModelConfig.from_dict(PHI3_MINI, "Phi-3-mini-4k")
    assert count_parameters(phi3) == 3_821_079_552
    assert (phi3.sliding_window, phi3.head_dim, phi3.rotary_dim) == (2047, 96, 96)
    gemma3 = ModelConfig.from_dict(GEMMA3_1B, "gemma-3-1b")
    assert count_parameters(gemma3) == 999_885_952
    assert gemma3.tie_word_embeddings and gemma3.layers_without_window == (5, 11, 17, 23)
    assert (gemma3.sliding_window, gemma3.rope_local_base_freq) == (512, 1e4)
    assert ModelConfig.from_dict(GEMMA3_NEWER, "gemma-3-1b") == gemma3
    phi4 = ModelConfig.from_dict(
        without(
            PHI3_MINI,
            hidden_size=5120,
            intermediate_size=17920,
            num_attention_heads=40,
            num_hidden_layers=40,
            num_key_value_heads=10,
            rope_theta=250000,
            sliding_window=None,
            vocab_size=100352,
            eos_token_id=100265,
        ),
        "phi-4",
    )
    assert count_parameters(phi4) == 14_659_507_200
    mini = ModelConfig.from_dict(
        without(
            PHI3_128K,
            num_attention_heads=24,
            num_key_value_heads=8,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
            vocab_size=200064,
            lm_head_bias=False,
        ),
        "Phi-4-mini",
    )
    assert count_parameters(mini) == 3_836_021_760
    assert (mini.head_dim, mini.rotary_dim) == (128, 96) and mini.long_rope is not None


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500_000},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_both_spellings_of_the_rotary_base_are_read(spelling: dict[str, object]) -> None:
    assert ModelConfig.from_dict(changed(**spelling), "x").rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, f"model_type: expected {' or '.join(map(repr, FAMILIES))} (all"),
        ({"model_type": ...}, "model_type: expected 'qwen2'"),
        ({"model_type": ["qwen2"]}, "found ['qwen2']"),
        ({"attention_bias": False}, "attention_bias: expected True (all that is supported)"),
        ({"mlp_bias": True}, "mlp_bias: expected False"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' (all that is supported), found"),
        ({"use_sliding_window": True}, "use_sliding_window: expected False"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 12},
            "found 'sliding_attention'",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "found 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "found 'linear'"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3"}}, "found 'llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": ...}, "rope_theta: expected a value, found none"),
        ({"rope_theta": float("nan")}, "rope_theta: expected a positive finite number"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number"),
        ({"rms_norm_eps": ...}, "rms_norm_eps: expected a value, found none"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a number, found '1e-6'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a positive finite number"),
        ({"vocab_size": 0}, "vocab_size: expected a positive integer, found 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an integer, found True"),
        ({"hidden_size": 896.0}, "hidden_size: expected an integer, found 896.0"),
        ({"hidden_size": 897}, "hidden_size: expected a multiple of 14 heads, found 897"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of 14 heads"),
        ({"num_key_value_heads": ...}, "num_key_value_heads: expected a value, found none"),
        ({"head_dim": 63}, "head_dim: expected an even number, found 63"),
        ({"head_dim": -2}, "head_dim: expected a positive integer, found -2"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected an integer or a list"),
        ({"eos_token_id": 151936}, "expected ids below vocab_size, found [151936]"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        ModelConfig.from_dict(changed(**changes), "models/x/config.json")
    assert words in str(caught.value)
    assert "models/x/config.json" in str(caught.value)
    assert "1 problem:" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (QWEN3_06B, {"head_dim": ...}, "head_dim: expected a value, found none"),
        (QWEN3_06B, {"head_dim": None}, "head_dim: expected an integer, found None"),
        (QWEN3_06B, {"attention_bias": True}, "attention_bias: expected False (all"),
        (QWEN3_06B, {"rope_scaling": SCALING}, "rope_type: expected 'default' (all"),
        (QWEN3_06B, {"use_sliding_window": True}, "use_sliding_window: expected False"),
        (SMOLLM3_3B, {"no_rope_layers": ...}, "no_rope_layers: expected 0 or 1 for each of 36"),
        (SMOLLM3_3B, {"no_rope_layers": [1] * 35}, "no_rope_layers: expected 0 or 1 for each of"),
        (SMOLLM3_3B, {"no_rope_layers": [2] * 36}, "no_rope_layers: expected 0 or 1 for each of"),
        (
            SMOLLM3_3B,
            {"layer_types": ["sliding_attention"] * 36},
            "layer_types: expected 'full_att",
        ),
        (
            LLAMA32_1B,
            {"model_type": "olmo2", "rope_scaling": None, "mlp_bias": True},
            "mlp_bias: expected False (all",
        ),
        (
            LLAMA32_1B,
            {"model_type": "olmo2"},
            "rope_type: expected 'default' (all that is supported), found 'llama3'",
        ),
        (MISTRAL_7B, {"sliding_window": ...}, "sliding_window: expected a value, found none"),
        (MISTRAL_7B, {"sliding_window": "4096"}, "sliding_window: expected an integer, found"),
        (
            PHI3_MINI,
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type: expected 'default' or 'longrope' (all that is supported), found",
        ),
        (
            PHI3_128K,
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0]}},
            "rope_scaling.short_factor: expected a number for each of 48 pairs, found 1",
        ),
        (
            PHI3_128K,
            {"rope_scaling": {**LONGROPE, "long_factor": "1"}},
            "rope_scaling.long_factor: expected a list of numbers, found '1'",
        ),
        (
            PHI3_128K,
            {"original_max_position_embeddings": ...},
            "rope_scaling.original_max_position_embeddings: expected a value, found none",
        ),
        (
            GEMMA3_1B,
            {"hidden_activation": "gelu"},
            "hidden_activation: expected 'gelu_pytorch_tanh' (all that is supported), found 'gelu'",
        ),
        (
            GEMMA3_1B,
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping: expected None (all that is supported), found 30.0",
        ),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None (al"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
        (GEMMA3_1B, {"attention_bias": True}, "attention_bias: expected False (all"),
        (GEMMA3_1B, {"query_pre_attn_scalar": ...}, "query_pre_attn_scalar: expected a value, fo"),
        (GEMMA3_1B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive"),
        (GEMMA3_1B, {"rope_local_base_freq": ...}, "rope_local_base_freq: expected a value, found"),
        (GEMMA3_1B, {"sliding_window": None}, "sliding_window: expected an integer, found None"),
        (
            GEMMA3_1B,
            {"sliding_window_pattern": ...},
            "layer_types: expected sliding_attention or full_attention for each of 26 layers, found",
        ),
        (
            GEMMA3_1B,
            {"layer_types": ["chunked_attention"] * 26},
            "layer_types: expected sliding_attention or full_attention for each of 26 layers, found",
        ),
        (
            GEMMA3_1B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            "rope_type: expected 'default' or 'linear' (all that is supported), found",
        ),
        (
            GEMMA3_1B,
            {"rope_scaling": {"rope_type": "linear"}},
            "rope_scaling.factor: expected a value, found none",
        ),
        (
            GEMMA3_NEWER,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_local_base_freq: expected a value, found none",
        ),
        (PHI3_MINI, {"resid_pdrop": 0.1}, "resid_pdrop: expected 0.0 (all that is supported)"),
        (
            PHI3_MINI,
            {"partial_rotary_factor": 0.29},
            "partial_rotary_factor: expected an even number of the 96 dimensions to rotate, found 27",
        ),
        (PHI3_MINI, {"partial_rotary_factor": "1"}, "partial_rotary_factor: expected a number, f"),
        (PHI3_MINI, {"sliding_window": ...}, "sliding_window: expected a value, found none"),
        (MISTRAL_7B, {"rope_scaling": SCALING}, "rope_type: expected 'default' (all"),
        (LLAMA32_1B, {"attention_bias": True}, "attention_bias: expected False (all"),
        (LLAMA32_1B, {"mlp_bias": True}, "mlp_bias: expected False (all"),
        (
            LLAMA32_1B,
            {"hidden_size": 2050},
            "hidden_size: expected a multiple of 32 heads, found 2050",
        ),
        (
            LLAMA32_1B,
            {"rope_scaling": {**SCALING, "rope_type": "yarn"}},
            "rope_type: expected 'default' or 'llama3' (all that is supported), found",
        ),
        (
            LLAMA32_1B,
            {"rope_scaling": without(SCALING, low_freq_factor=...)},
            "rope_scaling.low_freq_factor: expected a value, found none",
        ),
        (
            LLAMA32_1B,
            {"rope_scaling": {**SCALING, "original_max_position_embeddings": 8192.0}},
            "rope_scaling.original_max_position_embeddings: expected an integer, found 8192.0",
        ),
    ],
)
def test_what_a_qwen3_or_llama_may_not_say_is_refused_by_name(
    raw: dict[str, object], changes: dict[str, object], words: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        ModelConfig.from_dict(without(raw, **changes), "x")
    assert words in str(caught.value)
    assert "1 problem:" in str(caught.value)


@pytest.mark.parametrize(
    "spelling",
    [
        {},
        {"rope_scaling": {**without(SCALING, rope_type=...), "type": "llama3", "factor": 32}},
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "rope_parameters": {**SCALING, "rope_theta": 500000.0},
        },
        {"rope_parameters": {**SCALING, "rope_theta": 500000.0}},
    ],
)
def test_every_spelling_of_rope_scaling_is_read(spelling: dict[str, object]) -> None:
    config = ModelConfig.from_dict(without(LLAMA32_1B, **spelling), "x")
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_the_factors_of_longrope_are_read_in_either_spelling() -> None:
    phi3 = ModelConfig.from_dict(PHI3_128K, "x")
    older = {**without(LONGROPE, rope_type=...), "type": "longrope"}
    assert ModelConfig.from_dict({**PHI3_128K, "rope_scaling": older}, "x") == phi3
    long = phi3.long_rope
    assert long is not None and abs(long.angle_factor(131072) - 1.1902) < 1e-4


def test_rope_parameters_count_where_a_file_has_both_spellings() -> None:
    both = {"rope_parameters": {**SCALING, "rope_theta": 1e6, "factor": 8.0}}
    config = ModelConfig.from_dict(without(LLAMA32_1B, **both), "x")
    assert config.rope_theta == 1e6
    assert config.rope_scaling is not None and config.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    "raw",
    [
        QWEN_05B,
        QWEN3_06B,
        LLAMA32_1B,
        MISTRAL_7B,
        SMOLLM3_3B,
        PHI3_MINI,
        {**PHI3_MINI, "partial_rotary_factor": 0.75},
        PHI3_128K,
        GEMMA3_1B,
        GEMMA3_NEWER,
        {**GEMMA3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=lambda raw: raw["model_type"],
)
def test_transformers_reads_what_is_written_as_it_reads_the_published_file(
    raw: dict[str, object],
) -> None:
    from transformers import AutoConfig

    config = ModelConfig.from_dict(raw, "x")
    written: dict[str, Any] = json.loads(json.dumps(config.to_hf_dict()))
    assert ModelConfig.from_dict(written, "x") == config
    ours = AutoConfig.for_model(**written).to_dict()
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw))).to_dict()
    # What no forward pass reads, and the head_dim that Qwen2's file leaves to be worked out.
    silent = {"max_window_layers", "sliding_window", "dtype", "head_dim", "pretraining_tp"}
    silent |= {"cache_implementation", "sliding_window_pattern"}
    different = {
        key: (ours.get(key), theirs.get(key))
        for key in ours.keys() | theirs.keys()
        if key not in silent and ours.get(key) != theirs.get(key)
    }
    assert different == {}
    assert ours["head_dim"] == config.head_dim


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [
        (5e5, 128, (8.0, 1.0, 4.0, 8192)),
        (5e5, 64, (32.0, 1.0, 4.0, 8192)),
        (5e5, 16, (8.0, 1.0, 4.0, 8192)),
        (1e4, 64, (2.5, 1.0, 4.0, 8192)),
    ],
)
def test_a_scaling_is_found_from_its_divisors(
    theta: float, head_dim: int, scaling: tuple[float, float, float, int]
) -> None:
    factor, low, high, original = scaling
    expected = RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    stored = struct.unpack(
        f"{head_dim // 2}f",
        struct.pack(f"{head_dim // 2}f", *divisors(expected, theta, head_dim)),
    )
    assert 1.0 in stored and max(stored) == factor
    assert scaling_of_divisors(stored, theta, head_dim) == expected


def test_divisors_of_no_scaling_are_none_or_refused() -> None:
    assert scaling_of_divisors([1.0] * 32, 5e5, 64) is None
    for stored in ([2.0] * 32, [1.0] * 31 + [8.0], [1.0] * 16 + [0.0] * 16, [float("nan")] * 32):
        with pytest.raises(ValueError, match="another scaling"):
            scaling_of_divisors(stored, 5e5, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mlp_bias": True, "vocab_size": 1.5, "rope_theta": ...},
        {"vocab_size": -1, "rms_norm_eps": 0.0, "rope_theta": -1.0},
        {"num_key_value_heads": 3, "eos_token_id": -1, "head_dim": 63},
    ],
)
def test_all_problems_of_one_kind_come_in_one_error(wrong: dict[str, object]) -> None:
    with pytest.raises(WeightsError) as caught:
        ModelConfig.from_dict(changed(**wrong), "x")
    text = str(caught.value)
    assert "3 problems:" in text and all(f"{key}: expected" in text for key in wrong)


def test_null_key_value_heads_mean_one_for_each_head() -> None:
    assert ModelConfig.from_dict(changed(num_key_value_heads=None), "x").num_key_value_heads == 14


def test_a_config_built_in_code_is_checked_too() -> None:
    with pytest.raises(WeightsError, match="expected a divisor of 8 heads, found 3"):
        ModelConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=3,
            max_position_embeddings=64,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
        )


@pytest.mark.parametrize("eos", [None, 7, [7, 9]])
def test_hf_dict_reads_back_equal_and_transformers_reads_the_same(eos: object) -> None:
    from transformers import Qwen2Config

    config = ModelConfig.from_dict(changed(eos_token_id=eos, rope_theta=12345.0), "x")
    written = json.loads(json.dumps(config.to_hf_dict()))
    assert ModelConfig.from_dict(written, "x") == config
    theirs = Qwen2Config.from_dict(written)
    assert theirs.rope_parameters == {"rope_theta": 12345.0, "rope_type": "default"}
    for key in ("vocab_size", "hidden_size", "num_key_value_heads", "rms_norm_eps", "head_dim"):
        assert getattr(theirs, key) == getattr(config, key)
    assert theirs.tie_word_embeddings is True
    assert theirs.eos_token_id == eos


def test_a_folder_and_its_file_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected a file, found nothing"),
        (b"{", "expected JSON, found "),
        (b"[]", "expected a JSON object, found a list"),
        (b'{"a": "\xff"}', "expected JSON, found "),
        (b"[" * 100_000, "expected JSON nested"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_config(tmp_path)
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


def test_config_names_and_headers_load_without_torch() -> None:
    code = (
        "import sys, engine.models.config, engine.models.names, engine.formats.safetensors\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
