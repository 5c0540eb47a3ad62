"""Key/value pairs of a GGUF file: found and measured when a file is opened, decoded when asked for.

    key      u64 length, UTF-8; 1 to 65,535 bytes
    type     u32, a `ValueType`
    value    a scalar | string: u64 length, UTF-8 | array: u32 element type, u64 count, elements

A tokenizer is two arrays of 150 thousand strings. Opening walks over their lengths only, and
`decode` makes the texts; numbers are unpacked as one block. Bad UTF-8 within an array is therefore
met when the array is decoded, every other fault when the file is opened.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import WeightsError


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


NUMBER_FORMATS: dict[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
"""How `struct` reads each type of fixed width; all little-endian."""

MAX_KEY_BYTES = 65_535
MAX_STRINGS = 1 << 22
"""In one array; the largest vocabularies have 2^18 tokens and twice as many merges."""

CUT_SHORT = "the file may be cut short; compare its size with the source"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where the value of a key is, and what it is."""

    type: ValueType
    element: ValueType | None
    """Of an array."""
    count: int
    """Of the elements of an array; 1 otherwise."""
    key_at: int
    start: int
    """First byte of the text, the number or the first element."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufValue:
    """A value to write, with the type that other readers of GGUF insist on."""

    type: ValueType
    value: Any
    element: ValueType | None = None


@dataclass(slots=True, kw_only=True)
class Cursor:
    """A position in the bytes of a file that never passes their end."""

    data: bytes | mmap.mmap
    size: int
    at: int
    path: Path

    def take(self, count: int, code: str, what: str) -> int:
        """Steps over `count` bytes and answers where they start."""
        if count > self.size - self.at:
            raise self.error(
                code,
                self.at,
                f"{count:,} bytes of {what}",
                f"{self.size - self.at:,} bytes left in the file",
                CUT_SHORT,
            )
        start = self.at
        self.at += count
        return start

    def u32(self, code: str, what: str) -> int:
        found: int = _U32.unpack_from(self.data, self.take(4, code, what))[0]
        return found

    def u64(self, code: str, what: str) -> int:
        found: int = _U64.unpack_from(self.data, self.take(8, code, what))[0]
        return found

    def text(self, count: int, code: str, what: str) -> str:
        start = self.take(count, code, what)
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            at = start + error.start
            found = f"0x{error.object[error.start]:02x}"
            raise self.error(code, at, f"UTF-8 in {what}", found) from error

    def error(
        self, code: str, at: int, expected: str, found: str, hint: str | None = None
    ) -> WeightsError:
        where = f"{self.path} @{at}"
        return WeightsError.expected(f"{code} gguf", where, expected, found, hint=hint)


def refuse(
    code: str, where: object, expected: str, found: str, hint: str | None = None
) -> NoReturn:
    """Raises the `WeightsError` for a GGUF file; `where` has a byte (`@16`) or a tensor's name."""
    raise WeightsError.expected(f"{code} gguf", where, expected, found, hint=hint)


def quoted(text: str) -> str:
    """A name as one short line of ASCII, whatever is in it."""
    return json.dumps(text if len(text) <= 80 else text[:77] + "...")


def read_entry(cursor: Cursor) -> tuple[str, Entry]:
    """Steps over one key and its value. Raises `WeightsError` GG06 to GG10."""
    key_at = cursor.at
    length = cursor.u64("GG06", "the length of a key")
    if not 1 <= length <= MAX_KEY_BYTES:
        raise cursor.error(
            "GG06", key_at, f"a key of 1 to {MAX_KEY_BYTES:,} bytes", f"{length:,} bytes"
        )
    key = cursor.text(length, "GG06", "a key")
    kind = _value_type(cursor, key)
    element, count, start = None, 1, cursor.at
    if kind is ValueType.STRING:
        length = cursor.u64("GG07", f"the length of {quoted(key)}")
        start = cursor.at
        cursor.text(length, "GG07", quoted(key))
    elif kind is ValueType.ARRAY:
        element = _value_type(cursor, key)
        count = cursor.u64("GG08", f"the length of {quoted(key)}")
        start = cursor.at
        _skip_elements(cursor, key, element, count)
    else:
        cursor.take(struct.calcsize(NUMBER_FORMATS[kind]), "GG07", quoted(key))
        if kind is ValueType.BOOL:
            _check_bools(cursor, key, start)
    return key, Entry(
        type=kind, element=element, count=count, key_at=key_at, start=start, end=cursor.at
    )


def decode(data: bytes, entry: Entry, path: Path, key: str) -> Any:
    """The value: an int, float, bool or str, or a list of one of them."""
    kind = entry.type if entry.element is None else entry.element
    if kind is not ValueType.STRING:
        values = struct.unpack_from(f"<{entry.count}{NUMBER_FORMATS[kind]}", data, entry.start)
        return values[0] if entry.element is None else list(values)
    if entry.element is None:
        return str(data[entry.start : entry.end], "utf-8")
    at, texts = entry.start, []
    unpack = _U64.unpack_from
    try:
        for _ in range(entry.count):
            end = at + 8 + unpack(data, at)[0]
            texts.append(str(data[at + 8 : end], "utf-8"))
            at = end
    except UnicodeDecodeError as error:
        raise WeightsError.expected(
            "GG08 gguf",
            f"{path} @{at}",
            f"UTF-8 in {quoted(key)}[{len(texts)}]",
            f"0x{error.object[error.start]:02x}",
        ) from error
    return texts


def _value_type(cursor: Cursor, key: str) -> ValueType:
    at = cursor.at
    number = cursor.u32("GG10", f"the type of {quoted(key)}")
    if number > max(ValueType):
        raise cursor.error(
            "GG10", at, f"a value type from 0 to 12 for {quoted(key)}", f"unknown type {number:,}"
        )
    return ValueType(number)


def _skip_elements(cursor: Cursor, key: str, element: ValueType, count: int) -> None:
    start = cursor.at
    if element is ValueType.ARRAY:
        raise cursor.error(
            "GG09", start, f"an array of numbers or texts in {quoted(key)}", "an array of arrays"
        )
    what = f"{quoted(key)}, an array of {count:,} {element.name}"
    if element is not ValueType.STRING:
        cursor.take(count * struct.calcsize(NUMBER_FORMATS[element]), "GG08", what)
        if element is ValueType.BOOL:
            _check_bools(cursor, key, start)
        return
    if count > (cursor.size - start) // 8:
        raise cursor.error(
            "GG08",
            start,
            f"at most {(cursor.size - start) // 8:,} texts in {quoted(key)}",
            f"a length of {count:,}",
            CUT_SHORT,
        )
    if count > MAX_STRINGS:
        raise cursor.error(
            "GG08", start, f"at most {MAX_STRINGS:,} texts in {quoted(key)}", f"{count:,}"
        )
    # The one loop over every token and merge: no calls but these.
    data, size, at, unpack = cursor.data, cursor.size, start, _U64.unpack_from
    for index in range(count):
        length = unpack(data, at)[0] if size - at >= 8 else size
        if length > size - at - 8:
            raise cursor.error(
                "GG08",
                at,
                f"{quoted(key)}[{index:,}] within the file",
                f"a text of {length:,} bytes with {max(size - at - 8, 0):,} left",
                CUT_SHORT,
            )
        at += 8 + length
    cursor.at = at


def _check_bools(cursor: Cursor, key: str, start: int) -> None:
    values = bytes(cursor.data[start : cursor.at])
    others = values.translate(None, b"\0\1")
    if others:
        at = start + values.index(others[:1])
        raise cursor.error("GG10", at, f"0 or 1 for a BOOL of {quoted(key)}", f"{others[0]}")
