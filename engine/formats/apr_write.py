"""Write an .apr file (layout: `engine.formats.apr`) in one pass over its tensors, completely or
not at all. Tensors are stored in the order in which they come; the index is sorted by name.

    a tensor of F32 F16 BF16 F64 I32 I64 I8 U8     its values, row-major
    a QuantTensor of Q4_K or Q6_K                  its blocks, byte for byte
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import WeightsError
from engine.formats.apr import (
    ALIGNMENT,
    FOOTER_BYTES,
    HAS_VOCAB,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PLAIN,
    QUANTIZED,
    ROW_MAJOR,
    align,
    header_crc,
    index_entry,
)
from engine.formats.apr_metadata import build_metadata, check_family, embed
from engine.formats.safetensors import DTYPES
from engine.formats.writing import StoredTensor, new_file, tensor_bytes
from engine.quant.blocks import BLOCK_TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from engine.quant.tensor import QuantTensor

_BLOCKS = {name: kind for name, kind in BLOCK_TYPES.items() if kind.in_apr and kind.layout}


def write_apr(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor | QuantTensor]],
    tokenizer_json: bytes | None,
    metadata: Mapping[str, Any],
) -> None:
    """Write a new file, and return when it is safe on disk.

    `config` is a Hugging Face config.json. `metadata` holds further top-level keys (`name`,
    `license`, `data_source`, `data_license`, ...; `rope_type` is 2 by default); keys that the file
    computes are ignored. An existing file is refused and stays unchanged. Raises `WeightsError`,
    `TokenizerError`, `DiskFull`.
    """
    path = Path(path)
    check_family(config, path)
    tokenizer = {} if tokenizer_json is None else embed(tokenizer_json)
    with new_file(path, ALIGNMENT) as (file, data):
        for name, tensor in tensors:
            dtype, raw = _dtype_and_bytes(f"tensor {json.dumps(name)}", tensor)
            data.add(name, dtype, tuple(tensor.shape), raw)
        raw_metadata = build_metadata(
            config,
            metadata,
            tokenizer,
            total_bytes=sum(placed.bytes for placed in data.tensors.values()),
            parameters=sum(math.prod(placed.shape) for placed in data.tensors.values()),
            quantization=_quantization(data.tensors),
        )
        crc = 0
        head = _head(raw_metadata, data.tensors, bool(tokenizer))
        for piece in itertools.chain([head], data.pieces()):
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        file.write(crc.to_bytes(FOOTER_BYTES, "little"))


def _dtype_and_bytes(where: str, tensor: Tensor | QuantTensor) -> tuple[str, memoryview]:
    """Return the dtype's name in the index, and the bytes in host memory."""
    from engine.quant.tensor import QuantTensor

    if isinstance(tensor, QuantTensor):
        if tensor.type.name not in _BLOCKS:
            expected = f"blocks of {', '.join(_BLOCKS)}, the types that an .apr file has"
            raise WeightsError.expected(
                "apr to write", where, expected, tensor.type.name, hint="a .gguf file has it"
            )
        return tensor.type.name, tensor_bytes(tensor.blocks)
    name = str(tensor.dtype).removeprefix("torch.")
    code = next((code for code in PLAIN if DTYPES[code][1] == name), None)
    if code is None:
        raise WeightsError.expected("apr to write", where, f"one of {', '.join(PLAIN)}", name)
    return code, tensor_bytes(tensor)


def _quantization(tensors: Mapping[str, StoredTensor]) -> dict[str, Any] | None:
    """Return the metadata about quantisation, from the block type with the most bytes."""
    blocks: Counter[str] = Counter()
    for placed in tensors.values():
        if placed.dtype in _BLOCKS:
            blocks[placed.dtype] += placed.bytes
    if not blocks:
        return None
    kind = _BLOCKS[blocks.most_common(1)[0][0]]
    return {
        "quant_type": kind.name.lower(),
        "bits": int(kind.bits_per_weight),
        "block_size": kind.block_size,
        "symmetric": kind.in_blocks.second is None,
    }


def _head(metadata: bytes, tensors: Mapping[str, StoredTensor], has_tokenizer: bool) -> bytes:
    """Return the bytes before the data: header, metadata and index, each padded to 64 bytes."""
    index = b"".join(
        index_entry(name.encode(), placed.dtype, placed.shape, placed.offset, placed.bytes)
        for name, placed in sorted(tensors.items(), key=lambda item: item[0].encode())
    )
    index_start = HEADER_BYTES + align(len(metadata))
    flags = ROW_MAJOR
    flags |= HAS_VOCAB if has_tokenizer else 0
    flags |= QUANTIZED if any(placed.dtype in _BLOCKS for placed in tensors.values()) else 0
    fields = (
        *(MAGIC, 2, 0, flags, len(tensors), HEADER_BYTES, len(metadata)),
        *(index_start, index_start + align(len(index))),
    )
    header = HEADER.pack(*fields, header_crc(HEADER.pack(*fields, 0, bytes(20))), bytes(20))
    padded = metadata.ljust(align(len(metadata)), b"\0")
    return header + padded + index.ljust(align(len(index)), b"\0")
