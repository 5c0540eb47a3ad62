"""Open, check and read weights in GGUF: one file, or all parts of a split model.

A split model is `name-00001-of-00003.gguf` and its siblings; any part may be given, and all are
opened. Each part states its number (`split.no`, from 0) and the number of parts, and has its own
tensors; configuration and tokenizer are in the first. A part that is missing, or whose number does
not match its name, is refused by name (GG19).

`get` returns float types as torch tensors and block types as `QuantTensor`, as copies of the file's
bytes. A file that is truncated, replaced or modified after its header was read is refused (GG16).

**The header** is read and checked before anything relies on it:

    byte 0      4 bytes   "GGUF"
    byte 4      u32       version, 2 or 3 (3 allows big-endian files, which are refused here)
    byte 8      u64       number of tensors
    byte 16     u64       number of key/value pairs
    byte 24     pairs     key string, u32 value type, value
    then        tensors   name string, u32 n_dims, u64 ne[n_dims], u32 type, u64 offset
    then        data      from the next multiple of `general.alignment` (32 when absent); offsets
                          count from here, and each is a multiple of the alignment

Everything is little-endian. A string is a u64 length and UTF-8 without a terminating NUL; an array
is a u32 element type, a u64 count and the elements. ne[0] is the contiguous dimension, so a shape
in torch order is `ne` reversed.

Every length is compared with the bytes that are left, as `length <= size - at`, before the position
advances or anything is allocated. Each possible error has a code:

    GG01 not a GGUF file        GG07 string longer than file    GG13 dimension of zero
    GG02 truncated header       GG08 array: length, type        GG14 tensor name
    GG03 version, byte order    GG09 array in an array          GG15 rows that blocks do not fill
    GG05 counts                 GG10 unknown type               GG16 offset of a tensor's data
                                GG11 alignment                  GG17 architecture  (gguf_metadata)
    GG06 key                    GG12 number of dimensions       GG18 vocabulary    (gguf_metadata)
    GG19 parts of a split file

A file with 152 thousand tokens opens in a fraction of a second, because arrays are decoded only when
they are used. The values of tensors are not checked here.

An entry of the tensor table:

    name      u64 length, UTF-8
    n_dims    u32, 1 to 4
    ne        u64 for each dimension, ne[0] being the contiguous one
    type      u32, the id of a block type
    offset    u64, from the start of the data, a multiple of the alignment

Sizes are computed with Python's integers, which cannot overflow. A tensor is inside the file if `offset + bytes` is
at most the size of the data.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.formats.gguf_metadata import check_vocabulary, read_config
from engine.formats.gguf_tokenizer import build_tokenizer_json, unsupported_tokenizer
from engine.formats.gguf_values import (
    Cursor,
    Entry,
    GgufMetadata,
    ValueType,
    quoted,
    read_entry,
    refuse,
)
from engine.formats.kinds import START_BYTES, kind_of, other_kind
from engine.formats.weights import (
    CUT_SHORT,
    OpenFile,
    Scratch,
    TensorInfo,
    WeightFile,
    identity_of,
    open_regular,
)
from engine.quant.blocks import BLOCK_TYPES, GGML_NAMES, row_bytes

if TYPE_CHECKING:
    import torch

    from engine.quant.tensor import QuantTensor

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
SMALLEST_ALIGNMENT = 8
"""The specification does not allow smaller powers of two; with this one, floats are aligned."""

_HEADER_BYTES = 24
# The smallest pair has a key of one byte and a value of one byte; the smallest tensor has a name of
# one byte and one dimension.
_PAIR_BYTES = 8 + 1 + 4 + 1
_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
MAX_DIMS = 4

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufFile(WeightFile):
    """A model with llama.cpp's tensor names (`blk.0.attn_q.weight`). Created by `open_gguf`."""

    format = "gguf"
    convention = "gguf"
    metadata: GgufMetadata
    """Key/value pairs of the file, or of the first part of a split model; the chat template is under
    `tokenizer.chat_template`.
    """

    def __init__(self, path: Path, headers: list[GgufHeader]) -> None:
        self.path = path
        self.tensors = {name: info for header in headers for name, info in header.tensors.items()}
        self.metadata = headers[0].metadata
        oddities = check_vocabulary(self.metadata, self.tensors)
        self.warnings = (*oddities, *unsupported_tokenizer(self.metadata))
        scratch = Scratch()
        self._files = {
            header.path: OpenFile(header.path, "gguf", "GG16", header.identity, scratch)
            for header in headers
        }

    def get(self, name: str) -> torch.Tensor | QuantTensor:
        """Return the tensor on the CPU, in its own memory: writes never reach the file."""
        import torch

        from engine.quant.tensor import QuantTensor

        info = self.tensors.get(name)
        if info is None:
            where = f"{self.path}, tensor {quoted(name)}"
            refuse(
                "GG14", where, "a tensor of this name", f"{len(self.tensors)} tensors without it"
            )
        kind = BLOCK_TYPES[info.dtype]
        if kind.float_dtype is not None:
            return self.read(info, getattr(torch, kind.float_dtype)).view(info.shape)
        blocks = self.read(info, torch.uint8).view(
            *info.shape[:-1], row_bytes(kind, info.shape[-1])
        )
        return QuantTensor(blocks=blocks, type=kind, shape=info.shape)

    def config_dict(self) -> dict[str, Any]:
        """Return the content of a Hugging Face `config.json` of this model. Raises GG17 for another
        architecture.

        It does not contain the RoPE scaling of Llama 3.1, which is the tensor `rope_freqs.weight`.
        """
        return read_config(self.metadata, self.tensors)

    def tokenizer_json(self) -> bytes | None:
        """Return a `tokenizer.json` that gives the ids of this file; None, with the reason in
        `warnings`, if the kind of tokenizer is not supported.
        """
        return build_tokenizer_json(self.metadata)


def open_gguf(path: str | Path) -> GgufFile:
    """Open a GGUF file, or any part of a split one, and check every header. Raises `WeightsError`."""
    path = Path(path)
    header = read_gguf_header(path)
    count = _split_number(header, "split.count", 1)
    if count <= 1:
        return GgufFile(path, [header])
    return GgufFile(path, _open_parts(path, header, count))


def _open_parts(path: Path, opened: GgufHeader, count: int) -> list[GgufHeader]:
    """Return the headers of all parts, in order."""
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        expected = f"a name that ends in -00001-of-{count:05}.gguf, part {count} being the last"
        refuse("GG19", path, expected, quoted(path.name), "give the parts their names back")
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        listed = ", ".join(missing[:8]) + (", ..." if missing[8:] else "")
        found = f"{len(missing)} missing: {listed}"
        refuse("GG19", path, f"{count} parts", found, "fetch the rest of the model")
    headers = []
    for number, name in enumerate(names):
        part = path.with_name(name)
        header = opened if part == path else read_gguf_header(part)
        stated = _split_number(header, "split.no", None), _split_number(header, "split.count", None)
        if stated != (number, count):
            expected = f"split.no {number} and split.count {count}"
            refuse(
                "GG19", part, expected, f"{stated[0]} and {stated[1]}", "a part may be there twice"
            )
        headers.append(header)
    return headers


def _split_number(header: GgufHeader, key: str, absent: int | None) -> int:
    number = header.metadata.get(key, absent)
    # File names have five digits for it.
    if type(number) is not int or not 0 <= number <= 99_999:
        refuse(
            "GG19",
            f"{header.path}, key {quoted(key)}",
            "a number from 0 to 99,999",
            f"{number!r:.40}",
        )
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A checked header, whose tensors are all inside the file."""

    path: Path
    metadata: GgufMetadata
    tensors: dict[str, TensorInfo]
    data_start: int
    identity: tuple[int, ...] = ()
    """Identity of the file that was read, as `engine.formats.weights` compares it."""


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read and check the header of one file; no tensor data is read. Raises `WeightsError`."""
    path = Path(path)
    with open_regular(path, "gguf") as file:
        identity = identity_of(file.fileno())
        start = file.read(START_BYTES)
        if not start.startswith(b"GGUF"):
            where, kind = f"{path} @0", kind_of(start)
            raise other_kind("gguf", where, "a GGUF file", kind, start, "GG01")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return replace(parse_header(data, path), identity=identity)


def parse_header(data: bytes | mmap.mmap, path: Path) -> GgufHeader:
    """Return the header of a file with the content `data`, without keeping a reference to `data`."""
    size = len(data)
    version = int.from_bytes(data[4:8], "little")
    if size >= 8 and version not in (2, 3):
        found = "another byte order" if version and version & 0xFFFF == 0 else f"version {version}"
        hint = "make a new file of the model's original folder with a current llama.cpp"
        refuse("GG03", f"{path} @4", "version 2 or 3, little-endian", found, hint)
    if size < _HEADER_BYTES:
        found = f"a truncated header ({size} of {_HEADER_BYTES} bytes)"
        refuse("GG02", f"{path} @{size}", f"{_HEADER_BYTES} bytes", found, CUT_SHORT)
    n_tensors, n_pairs = struct.unpack_from("<QQ", data, 8)
    room = size - _HEADER_BYTES
    _check_count(path, 8, "tensors", n_tensors, room // _TENSOR_BYTES)
    room -= n_tensors * _TENSOR_BYTES
    _check_count(path, 16, "key/value pairs", n_pairs, room // _PAIR_BYTES)
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
        tensors[info.name] = with_file_position(info, data_start, alignment, size)
    return GgufHeader(path=path, metadata=metadata, tensors=tensors, data_start=data_start)


def _check_count(path: Path, at: int, items: str, count: int, room: int) -> None:
    if count > room:
        expected = f"at most {room:,} {items}, for which the file has room"
        refuse("GG05", f"{path} @{at}", expected, f"{count:,}", CUT_SHORT)


def _alignment(metadata: GgufMetadata) -> int:
    entry = metadata.entry(ALIGNMENT_KEY)
    if entry is None:
        return DEFAULT_ALIGNMENT
    alignment = metadata[ALIGNMENT_KEY] if entry.type is ValueType.UINT32 else entry.type.name
    if (
        isinstance(alignment, int)
        and alignment >= SMALLEST_ALIGNMENT
        and alignment & (alignment - 1) == 0
    ):
        return alignment
    refuse(
        "GG11",
        f"{metadata.path} @{entry.start}",
        f"{ALIGNMENT_KEY} as a UINT32, a power of two from {SMALLEST_ALIGNMENT}",
        str(alignment),
    )


def read_tensor(cursor: Cursor) -> tuple[int, TensorInfo]:
    """Return the position of an entry of the tensor table, and the tensor, with `start` still
    relative to the data.
    """
    at, path = cursor.at, cursor.path
    length = cursor.u64("GG14", "the length of a tensor's name")
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
    kind = BLOCK_TYPES.get(GGML_NAMES.get(ggml_id, ""))
    if kind is None:
        known = f" ({GGML_NAMES[ggml_id]})" if ggml_id in GGML_NAMES else ""
        refuse(
            "GG10",
            where,
            f"one of {', '.join(BLOCK_TYPES)}",
            f"type {ggml_id:,}{known}",
            "make a file of a type that is read: `llama-quantize --allow-requantize FILE NEW BF16`",
        )
    if ne[0] % kind.block_size:
        expected = f"rows of a multiple of {kind.block_size} for {kind.name}"
        refuse("GG15", where, expected, f"rows of {ne[0]:,}")
    return at, TensorInfo(
        name=name,
        dtype=kind.name,
        shape=tuple(reversed(ne)),
        file=path,
        start=offset,
        bytes=math.prod(ne[1:]) * row_bytes(kind, ne[0]),
    )


def with_file_position(info: TensorInfo, data_start: int, alignment: int, size: int) -> TensorInfo:
    """Return the tensor with its offset converted to a position in the file."""
    where = f"{info.file}, tensor {quoted(info.name)}"
    if info.start % alignment:
        refuse("GG16", where, f"an offset that is a multiple of {alignment}", f"{info.start:,}")
    if data_start + info.start + info.bytes > size:
        expected = f"{info.bytes:,} bytes at {info.start:,} of the data"
        found = f"data from byte {data_start:,}, and a file that ends at byte {size:,}"
        refuse("GG16", where, expected, found, CUT_SHORT)
    return replace(info, start=data_start + info.start)


def padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment
