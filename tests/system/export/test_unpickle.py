"""Checkpoints in pickles: their tensors become safetensors, and whatever else a pickle names is refused uncalled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import WeightsError
from engine.export.unpickle import PICKLE_FILE, PICKLE_INDEX, unpickle
from engine.formats.open import open_weights
from tests.support.running import engine_here

CONFIG = {"model_type": "gpt_neox", "tie_word_embeddings": True, "hidden_size": 4}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(6, 4, generator=generator)
    return {
        "embed.weight": embedding,
        "layer.weight": torch.randn(4, 8, generator=generator).t(),
        "layer.bias": torch.randn(4, generator=generator).bfloat16(),
        "count": torch.arange(3),
        "head.weight": embedding,
    }


def folder(path: Path, *files: tuple[str, Any], config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text("{}")
    for name, content in files:
        torch.save(content, path / name)
    return path


def read(path: Path) -> dict[str, Tensor]:
    with open_weights(path) as found:
        return {name: found.get(name) for name in found.tensors}  # type: ignore[misc]


def agree(made: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor), name


def test_a_whole_checkpoint_becomes_safetensors_with_what_lies_beside_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", (PICKLE_FILE, weights()))
    shown = engine_here("convert", "--from-pickle", source, tmp_path / "new", "--json")
    said = json.loads(shown.stdout)
    assert said["tensors"] == 4 and said["target"] == str(tmp_path / "new")
    wanted = weights()
    # It is the embedding, and config.json says so.
    del wanted["head.weight"]
    agree(read(tmp_path / "new"), wanted)
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == CONFIG
    assert (tmp_path / "new" / "tokenizer_config.json").exists()


def test_a_head_that_config_json_does_not_tie_is_written_too(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", (PICKLE_FILE, weights()), config={"model_type": "x"})
    unpickle(source, tmp_path / "new")
    agree(read(tmp_path / "new"), weights())


def test_shards_and_files_of_old_versions_are_read(tmp_path: Path) -> None:
    wanted = {name: one.clone() for name, one in weights().items()}
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    parts = [{name: wanted[name] for name in part} for part in (list(wanted)[:2], list(wanted)[2:])]
    source = folder(tmp_path / "old", (names[0], parts[0]))
    torch.save(parts[1], source / names[1], _use_new_zipfile_serialization=False)
    index = {"weight_map": {name: names[at] for at in (0, 1) for name in parts[at]}}
    (source / PICKLE_INDEX).write_text(json.dumps(index))
    unpickle(source, tmp_path / "new")
    agree(read(tmp_path / "new"), wanted)


class Calls:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(
    tmp_path: Path, is_zip: bool
) -> None:
    made = tmp_path / "made by the pickle"
    source = folder(tmp_path / "old")
    content = {"weight": torch.ones(2), "other": Calls(made)}
    torch.save(content, source / PICKLE_FILE, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(WeightsError, match="tensors and nothing else in the pickle"):
        unpickle(source, tmp_path / "new")
    assert not made.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([torch.ones(2)], "found list"),
        ({"a": torch.ones(2), "b": 3}, r"others: \['b'\]"),
        ({"a": torch.eye(3).to_sparse()}, r"others: \['a'\]"),
        ({}, "found dict"),
    ],
)
def test_what_is_no_names_and_tensors_is_refused(tmp_path: Path, content: Any, found: str) -> None:
    source = folder(tmp_path / "old", (PICKLE_FILE, content))
    with pytest.raises(WeightsError, match=found):
        unpickle(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_broken_files_and_indexes_are_refused_by_name(tmp_path: Path) -> None:
    source = folder(tmp_path / "old")
    with pytest.raises(WeightsError, match="neither"):
        unpickle(source, tmp_path / "new")
    torch.save(weights(), source / PICKLE_FILE)
    content = (source / PICKLE_FILE).read_bytes()
    (source / PICKLE_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match=PICKLE_FILE):
        unpickle(source, tmp_path / "new")
    for index in ({}, {"weight_map": {"a": "../a.bin"}}, {"weight_map": {"a": "none.bin"}}):
        (source / PICKLE_INDEX).write_text(json.dumps(index))
        with pytest.raises(WeightsError, match="index"):
            unpickle(source, tmp_path / "new")


def test_the_refusal_of_a_pickle_has_the_command_that_converts_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", (PICKLE_FILE, weights()))
    with pytest.raises(WeightsError) as refused:
        open_weights(source)
    assert f"engine convert --from-pickle {source} old-safetensors" in str(refused.value.hint)
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "a1b2"
    snapshot.parent.mkdir(parents=True)
    with pytest.raises(WeightsError) as refused:
        open_weights(folder(snapshot, (PICKLE_FILE, weights())))
    assert str(refused.value.hint).endswith(f"{snapshot} tiny-safetensors")
    shown = engine_here("convert", source, tmp_path / "new")
    assert shown.returncode == 64 and "--quant" in shown.stderr
