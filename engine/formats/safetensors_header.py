"""The header of a safetensors file, read and checked before anything trusts it.

    byte 0      8 bytes   N, the length of the header, unsigned little-endian
    byte 8      N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
                          and text under "__metadata__"
    byte 8+N    the rest  the data; offsets count from here, and tensors fill it without holes,
                          overlaps or a tail

The `safetensors` library checks this layout too, but it takes duplicate keys, names neither tensor
nor byte in its messages, and sees a download that went wrong (a Git-LFS pointer, an HTML page) as a
bad number. Here nothing is allocated from an unchecked length, and a file is refused with a code
and the byte or the tensor that is wrong:

    ST01  shorter than a header      ST05  not UTF-8, not JSON       ST10  overlap, hole, reversed
    ST02  another kind of file       ST07  a key twice               ST11  shape and bytes disagree
    ST03  header longer than file    ST08  data cut short            ST12  unknown dtype
    ST04  header over the limit      ST09  trailing bytes            ST17  too many tensors

ST06, a header that does not start with its brace, is a warning, and so is a field nobody knows.

No torch, and not the library either. Not covered: values (`engine.formats.values`), and a file that
changes after it was read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from engine import files, limits
from engine.errors import WeightsError
from engine.formats.kinds import HEADER_LIMIT_BYTES, START_BYTES, Kind, kind_of, other_kind
from engine.limits import Limit

TENSORS_LIMIT = limits.TENSORS.most
"""A 70B model has under a thousand; a header of a million empty tensors only costs time."""

# Name in a file -> bits of one value, name in torch where it has one.
DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "C64": (64, "complex64"),
}

_GGUF_TYPE = re.compile(r"(Q\d|IQ\d|TQ\d|MXFP)\w*", re.IGNORECASE)
_CUT_SHORT = "the file may be cut short; compare its size with the source"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file, before its data is read."""

    name: str
    dtype: str
    """The name in the file: F32, BF16, ..."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """First byte of the data, from the beginning of the file."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header: its tensors fill the rest of the file exactly."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int
    identity: tuple[int, ...] = ()
    """Of the file that was read, as `engine.formats.open_file` compares it."""
    warnings: tuple[str, ...] = ()
    """What the format does not foresee and this reader took, one line each."""


def read_header(path: str | Path) -> Header:
    """Reads and checks the header of one file; no tensor data is read. Raises `WeightsError`."""
    path = Path(path)
    with open_regular(path, "safetensors file") as file:
        identity = identity_of(file.fileno())
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(START_BYTES)
        kind = kind_of(start)
        if kind not in (Kind.SAFETENSORS, Kind.EMPTY, Kind.UNKNOWN):
            raise other_kind("weights", path, Kind.SAFETENSORS.value, kind, start, "ST02")
        if file_bytes < 8:
            refuse(
                path,
                "8 bytes of header length",
                f"a file of {file_bytes} bytes",
                _CUT_SHORT,
                code="ST01",
            )
        header_bytes = int.from_bytes(start[:8], "little")
        if header_bytes > HEADER_LIMIT_BYTES:
            refuse(
                path,
                f"a header of at most {HEADER_LIMIT_BYTES:,} bytes",
                f"a length of {header_bytes:,} (the file starts with {start[:8]!r})",
                "this may be no safetensors file at all",
                code="ST04",
            )
        if 8 + header_bytes > file_bytes:
            refuse(
                path,
                f"a header of {header_bytes:,} bytes",
                f"a truncated file of {file_bytes:,} bytes",
                _CUT_SHORT,
                code="ST03",
            )
        file.seek(8)
        text = file.read(header_bytes)
    raw = parse_object(
        text, "safetensors header", path, first_byte=8, code="ST05", twice_code="ST07"
    )
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(path, "__metadata__ of text to text", f"{metadata!r:.80}", code="ST05")
    if len(raw) > TENSORS_LIMIT:
        refuse(path, f"at most {TENSORS_LIMIT:,} tensors", f"{len(raw):,}", code="ST17")
    data_start = 8 + header_bytes
    tensors = {name: _tensor_info(path, name, raw[name], data_start) for name in raw}
    _check_layout(path, tensors, data_start, file_bytes)
    return Header(
        path=path,
        tensors=tensors,
        metadata=metadata,
        file_bytes=file_bytes,
        identity=identity,
        warnings=tuple(_oddities(path, text, raw)),
    )


def read_json_object(path: Path, what: str, limit: Limit) -> dict[str, Any]:
    """A JSON file of one object; duplicate keys and NaN, which `json` takes, are refused."""
    return parse_object(files.read_bytes(path, what, limit, error=WeightsError), what, path)


def refuse(
    where: object, expected: str, found: str, hint: str | None = None, *, code: str = ""
) -> NoReturn:
    """Raises the `WeightsError` for a weight file; `code` names the case, as ST08 does."""
    raise WeightsError.expected(f"{code} weights".lstrip(), where, expected, found, hint=hint)


def identity_of(descriptor: int) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_regular(path: Path, what: str) -> BinaryIO:
    """Opens a file to read; a folder, a pipe or nothing at all is refused by what it is."""
    return files.open_regular(path, what, error=WeightsError)


class _JsonRefused(ValueError):
    """Valid for `json`, not for us."""


class _TwiceError(_JsonRefused):
    """A key that an object has twice: `json` keeps the last value and says nothing."""


def _constant(text: str) -> NoReturn:
    raise _JsonRefused(f"the value {text}")


def parse_object(
    raw: bytes,
    what: str,
    path: Path,
    *,
    first_byte: int = 0,
    code: str = "",
    twice_code: str = "",
    twice: list[str] | None = None,
) -> dict[str, Any]:
    """The JSON object in `raw`, which starts at `first_byte` of the file. Raises `WeightsError`.

    A key that comes twice is refused under `twice_code`; or, where a list is given as `twice`,
    noted there, and the last value counts. NaN and infinity are refused.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and twice is None:
                raise _TwiceError(f"the key {json.dumps(key)} twice")
            if key in found and twice is not None:
                twice.append(key)
            key.encode()  # a lone surrogate could be neither printed nor written again
            found[key] = value
        return found

    coded = f"{code} {what}".lstrip()
    try:
        text = raw.decode()
        found = json.loads(text, object_pairs_hook=unique, parse_constant=_constant)
    except UnicodeDecodeError as error:
        at = first_byte + error.start
        raise WeightsError.expected(coded, path, "UTF-8", f"another byte at byte {at}") from error
    except json.JSONDecodeError as error:
        at = first_byte + len(text[: error.pos].encode())
        raise WeightsError.expected(coded, path, "JSON", f"{error.msg} at byte {at}") from error
    except RecursionError as error:
        raise WeightsError.expected(coded, path, "JSON", "brackets nested too deep") from error
    except MemoryError as error:
        raise WeightsError.expected(coded, path, "JSON that fits in memory", "more") from error
    except ValueError as error:
        # A key twice, NaN, a number of thousands of digits, a lone surrogate.
        if isinstance(error, _TwiceError):
            coded = f"{twice_code} {what}".lstrip()
        raise WeightsError.expected(coded, path, "JSON with unique keys", str(error)) from error
    if not isinstance(found, dict):
        raise WeightsError.expected(coded, path, "a JSON object", f"{type(found).__name__}")
    return found


def _oddities(path: Path, text: bytes, raw: dict[str, Any]) -> Iterator[str]:
    spaces = len(text) - len(text.lstrip())
    if spaces:
        yield f"ST06 {path}: non-canonical header start, {spaces} bytes of white space at byte 8"
    for name, entry in raw.items():
        for field in entry.keys() - {"dtype", "shape", "data_offsets"}:
            yield f"{path}, tensor {json.dumps(name)}: unknown field {json.dumps(field)} ignored"


def _tensor_info(path: Path, name: str, raw: object, data_start: int) -> TensorInfo:
    where = f"{path}, tensor {json.dumps(name)}"
    entry = raw if isinstance(raw, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        gguf = ", a GGUF type" if isinstance(dtype, str) and _GGUF_TYPE.fullmatch(dtype) else ""
        refuse(
            where,
            f"one of the dtypes {', '.join(DTYPES)}",
            f"{dtype!r:.80}{gguf}",
            "quantized blocks are kept in .gguf and .apr files" if gguf else None,
            code="ST12",
        )
    if not counts(shape):
        refuse(where, "a shape of integers from 0", f"{shape!r:.80}", code="ST11")
    if not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(where, "data_offsets of [begin, end]", f"{offsets!r:.80}", code="ST10")
    begin, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != (end - begin) * 8:
        refuse(
            where,
            f"{bits / 8:,g} bytes for {dtype}{shape!r:.80}",
            f"{end - begin:,} bytes",
            code="ST11",
        )
    if math.prod(size for size in shape if size) >= 2**63:
        # Only beside a zero, which fits in no bytes; torch cannot make such a tensor.
        refuse(where, "a shape below 2^63", f"{shape!r:.80}", code="ST11")
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=path,
        start=data_start + begin,
        bytes=end - begin,
    )


def counts(found: object) -> TypeGuard[list[int]]:
    """A short list of integers from 0 to 2^63 - 1, so that products stay small."""
    return (
        isinstance(found, list)
        and len(found) <= 64
        and all(type(count) is int and 0 <= count < 2**63 for count in found)
    )


def _check_layout(
    path: Path, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int
) -> None:
    """Each byte after the header belongs to exactly one tensor."""
    end, before = data_start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.bytes)):
        name = f"tensor {json.dumps(info.name)}"
        if info.start < end:
            refuse(
                path,
                f"{name} after {before}",
                f"it overlaps {before} at byte {info.start:,}",
                code="ST10",
            )
        if info.start > end:
            refuse(
                path,
                f"{name} at byte {end:,}",
                f"a hole of {info.start - end:,} bytes before it",
                code="ST10",
            )
        end, before = info.start + info.bytes, name
    if end > file_bytes:
        refuse(
            path,
            f"{end:,} bytes",
            f"a truncated file of {file_bytes:,}: {end - file_bytes:,} bytes are missing",
            _CUT_SHORT,
            code="ST08",
        )
    if end < file_bytes:
        refuse(
            path,
            f"{end:,} bytes",
            f"{file_bytes - end:,} trailing bytes of no tensor",
            "another file may be hidden behind the weights",
            code="ST09",
        )
