"""Configurations and checkpoints as people have them: older, of several models, or of what only transformers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.export.describe import describe
from engine.formats.open import open_weights
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.read_config import read_config
from engine.models.transformers_config import TransformersConfig
from engine.spec.sections import ModelSection
from tests.support.other_models import LIBRARY

SHAPE: dict[str, Any] = dict(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
)
NATIVE, TRANSFORMERS = ModelSection(engine="native"), ModelSection(engine="transformers")


def config_in(folder: Path, raw: dict[str, Any], *, without: tuple[str, ...] = ()) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({key: raw[key] for key in raw if key not in without}))
    return path


def model_in(folder: Path, family: str = "llama", **changes: Any) -> Path:
    config = ModelConfig.from_dict({"model_type": family, **SHAPE, **changes}, "here")
    save_decoder(new_decoder(config, 3), folder, torch.float32)
    return folder


def refusal(path: Path, how: ModelSection) -> str:
    with pytest.raises(WeightsError) as caught:
        read_config(path, how)
    return str(caught.value)


OLDER = ("num_key_value_heads", "rope_theta")


@pytest.mark.parametrize(
    ("family", "absent"),
    [
        *((family, absent) for family in ("llama", "olmo2", "phi3") for absent in (*OLDER, OLDER)),
        ("llama", "max_position_embeddings"),
        ("llama", (*OLDER, "max_position_embeddings")),
    ],
)
def test_keys_that_older_configs_lack_have_the_values_of_transformers(
    family: str, absent: str | tuple[str, ...], tmp_path: Path
) -> None:
    absent = (absent,) if isinstance(absent, str) else absent
    extra = {"sliding_window": None, "pad_token_id": None} if family == "phi3" else {}
    path = config_in(tmp_path, {"model_type": family, **SHAPE, **extra}, without=absent)
    ours = read_config(path, NATIVE)
    theirs = LIBRARY.AutoConfig.from_pretrained(tmp_path)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("absent", ["num_key_value_heads", "rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_a_key_without_a_default_of_the_decoder_says_that_transformers_has_one(
    family: str, absent: str, tmp_path: Path
) -> None:
    raw = {"model_type": family, **SHAPE, "head_dim": 8, "sliding_window": None}
    text = refusal(config_in(tmp_path, raw, without=(absent,)), NATIVE)
    assert f"{absent}: expected a value, found none" in text
    assert "model.engine=transformers" in text


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"model_type": "llama", "attention_bias": True},
        {"model_type": "llama", "mlp_bias": True},
        {"model_type": "llama", "attention_dropout": 0.1},
        {"model_type": "qwen2", "hidden_act": "gelu"},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16},
        {"model_type": "mixtral", "num_local_experts": 2},
        {"model_type": "gpt_neox"},
        {"model_type": "starcoder2"},
        {"model_type": "granite"},
        {"model_type": "olmo"},
    ],
    ids=str,
)
def test_what_the_decoder_lacks_says_that_transformers_runs_it(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    path = config_in(tmp_path, SHAPE | raw)
    text = refusal(path, NATIVE)
    assert "model.engine=transformers" in text and "config.json" in text
    assert isinstance(read_config(path, TRANSFORMERS), TransformersConfig)


@pytest.mark.parametrize("family", ["t5", "nonsense", "bert_like"])
def test_what_nothing_runs_does_not_name_transformers_as_the_way(
    family: str, tmp_path: Path
) -> None:
    path = config_in(tmp_path, SHAPE | {"model_type": family})
    assert "model.engine=transformers" not in refusal(path, NATIVE)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model_type": "llama", "hidden_act": "nonsense"}, "hidden_act 'nonsense'"),
        ({"model_type": "gpt_neox", "hidden_act": "swish9"}, "hidden_act 'swish9'"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "nonsense", "factor": 2.0}},
            "rope_scaling.type 'nonsense'",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}},
            "Missing required keys",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "Missing required keys",
        ),
        ({"model_type": "cohere2", "layer_types": ["full_attention"] * 3}, "num_hidden_layers"),
        ({"model_type": "gpt_neox", "num_attention_heads": "4"}, "num_attention_heads"),
        ({"model_type": "t5"}, "t5"),
        ({"model_type": "bert", "num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"model_type": "gpt_neox", "hidden_size": None}, "hidden_size"),
    ],
    ids=str,
)
def test_an_error_of_transformers_is_a_sentence_about_config_json(
    raw: dict[str, Any], said: str, tmp_path: Path
) -> None:
    text = refusal(config_in(tmp_path, SHAPE | raw), TRANSFORMERS)
    assert said in text and "config.json" in text
    for raw_name in ("KeyError", "<class", "StrictDataclass", "Traceback"):
        assert raw_name not in text


@pytest.mark.parametrize("how", [NATIVE, TRANSFORMERS], ids=["native", "transformers"])
@pytest.mark.parametrize("types", [1, 3, 0, 40])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_layer_types_of_another_length_are_refused(
    family: str, types: int, how: ModelSection, tmp_path: Path
) -> None:
    raw = SHAPE | {
        "model_type": family,
        "head_dim": 8,
        "no_rope_layers": [1, 1],
        "layer_types": ["full_attention"] * types,
    }
    text = refusal(config_in(tmp_path, raw), how)
    assert "layer_types" in text and str(types) in text and "config.json" in text


@pytest.mark.parametrize("fault", [{"hidden_size": -1}, {"vocab_size": "90"}, {"rms_norm_eps": 0}])
def test_a_fault_of_a_models_configuration_names_config_json(
    fault: dict[str, Any], tmp_path: Path
) -> None:
    folder = model_in(tmp_path / "model")
    config_in(folder, json.loads((folder / "config.json").read_text()) | fault)
    with pytest.raises(WeightsError, match=r"model/config\.json — "):
        load_decoder(folder)
    assert "model/config.json — " in describe(folder)["warnings"][0]


BUFFERS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64),
    "model.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 8, 8),
    "model.layers.0.self_attn.rotary_emb.sin_cached": torch.ones(1, 1, 8, 8),
}


@pytest.mark.parametrize("how", [NATIVE, TRANSFORMERS], ids=["native", "transformers"])
@pytest.mark.parametrize(
    ("family", "names"),
    [
        # One buffer alone says whether its name is known, which no family differs in.
        pytest.param(
            family, names, marks=[pytest.mark.soak] * (family != "llama" and len(names) == 1)
        )
        for family in ("llama", "qwen2", "mistral")
        for names in ([[name] for name in BUFFERS] + [[*BUFFERS]])
    ],
    ids=lambda one: one if isinstance(one, str) else one[-1],
)
def test_buffers_of_rope_are_left_out_with_a_notice(
    names: list[str], family: str, how: ModelSection, tmp_path: Path
) -> None:
    folder = model_in(tmp_path / "model", family, **({"sliding_window": None}))
    plain = load_decoder(folder, how=how).state_dict()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {name: BUFFERS[name] for name in names},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    found = load_decoder(folder, how=how).state_dict()
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    with open_weights(folder) as weights:
        (notice,) = weights.warnings
    assert f"{len(names)} buffer" in notice and min(names) in notice
    assert describe(folder)["runs"]


def test_another_tensor_is_still_refused(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in ("inv_freq", "model.layers.0.rotary_emb.weight", "rotary_emb.inv_freq.weight"):
        save_file(tensors | {name: torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(WeightsError, match=f"unexpected {name}"):
            load_decoder(folder)


def sharded(folder: Path, total: object) -> Path:
    """Split the model in two shards whose index has this `total_size`; None leaves it out."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    metadata = {} if total is None else {"metadata": {"total_size": total}}
    index = {**metadata, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_right_or_missing_total_size_is_not_mentioned(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model")
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    for number, total in enumerate((None, held, float(held))):
        with open_weights(sharded(model_in(tmp_path / f"{number}"), total)) as weights:
            assert weights.warnings == ()


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("llava", "llama"),
        ("llava", "mistral"),
        ("llava", "qwen2"),
        ("mistral3", "mistral"),
        ("qwen2", None),
        ("llama", None),
        ("qwen3", "qwen3"),
        ("gemma3", "gemma3_text"),
        ("smolvlm", "llama"),
        ("internvl", "qwen2"),
        ("nonsense", "llama"),
    ],
)
def test_the_configuration_of_a_text_model_inside_another_is_read(
    outer: str, inner: str | None, tmp_path: Path
) -> None:
    gemma = dict(
        query_pre_attn_scalar=8,
        sliding_window=16,
        rope_local_base_freq=1e4,
        sliding_window_pattern=2,
    )
    text = SHAPE | {"head_dim": 8} | (gemma if inner == "gemma3_text" else {"sliding_window": None})
    if inner is not None:
        text["model_type"] = inner
    path = config_in(tmp_path, {"model_type": outer, "text_config": text})
    for how in (NATIVE, ModelSection()):
        found = read_config(path, how)
        assert (found.hidden_size, found.num_hidden_layers, found.vocab_size) == (32, 2, 90)
    assert read_config(path, NATIVE).family == (inner or outer)


PREFIXES = {
    "of today": {"model.": "model.language_model.", "lm_head.": "lm_head."},
    "older": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("how", [NATIVE, ModelSection()], ids=["native", "auto"])
@pytest.mark.parametrize("inner", ["llama", "qwen2", "mistral"])
def test_the_text_model_of_a_checkpoint_with_other_parts_is_loaded(
    inner: str, how: ModelSection, prefixes: dict[str, str], tmp_path: Path
) -> None:
    folder = model_in(tmp_path / "model", inner, sliding_window=None)
    plain = load_decoder(folder).state_dict()
    raw = json.loads((folder / "config.json").read_text())
    config_in(folder, {"model_type": "llava", "text_config": raw, "vision_config": {}})
    tensors = {"vision_tower.encoder.weight": torch.ones(3, 3)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        first = next(one for one in prefixes if name.startswith(one))
        tensors[prefixes[first] + name.removeprefix(first)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = load_decoder(folder, how=how).state_dict()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    with open_weights(folder) as weights:
        assert any("vision_tower.encoder.weight" in text for text in weights.warnings)
