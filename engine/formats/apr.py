"""Opens, checks and reads weights in an .apr file (APR v2).

Opening reads header, metadata and index, but no data. `get` reads one tensor into its own memory.
Before the first tensor is returned, the footer's CRC is compared with the whole file, so that a
damaged file is refused instead of being partly used. A file without a footer gets a warning
instead.

The result of `get`, by the dtype in the index:

    F32 F16 BF16 F64 I32 I64 I8 U8   a tensor
    Q4_K Q6_K                        a QuantTensor: the blocks are GGUF's, byte for byte. If rows are
                                     not a multiple of 256, the last block of each is padded; such a
                                     tensor is dequantised, to float32 of its own shape
    APR_Q4 APR_Q8                    types of this format only: dequantised, to float32

    APR_Q4: 32 values in 18 bytes: d as f16, then 16 bytes q; value 2i is d (low nibble of q[i]
            - 8), value 2i + 1 is d (high nibble - 8). Q4_0 has the same parts, but low nibbles are
            its values 0 to 15 and high nibbles 16 to 31.
    APR_Q8: d as f32, then one i8 for each value: d q

Tensors under `__training__.` are optimizer state: checked like the others, and left out of
`tensors`. A file that was replaced or modified after it was opened is refused by the next `get`.

**The layout**, which is checked before anything relies on it:

    header, 64 bytes | metadata, JSON | tensor index | tensor data | CRC-32 of all before it

    byte 0    4    magic "APR\\0"             byte 24   u64  byte where the index starts
    byte 4    2    version 2, 0              byte 32   u64  byte where the data starts
    byte 6    u16  flags                     byte 40   u32  CRC-32 of bytes 0..40 and 44..64
    byte 8    u32  number of tensors         byte 44   20   zero
    byte 12   u64  byte where metadata starts, 64
    byte 20   u32  bytes of metadata, without padding

Everything is little-endian. Sections and tensors start at multiples of 64 bytes, with zeros
between. Some writers omit the footer's CRC.

    AP01  shorter than a header       AP06  dtype 8 or 9, no such size    AP11  flag not supported
    AP02  another kind of file        AP07  shape and size disagree       AP12  it is safetensors
    AP03  another version             AP08  bytes outside the file        AP13  name is not UTF-8
    AP04  a CRC is wrong              AP09  metadata
    AP05  unknown dtype               AP10  index out of order

AP09 comes from the metadata (`engine.formats.apr_metadata`).

**The index** holds names, dtypes, shapes and positions, and is checked entry by entry.

    u16 bytes of name | name | u8 dtype | u8 dims | u64 each dim | u64 offset | u64 size

Entries are sorted by the bytes of their names, which are unique. Offsets count from the start of
the data and are multiples of 64; sizes are exact. Shapes are row-major, (out, in), as in torch.

The dtype ids are GGML's if both formats have the type. Other ids differ: 3, 6 and 7 are F64, I8 and
U8 here and Q4_1, Q5_0 and Q5_1 in GGML. 8 was once this format's own Q4 and is Q8_0 in GGML; the size
of the tensor says which is meant. 9 was this format's Q8.

Sizes, for n values in rows of m:

    F32, F16, ...   n times the width
    Q4_K, Q6_K      rows x ceil(m / 256) x 144 or 210: each row is padded to whole blocks
    APR_Q4          ceil(n / 32) x 18: blocks continue across rows
    APR_Q8          4 + n: one scale for the whole tensor; 0 for no values
"""

# Shapes: N blocks, B bytes of a block, E values of all blocks

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.errors import WeightsError
from engine.formats.apr_metadata import (
    METADATA_LIMIT_BYTES,
    extract,
    read_config,
    read_metadata,
    refuse,
    unsupported,
)
from engine.formats.kinds import START_BYTES, Kind, kind_of, other_kind
from engine.formats.safetensors import DTYPES
from engine.formats.weights import (
    CUT_SHORT,
    OpenFile,
    Scratch,
    TensorInfo,
    WeightFile,
    identity_of,
    open_regular,
)
from engine.quant.blocks import BLOCK_TYPES, GGML_NAMES

if TYPE_CHECKING:
    from torch import Tensor

    from engine.quant.tensor import QuantTensor

MAGIC = b"APR\0"
HEADER_BYTES = 64
ALIGNMENT = 64
FOOTER_BYTES = 4
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

NAME_LIMIT_BYTES = 256
DIMS_LIMIT = 8
TENSORS_LIMIT = limits.TENSORS.most
_HEAD = struct.Struct("<H")
_MIDDLE = struct.Struct("<BB")
_TAIL = struct.Struct("<QQ")
_ENTRY_LIMIT_BYTES = _HEAD.size + NAME_LIMIT_BYTES + _MIDDLE.size + 8 * DIMS_LIMIT + _TAIL.size

PLAIN = ("F32", "F16", "BF16", "F64", "I32", "I64", "I8", "U8")
"""Dtypes stored as plain values, without blocks."""
DTYPE_IDS = {
    **{name: kind.ggml_id for name, kind in BLOCK_TYPES.items() if kind.in_apr},
    **{"F64": 3, "I32": 4, "I64": 5, "I8": 6, "U8": 7, "APR_Q4": 128, "APR_Q8": 129},
}
LEGACY_IDS = {8: ("APR_Q4", "Q8_0"), 9: ("APR_Q8",)}
"""Legacy ids: this format's own meaning, and GGML's. A tensor has the size of at most one."""
# Values and bytes of a block, for types whose blocks do not cross rows.
ROW_BLOCKS = {
    **{
        name: (kind.block_size, kind.block_bytes)
        for name, kind in BLOCK_TYPES.items()
        if kind.layout
    },
    "Q4_1": (32, 20),
}
APR_Q4_BLOCK = (32, 18)
_NAMES = {number: name for name, number in DTYPE_IDS.items()}

TRAINING_PREFIX = "__training__."
_ZERO_NIBBLE = 8
_READ_BYTES = 1 << 22


class AprFile(WeightFile):
    """One .apr file."""

    format = "apr"
    convention = "apr"

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        with open_regular(path, "apr") as file:
            identity = identity_of(file.fileno())
            self._files = {path: OpenFile(path, "apr", "AP08", identity, Scratch())}
            self._file_bytes = os.fstat(file.fileno()).st_size
            header = check_header(path, file.read(START_BYTES), self._file_bytes)
            file.seek(header.metadata_start)
            raw_metadata = file.read(header.metadata_bytes)
            file.seek(header.index_start)
            raw_index = file.read(index_limit_bytes(header))
        self.metadata, oddities = read_metadata(path, raw_metadata)
        all_tensors = read_index(path, header, raw_index)
        self._data_end, unclaimed = check_extent(path, header, all_tensors)
        self.tensors = {
            name: info for name, info in all_tensors.items() if not name.startswith(TRAINING_PREFIX)
        }
        warnings = [*header.warnings, *oddities, *unsupported(self.metadata, path)]
        if unclaimed:
            warnings.append(f"{path}: {unclaimed:,} bytes of the data belong to no tensor")
        if len(all_tensors) > len(self.tensors):
            left_out = len(all_tensors) - len(self.tensors)
            warnings.append(f"{path}: {left_out} tensors of optimizer state left out")
        for name, info in self.tensors.items():
            if not info.bytes:
                warnings.append(f"{path}, tensor {json.dumps(name)}: no values")
        if self._data_end == self._file_bytes:
            warnings.append(f"{path}: no footer, so damaged data would not be seen")
        self.warnings = tuple(warnings)
        self._verified = False

    def get(self, name: str) -> Tensor | QuantTensor:
        """Return the tensor on the CPU, in its own memory. Raises `WeightsError`."""
        import torch

        info = self.tensors.get(name)
        if info is None:
            found = f"{len(self.tensors)} tensors without it"
            raise WeightsError.expected("apr", self.path, f"tensor {json.dumps(name)}", found)
        if not self._verified:
            self.verify()
            self._verified = True
        if info.dtype in PLAIN:
            return self.read(info, getattr(torch, DTYPES[info.dtype][1] or "")).view(info.shape)
        flat = self.read(info, torch.uint8)
        if info.dtype in ROW_BLOCKS:
            return _blocks(flat, info)
        values_E = _apr_q4(flat) if info.dtype == "APR_Q4" else _apr_q8(flat)
        return values_E[: math.prod(info.shape)].view(info.shape)

    def config_dict(self) -> dict[str, Any]:
        """Return the content of a Hugging Face `config.json` of this model. Raises `WeightsError`
        AP09.
        """
        return read_config(self.path, self.metadata, self.tensors)

    def tokenizer_json(self) -> bytes | None:
        """Return the `tokenizer.json` in the metadata; None, with the reason in `warnings`, if
        there is none.
        """
        return extract(self.metadata, self.path)

    def verify(self) -> None:
        """Compare the footer's CRC, if there is one, with the whole file (AP04)."""
        if self._data_end == self._file_bytes:
            return
        import torch

        file, crc = self._files[self.path], 0
        for start in range(0, self._data_end, _READ_BYTES):
            count = min(_READ_BYTES, self._data_end - start)
            crc = zlib.crc32(file.read(start, count, torch.uint8).numpy().data, crc)
        footer = file.read(self._data_end, FOOTER_BYTES, torch.uint8)
        stored = int.from_bytes(footer.numpy().tobytes(), "little")
        if stored != crc:
            where = f"{self.path} @{self._data_end}"
            expected = f"the CRC-32 of all before it to be 0x{crc:08x}"
            hint = "the file is damaged: compare its digest with the source, fetch it again"
            refuse("AP04", where, expected, f"0x{stored:08x} in the footer", hint)


def _apr_q4(flat: Tensor) -> Tensor:
    import torch

    blocks_NB = flat.view(-1, APR_Q4_BLOCK[1])
    scale_N1 = blocks_NB[:, :2].clone().view(torch.float16).float()
    pairs_NH = blocks_NB[:, 2:]
    codes = torch.stack((pairs_NH & 15, pairs_NH >> 4), dim=-1).flatten(1)
    return ((codes.float() - _ZERO_NIBBLE) * scale_N1).flatten()


def _apr_q8(flat: Tensor) -> Tensor:
    import torch

    if not len(flat):
        return torch.empty(0)
    scale, codes_E = flat[:4].clone().view(torch.float32), flat[4:].view(torch.int8)
    return codes_E.float() * scale


def _blocks(flat: Tensor, info: TensorInfo) -> Tensor | QuantTensor:
    """Return a block-quantised tensor; dequantised if the last block of a row is padded."""
    from engine.quant.tensor import QuantTensor

    kind = BLOCK_TYPES[info.dtype]
    *lead, row_values = info.shape
    row_blocks = -(-row_values // kind.block_size)
    tensor = QuantTensor(
        blocks=flat.view(*lead, row_blocks * kind.block_bytes),
        type=kind,
        shape=(*lead, row_blocks * kind.block_size),
    )
    if tensor.shape == info.shape:
        return tensor
    return tensor.dequantize()[..., :row_values].contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class AprHeader:
    """A checked header: its sections are inside the file and in order."""

    flags: int
    tensor_count: int
    metadata_start: int
    metadata_bytes: int
    index_start: int
    data_start: int
    file_bytes: int
    warnings: tuple[str, ...]


def align(count: int) -> int:
    """Return `count` rounded up to the next multiple of 64."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def header_crc(raw: bytes) -> int:
    """Return the CRC-32 of a header, without its own four bytes."""
    return zlib.crc32(raw[44:64], zlib.crc32(raw[:40]))


def check_header(path: Path, start: bytes, file_bytes: int) -> AprHeader:
    """Return the checked header of a file that begins with `start`. Raises `WeightsError`."""
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
    """Return the end of the padded data, where the footer is or the file ends, and the number of
    bytes before it that belong to no tensor.

    Raises `WeightsError` for overlapping tensors, a truncated file and bytes after the footer.
    """
    end, previous, unclaimed = header.data_start, "the index", 0
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.bytes)):
        name = f"tensor {json.dumps(info.name)}"
        if info.bytes and info.start < end:
            refuse("AP08", path, f"{name} after {previous}", f"it overlaps at byte {info.start:,}")
        if info.bytes:
            unclaimed += info.start - end
            end, previous = info.start + align(info.bytes), name
    extra_bytes = header.file_bytes - end
    if extra_bytes < 0:
        expected = f"{end:,} bytes of padded data"
        refuse("AP08", path, expected, f"a file of {header.file_bytes:,}", CUT_SHORT)
    if extra_bytes not in (0, FOOTER_BYTES):
        expected = f"{end:,} bytes, or {end + FOOTER_BYTES:,} with a footer"
        hint = "another file may be hidden after the weights"
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
    """Check that header, metadata, index and data follow each other inside the file, each aligned."""
    end = header.file_bytes
    if header.metadata_bytes > METADATA_LIMIT_BYTES:
        expected = f"at most {METADATA_LIMIT_BYTES:,} bytes of metadata"
        refuse("AP09", f"{path} @20", expected, f"{header.metadata_bytes:,}")
    sections = (
        (12, "metadata", HEADER_BYTES, header.metadata_start),
        (24, "the index", header.metadata_start + header.metadata_bytes, header.index_start),
        (32, "the data", header.index_start, header.data_start),
    )
    for field, section, earliest, start in sections:
        where = f"{path} @{field}"
        if start < earliest or start > end:
            expected = (
                f"{section} to start between bytes {earliest:,} and {end:,}, the end of the file"
            )
            refuse("AP08", where, expected, f"{start:,}", CUT_SHORT if start > end else None)
        if start % ALIGNMENT:
            refuse("AP08", where, f"{section} to start at a multiple of 64", f"{start:,}")
    if header.tensor_count > TENSORS_LIMIT:
        expected = f"at most {TENSORS_LIMIT:,} tensors"
        refuse("AP10", f"{path} @8", expected, f"{header.tensor_count:,}")


def read_index(path: Path, header: AprHeader, raw: bytes) -> dict[str, TensorInfo]:
    """Return the tensors in the bytes of an index, checked against the file's size. Raises `WeightsError`."""
    tensors: dict[str, TensorInfo] = {}
    cursor = _Cursor(path=path, raw=raw, first_byte=header.index_start)
    previous = b""
    for number in range(header.tensor_count):
        where = f"{path} @{cursor.byte}, tensor {number}"
        (name_bytes,) = cursor.take(_HEAD, where)
        if not 0 < name_bytes <= NAME_LIMIT_BYTES:
            refuse("AP10", where, "a name of 1 to 256 bytes", f"{name_bytes:,} bytes")
        (raw_name,) = cursor.take(struct.Struct(f"{name_bytes}s"), where)
        try:
            name = raw_name.decode()
        except UnicodeDecodeError as error:
            found = f"{_quoted(raw_name)}, with another byte at {error.start}"
            refuse("AP13", where, "a name in UTF-8", found)
        if raw_name <= previous:
            found = "it a second time" if raw_name == previous else f"it after {_quoted(previous)}"
            refuse("AP10", where, f"{_quoted(raw_name)} in sorted order", found)
        previous = raw_name
        where = f"{where}, {json.dumps(name)}"
        dtype_id, dims = cursor.take(_MIDDLE, where)
        if dims > DIMS_LIMIT:
            refuse("AP07", where, f"at most {DIMS_LIMIT} dimensions", f"{dims}")
        shape = cursor.take(struct.Struct(f"<{dims}Q"), where)
        if math.prod(dim for dim in shape if dim) >= 2**63:
            refuse("AP07", where, "a shape below 2^63", f"{list(shape)}")
        offset, size = cursor.take(_TAIL, where)
        dtype = _dtype(where, dtype_id, shape, size)
        _check_size(where, dtype, shape, size)
        data_bytes = header.file_bytes - header.data_start
        if offset > data_bytes or size > data_bytes - offset:
            found = f"bytes {header.data_start + offset:,} to {header.data_start + offset + size:,}"
            refuse("AP08", where, f"data within {header.file_bytes:,} bytes", found, CUT_SHORT)
        if offset % ALIGNMENT:
            refuse("AP08", where, "an offset that 64 divides", f"{offset:,}")
        tensors[name] = TensorInfo(
            name=name,
            dtype=dtype,
            shape=shape,
            file=path,
            start=header.data_start + offset,
            bytes=size,
        )
    if raw[cursor.at :].strip(b"\0"):
        found = f"more after byte {cursor.byte}"
        refuse("AP10", f"{path} @8", f"{header.tensor_count} tensors in the index", found)
    return tensors


def index_limit_bytes(header: AprHeader) -> int:
    """Return how much to read for the index: its section, but no more than its entries can fill."""
    return min(
        header.data_start - header.index_start, header.tensor_count * _ENTRY_LIMIT_BYTES + 64
    )


def index_entry(name: bytes, dtype: str, shape: tuple[int, ...], offset: int, size: int) -> bytes:
    """Return the index entry of one tensor; the reverse of `read_index`."""
    head = _HEAD.pack(len(name)) + name + _MIDDLE.pack(DTYPE_IDS[dtype], len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + _TAIL.pack(offset, size)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes. Blocks do not cross rows, which are padded to whole
    blocks; only those of APR_Q4 do.
    """
    count = math.prod(shape)
    if dtype in PLAIN:
        return count * DTYPES[dtype][0] // 8
    if dtype == "APR_Q8":
        return 4 + count if count else 0
    if dtype == "APR_Q4":
        return -(-count // APR_Q4_BLOCK[0]) * APR_Q4_BLOCK[1]
    values, block_bytes = ROW_BLOCKS[dtype]
    return math.prod(shape[:-1]) * -(-shape[-1] // values) * block_bytes if shape else -1


@dataclass(slots=True, kw_only=True)
class _Cursor:
    path: Path
    raw: bytes
    first_byte: int
    at: int = 0

    @property
    def byte(self) -> int:
        """The current position in the file."""
        return self.first_byte + self.at

    def take(self, form: struct.Struct, where: str) -> tuple[Any, ...]:
        """Return the next fields, if all of their bytes exist."""
        if form.size > len(self.raw) - self.at:
            end = self.first_byte + len(self.raw)
            refuse(
                "AP08", where, f"{form.size} more bytes", f"the index to end at {end}", CUT_SHORT
            )
        self.at += form.size
        return form.unpack_from(self.raw, self.at - form.size)


def _quoted(raw: bytes) -> str:
    return json.dumps(raw.decode(errors="backslashreplace"))


def _dtype(where: str, number: int, shape: tuple[int, ...], size: int) -> str:
    """Return the name of a dtype id; of a legacy one, that whose size the tensor has."""
    if number in _NAMES:
        return _NAMES[number]
    if number not in LEGACY_IDS:
        ggml = f", which is {GGML_NAMES[number]} in GGUF" if number in GGML_NAMES else ""
        known = ", ".join(f"{i} {name}" for i, name in sorted(_NAMES.items()))
        refuse("AP05", where, f"one of the dtypes {known}", f"unknown dtype byte {number}{ggml}")
    sizes = {name: size_of(name, shape) for name in LEGACY_IDS[number]}
    for name, expected_size in sizes.items():
        if size == expected_size:
            return name
    expected = " or ".join(f"{count:,} bytes for {name}" for name, count in sizes.items())
    refuse("AP06", where, f"{expected}, which dtype {number} may be", f"{size:,} bytes")


def _check_size(where: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
    if dtype in ROW_BLOCKS and not shape:
        refuse("AP07", where, f"at least one dimension of {dtype}", "none")
    expected = size_of(dtype, shape)
    if size != expected:
        refuse("AP07", where, f"{expected:,} bytes for {dtype}{list(shape)}", f"{size:,} bytes")
