"""The header of one GGUF file, read and checked before anything trusts it.

    byte 0      4 bytes   "GGUF"
    byte 4      u32       version, 2 or 3 (3 allows big-endian files, which are refused here)
    byte 8      u64       number of tensors
    byte 16     u64       number of key/value pairs
    byte 24     pairs     key string, u32 value type, value
    then        tensors   name string, u32 n_dims, u64 ne[n_dims], u32 type, u64 offset
    then        data      from the next multiple of `general.alignment` (32 when absent); offsets
                          count from here, and each is a multiple of the alignment

All little-endian. A string is a u64 length and UTF-8 without a NUL; an array is a u32 element type,
a u64 count and the elements. ne[0] is the contiguous dimension, so a shape in torch order is `ne`
reversed.

Every length is compared with the bytes that are left, as `length <= size - at`, before a step is
taken or anything is allocated. What can be wrong has a code:

    GG01 not a GGUF file        GG07 string longer than file    GG13 dimension of zero
    GG02 header cut short       GG08 array: length, type        GG14 tensor name
    GG03 version                GG09 array in an array          GG15 tensor size
    GG04 big-endian             GG10 unknown type, bad bool     GG16 place of a tensor's data
    GG05 counts                 GG11 alignment                  GG17 architecture  (gguf_meta)
    GG06 key                    GG12 number of dimensions       GG18 vocabulary (gguf_vocabulary)
    GG19 parts of a split file  (gguf)

A file with 152 thousand tokens opens in a fraction of a second because arrays stay bytes until they
are asked for. No torch. Not covered: values of tensors, and a file that changes after it was read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import WeightsError
from engine.formats.gguf_tensor_table import padded, placed, read_tensor, unclaimed_bytes
from engine.formats.gguf_values import (
    CUT_SHORT,
    Cursor,
    Entry,
    ValueType,
    decode,
    quoted,
    read_entry,
    refuse,
)
from engine.formats.kinds import START_BYTES, kind_of, other_kind
from engine.formats.safetensors_header import TensorInfo, identity_of, open_regular

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
SMALLEST_ALIGNMENT = 8
"""Smaller powers of two are not allowed by the specification; with it, floats lie aligned."""
MAX_TENSORS = 65_536
MAX_PAIRS = 65_536

_HEADER_BYTES = 24
# The smallest pair: a key of one byte and a value of one byte. The smallest tensor: one of each.
_PAIR_BYTES = 8 + 1 + 4 + 1
_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


class GgufMetadata(Mapping[str, Any]):
    """The key/value pairs of a file; a value is decoded each time it is asked for."""

    def __init__(self, path: Path, head: bytes, entries: dict[str, Entry]) -> None:
        self.path = path
        self._head = head
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return decode(self._head, self._entries[key], self.path, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def entry(self, key: str) -> Entry | None:
        """Type and length of a value, without decoding it."""
        return self._entries.get(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A checked header: the data of every tensor lies within the file, and no two overlap."""

    path: Path
    version: int
    metadata: GgufMetadata
    tensors: dict[str, TensorInfo]
    alignment: int
    data_start: int
    file_bytes: int
    identity: tuple[int, ...] = ()
    """Of the file that was read, as `engine.formats.open_file` compares it."""
    unclaimed_bytes: int
    """Bytes of the data section that no tensor holds and alignment does not explain."""


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Reads and checks the header of one file; no tensor data is read. Raises `WeightsError`."""
    path = Path(path)
    with open_regular(path, "gguf") as file:
        identity = identity_of(file.fileno())
        start = file.read(START_BYTES)
        if not start.startswith(b"GGUF"):
            where, kind = f"{path} @0", kind_of(start)
            raise other_kind("gguf", where, "a GGUF file", kind, start, "GG01")
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise WeightsError.expected(
                "gguf", path, "a file that can be mapped", str(error.strerror)
            ) from error
        with data:
            return replace(parse_header(data, path), identity=identity)


def parse_header(data: bytes | mmap.mmap, path: Path) -> GgufHeader:
    """The header of a file with the content `data`; nothing of `data` is kept."""
    size = len(data)
    if data[:4] != b"GGUF":
        refuse("GG01", f"{path} @0", "the magic GGUF", f"{data[:4]!r}")
    if size >= 8:
        _check_version(path, int.from_bytes(data[4:8], "little"))
    if size < _HEADER_BYTES:
        found = f"a truncated header ({size} of {_HEADER_BYTES} bytes)"
        refuse("GG02", f"{path} @{size}", f"{_HEADER_BYTES} bytes", found, CUT_SHORT)
    version, n_tensors, n_pairs = struct.unpack_from("<IQQ", data, 4)
    room = size - _HEADER_BYTES
    _check_count(path, 8, "tensors", n_tensors, room // _TENSOR_BYTES, MAX_TENSORS)
    room -= n_tensors * _TENSOR_BYTES
    _check_count(path, 16, "key/value pairs", n_pairs, room // _PAIR_BYTES, MAX_PAIRS)
    cursor = Cursor(data=data, size=size, at=_HEADER_BYTES, path=path)
    entries: dict[str, Entry] = {}
    for _ in range(n_pairs):
        key, entry = read_entry(cursor)
        if key in entries:
            found = f"{quoted(key)}, which is also at byte {entries[key].key_at:,}"
            refuse("GG06", f"{path} @{entry.key_at}", "each key once", found)
        entries[key] = entry
    raw = [read_tensor(cursor) for _ in range(n_tensors)]
    metadata = GgufMetadata(path, bytes(data[: cursor.at]), entries)
    alignment = _alignment(metadata)
    data_start = padded(cursor.at, alignment)
    tensors: dict[str, TensorInfo] = {}
    for at, info in raw:
        if info.name in tensors:
            refuse("GG14", f"{path} @{at}", "each tensor once", f"{quoted(info.name)} twice")
        tensors[info.name] = placed(info, data_start, alignment, size)
    return GgufHeader(
        path=path,
        version=version,
        metadata=metadata,
        tensors=tensors,
        alignment=alignment,
        data_start=data_start,
        file_bytes=size,
        unclaimed_bytes=unclaimed_bytes(path, tensors, data_start, alignment, size),
    )


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:
        refuse(
            "GG04",
            f"{path} @4",
            "a little-endian file",
            "a big-endian one, which is not supported here",
            "convert it with gguf-py's gguf_convert_endian",
        )
    refuse("GG03", f"{path} @4", "version 2 or 3", f"version {version}")


def _check_count(path: Path, at: int, what: str, count: int, room: int, limit: int) -> None:
    if count > room:
        expected = f"at most {room:,} {what}, for which the file has room"
        refuse("GG05", f"{path} @{at}", expected, f"{count:,}", CUT_SHORT)
    if count > limit:
        refuse("GG05", f"{path} @{at}", f"at most {limit:,} {what}", f"{count:,}")


def _alignment(metadata: GgufMetadata) -> int:
    entry = metadata.entry(ALIGNMENT_KEY)
    if entry is None:
        return DEFAULT_ALIGNMENT
    found = metadata[ALIGNMENT_KEY] if entry.type is ValueType.UINT32 else entry.type.name
    if isinstance(found, int) and found >= SMALLEST_ALIGNMENT and found & (found - 1) == 0:
        return found
    refuse(
        "GG11",
        f"{metadata.path} @{entry.start}",
        f"{ALIGNMENT_KEY} as a UINT32, a power of two from {SMALLEST_ALIGNMENT}",
        str(found),
    )
