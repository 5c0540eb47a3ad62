"""Writes an .apr file (APR v2) in one pass over its tensors, whole or not at all.

The index stands before the data and is complete only after the last tensor, so the data goes to an
unnamed file in the same folder first, and from there behind the finished index; twice the data has
to fit on the disk for that time, and host memory peaks at one tensor. Tensors keep the order they
come in, the index is sorted by name. The file appears under its name by a rename, when all of it is
on the disk; until then it has another, and a write that fails leaves nothing.

    a tensor of F32 F16 BF16 F64 I32 I64 I8 U8     its values, row-major
    a QuantTensor of Q4_K or Q6_K                  its blocks, byte for byte

`engine.formats.apr_header` draws the layout.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.errors import WeightsError
from engine.formats.apr_header import (
    FOOTER_BYTES,
    HAS_VOCAB,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    QUANTIZED,
    ROW_MAJOR,
    align,
    header_crc,
)
from engine.formats.apr_index import (
    DIMS_LIMIT,
    NAME_LIMIT_BYTES,
    ROW_BLOCKS,
    WIDTHS,
    index_entry,
)
from engine.formats.apr_metadata import build_metadata
from engine.formats.apr_tokenizer import embed
from engine.formats.safetensors import fsync_folder, tensor_bytes, unwritable
from engine.formats.safetensors_header import DTYPES, TENSORS_LIMIT
from engine.signals import partial_output

if TYPE_CHECKING:
    from torch import Tensor

    from engine.quant.tensor import QuantTensor

_COPY_BYTES = 1 << 22
_BITS = {"Q4_K": 4, "Q6_K": 6}


@dataclass(slots=True, kw_only=True)
class _Written:
    """What is known of the data so far."""

    entries: dict[bytes, bytes] = field(default_factory=dict)
    """Name -> its entry of the index."""
    data_bytes: int = 0
    total_bytes: int = 0
    """Without padding."""
    values: int = 0
    bytes_of: dict[str, int] = field(default_factory=dict)
    """Of each dtype."""


def write_apr(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor | QuantTensor]],
    tokenizer_json: bytes | None,
    metadata: Mapping[str, Any],
) -> None:
    """Writes a new file, and returns with it on the disk.

    `config` is a Hugging Face config.json; `metadata` holds further top-level keys (`name`,
    `license`, `data_source`, `data_license`, ...; `rope_type` is 2 unless it is there), of which
    those that the file computes are not taken. An existing file is refused and stays as it is.
    Raises `WeightsError`, `TokenizerError`, `DiskFull`.
    """
    path = Path(path)
    tokenizer = {} if tokenizer_json is None else embed(tokenizer_json)
    _refuse_existing(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial_output(partial), tempfile.TemporaryFile(dir=path.parent) as data:
            written = _write_data(data, tensors)
            raw_metadata = build_metadata(
                config,
                metadata,
                tokenizer,
                total_bytes=written.total_bytes,
                parameters=written.values,
                quantization=_quantization(written),
            )
            head = _head(raw_metadata, written, bool(tokenizer))
            with partial.open("xb") as file:
                _assemble(file, head, data)
            _refuse_existing(path)
            partial.rename(path)
            fsync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise unwritable(path, FileExistsError())


def _write_data(data: IO[bytes], tensors: Iterable[tuple[str, Tensor | QuantTensor]]) -> _Written:
    """Each tensor's bytes, padded to 64, in the order they come."""
    written = _Written()
    for name, tensor in tensors:
        where = f"tensor {json.dumps(name)}"
        raw_name = name.encode(errors="backslashreplace")
        if not 0 < len(raw_name) <= NAME_LIMIT_BYTES or raw_name.decode() != name:
            expected = f"a name of 1 to {NAME_LIMIT_BYTES} bytes of UTF-8"
            raise WeightsError.expected("apr to write", where, expected, f"{len(raw_name)} bytes")
        if raw_name in written.entries:
            raise WeightsError.expected("apr to write", where, "it once", "it a second time")
        if len(written.entries) == TENSORS_LIMIT:
            raise WeightsError.expected("apr to write", where, f"{TENSORS_LIMIT:,} tensors", "more")
        dtype, raw = _raw(where, tensor)
        shape = tuple(tensor.shape)
        if len(shape) > DIMS_LIMIT:
            expected = f"at most {DIMS_LIMIT} dimensions"
            raise WeightsError.expected("apr to write", where, expected, f"{len(shape)}")
        written.entries[raw_name] = index_entry(
            raw_name, dtype, shape, written.data_bytes, len(raw)
        )
        data.write(raw)
        data.write(bytes(align(len(raw)) - len(raw)))
        written.data_bytes += align(len(raw))
        written.total_bytes += len(raw)
        written.values += math.prod(shape)
        written.bytes_of[dtype] = written.bytes_of.get(dtype, 0) + len(raw)
    return written


def _raw(where: str, tensor: Tensor | QuantTensor) -> tuple[str, memoryview]:
    """The dtype's name in the index, and the bytes in host memory."""
    from engine.quant.tensor import QuantTensor

    if isinstance(tensor, QuantTensor):
        if tensor.type.name not in _BITS:
            expected = f"blocks of {', '.join(_BITS)}, the types that an .apr file has"
            raise WeightsError.expected(
                "apr to write", where, expected, tensor.type.name, hint="a .gguf file has it"
            )
        return tensor.type.name, tensor_bytes(tensor.blocks)
    name = str(tensor.dtype).removeprefix("torch.")
    found = next((code for code in WIDTHS if DTYPES[code][1] == name), None)
    if found is None:
        raise WeightsError.expected("apr to write", where, f"one of {', '.join(WIDTHS)}", name)
    return found, tensor_bytes(tensor)


def _quantization(written: _Written) -> dict[str, Any] | None:
    """What the metadata says of the blocks that most of the quantized bytes are in."""
    blocks = {name: count for name, count in written.bytes_of.items() if name in _BITS}
    if not blocks:
        return None
    name = max(blocks, key=lambda name: blocks[name])
    return {
        "quant_type": name.lower(),
        "bits": _BITS[name],
        "block_size": ROW_BLOCKS[name][0],
        "symmetric": name == "Q6_K",  # Q4_K has a minimum beside its scale
    }


def _head(metadata: bytes, written: _Written, has_tokenizer: bool) -> bytes:
    """Everything before the data: header, metadata and index, each padded to 64."""
    index = b"".join(written.entries[name] for name in sorted(written.entries))
    index_start = HEADER_BYTES + align(len(metadata))
    flags = ROW_MAJOR
    flags |= HAS_VOCAB if has_tokenizer else 0
    flags |= QUANTIZED if any(name in _BITS for name in written.bytes_of) else 0
    fields = (
        *(MAGIC, 2, 0, flags, len(written.entries), HEADER_BYTES, len(metadata)),
        *(index_start, index_start + align(len(index))),
    )
    header = HEADER.pack(*fields, header_crc(HEADER.pack(*fields, 0, bytes(20))), bytes(20))
    padded = metadata.ljust(align(len(metadata)), b"\0")
    return header + padded + index.ljust(align(len(index)), b"\0")


def _assemble(file: IO[bytes], head: bytes, data: IO[bytes]) -> None:
    """Head, data and the CRC of both, on the disk."""
    file.write(head)
    crc = zlib.crc32(head)
    data.seek(0)
    while piece := data.read(_COPY_BYTES):
        crc = zlib.crc32(piece, crc)
        file.write(piece)
    file.write(crc.to_bytes(FOOTER_BYTES, "little"))
    file.flush()
    os.fsync(file.fileno())
