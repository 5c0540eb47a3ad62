"""The header of a safetensors file, read and checked before anything trusts it.

    byte 0      8 bytes   N, the length of the header, unsigned little-endian
    byte 8      N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
                          and text under "__metadata__"
    byte 8+N    the rest  the data; offsets count from here, and tensors fill it without holes,
                          overlaps or a tail

The `safetensors` library checks this layout too, but it takes duplicate keys, names neither tensor
nor byte in its messages, and sees a download that went wrong (a Git-LFS pointer, an HTML page) as a
bad number. Here nothing is allocated from an unchecked length, and a file is refused with the byte
or the tensor that is wrong.

No torch, and not the library either. Not covered: values (NaN), and a file that changes after it
was read.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from engine.errors import WeightsError

HEADER_LIMIT_BYTES = 100_000_000
"""The same limit as the library's."""

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


def read_header(path: str | Path) -> Header:
    """Reads and checks the header of one file; no tensor data is read. Raises `WeightsError`."""
    path = Path(path)
    with open_regular(path, "safetensors file") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(1024)
        _refuse_other_formats(path, start)
        if file_bytes < 8:
            refuse(path, "8 bytes of header length", f"a file of {file_bytes} bytes", _CUT_SHORT)
        header_bytes = int.from_bytes(start[:8], "little")
        if header_bytes > HEADER_LIMIT_BYTES:
            refuse(
                path,
                f"a header of at most {HEADER_LIMIT_BYTES:,} bytes",
                f"a length of {header_bytes:,} (the file starts with {start[:8]!r})",
                "this may be no safetensors file at all",
            )
        if 8 + header_bytes > file_bytes:
            refuse(
                path,
                f"a header of {header_bytes:,} bytes",
                f"a truncated file of {file_bytes:,} bytes",
                _CUT_SHORT,
            )
        file.seek(8)
        text = file.read(header_bytes)
    raw = _parse_object(text, "safetensors header", path, first_byte=8)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(path, "__metadata__ of text to text", f"{metadata!r:.80}")
    data_start = 8 + header_bytes
    tensors = {name: _tensor_info(path, name, raw[name], data_start) for name in raw}
    _check_layout(path, tensors, data_start, file_bytes)
    return Header(path=path, tensors=tensors, metadata=metadata, file_bytes=file_bytes)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON file of one object; duplicate keys and NaN, which `json` takes, are refused."""
    with open_regular(path, what) as file:
        text = file.read(HEADER_LIMIT_BYTES + 1)
    if len(text) > HEADER_LIMIT_BYTES:
        raise WeightsError.expected(
            what, path, f"at most {HEADER_LIMIT_BYTES:,} bytes", "a larger file"
        )
    return _parse_object(text, what, path, first_byte=0)


def refuse(where: object, expected: str, found: str, hint: str | None = None) -> NoReturn:
    """Raises the `WeightsError` for a weight file."""
    raise WeightsError.expected("weights", where, expected, found, hint=hint)


def open_regular(path: Path, what: str) -> BinaryIO:
    """Opens a file to read; a folder, a pipe or nothing at all is refused by what it is."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found = "a folder" if path.is_dir() else "something that is not a plain file"
            raise WeightsError.expected(what, path, "a file", found)
        return path.open("rb")
    except FileNotFoundError as error:
        found = (
            f"a link to {path.readlink()}, which is not there" if path.is_symlink() else "nothing"
        )
        raise WeightsError.expected(what, path, "a file", found) from error
    except OSError as error:
        raise WeightsError.expected(what, path, "a readable file", str(error.strerror)) from error


def _refuse_other_formats(path: Path, start: bytes) -> None:
    """Says what a file is when its first bytes are those of something else."""
    expected = "a safetensors file"
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d+)$", start, re.MULTILINE)
        object_text = f"a {int(size[1]):,}-byte object" if size else "an object of unknown size"
        refuse(path, expected, f"a Git-LFS pointer to {object_text}", "run `git lfs pull`")
    if re.match(rb"\s*<(!doctype|html|\?xml|head)", start, re.IGNORECASE):
        refuse(path, expected, "an HTML page", "the download failed; fetch the file again")
    if start.startswith(b"GGUF"):
        refuse(path, expected, "a GGUF file", "name it .gguf and open it as one")
    if start.startswith(b"APR"):
        refuse(path, expected, "an .apr file", "name it .apr and open it as one")
    # A pickle opens with PROTO and its version, and torch.save puts one in a zip archive.
    pickled = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if start.startswith(b"PK\x03\x04") or (pickled and start[2:8] != bytes(6)):
        kind = "a pickle file" if pickled else "a zip archive, as torch.save writes"
        refuse(
            path, expected, kind, "a pickle can run code: convert it to safetensors in a sandbox"
        )


class _JsonRefused(ValueError):
    """Valid for `json`, not for us."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _JsonRefused(f"the key {json.dumps(key)} twice")
        key.encode()  # a lone surrogate could be neither printed nor written again
        found[key] = value
    return found


def _constant(text: str) -> NoReturn:
    raise _JsonRefused(f"the value {text}")


def _parse_object(raw: bytes, what: str, path: Path, first_byte: int) -> dict[str, Any]:
    """The JSON object in `raw`, which starts at `first_byte` of the file."""
    try:
        text = raw.decode()
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        at = first_byte + error.start
        raise WeightsError.expected(what, path, "UTF-8", f"another byte at byte {at}") from error
    except json.JSONDecodeError as error:
        at = first_byte + len(text[: error.pos].encode())
        raise WeightsError.expected(what, path, "JSON", f"{error.msg} at byte {at}") from error
    except RecursionError as error:
        raise WeightsError.expected(what, path, "JSON", "brackets nested too deep") from error
    except ValueError as error:
        # Duplicate keys, NaN, a number of thousands of digits, a lone surrogate.
        raise WeightsError.expected(what, path, "JSON with unique keys", str(error)) from error
    if not isinstance(found, dict):
        raise WeightsError.expected(what, path, "a JSON object", f"{type(found).__name__}")
    return found


def _tensor_info(path: Path, name: str, raw: object, data_start: int) -> TensorInfo:
    where = f"{path}, tensor {json.dumps(name)}"
    entry = raw if isinstance(raw, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(where, f"one of the dtypes {', '.join(DTYPES)}", f"{dtype!r:.80}")
    if not _counts(shape):
        refuse(where, "a shape of integers from 0", f"{shape!r:.80}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(where, "data_offsets of [begin, end]", f"{offsets!r:.80}")
    begin, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != (end - begin) * 8:
        refuse(where, f"{bits / 8:,g} bytes for {dtype}{shape!r:.80}", f"{end - begin:,} bytes")
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=path,
        start=data_start + begin,
        bytes=end - begin,
    )


def _counts(found: object) -> TypeGuard[list[int]]:
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
            refuse(path, f"{name} after {before}", f"it overlaps {before} at byte {info.start:,}")
        if info.start > end:
            refuse(
                path, f"{name} at byte {end:,}", f"a hole of {info.start - end:,} bytes before it"
            )
        end, before = info.start + info.bytes, name
    if end > file_bytes:
        refuse(
            path,
            f"{end:,} bytes",
            f"a truncated file of {file_bytes:,}: {end - file_bytes:,} bytes are missing",
            _CUT_SHORT,
        )
    if end < file_bytes:
        refuse(path, f"{end:,} bytes", f"{file_bytes - end:,} trailing bytes of no tensor")
