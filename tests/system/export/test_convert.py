"""Conversion between weight formats: lossless where it can be, the types of llama.cpp where it
cannot, whole or absent, and readable by others.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.cli.main import main
from engine.errors import UsageError, WeightsError
from engine.export import convert as convert_module
from engine.export import hf_folder as folder_module
from engine.export import mixture
from engine.export.convert import Converted, Progress, format_of
from engine.export.convert import convert as convert_only
from engine.export.mixture import tensor_types
from engine.formats.gguf_write import write_gguf
from engine.formats.open import open_weights
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.names import names_for
from engine.models.read_config import config_of
from engine.models.rope import RopeScaling
from engine.quant.tensor import QuantTensor
from tests.support.converted_files import contradicts_its_source
from tests.support.kit import Kit

FAMILIES = ["qwen2", "qwen3", "llama"]
TOKENS_BT = torch.randint(300, (2, 79), generator=torch.Generator().manual_seed(0))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def convert(source: str | Path, target: str | Path, quant: str, **how: Any) -> Converted:
    """Convert a model, and read the new file again."""
    done = convert_only(source, target, quant, **how)
    assert (
        contradicts_its_source(done.source, done.target, tokenizer=how.get("tokenizer", True)) == ""
    )
    return done


def make_config(family: str = "qwen2", *, tied: bool = False, width: int = 256) -> ModelConfig:
    """Rows of 256 values, or of `width`, and a head of 32 (three blended pairs of sixteen)."""
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    return ModelConfig(
        family=family,
        vocab_size=300,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=scaling if family == "llama" else None,
        tie_word_embeddings=tied,
        eos_token_ids=(0,),
    )


def lively(config: ModelConfig) -> Decoder:
    decoder = new_decoder(config, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.06 * torch.randn(parameter.shape, generator=generator))
    return decoder.eval()


def save(kit: Kit, folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    save_decoder(lively(config), folder, dtype, [kit.teacher / "tokenizer.json"])
    return folder


def held(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor."""
    found = {}
    with open_weights(path) as weights:
        for name, info in weights.tensors.items():
            tensor = weights.get(name)
            raw = tensor.blocks if isinstance(tensor, QuantTensor) else tensor.reshape(-1)
            found[name] = (info.dtype, raw.contiguous().view(torch.uint8).numpy().tobytes())
    return found


@torch.no_grad()
def logits(path: Path) -> Tensor:
    found: Tensor = load_decoder(path).eval()(TOKENS_BT)
    return found


@pytest.mark.parametrize(
    ("family", "tied", "suffix", "quant"),
    [
        # Every pair of two, and of the family that permutes rows all.
        pytest.param(
            *case,
            marks=() if case[0] == "llama" or case[1] == (case[2] == "apr") else pytest.mark.soak,
        )
        for case in product(FAMILIES, (False, True), ("gguf", "apr"), ("f32", "bf16"))
    ],
)
def test_there_and_back_between_float_types_loses_nothing(
    family: str, tied: bool, suffix: str, quant: str, kit: Kit, tmp_path: Path
) -> None:
    dtype = torch.float32 if quant == "f32" else torch.bfloat16
    # Rows that no block fills: float types do not mind.
    source = save(kit, tmp_path / "source", make_config(family, tied=tied, width=120), dtype)
    there = convert(source, tmp_path / f"model.{suffix}", quant)
    back = convert(there.target, tmp_path / "back", quant)
    assert held(back.target) == held(source)
    assert config_of(open_weights(back.target)) == config_of(open_weights(source))
    ours, theirs = (json.loads((p / "tokenizer.json").read_text()) for p in (back.target, source))
    assert ours["model"]["vocab"] == theirs["model"]["vocab"]
    assert ours["model"]["merges"] == theirs["model"]["merges"]
    assert torch.equal(logits(there.target), logits(source))
    assert there.quantized == back.quantized == 0


@pytest.mark.parametrize("width", [256, 96])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_move_byte_for_byte(family: str, width: int, kit: Kit, tmp_path: Path) -> None:
    source = save(kit, tmp_path / "source", make_config(family, width=width))
    first = convert(source, tmp_path / "first.gguf", "q4_k_m")
    assert first.quantized == sum(first.tensors.values()) - first.tensors["F32"]
    again = convert(first.target, tmp_path / "again.gguf", "q4_k_m")
    assert (again.cast, again.quantized) == (0, 0)
    assert held(again.target) == held(first.target)
    if width == 96:
        return
    apr = convert(first.target, tmp_path / "model.apr", "q4_k_m")
    back = convert(apr.target, tmp_path / "back.gguf", "q4_k_m")
    assert apr.kept == back.kept == sum(first.tensors.values())
    assert held(back.target) == held(first.target)
    assert back.target.read_bytes() == again.target.read_bytes()


FEW_MODELS = {
    *(("llama", "q4_k_m"), ("llama", "q6_k"), ("llama", "q8_0")),
    ("gemma3_text", "q4_k_m"),
}


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        # Every type of blocks in the family that permutes rows, and the mixture in one that has most of its own;
        # tests/unit/models/test_packed_decoder.py has every family.
        pytest.param(
            family,
            quant,
            marks=() if (family, quant) in FEW_MODELS else pytest.mark.soak,
        )
        for family in FAMILIES
        for quant in ["q4_k_m", "q6_k", "q8_0", "bf16"]
    ],
)
def test_logits_are_those_of_the_dequantised_weights_everywhere(
    family: str, quant: str, kit: Kit, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = save(kit, tmp_path / "source", make_config(family))
    packed = convert(source, tmp_path / "model.gguf", quant)
    plain = convert(packed.target, tmp_path / "plain", "f32")
    expected_BTV = logits(plain.target)
    assert torch.equal(logits(packed.target), expected_BTV)
    if quant != "q8_0":
        apr = convert(packed.target, tmp_path / "model.apr", quant)
        assert torch.equal(logits(apr.target), expected_BTV)
    load: Any = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        theirs_BTV = load(plain.target, dtype=torch.float32)(TOKENS_BT).logits
    torch.testing.assert_close(expected_BTV, theirs_BTV, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=() if tied == (family == "qwen2") else pytest.mark.soak)
        for family in (*FAMILIES, "phi3", "gemma3_text")
        for tied in (False, True)
    ],
)
def test_transformers_reads_the_same_model_from_our_gguf(
    family: str, tied: bool, kit: Kit, tmp_path: Path
) -> None:
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    # Its loader does not know `rope_freqs.weight`, so without a scaling.
    config = replace(make_config(family, tied=tied), rope_scaling=None)
    source = save(kit, tmp_path / "source", config)
    done = convert(source, tmp_path / "model.gguf", "q8_0")
    raw: Any = config.to_hf_dict()
    theirs: Any = getattr(transformers, raw["architectures"][0])(
        transformers.AutoConfig.for_model(**raw)
    )
    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    read = load(str(done.target), return_tensors=True, model_to_load=theirs)
    for key in ("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert read["config"][key] == pytest.approx(raw[key], rel=1e-6)
    missing, unexpected = theirs.load_state_dict(read["tensors"], strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if tied else [])
    with torch.no_grad():
        expected_BTV = theirs.eval()(TOKENS_BT).logits
    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(logits(done.target), expected_BTV, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quant", ["q4_k_m", "q6_k", "q8_0", "bf16", "f32"])
@pytest.mark.parametrize("width", [256, 96])
def test_the_gguf_package_reads_the_same_values(
    quant: str, width: int, kit: Kit, tmp_path: Path
) -> None:
    source = save(kit, tmp_path / "source", make_config("llama", width=width))
    done = convert(source, tmp_path / "model.gguf", quant)
    reader = gguf.GGUFReader(done.target)
    with open_weights(done.target) as weights:
        assert [tensor.name for tensor in reader.tensors] == list(weights.tensors)
        for theirs in reader.tensors:
            ours = weights.get(theirs.name)
            assert weights.tensors[theirs.name].dtype == theirs.tensor_type.name
            if isinstance(ours, QuantTensor):
                ours = ours.dequantize()
            expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(ours.float().numpy(), expected.reshape(ours.shape))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    assert field("general.architecture") == "llama"
    assert gguf.LlamaFileType(field("general.file_type")).name.endswith(quant.upper())
    assert field("llama.block_count") == 2
    assert field("llama.attention.key_length") == 32
    assert field("general.name") == "source"


def test_llamas_scaling_travels_as_divisors(kit: Kit, tmp_path: Path) -> None:
    config = make_config("llama")
    source = save(kit, tmp_path / "source", config)
    there = convert(source, tmp_path / "model.gguf", "f32")
    with open_weights(there.target) as weights:
        assert weights.tensors["rope_freqs.weight"].shape == (16,)
        assert "llama3" not in json.dumps(weights.config_dict())
        assert config_of(weights) == config
    back = convert(there.target, tmp_path / "back", "f32")
    raw = json.loads((back.target / "config.json").read_text())
    assert raw["rope_scaling"]["rope_type"] == "llama3"
    assert raw["rope_scaling"]["original_max_position_embeddings"] == 8192


def test_rows_of_a_llama_are_permuted_for_those_that_turn_neighbours(
    kit: Kit, tmp_path: Path
) -> None:
    source = save(kit, tmp_path / "source", make_config("llama"))
    plain = load_file(source / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    for suffix, name in (
        ("gguf", "blk.1.attn_k.weight"),
        ("apr", "model.layers.1.self_attn.k_proj.weight"),
    ):
        done = convert(source, tmp_path / f"model.{suffix}", "f32")
        with open_weights(done.target) as weights:
            found = weights.get(name)
            assert isinstance(found, Tensor)
            assert torch.equal(found[0::2][:16], plain[:16])
            assert torch.equal(found[1::2][:16], plain[16:32])
            if suffix == "apr":
                assert weights.metadata["rope_type"] == 0


def test_a_mistral_is_a_llama_in_a_gguf_and_is_refused_where_its_window_would_be_lost(
    kit: Kit, tmp_path: Path
) -> None:
    config = replace(make_config("mistral"), sliding_window=128)
    source = save(kit, tmp_path / "source", config)
    there = convert(source, tmp_path / "model.gguf", "f32")
    with open_weights(there.target) as weights:
        assert weights.metadata["general.architecture"] == "llama"
        assert config_of(weights).family == "llama"
    assert torch.equal(logits(there.target), logits(source))
    short = save(kit, tmp_path / "short", replace(config, sliding_window=16))
    for suffix, words in (
        ("gguf", "expected a sliding_window of null or at least 128, found 16"),
        ("apr", "a family that .apr describes: qwen2, qwen3, llama, found mistral"),
    ):
        with pytest.raises(WeightsError, match=words):
            convert(short, tmp_path / f"short.{suffix}", "f32")
        assert not (tmp_path / f"short.{suffix}").exists()


def test_layers_without_rope_travel_in_a_gguf_where_its_readers_leave_it_out(
    kit: Kit, tmp_path: Path
) -> None:
    config = replace(make_config("smollm3"), num_hidden_layers=5, layers_without_rope=(3,))
    source = save(kit, tmp_path / "source", config)
    there = convert(source, tmp_path / "model.gguf", "f32")
    back = convert(there.target, tmp_path / "back", "f32")
    assert held(back.target) == held(source)
    assert config_of(open_weights(back.target)) == config_of(open_weights(source))
    assert torch.equal(logits(there.target), logits(source))
    other = save(kit, tmp_path / "other", replace(config, layers_without_rope=(2,)))
    with pytest.raises(WeightsError, match="with a 0 for every layer whose number 4 divides"):
        convert(other, tmp_path / "other.gguf", "f32")


def test_has_post_norms_travel_in_a_gguf(kit: Kit, tmp_path: Path) -> None:
    source = save(kit, tmp_path / "source", make_config("olmo2"))
    there = convert(source, tmp_path / "model.gguf", "f32")
    back = convert(there.target, tmp_path / "back", "f32")
    assert held(back.target) == held(source)
    assert config_of(open_weights(back.target)) == config_of(open_weights(source))
    assert torch.equal(logits(there.target), logits(source))


def test_parts_of_one_tensor_travel_together(kit: Kit, tmp_path: Path) -> None:
    config = replace(make_config("phi3"), partial_rotary_factor=0.75, sliding_window=None)
    source = save(kit, tmp_path / "source", config)
    there = convert(source, tmp_path / "model.gguf", "f32")
    with open_weights(there.target) as weights:
        assert weights.metadata["general.architecture"] == "phi3"
        assert weights.metadata["phi3.rope.dimension_count"] == 24
        assert weights.tensors["blk.1.attn_qkv.weight"].shape == (256 + 2 * 64, 256)
        assert config_of(weights) == config
    back = convert(there.target, tmp_path / "back", "f32")
    assert held(back.target) == held(source)
    assert torch.equal(logits(there.target), logits(source))
    first = convert(source, tmp_path / "first.gguf", "q4_k_m")
    with open_weights(first.target) as weights:
        # As llama.cpp has it: of one tensor, v alone cannot have more bits.
        assert weights.tensors["blk.0.attn_qkv.weight"].dtype == "Q6_K"
        assert weights.tensors["blk.0.ffn_up.weight"].dtype == "Q4_K"
    again = convert(first.target, tmp_path / "again.gguf", "q4_k_m")
    assert (again.cast, again.quantized) == (0, 0)
    assert held(again.target) == held(first.target)
    plain = convert(first.target, tmp_path / "plain", "f32")
    assert torch.equal(logits(first.target), logits(plain.target))
    short = save(kit, tmp_path / "short", replace(config, sliding_window=16))
    with pytest.raises(WeightsError, match="expected a sliding_window of null or at least 128"):
        convert(short, tmp_path / "short.gguf", "f32")


def test_factors_of_norms_and_windows_of_layers_travel_in_a_gguf(kit: Kit, tmp_path: Path) -> None:
    config = replace(
        make_config("gemma3_text"),
        num_hidden_layers=7,
        layers_without_window=(5,),
        sliding_window=3,
        rope_theta=1e6,
        rope_factor=8.0,
    )
    source = save(kit, tmp_path / "source", config)
    there = convert(source, tmp_path / "model.gguf", "f32")
    with open_weights(there.target) as weights:
        assert weights.metadata["general.architecture"] == "gemma3"
        assert weights.metadata["gemma3.attention.sliding_window"] == 3
        assert config_of(weights) == config
        found = weights.get("blk.2.post_ffw_norm.weight")
        plain = load_file(source / "model.safetensors")
        wanted = plain["model.layers.2.post_feedforward_layernorm.weight"] + 1
        assert isinstance(found, Tensor) and torch.equal(found, wanted)
    torch.testing.assert_close(logits(there.target), logits(source), rtol=0, atol=1e-5)
    back = convert(there.target, tmp_path / "back", "bf16")
    again = convert(back.target, tmp_path / "again.gguf", "f32")
    assert held(convert(again.target, tmp_path / "more", "bf16").target) == held(back.target)
    for changes, words in (
        ({"layers_without_window": (4,)}, "layer_types with full_attention in every layer 6"),
        ({"rope_local_base_freq": 2e4}, "expected a rope_local_base_freq of 10000, found 20000"),
        ({"query_pre_attn_scalar": 40}, "expected a query_pre_attn_scalar of 32, found 40"),
    ):
        other = save(kit, tmp_path / words, replace(config, **changes))  # type: ignore[arg-type]
        with pytest.raises(WeightsError, match=words):
            convert(other, tmp_path / "other.gguf", "f32")
        assert not (tmp_path / "other.gguf").exists()


def test_a_gguf_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = replace(make_config("mistral"), sliding_window=16)
    path, names = tmp_path / "model.gguf", names_for("gguf", config)
    write_gguf(
        path,
        config={**config.to_hf_dict(), "sliding_window": None},
        tensors=[(names[ours], tensor) for ours, tensor in lively(config).state_dict().items()],
        metadata={"llama.attention.sliding_window": 16},
    )
    with open_weights(path) as weights:
        assert replace(config_of(weights), eos_token_ids=(0,)) == config


QWEN_7B = replace(
    make_config(),
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
)


def types_of(config: ModelConfig, quant: str, format_: str) -> dict[str, str]:
    return {name: kind.name for name, kind in tensor_types(config, quant, format_).items()}


@pytest.mark.parametrize("layers", [9, pytest.param(80, marks=pytest.mark.soak)])
def test_a_gguf_without_the_types_of_its_mixture_is_seen(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 256}
    config = replace(make_config(width=32), num_hidden_layers=layers, **small)
    save_decoder(new_decoder(config, seed=0), tmp_path / "m", torch.float32)
    for quant in ("q4_k_m", "bf16"):
        convert(tmp_path / "m", tmp_path / f"{quant}.gguf", quant)
    monkeypatch.setattr(mixture, "_more_bits", lambda layer, layers: layer < layers // 8)
    other = convert_only(tmp_path / "m", tmp_path / "other.gguf", "q4_k_m").target
    wrong = contradicts_its_source(tmp_path / "m", other, tokenizer=True)
    assert re.search(r"file_type 15: blk\.\d+\.\w+\.weight is \w+, expected \w+", wrong)


@pytest.mark.parametrize(
    ("file", "name", "value", "words"),
    [
        ("m.gguf", "chat_template", lambda weights: None, "template: ''"),
        ("m.apr", "chat_template", lambda weights: None, "template: ''"),
        ("m.apr", "APR_HALVES", 5, "rope_type"),
    ],
)
def test_a_file_that_says_something_else_than_its_source_is_seen(
    file: str, name: str, value: object, words: str, kit: Kit, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(kit.teacher, source)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    convert(source, tmp_path / f"sound-{file}", "bf16")
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(convert_module, name, value)
        convert_only(source, tmp_path / file, "bf16")
        assert words in contradicts_its_source(source, tmp_path / file, tokenizer=True)


def test_q4_k_m_is_the_mixture_of_llama_cpp() -> None:
    found = types_of(QWEN_7B, "q4_k_m", "gguf")
    more = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    for part in ("attention.v", "mlp.down"):
        better = [i for i in range(28) if found[f"layers.{i}.{part}.weight"] == "Q6_K"]
        assert better == more
    assert found["head.weight"] == "Q6_K" and found["embed.weight"] == "Q4_K"
    assert found["layers.3.mlp.down.weight"] == found["layers.3.mlp.gate.weight"] == "Q4_K"
    assert found["layers.0.attention.q.bias"] == found["norm.weight"] == "F32"
    tied = types_of(replace(QWEN_7B, tie_word_embeddings=True), "q4_k_m", "gguf")
    assert tied["embed.weight"] == "Q6_K"
    deep = types_of(replace(QWEN_7B, num_hidden_layers=80), "q4_k_m", "gguf")
    assert deep["layers.10.attention.v.weight"] == "Q6_K"
    assert deep["layers.10.mlp.down.weight"] == "Q4_K"
    assert deep["layers.9.attention.v.weight"] == "Q6_K"


def test_rows_that_blocks_do_not_fill_get_other_types() -> None:
    half = replace(
        QWEN_7B,
        hidden_size=896,
        intermediate_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
    )
    found = types_of(half, "q4_k_m", "gguf")
    assert found["layers.3.mlp.gate.weight"] == "Q5_0"
    assert found["layers.0.attention.v.weight"] == found["head.weight"] == "Q8_0"
    assert found["layers.0.mlp.down.weight"] == "Q6_K"
    odd = types_of(replace(half, intermediate_size=4865), "q8_0", "gguf")
    assert odd["layers.0.mlp.down.weight"] == "F16"
    apr = types_of(half, "q4_k_m", "apr")
    assert apr["layers.3.mlp.gate.weight"] == apr["head.weight"] == "F32"
    assert apr["layers.0.mlp.down.weight"] == "Q6_K"
    deep = types_of(replace(QWEN_7B, num_hidden_layers=80), "q4_k_m", "apr")
    assert set(deep.values()) == {"F32", "Q4_K", "Q6_K"}


@pytest.mark.parametrize(
    ("quant", "format_", "words"),
    [
        ("q8_0", "apr", "expected q4_k_m, q6_k, bf16, f32, found q8_0"),
        ("q4_k_m", "safetensors", "expected bf16, f32, found q4_k_m"),
    ],
)
def test_what_a_format_has_no_type_for_is_refused(quant: str, format_: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tensor_types(QWEN_7B, quant, format_)


def test_the_suffix_says_the_format_unless_told_otherwise() -> None:
    assert format_of(Path("a/x.gguf"), None) == "gguf"
    assert format_of(Path("a/x.APR"), None) == "apr"
    assert format_of(Path("models/qwen"), None) == "safetensors"
    assert format_of(Path("models/qwen2.5-0.5B"), None) == "safetensors"
    assert format_of(Path("x.bin"), "gguf") == "gguf"
    for name in ("model.safetensors", "model.bin"):
        with pytest.raises(UsageError, match=r"expected a \.gguf, an \.apr, or a folder"):
            format_of(Path(name), None)


@pytest.mark.parametrize("name", ["there.gguf", "there.apr", "folder"])
def test_what_is_there_is_never_touched(name: str, kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("there.gguf", "there.apr", "folder/keep"):
        (tmp_path / file).write_text("keep me")
    with pytest.raises(WeightsError, match="expected a new path"):
        convert(kit.teacher, tmp_path / name, "f32")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "there.apr", "there.gguf"]
    assert (tmp_path / "there.gguf").read_text() == "keep me"


@pytest.mark.parametrize("name", ["model.gguf", "model.apr", "model"])
def test_a_conversion_that_fails_leaves_nothing(name: str, kit: Kit, tmp_path: Path) -> None:
    source = save(kit, tmp_path / "source", make_config())
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"][7, 3] = torch.nan  # the last one: all others are written by then
    save_file(tensors, source / "model.safetensors")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(
        WeightsError, match=r"expected finite numbers, found \n  lm_head\.weight: 1 of"
    ):
        convert(source, tmp_path / name, "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_tied_head_that_is_another_matrix_is_refused(kit: Kit, tmp_path: Path) -> None:
    source = save(kit, tmp_path / "source", make_config(tied=True))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight equal to model\.embed_tokens\.weight"):
        convert(source, tmp_path / "model.gguf", "f32")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    done = convert(source, tmp_path / "model.gguf", "f32")
    with open_weights(done.target) as weights:
        assert "output.weight" not in weights.tensors


def test_a_large_folder_is_written_in_shards(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    source = save(kit, tmp_path / "source", make_config())
    monkeypatch.setattr(folder_module, "SHARD_BYTES", 1_000_000)
    done = convert(source, tmp_path / "sharded", "f32")
    parts = sorted(done.target.glob("*.safetensors"))
    assert len(parts) > 3
    assert parts[0].name == f"model-00001-of-{len(parts):05}.safetensors"
    assert held(done.target) == held(source)
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs, report = load(done.target, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.config.model_type == "qwen2"


def test_the_chat_template_and_other_files_come_along(kit: Kit, tmp_path: Path) -> None:
    source = save(kit, tmp_path / "source", make_config())
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (source / "generation_config.json").write_text("{}")
    there = convert(source, tmp_path / "a.gguf", "f32").target
    on = convert(there, tmp_path / "b.apr", "f32").target
    back = convert(on, tmp_path / "back", "f32").target
    assert gguf.GGUFReader(there).fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert (back / "chat_template.jinja").read_text() == TEMPLATE
    assert {p.name for p in convert(source, tmp_path / "copy", "bf16").target.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_a_file_says_of_its_origin_is_kept(kit: Kit, tmp_path: Path) -> None:
    config = make_config()
    plain = convert(save(kit, tmp_path / "source", config), tmp_path / "plain.gguf", "f32").target
    with open_weights(plain) as weights:
        write_gguf(
            tmp_path / "said.gguf",
            config=config.to_hf_dict(),
            tensors=[(name, weights.get(name)) for name in weights.tensors],
            metadata={"general.license": "mit", "general.author": "me", "general.name": "Mine"},
        )
    again = convert(tmp_path / "said.gguf", tmp_path / "again.gguf", "q8_0").target
    apr = convert(again, tmp_path / "model.apr", "bf16").target
    with open_weights(again) as weights:
        assert weights.metadata["general.license"] == "mit"
        assert weights.metadata["general.file_type"] == 7
    with open_weights(apr) as weights:
        assert [weights.metadata[key] for key in ("license", "author", "name")] == [
            "mit",
            "me",
            "Mine",
        ]
    on = convert(apr, tmp_path / "on.apr", "f32").target
    with open_weights(on) as weights:
        assert weights.metadata["license"] == "mit" and "quantization" not in weights.metadata
        assert weights.metadata["total_size"] == sum(i.bytes for i in weights.tensors.values())


def test_what_the_configuration_says_beside_the_shape_is_kept(kit: Kit, tmp_path: Path) -> None:
    source = save(kit, tmp_path / "source", make_config())
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "pad_token_id": 5, "mine": "kept"}))
    back = convert(source, tmp_path / "copy", "f32").target
    assert json.loads((back / "config.json").read_text())["mine"] == "kept"
    there = convert(source, tmp_path / "a.gguf", "f32").target
    with open_weights(there) as weights:
        assert weights.config_dict()["pad_token_id"] == 5


def test_every_tensor_is_reported_once(kit: Kit, tmp_path: Path) -> None:
    seen: list[Progress] = []
    done: Converted = convert(kit.teacher, tmp_path / "m.gguf", "q8_0", on_tensor=seen.append)
    assert [progress.done for progress in seen] == list(range(1, len(seen) + 1))
    assert {progress.total for progress in seen} == {len(seen)} == {sum(done.tensors.values())}
    assert seen[0].name == "token_embd.weight"
    with open_weights(done.target) as weights:
        assert sum(info.bytes for info in weights.tensors.values()) == done.bytes


def test_the_command_prints_the_path_or_one_json_value(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    assert main(["convert", str(kit.teacher), str(path), "--quant", "q8_0"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}\n"
    assert "kept, " in err and "bits per weight" in err
    arguments = [str(path), str(tmp_path / "m"), "--quant", "f32", "--json", "--no-tokenizer"]
    assert main(["convert", *arguments]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["format"] == "safetensors" and record["tokenizer"] is False
    assert record["bits_per_weight"] == 32
    assert "m has no tokenizer" in err
    assert not (tmp_path / "m" / "tokenizer.json").exists()


def test_a_gpu_that_is_not_there_is_refused(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="expected a GPU, found none"):
        convert(kit.teacher, tmp_path / "m.gguf", "q8_0", device="cuda")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{teacher}", "{tmp}/x.bin", "--quant", "f32"], 64, "say which with --format"),
        (["{teacher}", "{tmp}/x.apr", "--quant", "q8_0"], 64, "found q8_0"),
        (["{teacher}", "{tmp}", "--quant", "f32"], 65, "a new path"),
        (["{tmp}/none", "{tmp}/x.gguf", "--quant", "f32"], 65, "none"),
        (["{teacher}", "{tmp}/no/x.gguf", "--quant", "f32"], 65, "{tmp}/no"),
    ],
)
def test_the_command_refuses_with_its_exit_code(
    arguments: list[str],
    code: int,
    words: str,
    kit: Kit,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [text.format(teacher=kit.teacher, tmp=tmp_path) for text in arguments]
    assert main(["convert", *filled]) == code
    out, err = capsys.readouterr()
    assert out == "" and words.format(tmp=tmp_path) in err
    assert list(tmp_path.iterdir()) == []
