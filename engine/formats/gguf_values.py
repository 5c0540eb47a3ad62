"""Read and write the key/value pairs of a GGUF file. When a file is opened, positions and lengths of the values are
read; a value is decoded when it is used.

    key      u64 length, UTF-8
    type     u32, a `ValueType`
    value    a scalar | string: u64 length, UTF-8 | array: u32 element type, u64 count, elements

A tokenizer is two arrays of 150 thousand strings. Opening a file only reads their lengths, and
`decode` creates the strings; arrays of numbers are unpacked at once. So invalid UTF-8 in an array is
found when the array is decoded, and every other error when the file is opened.

This module does not import torch.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from engine.errors import WeightsError
from engine.formats.weights import CUT_SHORT


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
"""The `struct` format of each fixed-width type; all little-endian."""

LARGEST_REAL = 1e38
"""Exclusive limit of numbers that may be written: smaller numbers do not round to infinity in fp32."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The position and type of a key's value."""

    type: ValueType
    element: ValueType | None
    """Element type of an array; None for other values."""
    count: int
    """Number of elements of an array; 1 for other values."""
    key_at: int
    start: int
    """Position in the file of the string's first byte, the number, or the array's first element."""
    end: int


class GgufValue(NamedTuple):
    """A value to write, with the type that other readers of GGUF require."""

    type: ValueType
    value: Any
    element: ValueType | None = None


@dataclass(slots=True, kw_only=True)
class Cursor:
    """A reading position in the bytes of a file, which refuses to move beyond their end."""

    data: bytes | mmap.mmap
    size: int
    at: int
    path: Path

    def take(self, count: int, code: str, what: str) -> int:
        """Advance by `count` bytes and return where they start."""
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
        number: int = _U32.unpack_from(self.data, self.take(4, code, what))[0]
        return number

    def u64(self, code: str, what: str) -> int:
        number: int = _U64.unpack_from(self.data, self.take(8, code, what))[0]
        return number

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
    """Raise the `WeightsError` for a GGUF file; `where` has a byte (`@16`) or a tensor's name."""
    raise WeightsError.expected(f"{code} gguf", where, expected, found, hint=hint)


def quoted(text: str) -> str:
    """Return a name as one short line of ASCII, whatever characters it has."""
    return json.dumps(text if len(text) <= 80 else text[:77] + "...")


def read_entry(cursor: Cursor) -> tuple[str, Entry]:
    """Advance past one key and its value. Raises `WeightsError` GG06 to GG10."""
    key_at = cursor.at
    length = cursor.u64("GG06", "the length of a key")
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
    return key, Entry(
        type=kind, element=element, count=count, key_at=key_at, start=start, end=cursor.at
    )


def decode(data: bytes, entry: Entry, path: Path, key: str) -> Any:
    """Return the value: an int, float, bool or str, or a list of one of them."""
    kind = entry.type if entry.element is None else entry.element
    if kind is not ValueType.STRING:
        values = struct.unpack_from(f"<{entry.count}{NUMBER_FORMATS[kind]}", data, entry.start)
        return values[0] if entry.element is None else list(values)
    if entry.element is None:
        return str(data[entry.start : entry.end], "utf-8")
    position, texts = entry.start, []
    unpack = _U64.unpack_from
    try:
        for _ in range(entry.count):
            end = position + 8 + unpack(data, position)[0]
            texts.append(str(data[position + 8 : end], "utf-8"))
            position = end
    except UnicodeDecodeError as error:
        raise WeightsError.expected(
            "GG08 gguf",
            f"{path} @{position}",
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
        return
    if count > (cursor.size - start) // 8:
        raise cursor.error(
            "GG08",
            start,
            f"at most {(cursor.size - start) // 8:,} texts in {quoted(key)}",
            f"a length of {count:,}",
            CUT_SHORT,
        )
    # This loop runs over every token and merge, so it calls nothing but `unpack`.
    data, size, position, unpack = cursor.data, cursor.size, start, _U64.unpack_from
    for index in range(count):
        length = unpack(data, position)[0] if size - position >= 8 else size
        if length > size - position - 8:
            raise cursor.error(
                "GG08",
                position,
                f"{quoted(key)}[{index:,}] within the file",
                f"a text of {length:,} bytes with {max(size - position - 8, 0):,} left",
                CUT_SHORT,
            )
        position += 8 + length
    cursor.at = position


class GgufMetadata(Mapping[str, Any]):
    """The key/value pairs of a file; a value is decoded at each access."""

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
        """Return the position, type and length of a value, without decoding it."""
        return self._entries.get(key)


def encode_value(value: GgufValue) -> bytes:
    """Return the bytes of a value, preceded by its type."""
    head = struct.pack("<I", value.type)
    if value.type is ValueType.STRING:
        return head + encode_string(value.value)
    if value.type is not ValueType.ARRAY:
        return head + struct.pack(f"<{NUMBER_FORMATS[value.type]}", value.value)
    assert value.element is not None
    head += struct.pack("<IQ", value.element, len(value.value))
    if value.element is ValueType.STRING:
        return head + b"".join(map(encode_string, value.value))
    return head + struct.pack(f"<{len(value.value)}{NUMBER_FORMATS[value.element]}", *value.value)


def encode_string(text: str) -> bytes:
    """Return the bytes of a string: its length and its UTF-8. Raises WeightsError for a lone surrogate, as in a
    folder's name that is not valid UTF-8."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise WeightsError.expected(
            "GGUF metadata", ascii(text)[:80], "text of Unicode characters", "a lone surrogate"
        ) from None
    return struct.pack("<Q", len(raw)) + raw


def refuse_key(where: object, key: str, expected: str, found: str) -> NoReturn:
    raise WeightsError.expected("GGUF metadata", f"{where}, key {quoted(key)}", expected, found)
