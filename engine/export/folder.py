"""A Hugging Face model folder, written tensor by tensor.

    config.json, tokenizer.json, chat_template.jinja, what else the source has beside its weights,
    and model.safetensors, or shards `model-00001-of-00003.safetensors` with their index

Tensors come one at a time, and how large the model is shows at the end: a shard is written when it
is full, under a name for the time being. The folder is whole or absent.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.export.about import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from engine.formats.safetensors import INDEX_FILE, SINGLE_FILE, write_safetensors
from engine.formats.tokenizer import FILE_NAME as TOKENIZER_FILE
from engine.models.config import CONFIG_FILE
from engine.models.load import new_folder

SHARD_BYTES = 2 << 30
# Of the source, copied as they are: what transformers reads beside weights and configuration.
BESIDE = (
    "generation_config.json",
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_json: bytes | None,
    chat_template: str | None,
    beside: Path | None,
) -> None:
    """Writes a new folder and returns with it on the disk.

    `tensors` have Hugging Face names; `beside` is the folder of the source, where there is one.
    Raises `WeightsError`, `DiskFull`.
    """
    with new_folder(folder) as partial:
        shards = _write_shards(partial, tensors)
        _name_shards(partial, shards)
        _write_text(partial / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        if tokenizer_json is not None:
            (partial / TOKENIZER_FILE).write_bytes(tokenizer_json)
        if chat_template is not None:
            _write_text(partial / TEMPLATE_FILE, chat_template)
        for name in BESIDE if beside is not None else ():
            assert beside is not None
            if (beside / name).is_file():
                shutil.copyfile(beside / name, partial / name)


def _write_shards(partial: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, int]]:
    """Name -> bytes of the tensors of each shard; shard i is the file `_part(i)`."""
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        # transformers refuses a file that does not say which library's tensors it holds.
        write_safetensors(partial / _part(len(shards)), held, {"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor
    flush()
    return shards


def _name_shards(partial: Path, shards: list[dict[str, int]]) -> None:
    if len(shards) == 1:
        (partial / _part(0)).rename(partial / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (partial / _part(number)).rename(partial / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(sum(shard.values()) for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_text(partial / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _part(number: int) -> str:
    return f"part-{number}"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
