"""Conversion of a checkpoint in pickles (`pytorch_model.bin`, whole or in shards) to a folder of safetensors.

A pickle can name any function and have it called. `torch.load(weights_only=True)` has an unpickler of its own, which
makes tensors and containers of them, and refuses every other name before anything is called; nothing else here reads
the file. Only a command of its own converts a pickle; no other command does it on the way.

Any architecture is converted: names and values are those of the file. A head that is the embedding's own memory is
written once where config.json says that the two are tied.

Host memory: one shard of at most `SHARD_BYTES` plus the mapped files; files of torch before 1.6 are read whole.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine import files, limits
from engine.errors import WeightsError
from engine.export.hf_folder import TEMPLATE_FILE, write_folder
from engine.formats.safetensors import escapes
from engine.formats.tokenizer import FILE_NAME as TOKENIZER_FILE
from engine.formats.weights import read_json_object
from engine.models.config import CONFIG_FILE

PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpickled:
    target: Path
    tensors: int
    bytes: int


def unpickle(
    source: Path, target: Path, on_tensor: Callable[[str], None] = lambda name: None
) -> Unpickled:
    """Write the checkpoint in the folder `source` to the new folder `target`.

    Raises `WeightsError`, `DiskFull`.
    """
    config = read_json_object(source / CONFIG_FILE, "config", limits.MODEL_CONFIG)
    counted: list[int] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        written: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
        for file in _list_files(source):
            for name, tensor in _read(file).items():
                memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
                if config.get("tie_word_embeddings") and memory in written:
                    continue
                written[memory] = name
                counted.append(tensor.nbytes)
                on_tensor(name)
                yield name, tensor.contiguous()

    tokenizer = source / TOKENIZER_FILE
    template = source / TEMPLATE_FILE
    write_folder(
        target,
        config=config,
        tensors=tensors(),
        tokenizer_json=files.read_bytes(
            tokenizer, "tokenizer", limits.TOKENIZER_FILE, error=WeightsError
        )
        if tokenizer.exists()
        else None,
        chat_template=files.read_text(
            template, "chat template", limits.MODEL_TEXT, error=WeightsError
        )
        if template.exists()
        else None,
        source=source,
    )
    return Unpickled(target=target, tensors=len(counted), bytes=sum(counted))


def _list_files(source: Path) -> list[Path]:
    """Return the files of the checkpoint. Raises WeightsError."""
    index = source / PICKLE_INDEX
    if not index.exists():
        if not (source / PICKLE_FILE).is_file():
            raise WeightsError.expected(
                "weights", source, f"{PICKLE_FILE} or {PICKLE_INDEX}", "neither"
            )
        return [source / PICKLE_FILE]
    weight_map = read_json_object(index, "index", limits.WEIGHTS_HEADER).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise WeightsError.expected("index", index, "`weight_map`, names to files", "none")
    names = sorted(set(weight_map.values()))
    for name in names:
        if escapes(name) or not (source / name).is_file():
            raise WeightsError.expected("index", index, "files in its folder", name)
    return [source / name for name in names]


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one file, by name; they are mapped from the disk if it is a zip archive. Raises
    WeightsError."""
    try:
        tensors = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except pickle.UnpicklingError as error:
        lines = str(error).split("\n")
        reason = next(
            (line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0]
        )
        raise WeightsError.expected(
            "weights", file, "tensors and nothing else in the pickle", reason.strip()
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        text = str(error).split("\n")[0] or type(error).__name__
        raise WeightsError.expected("weights", file, "a whole file of torch.save", text) from error
    if not isinstance(tensors, dict) or not tensors:
        raise WeightsError.expected(
            "weights", file, "names and their tensors", type(tensors).__name__
        )
    unsupported = [name for name, tensor in tensors.items() if not _is_plain(name, tensor)]
    if unsupported:
        raise WeightsError.expected(
            "weights", file, "names and their dense tensors alone", f"others: {unsupported[:4]}"
        )
    return tensors


def _is_plain(name: object, tensor: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
    )
