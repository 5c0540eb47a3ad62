"""Open, check and read weights in an .apr file (APR v2).

Opening reads header, metadata and index, but no data. `get` reads one tensor into its own memory.
Before the first tensor is returned, the footer's CRC is compared with the whole file, so that a
damaged file is refused instead of being partly used. For a file without a footer there is only a
warning.

The result of `get`, by the dtype in the index:

    F32 F16 BF16 F64 I32 I64 I8 U8   a tensor
    Q4_K Q6_K                        a QuantTensor: the blocks are GGUF's, byte for byte. If rows are
                                     not a multiple of 256, the last block of each is padded; such a
                                     tensor is dequantised, to float32 of its own shape

Tensors whose names begin with `__training__.` are optimizer state: they are checked, and left out of
`tensors`. If the file is replaced or modified after it was opened, the next `get` refuses it.

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

    AP02  not an .apr file         AP05  unknown dtype                AP09  metadata
    AP03  unsupported version      AP08  truncated, or sections and   AP10  index
    AP04  a CRC is wrong                 tensors beyond its end       AP11  flag not supported

AP09 comes from the metadata (`engine.formats.apr_metadata`).

**The index** holds names, dtypes, shapes and positions, and is checked entry by entry.

    u16 bytes of name | name | u8 dtype | u8 dims | u64 each dim | u64 offset | u64 size

Entries are sorted by the bytes of their names, which are unique. Offsets are relative to the start of
the data and multiples of 64; sizes are exact. Shapes are row-major, (out, in), as in torch.

The dtype ids are GGML's if both formats have the type. Other ids differ: 3, 6 and 7 are F64, I8 and
U8 here and Q4_1, Q5_0 and Q5_1 in GGML. Blocks that only this format has (ids 8, 9, 128 and 129) are
not read.

Sizes, for n values in rows of m:

    F32, F16, ...   n times the width
    Q4_K, Q6_K      rows x ceil(m / 256) x 144 or 210: each row is padded to whole blocks
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_UNSUPPORTED = 0xF81F
"""Header flags that are refused: compressed, encrypted, signed, sharded or column-major files, and undefined bits."""

_NAME_LIMIT_BYTES = 256
_HEAD = struct.Struct("<H")
_MIDDLE = struct.Struct("<BB")
_TAIL = struct.Struct("<QQ")
_ENTRY_LIMIT_BYTES = _HEAD.size + _NAME_LIMIT_BYTES + _MIDDLE.size + 8 * 8 + _TAIL.size
"""Size in bytes of an index entry with a long name and eight dimensions."""

PLAIN = ("F32", "F16", "BF16", "F64", "I32", "I64", "I8", "U8")
"""Dtypes stored as plain values, without blocks."""
DTYPE_IDS = {
    **{name: kind.ggml_id for name, kind in BLOCK_TYPES.items() if kind.in_apr},
    **{"F64": 3, "I32": 4, "I64": 5, "I8": 6, "U8": 7},
}
_NAMES = {number: name for name, number in DTYPE_IDS.items()}

TRAINING_PREFIX = "__training__."
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
        self.metadata = read_metadata(path, raw_metadata)
        all_tensors = read_index(path, header, raw_index)
        ends = (info.start + align(info.bytes) for info in all_tensors.values())
        self._data_end = max(ends, default=header.data_start)
        if self._file_bytes - self._data_end not in (0, FOOTER_BYTES):
            expected = (
                f"{self._data_end:,} bytes, or {self._data_end + FOOTER_BYTES:,} with a footer"
            )
            refuse("AP08", path, expected, f"{self._file_bytes:,}", CUT_SHORT)
        self.tensors = {
            name: info for name, info in all_tensors.items() if not name.startswith(TRAINING_PREFIX)
        }
        warnings = unsupported(self.metadata, path)
        if len(all_tensors) > len(self.tensors):
            left_out = len(all_tensors) - len(self.tensors)
            warnings.append(f"{path}: {left_out} tensors of optimizer state left out")
        if self._data_end == self._file_bytes:
            warnings.append(f"{path}: no footer, so damaged data would not be seen")
        self.warnings = tuple(warnings)
        self._verified = False

    def get(self, name: str) -> Tensor | QuantTensor:
        """Return the tensor on the CPU, in memory that nothing else uses. Raises `WeightsError`."""
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
        return _blocks(self.read(info, torch.uint8), info)

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

    tensor_count: int
    metadata_start: int
    metadata_bytes: int
    index_start: int
    data_start: int
    file_bytes: int


def align(count: int) -> int:
    """Return `count` rounded up to the next multiple of 64."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def header_crc(raw: bytes) -> int:
    """Return the CRC-32 of a header, without its own four bytes."""
    return zlib.crc32(raw[44:64], zlib.crc32(raw[:40]))


def check_header(path: Path, start: bytes, file_bytes: int) -> AprHeader:
    """Return the checked header of a file that begins with `start`. Raises `WeightsError`."""
    kind = kind_of(start)
    if kind is not Kind.APR:
        raise other_kind("apr", path, Kind.APR.value, kind, start, "AP02")
    if file_bytes < HEADER_BYTES:
        refuse("AP08", path, "a header of 64 bytes", f"a file of {file_bytes} bytes", CUT_SHORT)
    fields = HEADER.unpack(start[:HEADER_BYTES])
    magic, major, minor, flags, tensor_count, metadata_start, metadata_bytes = fields[:7]
    index_start, data_start, crc, _ = fields[7:]
    if magic != MAGIC or major != 2:
        found = f"{magic!r} and version {major}.{minor}"
        refuse("AP03", f"{path} @0", f"{MAGIC!r} and version 2", found)
    computed = header_crc(start[:HEADER_BYTES])
    if crc != computed:
        found = f"0x{crc:08x} in the header"
        refuse("AP04", f"{path} @40", f"the header's CRC-32 to be 0x{computed:08x}", found)
    if flags & _UNSUPPORTED:
        expected = "no flags of compression, encryption, signatures, shards or column-major data"
        hint = "write the file again without, with the `apr` that wrote it"
        refuse("AP11", f"{path} @6", expected, f"0x{flags & _UNSUPPORTED:04x}", hint)
    if metadata_bytes > METADATA_LIMIT_BYTES:
        expected = f"at most {METADATA_LIMIT_BYTES:,} bytes of metadata"
        refuse("AP09", f"{path} @20", expected, f"{metadata_bytes:,}")
    ends = (HEADER_BYTES, metadata_start + metadata_bytes, index_start, file_bytes)
    starts = (metadata_start, index_start, data_start)
    if any(at % ALIGNMENT or not ends[i] <= at <= file_bytes for i, at in enumerate(starts)):
        expected = (
            f"metadata, index and data in this order, at multiples of 64, in {file_bytes:,} bytes"
        )
        found = f"them at bytes {metadata_start:,}, {index_start:,} and {data_start:,}"
        refuse("AP08", f"{path} @12", expected, found, CUT_SHORT)
    return AprHeader(
        tensor_count=tensor_count,
        metadata_start=metadata_start,
        metadata_bytes=metadata_bytes,
        index_start=index_start,
        data_start=data_start,
        file_bytes=file_bytes,
    )


def read_index(path: Path, header: AprHeader, raw: bytes) -> dict[str, TensorInfo]:
    """Return the tensors in the bytes of an index, checked against the file's size. Raises `WeightsError`."""
    tensors: dict[str, TensorInfo] = {}
    at = 0
    for number in range(header.tensor_count):
        where = f"{path} @{header.index_start + at}, tensor {number}"
        try:
            (name_bytes,) = _HEAD.unpack_from(raw, at)
            name = raw[at + _HEAD.size : at + _HEAD.size + name_bytes].decode()
            at += _HEAD.size + name_bytes
            dtype_id, dims = _MIDDLE.unpack_from(raw, at)
            shape = struct.unpack_from(f"<{dims}Q", raw, at + _MIDDLE.size)
            at += _MIDDLE.size + 8 * dims
            offset, size = _TAIL.unpack_from(raw, at)
            at += _TAIL.size
        except (struct.error, UnicodeDecodeError) as error:
            refuse("AP10", where, "an entry of the index", str(error), CUT_SHORT)
        where = f"{where}, {json.dumps(name)}"
        if name in tensors:
            refuse("AP10", where, "each tensor once", "it a second time")
        dtype = _dtype(where, dtype_id)
        expected_bytes = size_of(dtype, shape)
        room = header.file_bytes - header.data_start
        is_sound = size == expected_bytes and offset % ALIGNMENT == 0 and offset + size <= room
        if not is_sound or math.prod(dim for dim in shape if dim) >= 2**63:
            expected = f"{expected_bytes:,} bytes for {dtype}{list(shape)}, at a multiple of 64, in data of {room:,}"
            refuse("AP08", where, expected, f"{size:,} at {offset:,}", CUT_SHORT)
        tensors[name] = TensorInfo(
            name=name,
            dtype=dtype,
            shape=shape,
            file=path,
            start=header.data_start + offset,
            bytes=size,
        )
    return tensors


def index_limit_bytes(header: AprHeader) -> int:
    """Return the number of bytes to read for the index: its section, but at most what its entries can fill."""
    return min(header.data_start - header.index_start, header.tensor_count * _ENTRY_LIMIT_BYTES)


def index_entry(name: bytes, dtype: str, shape: tuple[int, ...], offset: int, size: int) -> bytes:
    """Return the bytes of one tensor's index entry, as `read_index` reads them."""
    head = _HEAD.pack(len(name)) + name + _MIDDLE.pack(DTYPE_IDS[dtype], len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + _TAIL.pack(offset, size)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes. Blocks do not cross rows, which are padded to whole blocks."""
    if dtype in PLAIN:
        return math.prod(shape) * DTYPES[dtype][0] // 8
    kind = BLOCK_TYPES[dtype]
    return (
        math.prod(shape[:-1]) * -(-shape[-1] // kind.block_size) * kind.block_bytes if shape else -1
    )


def _dtype(where: str, number: int) -> str:
    """Return the name of a dtype id."""
    if number in _NAMES:
        return _NAMES[number]
    ggml = f", which is {GGML_NAMES[number]} in GGUF" if number in GGML_NAMES else ""
    known = ", ".join(f"{i} {name}" for i, name in sorted(_NAMES.items()))
    hint = "write the file again in a type that is read, with the `apr` that wrote it"
    refuse("AP05", where, f"one of the dtypes {known}", f"dtype byte {number}{ggml}", hint)
