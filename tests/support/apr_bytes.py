"""An independent writer and reader of .apr files, byte by byte, that shares nothing with the engine's."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ROW_MAJOR = 0x400
METADATA: dict[str, object] = {
    "model_type": "qwen2",
    "total_size": 0,
    "param_count": 0,
    "license": None,
    "data_source": None,
    "data_license": None,
    "architecture": "qwen2",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 300,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_type": 2,
    "rms_norm_eps": 1e-6,
}


class Entry(NamedTuple):
    """One tensor; an explicit `offset` or `size` is written even if it is wrong."""

    name: str | bytes
    dtype: int
    shape: Sequence[int]
    data: bytes
    offset: int | None = None
    size: int | None = None
    ndim: int | None = None


FLOATS = Entry("b.weight", 0, [2, 3], struct.pack("<6f", *range(6)))
HALVES = Entry("a.weight", 30, [4], struct.pack("<4H", 0x3F80, 0xC000, 0, 0x4040))


def padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 64)


def build_apr(
    tensors: Sequence[Entry] = (HALVES, FLOATS),
    metadata: Mapping[str, object] | bytes = METADATA,
    *,
    magic: bytes = b"APR\0",
    version: tuple[int, int] = (2, 0),
    flags: int = ROW_MAJOR,
    footer: bool = True,
    header: Mapping[str, int] | None = None,
    tail: bytes = b"",
) -> bytes:
    """Build a whole file; `header` replaces fields by name, and the header's CRC is valid even then."""
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    index, data = b"", b""
    for one in tensors:
        name = one.name.encode() if isinstance(one.name, str) else one.name
        offset = len(data) if one.offset is None else one.offset
        size = len(one.data) if one.size is None else one.size
        ndim = len(one.shape) if one.ndim is None else one.ndim
        index += struct.pack("<H", len(name)) + name + bytes([one.dtype, ndim])
        index += struct.pack(f"<{len(one.shape)}Q", *one.shape) + struct.pack("<QQ", offset, size)
        data += padded(one.data)
    fields = {
        "flags": flags,
        "tensor_count": len(tensors),
        "metadata_offset": 64,
        "metadata_size": len(text),
        "tensor_index_offset": 64 + len(padded(text)),
        "data_offset": 64 + len(padded(text)) + len(padded(index)),
    } | dict(header or {})
    head = magic + bytes(version) + struct.pack("<HIQIQQ", *fields.values()) + bytes(24)
    whole = seal_header(head) + padded(text) + padded(index) + data
    return whole + (struct.pack("<I", zlib.crc32(whole)) if footer else b"") + tail


def seal_header(raw: bytes) -> bytes:
    """Return the file with a valid header CRC."""
    return raw[:40] + struct.pack("<I", zlib.crc32(raw[:40] + raw[44:64])) + raw[44:]


def seal(raw: bytes) -> bytes:
    """Return the file with both CRCs valid; the last four bytes are taken as the footer."""
    whole = seal_header(raw)[:-4]
    return whole + struct.pack("<I", zlib.crc32(whole))


def take_apart(raw: bytes) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Return name -> (dtype, shape, bytes), trusting every number in a file."""
    count, _, _, index, data = struct.unpack("<IQIQQ", raw[8:40])
    found = {}
    at = index
    for _ in range(count):
        (length,) = struct.unpack_from("<H", raw, at)
        name = raw[at + 2 : at + 2 + length].decode()
        at += 2 + length
        dtype, ndim = raw[at], raw[at + 1]
        shape = struct.unpack_from(f"<{ndim}Q", raw, at + 2)
        offset, size = struct.unpack_from("<QQ", raw, at + 2 + 8 * ndim)
        at += 2 + 8 * ndim + 16
        found[name] = (dtype, shape, raw[data + offset : data + offset + size])
    return found
