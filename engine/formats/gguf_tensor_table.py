"""The tensors that the header of a GGUF file lists, and whether their data is in the file.

    name      u64 length, UTF-8; 1 to 63 bytes
    n_dims    u32, 1 to 4
    ne        u64 for each dimension, ne[0] being the contiguous one
    type      u32, the id of a block type
    offset    u64, from the start of the data, a multiple of the alignment

Sizes are computed with Python's integers, which cannot overflow, and refused where those of another
reader would: above 2^63 - 1. A tensor lies in the file if `offset <= room` and `bytes <= room -
offset`; the sum `offset + bytes` is never formed from unchecked numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from engine.formats.gguf_values import CUT_SHORT, Cursor, quoted, refuse
from engine.formats.safetensors_header import TensorInfo
from engine.quant.blocks import BLOCK_TYPES, BlockType, row_bytes

MAX_DIMS = 4
MAX_NAME_BYTES = 63
LARGEST = 2**63 - 1
"""Of counts and sizes: what a signed 64-bit integer of torch or of the system can hold."""

_BLOCK_TYPES = {kind.ggml_id: kind for kind in BLOCK_TYPES.values()}
# Types that exist and are not read here, so that a message can name them.
_OTHER_TYPES = {
    3: "Q4_1",
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def read_tensor(cursor: Cursor) -> tuple[int, TensorInfo]:
    """Where one entry of the tensor table is, and the tensor, `start` still being its offset."""
    at, path = cursor.at, cursor.path
    length = cursor.u64("GG14", "the length of a tensor's name")
    if not 1 <= length <= MAX_NAME_BYTES:
        expected = f"a tensor name of 1 to {MAX_NAME_BYTES} bytes"
        refuse("GG14", f"{path} @{at}", expected, f"{length:,} bytes")
    name = cursor.text(length, "GG14", "a tensor's name")
    where = f"{path} @{at}, tensor {quoted(name)}"
    n_dims = cursor.u32("GG12", "a number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        refuse("GG12", where, f"1 to {MAX_DIMS} dimensions", f"{n_dims:,}")
    ne = [cursor.u64("GG12", "a dimension") for _ in range(n_dims)]
    if 0 in ne:
        refuse("GG13", where, "no dimension of zero", f"{ne}")
    ggml_id = cursor.u32("GG10", "a tensor's type")
    offset = cursor.u64("GG16", "a tensor's offset")
    kind = _block_type(ggml_id, where)
    if math.prod(ne) > LARGEST:
        refuse("GG15", where, "at most 2^63 - 1 elements", f"{ne}: {math.prod(ne):.3g} elements")
    if ne[0] % kind.block_size:
        expected = f"rows of a multiple of {kind.block_size} for {kind.name}"
        refuse("GG15", where, expected, f"rows of {ne[0]:,}")
    data_bytes = math.prod(ne[1:]) * row_bytes(kind, ne[0])
    # So that rounding it up to the alignment cannot leave 63 bits either.
    if data_bytes > LARGEST - 2**32:
        refuse("GG15", where, "fewer than 2^63 bytes", f"{ne} of {kind.name}: {data_bytes:.3g}")
    return at, TensorInfo(
        name=name,
        dtype=kind.name,
        shape=tuple(reversed(ne)),
        file=path,
        start=offset,
        bytes=data_bytes,
    )


def placed(info: TensorInfo, data_start: int, alignment: int, size: int) -> TensorInfo:
    """The tensor with its offset as a position in the file."""
    where = f"{info.file}, tensor {quoted(info.name)}"
    if info.start % alignment:
        refuse("GG16", where, f"an offset that is a multiple of {alignment}", f"{info.start:,}")
    room = max(size - data_start, 0)
    if info.start > room or info.bytes > room - info.start:
        expected = f"{info.bytes:,} bytes at {info.start:,} of the data"
        found = f"data from byte {data_start:,}, and a file that ends at byte {size:,}"
        refuse("GG16", where, expected, found, CUT_SHORT)
    return replace(info, start=data_start + info.start)


def unclaimed_bytes(
    path: Path, tensors: dict[str, TensorInfo], data_start: int, alignment: int, size: int
) -> int:
    """Refuses a byte in two tensors; answers how many, padding apart, are in none."""
    end, before, unclaimed = data_start, "the header", 0
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.bytes)):
        if info.start < end:
            where = f"{path} @{info.start}, tensor {quoted(info.name)}"
            refuse("GG16", where, f"it after {before}", f"it overlapping {before}")
        unclaimed += info.start - padded(end, alignment)
        end, before = info.start + info.bytes, f"tensor {quoted(info.name)}"
    return unclaimed + max(size - padded(end, alignment), 0)


def padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _block_type(ggml_id: int, where: str) -> BlockType:
    kind = _BLOCK_TYPES.get(ggml_id)
    if kind is None:
        name = f" ({_OTHER_TYPES[ggml_id]})" if ggml_id in _OTHER_TYPES else ""
        refuse("GG10", where, f"one of {', '.join(BLOCK_TYPES)}", f"type {ggml_id:,}{name}")
    return kind
