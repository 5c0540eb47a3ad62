"""What the audit reads in a model's files is what the engine reads there, in every format and family."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from engine.checks.weights import shape_of, weights_of
from engine.errors import WeightsError
from engine.export.convert import convert
from engine.formats.open import open_weights
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, new_decoder, save_decoder
from tests.support.file_metadata import difference, read_apr_metadata, read_metadata
from tests.support.kit import Kit, tiny_config
from tests.support.model_files import open_files, tensor_names

FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "mistral": {"head_dim": 24, "sliding_window": 200},
    "longrope": {
        "model_type": "phi3",
        "sliding_window": None,
        "original_max_position_embeddings": 50,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + pair / 64 for pair in range(32)],
            "long_factor": [1.0 + pair for pair in range(32)],
        },
    },
    "gemma3_text": {
        "head_dim": 24,
        "num_hidden_layers": 7,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 200,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000,
    },
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": None, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    config = tiny_config(
        **{
            "model_type": family,
            "hidden_size": 256,
            "intermediate_size": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            **FAMILIES[family],
        }
    )
    decoder = new_decoder(ModelConfig.from_dict(config, family), seed=3)
    for number, parameter in enumerate(decoder.parameters()):
        if parameter.ndim == 1:
            # Fresh norms are all ones, fresh biases all zeros.
            generator = torch.Generator().manual_seed(number)
            parameter.data.add_(torch.rand(parameter.shape, generator=generator))
    path = tmp_path_factory.mktemp(family) / "model"
    save_decoder(decoder, path, torch.float32)
    return path


@pytest.mark.parametrize("quant", ["folder", pytest.param("f32", marks=pytest.mark.soak), "q4_k_m"])
def test_files_hold_the_weights_and_the_shape_that_are_loaded(
    folder: Path, quant: str, tmp_path: Path
) -> None:
    path = folder
    if quant != "folder" and folder.parent.name.startswith("longrope"):
        with pytest.raises(WeightsError, match=r"rotary positions of .*, found 'longrope'"):
            convert(folder, tmp_path / "model.gguf", quant)
        return
    if quant != "folder":
        path = convert(folder, tmp_path / "model.gguf", quant).target
    decoder = load_decoder(path)
    files, shape = open_files(path), shape_of(decoder.config)
    assert files is not None
    fields = asdict(shape)
    for name, value in files.shape.items():
        assert (fields.get(name) or 0) == pytest.approx(value or 0), name
    weight = weights_of(decoder)
    for name in tensor_names(shape):
        count = files.count(name)
        assert count == weight(name).shape[0], name
        rows = [0, 1, count // 2, count - 1]
        assert torch.equal(files.rows(name, rows), weight(name)[rows]), name


@pytest.mark.parametrize("name", ["model.gguf", "model.apr"])
def test_converted_files_say_what_the_folder_says(
    folder: Path, name: str, kit: Kit, tmp_path: Path
) -> None:
    shutil.copytree(folder, model := tmp_path / "model")
    shutil.copyfile(kit.teacher / "tokenizer.json", model / "tokenizer.json")
    try:
        path = convert(model, tmp_path / name, "f32").target
    except WeightsError as error:
        # Formats that do not have it.
        assert "longrope" in error.message or "family" in error.message
        return
    wanted = read_metadata(model)
    assert wanted is not None
    if name == "model.gguf":
        files = [("", read_metadata(path))]
    else:
        with open_weights(path) as apr:
            files = list(read_apr_metadata(apr.metadata, path))
    for _, found in files:
        assert found is not None and difference(wanted, found) == ""
        assert {"layers", "theta", "positions", "tokens", "kinds", "merges"} <= found.keys()


def test_a_format_that_nobody_else_reads_has_no_files(tmp_path: Path) -> None:
    assert open_files(tmp_path / "model.apr") is None
