"""The table of names: the tensors that transformers has, and one error for all that misfit."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.errors import WeightsError
from engine.models.config import ModelConfig, count_parameters
from engine.models.decoder import Decoder
from engine.models.names import check_fits, expected_tensors, hf_names


def make_config(tied: bool = False, layers: int = 3) -> ModelConfig:
    return ModelConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=tied,
    )


@dataclass
class Facts:
    dtype: str
    shape: tuple[int, ...]


class Weights:
    def __init__(self, config: ModelConfig, dtype: str = "BF16") -> None:
        self.tensors = {n: Facts(dtype, s) for n, s in expected_tensors(config).items()}


def refusal(config: ModelConfig, weights: Weights) -> str:
    with pytest.raises(WeightsError) as caught:
        check_fits(config, weights, "models/x")
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(tied: bool) -> None:
    config = make_config(tied)
    with torch.device("meta"):
        theirs = Qwen2ForCausalLM(Qwen2Config.from_dict(config.to_hf_dict())).state_dict()
        ours = Decoder(config).state_dict()
    if tied:
        del theirs["lm_head.weight"]  # the embedding under a second name
    assert expected_tensors(config) == {name: tuple(t.shape) for name, t in theirs.items()}
    names = hf_names(config)
    assert {names[name]: tuple(t.shape) for name, t in ours.items()} == expected_tensors(config)


@pytest.mark.parametrize("tied", [False, True])
def test_shapes_add_up_to_the_parameter_count(tied: bool) -> None:
    config = make_config(tied)
    assert sum(map(prod, expected_tensors(config).values())) == count_parameters(config)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_float_weights_that_fit_pass(dtype: str) -> None:
    check_fits(make_config(), Weights(make_config(), dtype), "x")


def test_a_tied_model_may_bring_its_head() -> None:
    config, weights = make_config(tied=True), Weights(make_config(tied=True))
    weights.tensors["lm_head.weight"] = Facts("BF16", (50, 32))
    check_fits(config, weights, "x")
    weights.tensors["lm_head.weight"] = Facts("BF16", (0, 32))
    assert "misshapen lm_head.weight: expected [50, 32], found [0, 32]" in refusal(config, weights)


def test_every_kind_of_misfit_is_in_one_error() -> None:
    weights = Weights(make_config())
    del weights.tensors["model.norm.weight"]
    weights.tensors["model.layers.0.self_attn.o_proj.bias"] = Facts("BF16", (32,))
    weights.tensors["model.layers.1.self_attn.k_proj.weight"] = Facts("BF16", (32, 16))
    weights.tensors["lm_head.weight"] = Facts("I8", (50, 32))
    text = refusal(make_config(), weights)
    assert "1 missing, 1 unexpected, 1 misshapen, 1 of another dtype:" in text
    assert "missing model.norm.weight [32]" in text
    assert "unexpected model.layers.0.self_attn.o_proj.bias [32]" in text
    assert "k_proj.weight: expected [16, 32], found [32, 16]" in text
    assert "dtype of lm_head.weight: expected F32, BF16, F16, found I8" in text
    assert "models/x" in text


def test_a_long_list_is_cut_with_a_count() -> None:
    weights = Weights(make_config())
    weights.tensors.clear()
    text = refusal(make_config(), weights)
    assert text.count("\n  missing ") == 12
    assert "... and 27 more" in text


def test_a_missing_head_hints_at_tying() -> None:
    weights = Weights(make_config())
    del weights.tensors["lm_head.weight"]
    assert "hint: the head may be the embedding" in refusal(make_config(), weights)
