"""Identify a file's format by its first bytes, never by its name.

    GGUF            "GGUF"
    .apr            "APR\\0"; "APRN" and "APR1" are the first version, which no loader here reads
    safetensors     8 bytes of header length N <= 100 MB, then the header's "{" (JSON may have white
                    space before it)
    pickle          PROTO (0x80) and a version from 2 to 5, or the text opcodes of version 0
    zip             "PK\\3\\4", as torch.save writes around a pickle
    JSON            "{": the index of a sharded model, or a config given by mistake
    Git-LFS, HTML   a pointer or an error page that was downloaded instead of the file

Safetensors is tested first: its header begins with a length, whose bytes may equal the magic number of
another format (0x0280, 0x7b). A file that is not a weight file is refused with its kind and a hint. A
pickle is a program: it is recognised and refused, never opened.
"""

from __future__ import annotations

import re
from enum import Enum

from engine import limits
from engine.errors import WeightsError

START_BYTES = 1024
"""Number of bytes from the start of a file that `kind_of` needs."""

HEADER_LIMIT_BYTES = limits.WEIGHTS_HEADER.most
"""Limit of a safetensors header, the same as the library's."""

_JSON_SPACE = b" \t\r\n"
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg")
_GLOBAL_OPCODE = re.compile(rb"[ci][A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\(dp\d+\n|\(lp\d+\n")


class Kind(Enum):
    SAFETENSORS = "a safetensors file"
    GGUF = "a GGUF file"
    APR = "an .apr file"
    APR_V1 = "an .apr file of version 1"
    OLD_GGML = "a GGML file from before GGUF"
    PICKLE = "a pickle file"
    ZIP = "a zip archive, as torch.save writes"
    JSON = "a JSON file"
    GIT_LFS = "a Git-LFS pointer"
    HTML = "an HTML page"
    EMPTY = "an empty file"
    UNKNOWN = "a file of unknown content"


_UNPICKLE = "a pickle can run code: convert it to safetensors in a sandbox"
HINTS = {
    Kind.SAFETENSORS: "give its path as the model: the name does not matter",
    Kind.GGUF: "give its path as the model: the name does not matter",
    Kind.APR: "give its path as the model: the name does not matter",
    Kind.APR_V1: "convert it with `apr convert old.apr -o new.apr --format apr2`",
    Kind.OLD_GGML: "convert it to GGUF with llama.cpp",
    Kind.PICKLE: _UNPICKLE,
    Kind.ZIP: _UNPICKLE,
    Kind.JSON: "give the weight file, or the folder that it is in",
    Kind.GIT_LFS: "run `git lfs pull`",
    Kind.HTML: "the download failed; fetch the file again",
    Kind.EMPTY: "the download failed; fetch the file again",
}


def kind_of(start: bytes) -> Kind:
    """Return the kind of a file that begins with `start`: `START_BYTES` bytes or the whole file."""
    if not start:
        return Kind.EMPTY
    if is_safetensors(start):
        return Kind.SAFETENSORS
    if start.startswith(b"GGUF"):
        return Kind.GGUF
    if start.startswith((b"APRN", b"APR1")):
        return Kind.APR_V1
    if start.startswith(b"APR"):
        return Kind.APR
    if start.startswith(_OLD_GGML):
        return Kind.OLD_GGML
    if start.startswith(b"PK\x03\x04"):
        return Kind.ZIP
    if (start[0] == 0x80 and start[1:2] in (b"\2", b"\3", b"\4", b"\5")) or _GLOBAL_OPCODE.match(
        start
    ):
        return Kind.PICKLE
    if start.startswith(b"version https://git-lfs"):
        return Kind.GIT_LFS
    if re.match(rb"\s*<(!doctype|html|\?xml|head)", start, re.IGNORECASE):
        return Kind.HTML
    if start.lstrip(_JSON_SPACE).startswith(b"{"):
        return Kind.JSON
    return Kind.UNKNOWN


def is_safetensors(start: bytes) -> bool:
    """Return whether a file begins with a header length within the limit and an opening brace."""
    return (
        len(start) > 8
        and int.from_bytes(start[:8], "little") <= HEADER_LIMIT_BYTES
        and start[8:].lstrip(_JSON_SPACE).startswith(b"{")
    )


def other_kind(
    what: str, where: object, expected: str, kind: Kind, start: bytes, code: str
) -> WeightsError:
    """Return the error for a file of another kind than expected, with a hint."""
    found = kind.value
    if kind is Kind.GIT_LFS:
        size = re.search(rb"^size (\d{1,18})$", start, re.MULTILINE)
        found += f" to {f'a {int(size[1]):,}-byte object' if size else 'an object of unknown size'}"
    if kind is Kind.UNKNOWN:
        found = f"a file that begins with {start[:8]!r}"
    return WeightsError.expected(
        f"{code} {what}".lstrip(), where, expected, found, hint=HINTS.get(kind)
    )
