"""The table of names: the tensors that transformers and llama.cpp have, the order of the rows of q
and k, and one error for all that misfit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import gguf
import pytest
import torch

from engine.errors import WeightsError
from engine.model_families import FAMILIES
from engine.models.config import ModelConfig, count_parameters
from engine.models.decoder import Decoder
from engine.models.names import (
    check_fits,
    expected_tensors,
    hf_names,
    joined,
    names_for,
    permute_rows,
    rotated_heads,
    rotates_neighbours,
    unpermute_rows,
)
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.tensor import QuantTensor


def make_config(tied: bool = False, layers: int = 3, family: str = "qwen2") -> ModelConfig:
    return ModelConfig(
        family=family,
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
    name: str = ""


class Weights:
    def __init__(self, config: ModelConfig, dtype: str = "BF16", convention: str = "hf") -> None:
        expected = expected_tensors(config, convention)
        self.tensors = {name: Facts(dtype, shape, name) for name, shape in expected.items()}


def refusal(config: ModelConfig, weights: Weights, convention: str = "hf") -> str:
    with pytest.raises(WeightsError) as caught:
        check_fits(config, weights, "models/x", convention)
    return str(caught.value)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(tied: bool, family: str) -> None:
    import transformers

    config = make_config(tied, family=family)
    raw: Any = config.to_hf_dict()
    with torch.device("meta"):
        made: Any = getattr(transformers, raw["architectures"][0])
        theirs = made(transformers.AutoConfig.for_model(**raw)).state_dict()
        ours = Decoder(config).state_dict()
    if tied:
        del theirs["lm_head.weight"]  # the embedding under a second name
    assert expected_tensors(config) == {name: tuple(t.shape) for name, t in theirs.items()}
    names = hf_names(config)
    found = joined(names, ((name, ours[name]) for name in names))
    assert {name: tuple(t.shape) for name, t in found} == expected_tensors(config)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_gguf_names_are_those_that_llama_cpp_gives_to_the_hugging_face_names(family: str) -> None:
    config = make_config(family=family)
    architecture = gguf.MODEL_ARCH[config.kind.gguf.upper()]
    theirs = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    names = names_for("gguf", config)
    for ours, hf in hf_names(config).items():
        assert names[ours] == theirs.get_name(hf, try_suffixes=(".weight", ".bias"))
    assert list(names) == list(hf_names(config))
    assert list(expected_tensors(config, "gguf").values()) == list(
        expected_tensors(config).values()
    )


def test_apr_names_are_the_hugging_face_names() -> None:
    config = make_config(family="qwen3")
    assert names_for("apr", config) == hf_names(config)
    with pytest.raises(ValueError, match="convention: expected hf, gguf, apr, found 'onnx'"):
        names_for("onnx", config)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_shapes_add_up_to_the_parameter_count(tied: bool, family: str) -> None:
    config = make_config(tied, family=family)
    assert sum(map(prod, expected_tensors(config).values())) == count_parameters(config)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("convention", ["hf", "gguf", "apr"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_float_weights_that_fit_pass(dtype: str, convention: str, family: str) -> None:
    config = make_config(family=family)
    check_fits(config, Weights(config, dtype, convention), "x", convention)


def test_blocks_fit_where_the_format_has_them() -> None:
    config = make_config()
    blocks = (
        "F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS"
    )
    for convention, dtypes in (("gguf", blocks), ("apr", blocks)):
        check_fits(config, Weights(config, "Q4_K", convention), "x", convention)
        text = refusal(config, Weights(config, "I8", convention), convention)
        assert f"expected {dtypes}, found I8" in text
    text = refusal(config, Weights(config, "Q4_K"))
    assert "dtype of lm_head.weight: expected F32, BF16, F16, found Q4_K" in text.replace(
        "model.embed_tokens.weight", "lm_head.weight"
    )


def test_a_gguf_does_not_fit_by_the_names_of_another_convention() -> None:
    config = make_config(layers=1)
    text = refusal(config, Weights(config, "F32", "gguf"))
    assert "15 missing, 15 unexpected" in text


def test_a_tied_gguf_may_bring_its_head_and_a_llama_its_rope_divisors() -> None:
    config = make_config(tied=True, family="llama")
    weights = Weights(config, "F32", "gguf")
    weights.tensors["output.weight"] = Facts("Q6_K", (50, 32), "output.weight")
    weights.tensors["rope_freqs.weight"] = Facts("F32", (4,), "rope_freqs.weight")
    check_fits(config, weights, "x", "gguf")
    weights.tensors["rope_freqs.weight"] = Facts("F32", (8,), "rope_freqs.weight")
    assert "misshapen rope_freqs.weight: expected [4], found [8]" in refusal(
        config, weights, "gguf"
    )
    qwen = Weights(make_config(tied=True), "F32", "gguf")
    qwen.tensors["rope_freqs.weight"] = Facts("F32", (4,), "rope_freqs.weight")
    assert "unexpected rope_freqs.weight" in refusal(make_config(tied=True), qwen, "gguf")


def test_a_head_without_values_is_no_head_in_a_tied_apr_and_nowhere_else() -> None:
    tied = make_config(tied=True)
    for shape in ((0,), (0, 32)):
        weights = Weights(tied, "F32", "apr")
        weights.tensors["lm_head.weight"] = Facts("F32", shape, "lm_head.weight")
        check_fits(tied, weights, "x", "apr")
        assert "misshapen lm_head.weight" in refusal(tied, weights)
        weights.tensors["model.norm.weight"] = Facts("F32", (0,), "model.norm.weight")
        assert "misshapen model.norm.weight" in refusal(tied, weights, "apr")
    untied = Weights(make_config(), "F32", "apr")
    untied.tensors["lm_head.weight"] = Facts("F32", (0, 32), "lm_head.weight")
    assert "missing lm_head.weight [50, 32]" not in refusal(make_config(), untied, "apr")


@pytest.mark.parametrize("missing", ["attn_q_norm", "attn_k_norm"])
def test_a_qwen3_without_its_norms_does_not_fit(missing: str) -> None:
    config = make_config(family="qwen3")
    weights = Weights(config, "F32", "gguf")
    del weights.tensors[f"blk.1.{missing}.weight"]
    assert f"missing blk.1.{missing}.weight [8]" in refusal(config, weights, "gguf")


# Rows of two heads of six: the halves are 0 1 2 | 3 4 5, and the pairs 0 3, 1 4, 2 5.
HALVES = list(range(12))
NEIGHBOURS = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_permuted_rows_put_each_pair_side_by_side() -> None:
    rows = torch.tensor(HALVES)
    assert permute_rows(rows, heads=2).tolist() == NEIGHBOURS
    assert unpermute_rows(torch.tensor(NEIGHBOURS), heads=2).tolist() == HALVES


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("width", [2, 6, 64])
@pytest.mark.parametrize("columns", [(), (1,), (5,), (3, 2)])
def test_permuting_is_undone_by_unpermuting(
    heads: int, width: int, columns: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(heads)
    rows = torch.randn(heads * width, *columns, generator=generator)
    there = permute_rows(rows, heads)
    # The formula of llama.cpp's converter.
    theirs = rows.numpy().reshape(heads, 2, width // 2, *columns).swapaxes(1, 2).reshape(rows.shape)
    assert torch.equal(there, torch.from_numpy(theirs.copy()))
    assert torch.equal(unpermute_rows(there, heads), rows)
    assert torch.equal(permute_rows(unpermute_rows(rows, heads), heads), rows)
    if width > 2:
        assert not torch.equal(there, rows)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_blocks_move_with_their_row_and_keep_every_byte(name: str) -> None:
    type_ = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(0)
    shape = (12, 2 * type_.block_size)
    blocks = torch.randint(256, (12, 2 * type_.block_bytes), generator=generator).to(torch.uint8)
    tensor = QuantTensor(blocks, type_, shape)
    there = permute_rows(tensor, heads=2)
    assert there.shape == shape and there.type is type_
    for row, source in enumerate(NEIGHBOURS):
        assert torch.equal(there.blocks[row], blocks[source])
    assert torch.equal(unpermute_rows(there, heads=2).blocks, blocks)


def test_the_heads_of_q_and_k_are_turned_and_nothing_else() -> None:
    config = make_config(family="qwen2", layers=1)
    turned = {ours: rotated_heads(config, ours) for ours in hf_names(config)}
    assert {ours: heads for ours, heads in turned.items() if heads} == {
        "layers.0.attention.q.weight": 4,
        "layers.0.attention.q.bias": 4,
        "layers.0.attention.k.weight": 2,
        "layers.0.attention.k.bias": 2,
    }
    norms = [ours for ours in hf_names(make_config(family="qwen3")) if "_norm" in ours]
    assert norms and not any(rotated_heads(config, ours) for ours in norms)


def test_only_llama_is_stored_for_turning_neighbours() -> None:
    llama, qwen = make_config(family="llama"), make_config(family="qwen3")
    assert rotates_neighbours(llama, "gguf", {}, "x")
    assert not rotates_neighbours(llama, "hf", {}, "x")
    assert not rotates_neighbours(qwen, "gguf", {}, "x")
    assert rotates_neighbours(llama, "apr", {"rope_type": 0}, "x")
    assert not rotates_neighbours(llama, "apr", {"rope_type": 2}, "x")
    assert not rotates_neighbours(qwen, "apr", {"rope_type": 2}, "x")
    assert not rotates_neighbours(qwen, "apr", {}, "x")
    with pytest.raises(WeightsError, match="rope_type: x — expected 0 or 2 for llama, found None"):
        rotates_neighbours(llama, "apr", {}, "x")
    with pytest.raises(WeightsError, match="expected 2 or none for qwen3, found 0"):
        rotates_neighbours(qwen, "apr", {"rope_type": 0}, "x")


def test_a_tied_model_may_bring_its_head() -> None:
    config, weights = make_config(tied=True), Weights(make_config(tied=True))
    weights.tensors["lm_head.weight"] = Facts("BF16", (50, 32), "lm_head.weight")
    check_fits(config, weights, "x")
    weights.tensors["lm_head.weight"] = Facts("BF16", (0, 32), "lm_head.weight")
    assert "misshapen lm_head.weight: expected [50, 32], found [0, 32]" in refusal(config, weights)


def test_every_kind_of_misfit_is_in_one_error() -> None:
    weights = Weights(make_config())
    del weights.tensors["model.norm.weight"]
    weights.tensors["model.layers.0.self_attn.o_proj.bias"] = Facts(
        "BF16", (32,), "model.layers.0.self_attn.o_proj.bias"
    )
    weights.tensors["model.layers.1.self_attn.k_proj.weight"] = Facts(
        "BF16", (32, 16), "model.layers.1.self_attn.k_proj.weight"
    )
    weights.tensors["lm_head.weight"] = Facts("I8", (50, 32), "lm_head.weight")
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
