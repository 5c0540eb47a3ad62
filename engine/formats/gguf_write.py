"""Writes a GGUF file of version 3 (layout: `engine.formats.gguf`), completely or not at all.

Metadata comes from a config.json and a tokenizer.json; tensors keep their order and their types.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import WeightsError
from engine.formats.gguf import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_DIMS, MAX_NAME_BYTES
from engine.formats.gguf_metadata import config_metadata
from engine.formats.gguf_tokenizer import tokenizer_metadata
from engine.formats.gguf_values import (
    MAX_KEY_BYTES,
    GgufValue,
    ValueType,
    encode_string,
    encode_text,
    encode_value,
    quoted,
    refuse_key,
    typed,
)
from engine.formats.writing import Placed, TensorData, new_file, tensor_bytes
from engine.model_families import EMBEDDING, FAMILIES, HEAD, ROPE_DIVISORS
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
    and type (float32, float16, bfloat16 or blocks). `metadata` adds keys (`general.name`,
    `tokenizer.chat_template`, ...) and may set `general.file_type`, by default the type of most
    weights. An existing file is refused. Raises `WeightsError`, `TokenizerError`, `DiskFull`.
    """
    path = Path(path)
    values = _metadata(config, tokenizer_json, metadata or {}, path)
    partial = path.with_name(path.name + ".partial")
    with new_file(path, partial, DEFAULT_ALIGNMENT) as (file, data):
        _add_tensors(data, tensors, path)
        _check_model(config, data.tensors, path)
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
                # bos or eos: GGUF has one id both for the model's token and for the one put around
                # a text.
                expected = f"{value.value}, as in the tokenizer's template"
                refuse_key(path, key, expected, str(values[key].value))
    for key, value in extra.items():
        if key in values or key == ALIGNMENT_KEY or key.startswith("split."):
            expected = "a key that the configuration and the tokenizer do not decide"
            refuse_key(path, key, expected, f"{value!r:.80}")
        values[key] = typed(value, key, path)
    for key in values:
        if not 1 <= len(encode_text(key, key, path)) <= MAX_KEY_BYTES:
            refuse_key(
                path, key, f"a key of 1 to {MAX_KEY_BYTES:,} bytes", f"{len(key):,} characters"
            )
    return values


def _add_tensors(
    data: TensorData, tensors: Iterable[tuple[str, torch.Tensor | QuantTensor]], path: Path
) -> None:
    for name, tensor in tensors:
        kind, raw = _raw(name, tensor, path)
        shape = tuple(tensor.shape)
        twice = name in data.tensors
        if twice or not 1 <= len(encode_text(name, name, path)) <= MAX_NAME_BYTES:
            expected = f"a name of its own, of 1 to {MAX_NAME_BYTES} bytes"
            _refuse_tensor(path, name, expected, "it twice" if twice else "a longer one")
        if not 1 <= len(shape) <= MAX_DIMS or 0 in shape:
            _refuse_tensor(path, name, f"1 to {MAX_DIMS} dimensions, none of zero", f"{shape}")
        data.add(name, kind, shape, raw)


def _raw(name: str, tensor: torch.Tensor | QuantTensor, path: Path) -> tuple[str, memoryview]:
    """Return the type of a tensor, and its bytes."""
    from engine.quant.tensor import QuantTensor

    if isinstance(tensor, QuantTensor):
        return tensor.type.name, tensor_bytes(tensor.blocks)
    kind = _TORCH_KINDS.get(str(tensor.dtype))
    if kind is None:
        _refuse_tensor(path, name, f"one of {', '.join(_TORCH_KINDS)}", str(tensor.dtype))
    return kind, tensor_bytes(tensor)


def _check_model(config: Mapping[str, Any], written: Mapping[str, Placed], path: Path) -> None:
    """Check that the tensors imply the same configuration to a reader as `config`."""
    embedding = written.get(EMBEDDING.gguf)
    if embedding is None:
        return
    if embedding.shape[0] != config["vocab_size"]:
        expected = f"{config['vocab_size']:,} rows, the vocab_size"
        _refuse_tensor(path, EMBEDDING.gguf, expected, f"{embedding.shape[0]:,}")
    tied = bool(config.get("tie_word_embeddings", False))
    if tied == (HEAD.gguf in written):
        expected = f"{'no such tensor' if tied else 'it'}, tie_word_embeddings being {tied}"
        _refuse_tensor(path, HEAD.gguf, expected, "it" if tied else "none")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "llama3" and ROPE_DIVISORS not in written:
        _refuse_tensor(path, ROPE_DIVISORS, "the divisors of the llama3 rope_scaling", "none")


def _header(values: Mapping[str, GgufValue], written: Mapping[str, Placed]) -> bytes:
    """Return everything before the data, padded to where the data starts."""
    parts = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(written), len(values))]
    parts += [encode_string(key) + encode_value(value) for key, value in values.items()]
    for name, one in written.items():
        ne = one.shape[::-1]
        parts.append(encode_string(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne))
        parts.append(struct.pack("<IQ", BLOCK_TYPES[one.dtype].ggml_id, one.offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _file_type(written: Mapping[str, Placed]) -> int:
    """Return the file type of the type that most weights in matrices have."""
    values: Counter[str] = Counter()
    for one in written.values():
        if len(one.shape) > 1:
            values[one.dtype] += math.prod(one.shape)
    return BLOCK_TYPES[values.most_common(1)[0][0] if values else "F32"].file_type


def _u32(number: int) -> GgufValue:
    return GgufValue(ValueType.UINT32, number)


def _refuse_tensor(where: object, name: str, expected: str, found: str) -> NoReturn:
    raise WeightsError.expected("GGUF tensor", f"{where}, tensor {quoted(name)}", expected, found)
