"""A row of the table of families, and one of block types, is all that a new one needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import WeightsError
from engine.formats.gguf_metadata import config_metadata
from engine.formats.open import open_weights
from engine.model_families import FAMILIES, Family
from engine.models.config import ModelConfig, count_parameters
from engine.models.load import load_decoder, load_packed_decoder, save_decoder
from engine.models.names import names_for
from engine.models.read_config import config_of, read_config
from engine.quant.blocks import BLOCK_TYPES, GGML_NAMES, Bits, BlockType, Layout
from engine.quant.planes import pack, unpack
from engine.quant.quantize import quantize
from tests.support.packed_models import lively, make_config, random_tokens, write

TOY_FAMILY = Family(
    name="toy",
    title="Toy",
    hf_class="ToyForCausalLM",
    attention_bias=True,
    qk_norm=True,
    rope_types=("default", "llama3"),
    hf_flags={"mlp_bias": False},
    turns_neighbours=True,
)
TOY_TYPE = BlockType(
    name="Q6_0",
    ggml_id=98,
    block_size=32,
    block_bytes=26,
    file_type=1098,
    largest=31 * 65504.0,
    layout=Layout(
        d=24,
        low=Bits(start=0, count=16, run=16, width=4),
        high=Bits(start=16, count=8, run=8, width=2),
        zero=32,
        levels=63,
        steps=(-3.0, 0.5),
    ),
)


@pytest.fixture
def toy_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(FAMILIES, TOY_FAMILY.name, TOY_FAMILY)
    return TOY_FAMILY


@pytest.fixture
def toy_type(monkeypatch: pytest.MonkeyPatch) -> BlockType:
    monkeypatch.setitem(BLOCK_TYPES, TOY_TYPE.name, TOY_TYPE)
    monkeypatch.setitem(GGML_NAMES, TOY_TYPE.ggml_id, TOY_TYPE.name)
    return TOY_TYPE


def test_a_new_family_is_read_run_saved_and_loaded_again(
    tmp_path: Path, toy_family: Family
) -> None:
    config = make_config("toy")
    assert ModelConfig.from_dict(config.to_hf_dict(), "config.json") == config
    assert config.to_hf_dict()["architectures"] == ["ToyForCausalLM"]
    decoder = lively(config)
    assert set(decoder.state_dict()) == set(names_for("hf", config))
    assert count_parameters(config) == sum(p.numel() for p in decoder.parameters())
    assert "blk.1.attn_q.bias" in names_for("gguf", config).values()
    assert "blk.1.attn_q_norm.weight" in names_for("gguf", config).values()

    save_decoder(decoder, tmp_path / "model", torch.float32)
    assert read_config(tmp_path / "model") == config
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(load_decoder(tmp_path / "model").logits(tokens), decoder.logits(tokens))


@pytest.mark.parametrize("suffix", ["gguf", "apr"])
def test_a_new_family_is_read_from_every_kind_of_file(
    tmp_path: Path, toy_family: Family, suffix: str
) -> None:
    decoder = lively(make_config("toy"))
    path = write(tmp_path / f"m.{suffix}", decoder, "Q6_K", floats="weight")
    with open_weights(path) as weights:
        assert config_of(weights) == decoder.config
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(load_decoder(path).logits(tokens), decoder.logits(tokens))


def test_a_new_family_is_named_where_another_is_refused(toy_family: Family) -> None:
    raw = make_config("qwen2").to_hf_dict() | {"model_type": "gpt2"}
    with pytest.raises(WeightsError, match=r"a Qwen2, Qwen3, .* or Toy decoder") as caught:
        ModelConfig.from_dict(raw, "config.json")
    assert "' or 'toy'" in str(caught.value)
    with pytest.raises(WeightsError, match=r"a model_type of qwen2, qwen3, .*, toy"):
        config_metadata(raw, "m.gguf")


def test_a_new_block_type_is_written_read_packed_and_run(
    tmp_path: Path, toy_type: BlockType
) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    made = quantize(x, toy_type)
    assert made.blocks.shape == (5, 52)
    assert (made.dequantize() - x).abs().max() < x.abs().max() / 31
    assert torch.equal(unpack(pack(made)).blocks, made.blocks)

    path = write(tmp_path / "m.gguf", lively(make_config("qwen2")), "Q6_0")
    with open_weights(path) as weights:
        assert weights.tensors["blk.0.attn_q.weight"].dtype == "Q6_0"
        assert weights.metadata["general.file_type"] == 1098
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        expected = load_decoder(path).logits(tokens)
        found = load_packed_decoder(path).logits(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
