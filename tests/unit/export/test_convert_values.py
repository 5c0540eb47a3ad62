"""What a conversion refuses of values, and files that it writes without a tokenizer, read by other readers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.export.convert import convert
from engine.formats.open import open_weights
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, new_decoder, save_decoder
from tests.support.paths import DEMO

SHAPE: dict[str, object] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
)
NAN, INF = float("nan"), float("inf")


def model_in(folder: Path, vocab_size: int = 90) -> Path:
    raw = {"model_type": "qwen2", "vocab_size": vocab_size, **SHAPE}
    save_decoder(new_decoder(ModelConfig.from_dict(raw, "here"), 3), folder, torch.float32)
    return folder


@pytest.mark.parametrize(
    ("target", "quant"),
    [
        *(("m.gguf", quant) for quant in ("f32", "bf16", "q8_0")),
        *(("m.apr", quant) for quant in ("f32", "q6_k")),
        *(("folder", quant) for quant in ("f32", "bf16")),
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.gate_proj.weight", NAN),
        ("model.layers.0.input_layernorm.weight", NAN),
        ("model.layers.0.self_attn.q_proj.bias", NAN),
        ("model.norm.weight", INF),
        ("model.embed_tokens.weight", -INF),
        ("lm_head.weight", INF),
    ],
)
def test_values_that_are_not_finite_are_refused_in_every_type(
    name: str, value: float, quant: str, target: str, tmp_path: Path
) -> None:
    tensors = load_file(model_in(tmp_path / "model") / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        convert(tmp_path / "model", tmp_path / target, quant)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("start", [0, 34, 34 * 100])
def test_blocks_that_are_kept_are_refused_where_their_scales_are_not_finite(
    start: int, tmp_path: Path
) -> None:
    made = convert(model_in(tmp_path / "model"), tmp_path / "a.gguf", "q8_0").target
    with open_weights(made) as weights:
        at = weights.tensors["token_embd.weight"].start
    with made.open("r+b") as file:
        file.seek(at + start)
        file.write(b"\x00\x7e")
    with pytest.raises(WeightsError, match=r"token_embd\.weight: 32 of .* are NaN"):
        convert(made, tmp_path / "b.gguf", "q8_0")


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize(
    ("target", "quant"),
    [
        *(("m.gguf", quant) for quant in ("f32", "bf16", "q8_0", "q6_k", "q4_k_m")),
        ("m.apr", "f32"),
        ("m.apr", "q6_k"),
        ("folder", "f32"),
        ("folder", "bf16"),
    ],
)
def test_a_file_without_the_tokenizer_of_its_source_is_complete(
    target: str, quant: str, template: bool, tmp_path: Path
) -> None:
    source = model_in(tmp_path / "model", vocab_size=512)
    shutil.copyfile(DEMO / "teacher" / "tokenizer.json", source / "tokenizer.json")
    if template:
        (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    done = convert(source, tmp_path / target, quant, tokenizer=False)
    assert not done.tokenizer
    assert load_decoder(done.target).config == load_decoder(source).config
    if target == "m.gguf":
        reader = GGUFReader(done.target)
        assert "tokenizer.ggml.tokens" not in reader.fields
        assert len(reader.tensors) == len(load_file(source / "model.safetensors"))
    assert not (done.target / "tokenizer.json").exists()
