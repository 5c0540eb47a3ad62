"""The layout of an .apr file, and its header, read and checked before anything trusts it.

    header, 64 bytes | metadata, JSON | tensor index | tensor data | CRC-32 of all before it

    byte 0    4    magic "APR\\0"             byte 24   u64  byte where the index starts
    byte 4    2    version 2, 0              byte 32   u64  byte where the data starts
    byte 6    u16  flags                     byte 40   u32  CRC-32 of bytes 0..40 and 44..64
    byte 8    u32  number of tensors         byte 44   20   zero
    byte 12   u64  byte where metadata starts, 64
    byte 20   u32  bytes of metadata, without padding

All little-endian. Sections and tensors start at multiples of 64 bytes, with zeros between. The
footer's CRC is left out by some writers.

    AP01  shorter than a header       AP06  dtype 8 or 9: two meanings    AP11  flag not supported
    AP02  another kind of file        AP07  shape and size disagree       AP12  it is safetensors
    AP03  another version             AP08  bytes outside the file        AP13  name is not UTF-8
    AP04  a CRC is wrong              AP09  metadata
    AP05  unknown dtype               AP10  index out of order

AP05 to AP07, AP10 and AP13 are the index's (`engine.formats.apr_index`), AP09 is the metadata's
(`engine.formats.apr_metadata`).

No torch. Not covered: the footer, and values (`engine.formats.apr`).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine import limits
from engine.errors import WeightsError
from engine.formats.kinds import Kind, kind_of, other_kind
from engine.formats.safetensors_header import TENSORS_LIMIT, TensorInfo

MAGIC = b"APR\0"
HEADER_BYTES = 64
ALIGNMENT = 64
FOOTER_BYTES = 4
METADATA_LIMIT_BYTES = limits.APR_METADATA.most
HEADER = struct.Struct("<4sBBHIQIQQI20s")
QUANTIZED, HAS_VOCAB, ROW_MAJOR = 0x020, 0x200, 0x400
_UNSUPPORTED = {
    0x001: "LZ4 (compressed data)",
    0x002: "ZSTD (compressed data)",
    0x004: "ENCRYPTED (AES-256-GCM)",
    0x008: "SIGNED (a signature that cannot be checked here)",
    0x010: "SHARDED (a part of a model)",
    0x800: "LAYOUT_COLUMN_MAJOR (a wrong conversion)",
}
_KNOWN = 0xFFF

CUT_SHORT = "the file may be cut short; compare its size with the source"


@dataclass(frozen=True, slots=True, kw_only=True)
class AprHeader:
    """A header whose sections lie inside the file in order."""

    flags: int
    tensor_count: int
    metadata_start: int
    metadata_bytes: int
    index_start: int
    data_start: int
    file_bytes: int
    warnings: tuple[str, ...]


def refuse(
    code: str, where: object, expected: str, found: str, hint: str | None = None
) -> NoReturn:
    """Raises the `WeightsError` for an .apr file."""
    raise WeightsError.expected(f"{code} apr", where, expected, found, hint=hint)


def align(count: int) -> int:
    """`count` rounded up to the next multiple of 64."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def header_crc(raw: bytes) -> int:
    """The CRC-32 of a header, which leaves out its own four bytes."""
    return zlib.crc32(raw[44:64], zlib.crc32(raw[:40]))


def check_header(path: Path, start: bytes, file_bytes: int) -> AprHeader:
    """The checked header of a file that begins with `start`. Raises `WeightsError`."""
    kind = kind_of(start)
    if kind is Kind.SAFETENSORS:
        found = f"a safetensors file named {path.name}"
        refuse("AP12", path, Kind.APR.value, found, "open it as one: the name does not matter")
    if kind is Kind.APR_V1:
        raise other_kind("apr", path, "version 2", kind, start, "AP03")
    if kind not in (Kind.APR, Kind.EMPTY, Kind.UNKNOWN):
        raise other_kind("apr", path, Kind.APR.value, kind, start, "AP02")
    if file_bytes < HEADER_BYTES:
        refuse("AP01", path, "a header of 64 bytes", f"a file of {file_bytes} bytes", CUT_SHORT)
    if kind is Kind.UNKNOWN:
        raise other_kind("apr", path, Kind.APR.value, kind, start, "AP02")
    fields = HEADER.unpack(start[:HEADER_BYTES])
    magic, major, minor, flags, tensor_count, metadata_start, metadata_bytes = fields[:7]
    index_start, data_start, crc, reserved = fields[7:]
    if magic != MAGIC or major != 2:
        found = f"{magic!r} and version {major}.{minor}"
        refuse("AP03", f"{path} @0", f"{MAGIC!r} and version 2", found)
    computed = header_crc(start[:HEADER_BYTES])
    if crc != computed:
        found = f"0x{crc:08x} in the header"
        refuse("AP04", f"{path} @40", f"the header's CRC-32 to be 0x{computed:08x}", found)
    _check_flags(path, flags)
    header = AprHeader(
        flags=flags,
        tensor_count=tensor_count,
        metadata_start=metadata_start,
        metadata_bytes=metadata_bytes,
        index_start=index_start,
        data_start=data_start,
        file_bytes=file_bytes,
        warnings=tuple(_header_oddities(path, minor, flags, reserved)),
    )
    _check_sections(path, header)
    return header


def check_extent(
    path: Path, header: AprHeader, tensors: Mapping[str, TensorInfo]
) -> tuple[int, int]:
    """The byte after the padded data, where the footer is or the file ends; and the number of bytes
    before it that belong to no tensor.

    Raises `WeightsError` for overlapping tensors, a cut file and bytes after the footer.
    """
    end, before, unclaimed = header.data_start, "the index", 0
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.bytes)):
        name = f"tensor {json.dumps(info.name)}"
        if info.bytes and info.start < end:
            refuse("AP08", path, f"{name} after {before}", f"it overlaps at byte {info.start:,}")
        if info.bytes:
            unclaimed += info.start - end
            end, before = info.start + align(info.bytes), name
    rest = header.file_bytes - end
    if rest < 0:
        expected = f"{end:,} bytes of padded data"
        refuse("AP08", path, expected, f"a file of {header.file_bytes:,}", CUT_SHORT)
    if rest not in (0, FOOTER_BYTES):
        expected = f"{end:,} bytes, or {end + FOOTER_BYTES:,} with a footer"
        hint = "another file may be hidden behind the weights"
        refuse("AP08", path, expected, f"{header.file_bytes:,}", hint)
    return end, unclaimed


def _check_flags(path: Path, flags: int) -> None:
    named = [text for bit, text in _UNSUPPORTED.items() if flags & bit]
    if flags & ~_KNOWN:
        named.append(f"unknown bits 0x{flags & ~_KNOWN:04x}")
    if named:
        hint = "write the file again without, with the `apr` that wrote it"
        refuse("AP11", f"{path} @6", "flags that are supported", ", ".join(named), hint)


def _header_oddities(path: Path, minor: int, flags: int, reserved: bytes) -> Iterator[str]:
    if minor:
        yield f"{path}: version 2.{minor}, read as 2.0"
    if not flags & ROW_MAJOR:
        yield f"{path}: no layout flag, taken as row-major"
    if any(reserved):
        yield f"{path}: reserved bytes at byte 44 are not zero"


def _check_sections(path: Path, header: AprHeader) -> None:
    """Header, metadata, index and data follow each other inside the file, each aligned."""
    end = header.file_bytes
    if header.metadata_bytes > METADATA_LIMIT_BYTES:
        expected = f"at most {METADATA_LIMIT_BYTES:,} bytes of metadata"
        refuse("AP09", f"{path} @20", expected, f"{header.metadata_bytes:,}")
    sections = (
        (12, "metadata", HEADER_BYTES, header.metadata_start),
        (24, "the index", header.metadata_start + header.metadata_bytes, header.index_start),
        (32, "the data", header.index_start, header.data_start),
    )
    for field, what, after, start in sections:
        where = f"{path} @{field}"
        if start < after or start > end:
            expected = f"{what} to start between bytes {after:,} and {end:,}, the end of the file"
            refuse("AP08", where, expected, f"{start:,}", CUT_SHORT if start > end else None)
        if start % ALIGNMENT:
            refuse("AP08", where, f"{what} to start at a multiple of 64", f"{start:,}")
    if header.tensor_count > TENSORS_LIMIT:
        expected = f"at most {TENSORS_LIMIT:,} tensors"
        refuse("AP10", f"{path} @8", expected, f"{header.tensor_count:,}")
