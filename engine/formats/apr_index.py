"""The tensor index of an .apr file: names, dtypes, shapes and places, checked entry by entry.

    u16 bytes of name | name | u8 dtype | u8 dims | u64 each dim | u64 offset | u64 size

Entries are sorted by the bytes of their names, and no two are equal. Offsets count from the start
of the data and are multiples of 64; sizes are exact. Shapes are row-major, (out, in), as torch has
them.

The dtypes are GGML's ids where both have the type, and others where they do not: 3, 6 and 7 are
F64, I8 and U8 here and Q4_1, Q5_0 and Q5_1 there. 8 and 9 were once the format's own Q4 and Q8 and
are Q8_0 and Q8_1 of GGML: such a file is refused until its user says which, and the sizes agree.

Sizes, for n values in rows of m:

    F32, F16, ...   n times the width
    Q4_K, Q6_K      rows x ceil(m / 256) x 144 or 210: a row is filled up to whole blocks
    APR_Q4          ceil(n / 32) x 18: blocks run on from row to row
    APR_Q8          4 + n: one scale for the whole tensor; 0 for no values

No torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.formats.apr_header import ALIGNMENT, CUT_SHORT, AprHeader, refuse
from engine.formats.safetensors_header import TensorInfo

NAME_LIMIT_BYTES = 256
DIMS_LIMIT = 8
_HEAD = struct.Struct("<H")
_MIDDLE = struct.Struct("<BB")
_TAIL = struct.Struct("<QQ")
_ENTRY_LIMIT_BYTES = _HEAD.size + NAME_LIMIT_BYTES + _MIDDLE.size + 8 * DIMS_LIMIT + _TAIL.size

DTYPE_IDS = {
    "F32": 0,
    "F16": 1,
    "F64": 3,
    "I32": 4,
    "I64": 5,
    "I8": 6,
    "U8": 7,
    "Q4_K": 12,
    "Q6_K": 14,
    "BF16": 30,
    "APR_Q4": 128,
    "APR_Q8": 129,
}
AMBIGUOUS = {8: ("APR_Q4", "Q8_0"), 9: ("APR_Q8", "Q8_1")}
"""Legacy ids: the format's own meaning, and GGML's."""
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4, "I64": 8, "I8": 1, "U8": 1}
# Values and bytes of a block, for types whose blocks run along a row.
ROW_BLOCKS = {
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
    "Q8_0": (32, 34),
    "Q8_1": (32, 36),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q5_K": (256, 176),
}
APR_Q4_BLOCK = (32, 18)
_NAMES = {number: name for name, number in DTYPE_IDS.items()}
_GGML_ONLY = {2: "Q4_0", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K"}
_GGML_SHADOWED = {"F64": "Q4_1", "I8": "Q5_0", "U8": "Q5_1"}


def read_index(
    path: Path, header: AprHeader, raw: bytes, dtypes: Mapping[int, str]
) -> dict[str, TensorInfo]:
    """The tensors in the bytes of an index, checked against the file's size.

    `dtypes` says what the ambiguous ids mean: {8: "APR_Q4"} or {8: "Q8_0"}. Raises `WeightsError`.
    """
    tensors: dict[str, TensorInfo] = {}
    cursor = _Cursor(path=path, raw=raw, first_byte=header.index_start)
    before = b""
    for number in range(header.tensor_count):
        where = f"{path} @{cursor.byte}, tensor {number}"
        (name_bytes,) = cursor.take(_HEAD, where)
        if not 0 < name_bytes <= NAME_LIMIT_BYTES:
            refuse("AP10", where, "a name of 1 to 256 bytes", f"{name_bytes:,} bytes")
        (raw_name,) = cursor.take(struct.Struct(f"{name_bytes}s"), where)
        name = _name(where, raw_name)
        if raw_name <= before:
            found = "it a second time" if raw_name == before else f"it after {_quoted(before)}"
            refuse("AP10", where, f"{_quoted(raw_name)} in sorted order", found)
        before = raw_name
        where = f"{where}, {json.dumps(name)}"
        dtype_id, dims = cursor.take(_MIDDLE, where)
        if dims > DIMS_LIMIT:
            refuse("AP07", where, f"at most {DIMS_LIMIT} dimensions", f"{dims}")
        shape = cursor.take(struct.Struct(f"<{dims}Q"), where)
        if math.prod(dim for dim in shape if dim) >= 2**63:
            refuse("AP07", where, "a shape below 2^63", f"{list(shape)}")
        offset, size = cursor.take(_TAIL, where)
        dtype = _dtype(where, dtype_id, shape, size, dtypes)
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
    """How much to read for the index: its section, but no more than its entries can fill."""
    return min(
        header.data_start - header.index_start, header.tensor_count * _ENTRY_LIMIT_BYTES + 64
    )


def index_entry(name: bytes, dtype: str, shape: tuple[int, ...], offset: int, size: int) -> bytes:
    """One tensor as the index holds it; the reverse of `read_index`."""
    head = _HEAD.pack(len(name)) + name + _MIDDLE.pack(DTYPE_IDS[dtype], len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + _TAIL.pack(offset, size)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Blocks run along a row and fill it up; those of APR_Q4 run through all."""
    count = math.prod(shape)
    if dtype in WIDTHS:
        return count * WIDTHS[dtype]
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
        """Where in the file it stands."""
        return self.first_byte + self.at

    def take(self, form: struct.Struct, where: str) -> tuple[Any, ...]:
        """The next fields, if all of their bytes are there."""
        if form.size > len(self.raw) - self.at:
            end = self.first_byte + len(self.raw)
            refuse(
                "AP08", where, f"{form.size} more bytes", f"the index to end at {end}", CUT_SHORT
            )
        self.at += form.size
        return form.unpack_from(self.raw, self.at - form.size)


def _name(where: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        found = f"{_quoted(raw)}, with another byte at {error.start}"
        refuse("AP13", where, "a name in UTF-8", found)


def _quoted(raw: bytes) -> str:
    return json.dumps(raw.decode(errors="backslashreplace"))


def _dtype(
    where: str, number: int, shape: tuple[int, ...], size: int, dtypes: Mapping[int, str]
) -> str:
    """The name of a dtype's number. An ambiguous one needs the user's word and the right size."""
    if number in _NAMES:
        return _NAMES[number]
    if number not in AMBIGUOUS:
        ggml = f", which is {_GGML_ONLY[number]} in GGUF" if number in _GGML_ONLY else ""
        known = ", ".join(f"{i} {name}" for name, i in sorted(DTYPE_IDS.items(), key=_second))
        refuse("AP05", where, f"one of the dtypes {known}", f"unknown dtype byte {number}{ggml}")
    ours, ggml = AMBIGUOUS[number]
    fits = [name for name in (ours, ggml) if size_of(name, shape) == size]
    said = dtypes.get(number)
    if said not in fits or said == "Q8_1":
        fitting = " and ".join(fits) or "neither"
        found = f"{said or 'neither said'}, and {size:,} bytes that fit {fitting}"
        refuse(
            "AP06",
            where,
            f"ambiguous dtype {number} to be {ours}, as old writers meant, or {ggml}, as GGUF does",
            found,
            f"open it with apr_dtypes={{{number}: {fits[0]!r}}}" if fits and not said else None,
        )
    return said


def _second(item: tuple[str, int]) -> int:
    return item[1]


def _check_size(where: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
    if dtype in ROW_BLOCKS and not shape:
        refuse("AP07", where, f"at least one dimension of {dtype}", "none")
    expected = size_of(dtype, shape)
    if size == expected:
        return
    hint = None
    other = _GGML_SHADOWED.get(dtype)
    if other is not None and shape and size == size_of(other, shape):
        hint = f"that is the size of {other}, which has the same number in GGUF"
    elif dtype in ROW_BLOCKS and size == size_of(dtype, shape[::-1]):
        hint = "that is the size with rows and columns swapped"
    elif dtype in ROW_BLOCKS and size == size_of(dtype, (math.prod(shape),)):
        hint = "that is the size of blocks that run on from row to row"
    refuse("AP07", where, f"{expected:,} bytes for {dtype}{list(shape)}", f"{size:,} bytes", hint)
