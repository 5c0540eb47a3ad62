"""Write a GGUF file of version 3 (layout: `engine.formats.gguf`), completely or not at all.

Metadata is built from a config.json and a tokenizer.json. Tensors keep their order and types.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import WeightsError
from engine.formats.gguf import DEFAULT_ALIGNMENT
from engine.formats.gguf_metadata import config_metadata, uint32
from engine.formats.gguf_tokenizer import tokenizer_metadata
from engine.formats.gguf_values import (
    GgufValue,
    ValueType,
    encode_string,
    encode_value,
    quoted,
    refuse_key,
)
from engine.formats.writing import StoredTensor, new_file, tensor_bytes
from engine.model_families import FAMILIES
from engine.quant.blocks import BLOCK_TYPES

if TYPE_CHECKING:
    import torch

    from engine.quant.tensor import QuantTensor

VERSION = 3
QUANTIZATION_VERSION = 2

_TORCH_KINDS = {
    f"torch.{kind.float_dtype}": name for name, kind in BLOCK_TYPES.items() if kind.float_dtype
}


def write_gguf(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor | QuantTensor]],
    tokenizer_json: bytes | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a new file, and return when it is safe on disk.

    `config` is a Hugging Face config.json. `tensors` have GGUF names and are written in their order
    and type (float32, float16, bfloat16 or blocks). `metadata` adds keys with a text or a count
    (`general.name`, `tokenizer.chat_template`, ...) and may set `general.file_type`, by default the type of most
    weights. An existing file is refused. Raises `WeightsError`, `TokenizerError`, `DiskFull`.
    """
    path = Path(path)
    values = _metadata(config, tokenizer_json, metadata or {}, path)
    with new_file(path, DEFAULT_ALIGNMENT) as (file, data):
        for name, tensor in tensors:
            kind, raw = _dtype_and_bytes(name, tensor, path)
            data.add(name, kind, tuple(tensor.shape), raw)
        values.setdefault("general.file_type", _u32(_file_type(data.tensors)))
        file.write(_header(values, data.tensors))
        for piece in data.pieces():
            file.write(piece)


def _metadata(
    config: Mapping[str, Any],
    tokenizer_json: bytes | None,
    extra: Mapping[str, Any],
    path: Path,
) -> dict[str, GgufValue]:
    """Return all key/value pairs except the file type, which depends on the tensors."""
    of_config = config_metadata(config, path)
    values = {
        "general.architecture": GgufValue(ValueType.STRING, FAMILIES[config["model_type"]].gguf),
        "general.quantization_version": _u32(QUANTIZATION_VERSION),
        **of_config,
    }
    if tokenizer_json is not None:
        for key, value in tokenizer_metadata(tokenizer_json, config["vocab_size"], path).items():
            if values.setdefault(key, value) != value:
                # GGUF has one id of bos (or eos), both for the model and for the token that the tokenizer adds
                # to a document.
                expected = f"{value.value}, as in the tokenizer's template"
                refuse_key(path, key, expected, str(values[key].value))
    for key, value in extra.items():
        values[key] = (
            GgufValue(ValueType.STRING, value)
            if isinstance(value, str)
            else uint32(value, key, path)
        )
    return values


def _dtype_and_bytes(
    name: str, tensor: torch.Tensor | QuantTensor, path: Path
) -> tuple[str, memoryview]:
    """Return the type of a tensor, and its bytes."""
    from engine.quant.tensor import QuantTensor

    if isinstance(tensor, QuantTensor):
        return tensor.type.name, tensor_bytes(tensor.blocks)
    kind = _TORCH_KINDS.get(str(tensor.dtype))
    if kind is None:
        where = f"{path}, tensor {quoted(name)}"
        expected = f"one of {', '.join(_TORCH_KINDS)}"
        raise WeightsError.expected("GGUF tensor", where, expected, str(tensor.dtype))
    return kind, tensor_bytes(tensor)


def _header(values: Mapping[str, GgufValue], written: Mapping[str, StoredTensor]) -> bytes:
    """Return everything before the data, padded to where the data starts."""
    parts = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(written), len(values))]
    parts += [encode_string(key) + encode_value(value) for key, value in values.items()]
    for name, one in written.items():
        ne = one.shape[::-1]
        parts.append(encode_string(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne))
        parts.append(struct.pack("<IQ", BLOCK_TYPES[one.dtype].ggml_id, one.offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _file_type(written: Mapping[str, StoredTensor]) -> int:
    """Return the `general.file_type` of the type that most matrix weights have."""
    values: Counter[str] = Counter()
    for one in written.values():
        if len(one.shape) > 1:
            values[one.dtype] += math.prod(one.shape)
    return BLOCK_TYPES[values.most_common(1)[0][0] if values else "F32"].file_type


def _u32(number: int) -> GgufValue:
    return GgufValue(ValueType.UINT32, number)
