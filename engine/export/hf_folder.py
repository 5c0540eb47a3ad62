"""Write a Hugging Face model folder tensor by tensor.

    config.json, tokenizer.json, chat_template.jinja; other files of the source, except weights;
    model.safetensors, or shards `model-00001-of-00003.safetensors` with their index

Tensors arrive one at a time, and the size of the model is known only at the end. So a shard is written under a
temporary name as soon as it is full. The folder appears only when it is complete.

A run's student has only weights, configuration and tokenizer.json. The other files that transformers reads
are created:

    generation_config.json    the end-of-text tokens: the same as in this engine
    tokenizer_config.json     says that tokenizer.json is the whole tokenizer, and which token ends a document

If the student's base has these two files, they are copied instead. A teacher's files are not used: its chat template
would suggest that the student was trained on chats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.errors import TokenizerError
from engine.formats.safetensors import INDEX_FILE, SINGLE_FILE, write_safetensors
from engine.formats.tokenizer import FILE_NAME as TOKENIZER_FILE
from engine.formats.tokenizer import open_tokenizer
from engine.models.config import CONFIG_FILE
from engine.models.load import new_folder
from engine.models.read_config import read_config
from engine.quant.tensor import QuantTensor

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
SHARD_BYTES = 2 << 30
# Files of the source that are copied unchanged: what transformers reads except weights and configuration.
COPIED_FILES = (
    GENERATION_FILE,
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
    tensors: Iterable[tuple[str, Tensor | QuantTensor]],
    tokenizer_json: bytes | None,
    chat_template: str | None,
    source: Path | None,
) -> None:
    """Write a new folder and return when it is safe on disk.

    `tensors` have Hugging Face names; `source` is the folder of the source model, or None. Raises `WeightsError`,
    `DiskFull`.
    """
    with new_folder(folder) as partial:
        shards = _write_shards(partial, tensors)
        _name_shards(partial, shards)
        _write_json(partial / CONFIG_FILE, config)
        if tokenizer_json is not None:
            (partial / TOKENIZER_FILE).write_bytes(tokenizer_json)
        if chat_template is not None:
            (partial / TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")
        _copy_missing(source, partial, COPIED_FILES)


def _write_shards(
    partial: Path, tensors: Iterable[tuple[str, Tensor | QuantTensor]]
) -> list[dict[str, int]]:
    """Write the shards and return name -> bytes of the tensors in each; shard i is the file `_part(i)`."""
    shards: list[dict[str, int]] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        # transformers rejects a file whose metadata does not name the framework of its tensors.
        write_safetensors(partial / _part(len(shards)), shard, {"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in shard.items()})
        shard.clear()

    for name, tensor in tensors:
        assert isinstance(tensor, Tensor), "`convert` writes no blocks to safetensors"
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
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
    _write_json(partial / INDEX_FILE, index)


def _part(number: int) -> str:
    return f"part-{number}"


def complete_folder(folder: Path, base: Path | None) -> None:
    """Add the other files that transformers reads to `folder`, which has a model and its tokenizer.json.

    `base` is the folder of the student's base model, if there was one and it still exists.
    """
    _copy_missing(base, folder, (*COPIED_FILES, TEMPLATE_FILE))
    config = read_config(folder)
    tokenizer = open_tokenizer(folder)
    try:
        end: int | None = tokenizer.end_of_text_id
    except TokenizerError:
        end = None
    eos = list(config.eos_token_ids) or ([] if end is None else [end])
    if not (folder / GENERATION_FILE).exists():
        record: dict[str, Any] = {"do_sample": False}
        if eos:
            record |= {"eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": eos[0]}
        if config.bos_token_id is not None:
            record["bos_token_id"] = config.bos_token_id
        _write_json(folder / GENERATION_FILE, record)
    if not (folder / TOKENIZER_CONFIG_FILE).exists():
        record = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        }
        if end is not None:
            text = tokenizer.tokens()[end]
            record |= {"eos_token": text, "pad_token": text}
        _write_json(folder / TOKENIZER_CONFIG_FILE, record)


def _copy_missing(source: Path | None, folder: Path, names: Iterable[str]) -> None:
    """Copy the files of `names` that exist in the source and not in the folder."""
    for name in names:
        if source is not None and (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
