"""GGUF metadata and config.json: each says what the other says."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WeightsError
from engine.formats.gguf import parse_header
from engine.formats.gguf_metadata import config_metadata, read_config, shortest_decimal
from engine.formats.gguf_values import encode_value
from engine.models.config import ModelConfig
from tests.support.gguf_files import (
    ARRAY,
    F16,
    FLOAT32,
    FLOAT64,
    INT32,
    QWEN2,
    STRING,
    UINT8,
    UINT32,
    array,
    build,
    pair,
    tensor,
    text,
    u32,
)
from tests.support.kit import tiny_config


def config_of(pairs: list[bytes], tensors: list[bytes] | None = None) -> dict[str, Any]:
    embedding = [tensor("token_embd.weight", [2, 7], F16)] if tensors is None else tensors
    header = parse_header(build(pairs, embedding, bytes(4096)), Path("m"))
    return read_config(header.metadata, header.tensors)


def real(key: str, number: float) -> bytes:
    return pair(key, FLOAT32, struct.pack("<f", number))


def without(key: str) -> list[bytes]:
    return [one for one in QWEN2 if not one[8:].startswith(key.encode())]


def renamed(arch: str) -> list[bytes]:
    """The same numbers under another architecture; a key's length changes with its name."""
    pairs = [pair("general.architecture", STRING, text(arch))]
    for one in QWEN2[1:]:
        length = int.from_bytes(one[:8], "little")
        key = one[8 : 8 + length].decode()
        pairs.append(text(key.replace("qwen2", arch)) + one[8 + length :])
    return pairs


def test_a_qwen2_file_gives_its_configuration() -> None:
    assert config_of(QWEN2) == {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": 7,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_the_model_takes_the_configuration_of_each_architecture(arch: str) -> None:
    pairs = [*renamed(arch), pair(f"{arch}.attention.key_length", UINT32, u32(32))]
    config = ModelConfig.from_dict(config_of(pairs), "m")
    assert (config.head_dim, config.num_attention_heads, config.vocab_size) == (32, 4, 7)


def test_a_head_of_its_own_is_not_tied() -> None:
    tensors = [
        tensor("token_embd.weight", [2, 7], F16),
        tensor("output.weight", [2, 7], F16, 32),
    ]
    assert config_of(QWEN2, tensors)["tie_word_embeddings"] is False


def test_without_kv_heads_there_are_as_many_as_heads_and_one_a_layer_may_be_given() -> None:
    pairs = without("qwen2.attention.head_count_kv")
    assert config_of(pairs)["num_key_value_heads"] == 4
    each = array("qwen2.attention.head_count_kv", INT32, [u32(2), u32(2)])
    assert config_of([*pairs, each])["num_key_value_heads"] == 2
    mixed = array("qwen2.attention.head_count_kv", INT32, [u32(2), u32(4)])
    with pytest.raises(WeightsError, match=r"GG17 gguf: m, key .*head_count_kv"):
        config_of([*pairs, mixed])


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {"rope_type": "default"}),
        ([pair("qwen2.rope.scaling.type", STRING, text("none"))], {"rope_type": "default"}),
        (
            [
                pair("qwen2.rope.scaling.type", STRING, text("linear")),
                real("qwen2.rope.scaling.factor", 2.5),
            ],
            {"rope_type": "linear", "factor": 2.5},
        ),
        (
            [
                pair("qwen2.rope.scaling.type", STRING, text("yarn")),
                real("qwen2.rope.scaling.factor", 4.0),
                pair("qwen2.rope.scaling.original_context_length", UINT32, u32(32768)),
                real("qwen2.rope.scaling.yarn_beta_fast", 32.0),
            ],
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 32.0,
            },
        ),
        (
            [pair("qwen2.rope.dimension_count", UINT32, u32(8))],
            {"rope_type": "default", "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_rotary_positions_are_carried_over(pairs: list[bytes], expected: dict[str, Any]) -> None:
    found = config_of([*QWEN2, *pairs])["rope_parameters"]
    assert found == {"rope_theta": 1_000_000.0, **expected}


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([pair("qwen2.expert_count", UINT32, u32(8))], "8 experts"),
        ([pair("qwen2.rope.scaling.type", STRING, text("longrope"))], "'longrope'"),
        ([array("qwen2.rope.scaling.type", UINT8, [])], "scaling.type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pairs: list[bytes], said: str) -> None:
    with pytest.raises(WeightsError, match=r"^GG17 gguf: m, key ") as caught:
        config_of([*QWEN2, *pairs])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        pair("qwen2.block_count", UINT32, u32(0)),
        pair("qwen2.block_count", INT32, struct.pack("<i", -1)),
        pair("qwen2.block_count", UINT32, u32(2**32 - 1)),
        pair("qwen2.block_count", STRING, text("2")),
        real("qwen2.block_count", 2.0),
        pair("qwen2.block_count", ARRAY, u32(INT32) + bytes(8)),
    ],
)
def test_a_count_that_is_no_count_is_refused(value: bytes) -> None:
    with pytest.raises(WeightsError, match=r'GG17 gguf: m, key "qwen2.block_count"'):
        config_of([*without("qwen2.block_count"), value])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0, 3.4028e38])
def test_a_real_that_no_model_has_is_refused(number: float) -> None:
    pairs = without("qwen2.rope.freq_base")
    with pytest.raises(WeightsError, match=r"GG17 gguf: m, key .*rope.freq_base"):
        config_of([*pairs, real("qwen2.rope.freq_base", number)])
    wide = pair("qwen2.rope.freq_base", FLOAT64, struct.pack("<d", 1e300))
    with pytest.raises(WeightsError, match=r"GG17"):
        config_of([*pairs, wide])


def test_a_role_without_a_token_is_ignored_with_a_warning(tmp_path: Path) -> None:
    from engine.formats.gguf import open_gguf

    path = tmp_path / "m.gguf"
    pairs = [
        *QWEN2,
        array("tokenizer.ggml.tokens", STRING, [text("a")] * 7),
        pair("tokenizer.ggml.bos_token_id", UINT32, u32(7)),
        pair("tokenizer.ggml.eos_token_id", UINT32, u32(6)),
    ]
    path.write_bytes(build(pairs, [tensor("token_embd.weight", [2, 7], F16)], bytes(28)))
    file = open_gguf(path)
    assert (file.config_dict()["bos_token_id"], file.config_dict()["eos_token_id"]) == (None, 6)
    assert any("bos_token_id 7 is ignored" in warning for warning in file.warnings)


CONFIGS: dict[str, dict[str, object]] = {
    "qwen2": tiny_config(head_dim=8, vocab_size=7),
    "two ends": tiny_config(head_dim=8, vocab_size=7, eos_token_id=[3, 5], bos_token_id=1),
    "three ends": tiny_config(head_dim=8, vocab_size=7, eos_token_id=[3, 5, 2], pad_token_id=0),
    "qwen3": tiny_config(model_type="qwen3", head_dim=16, vocab_size=7, rms_norm_eps=1e-5),
    "llama": tiny_config(model_type="llama", head_dim=8, vocab_size=7, rope_theta=500_000.0),
    "odd reals": tiny_config(head_dim=8, vocab_size=7, rms_norm_eps=1.1e-7, rope_theta=123456.7),
    "yarn": tiny_config(
        head_dim=8,
        vocab_size=7,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 0.1,
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_survives_the_way_there_and_back(name: str) -> None:
    config = CONFIGS[name]
    values = config_metadata(config, "config")
    arch = str(config["model_type"])
    pairs = [pair("general.architecture", STRING, text(arch))]
    pairs += [text(key) + encode_value(value) for key, value in values.items()]
    found = config_of(pairs)
    kept = {key: found[key] for key in config if key not in ("architectures", "rope_parameters")}
    assert kept == {key: config[key] for key in kept}
    if "rope_parameters" in config:
        assert found["rope_parameters"] == config["rope_parameters"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"model_type": ["qwen2"]},
        {"num_hidden_layers": None},
        {"num_hidden_layers": 2.0},
        {"hidden_size": -1},
        {"rms_norm_eps": 0},
        {"rope_theta": float("nan")},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
        {"eos_token_id": -1},
        {"vocab_size": None},
    ],
)
def test_a_configuration_that_gguf_cannot_say_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WeightsError, match="model configuration for GGUF: here"):
        config_metadata(tiny_config(**changes), "here")


@pytest.mark.parametrize("number", [1e-6, 1e-5, 0.1, 1e6, 500_000.0, 1.1e-7, 123456.7, 3.0])
def test_the_shortest_decimal_is_the_number_that_was_stored(number: float) -> None:
    assert shortest_decimal(struct.unpack("<f", struct.pack("<f", number))[0]) == number
