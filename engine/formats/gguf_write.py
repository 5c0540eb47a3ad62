"""Writing a GGUF file of version 3, tensor by tensor.

A header comes first and lists every tensor, and an iterable of tensors tells them one at a time,
each perhaps quantized only then. So the data goes to an unnamed temporary file beside the target,
the header is made when the last tensor has been seen, and the data is copied behind it.
Host memory peaks at one tensor; the disk holds the data twice while it is copied.

The file appears under its name only when all of it is on the disk. Nothing is ever overwritten, and
a write that fails leaves nothing behind (a killed one: `<name>.partial`).
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from engine.errors import WeightsError
from engine.formats.gguf_encode import (
    encode_string,
    encode_text,
    encode_value,
    refuse_key,
    typed,
)
from engine.formats.gguf_header import ALIGNMENT_KEY, DEFAULT_ALIGNMENT
from engine.formats.gguf_meta import HEAD, ROPE_FREQS, config_metadata
from engine.formats.gguf_tensor_table import MAX_DIMS, MAX_NAME_BYTES
from engine.formats.gguf_tokenizer_write import tokenizer_metadata
from engine.formats.gguf_values import MAX_KEY_BYTES, GgufValue, ValueType, quoted
from engine.formats.gguf_vocabulary import EMBEDDING
from engine.formats.safetensors import fsync_folder, unwritable
from engine.quant.blocks import BLOCK_TYPES
from engine.signals import partial_output

if TYPE_CHECKING:
    import torch

    from engine.quant.tensor import QuantTensor

VERSION = 3
QUANTIZATION_VERSION = 2

# What llama.cpp calls a file by the type of most of its weights.
_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "BF16": 32,
}


_TORCH_KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
_COPY_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A tensor in the data file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def write_gguf(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor | QuantTensor]],
    tokenizer_json: bytes | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a new file and returns with it on the disk.

    `config` is a Hugging Face config.json, `tensors` have GGUF names and are written in their order
    and type (float32, float16, bfloat16 or blocks). `metadata` adds keys (`general.name`,
    `tokenizer.chat_template`, ...) and may replace `general.file_type`, by default the type of most
    weights. An existing file is refused. Raises `WeightsError`, `TokenizerError`, `DiskFull`.
    """
    path = Path(path)
    values = _metadata(config, tokenizer_json, metadata or {}, path)
    partial = path.with_name(path.name + ".partial")
    if os.path.lexists(path):
        raise unwritable(path, FileExistsError(errno.EEXIST, "exists"))
    try:
        file = partial.open("xb")
    except FileExistsError as error:
        hint = "remove it if no other process is writing there"
        raise WeightsError.expected(
            "weights to write", partial, "nothing at that path", "something", hint=hint
        ) from error
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with partial_output(partial), file, tempfile.TemporaryFile(dir=path.parent) as data:
            written = _write_data(data, tensors, path)
            _check_model(config, written, path)
            values.setdefault("general.file_type", _u32(_file_type(written)))
            file.write(_header(values, written))
            data.seek(0)
            shutil.copyfileobj(data, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
            _publish(partial, path)
            fsync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def _metadata(
    config: Mapping[str, Any],
    tokenizer_json: bytes | None,
    extra: Mapping[str, Any],
    path: Path,
) -> dict[str, GgufValue]:
    """All pairs but the type of the file, which the tensors decide."""
    of_config = config_metadata(config, path)
    values = {
        "general.architecture": GgufValue(type=ValueType.STRING, value=config["model_type"]),
        "general.quantization_version": _u32(QUANTIZATION_VERSION),
        **of_config,
    }
    if tokenizer_json is not None:
        for key, value in tokenizer_metadata(tokenizer_json, config["vocab_size"], path).items():
            if values.setdefault(key, value) != value:
                # bos or eos: GGUF has one id for the model's and for the one put around a text.
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


def _write_data(
    data: IO[bytes], tensors: Iterable[tuple[str, torch.Tensor | QuantTensor]], path: Path
) -> list[_Written]:
    """The tensors one after the other, each padded to the alignment."""
    written: dict[str, _Written] = {}
    offset = 0
    for name, tensor in tensors:
        kind, raw_u8 = _raw(name, tensor, path)
        shape = tuple(tensor.shape)
        if name in written or not 1 <= len(encode_text(name, name, path)) <= MAX_NAME_BYTES:
            expected = f"a name of its own, of 1 to {MAX_NAME_BYTES} bytes"
            _refuse_tensor(path, name, expected, "it twice" if name in written else "a longer one")
        if not 1 <= len(shape) <= MAX_DIMS or 0 in shape:
            _refuse_tensor(path, name, f"1 to {MAX_DIMS} dimensions, none of zero", f"{shape}")
        data.write(raw_u8.numpy().data)
        data.write(bytes(-raw_u8.numel() % DEFAULT_ALIGNMENT))
        written[name] = _Written(
            name=name, kind=kind, shape=shape, offset=offset, bytes=raw_u8.numel()
        )
        offset += -(-raw_u8.numel() // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return list(written.values())


def _raw(name: str, tensor: torch.Tensor | QuantTensor, path: Path) -> tuple[str, torch.Tensor]:
    """The type of a tensor and its bytes in row-major order, in host memory."""
    import torch

    from engine.quant.tensor import QuantTensor

    if isinstance(tensor, QuantTensor):
        return tensor.type.name, tensor.blocks.to("cpu").contiguous().reshape(-1)
    kind = _TORCH_KINDS.get(str(tensor.dtype))
    if kind is None:
        _refuse_tensor(path, name, f"one of {', '.join(_TORCH_KINDS)}", str(tensor.dtype))
    return kind, tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _check_model(config: Mapping[str, Any], written: list[_Written], path: Path) -> None:
    """What a reader concludes from the tensors is what the configuration says."""
    shapes = {one.name: one.shape for one in written}
    if EMBEDDING not in shapes:
        return
    if shapes[EMBEDDING][0] != config["vocab_size"]:
        expected = f"{config['vocab_size']:,} rows, the vocab_size"
        _refuse_tensor(path, EMBEDDING, expected, f"{shapes[EMBEDDING][0]:,}")
    tied = bool(config.get("tie_word_embeddings", False))
    if tied == (HEAD in shapes):
        expected = f"{'no such tensor' if tied else 'it'}, tie_word_embeddings being {tied}"
        _refuse_tensor(path, HEAD, expected, "it" if tied else "none")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "llama3" and ROPE_FREQS not in shapes:
        _refuse_tensor(path, ROPE_FREQS, "the divisors of the llama3 rope_scaling", "none")


def _header(values: Mapping[str, GgufValue], written: list[_Written]) -> bytes:
    """Everything before the data, padded to where that starts."""
    parts = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(written), len(values))]
    parts += [encode_string(key) + encode_value(value) for key, value in values.items()]
    for one in written:
        ne = one.shape[::-1]
        parts.append(encode_string(one.name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne))
        parts.append(struct.pack("<IQ", BLOCK_TYPES[one.kind].ggml_id, one.offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _publish(partial: Path, path: Path) -> None:
    """Gives a finished file its name, unless something has that name by now."""
    try:
        os.link(partial, path)  # unlike a rename, it never replaces
        partial.unlink()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links: exFAT, some network shares.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        partial.rename(path)


def _file_type(written: list[_Written]) -> int:
    values: Counter[str] = Counter()
    for one in written:
        if len(one.shape) > 1:
            values[one.kind] += math.prod(one.shape)
    return _FILE_TYPES[values.most_common(1)[0][0] if values else "F32"]


def _u32(number: int) -> GgufValue:
    return GgufValue(type=ValueType.UINT32, value=number)


def _refuse_tensor(where: object, name: str, expected: str, found: str) -> NoReturn:
    raise WeightsError.expected("GGUF tensor", f"{where}, tensor {quoted(name)}", expected, found)
