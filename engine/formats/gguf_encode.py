"""Values as GGUF writes them, and the types to write them in.

Other readers insist on types: a count is UINT32, a list of ids INT32, a real FLOAT32. Those are
chosen where they hold the value exactly, and the next wider one where they do not. No torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NoReturn

from engine.errors import WeightsError
from engine.formats.gguf_meta import LARGEST_REAL
from engine.formats.gguf_values import NUMBER_FORMATS, GgufValue, ValueType, quoted


def encode_value(value: GgufValue) -> bytes:
    """A value as it stands in a file, after its type."""
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


def typed(value: object, key: str, where: object) -> GgufValue:
    """A value in the smallest usual type that holds it; a list is of one kind. `WeightsError`."""
    if isinstance(value, list | tuple):
        kinds = {type(one) for one in value}
        if kinds <= {int} and (element := _integer_type(value, ValueType.INT32)):
            return GgufValue(type=ValueType.ARRAY, element=element, value=list(value))
        if kinds == {float}:
            element = max(map(_real_type, value))
            return GgufValue(type=ValueType.ARRAY, element=element, value=list(value))
        if kinds in ({bool}, {str}):
            element = ValueType.BOOL if kinds == {bool} else ValueType.STRING
            for text in value if element is ValueType.STRING else ():
                encode_text(text, key, where)
            return GgufValue(type=ValueType.ARRAY, element=element, value=list(value))
    elif isinstance(value, bool):
        return GgufValue(type=ValueType.BOOL, value=value)
    elif isinstance(value, int) and (kind := _integer_type([value], ValueType.UINT32)):
        return GgufValue(type=kind, value=value)
    elif isinstance(value, float):
        return GgufValue(type=_real_type(value), value=value)
    elif isinstance(value, str):
        encode_text(value, key, where)
        return GgufValue(type=ValueType.STRING, value=value)
    expected = "a number of at most 64 bits, a text, true, false, or a list of one of them"
    refuse_key(where, key, expected, f"{value!r:.80}")


def _integer_type(values: Sequence[int], usual: ValueType) -> ValueType | None:
    low, high = min(values, default=0), max(values, default=0)
    for kind in (usual, ValueType.UINT32, ValueType.INT32, ValueType.INT64, ValueType.UINT64):
        bits = 8 * struct.calcsize(NUMBER_FORMATS[kind])
        signed = NUMBER_FORMATS[kind].islower()
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
        if least <= low and high < most:
            return kind
    return None


def _real_type(value: float) -> ValueType:
    """FLOAT32, which readers expect, where nothing is lost by it."""
    if not math.isfinite(value):
        return ValueType.FLOAT32
    fits = abs(value) < LARGEST_REAL and struct.unpack("<f", struct.pack("<f", value))[0] == value
    return ValueType.FLOAT32 if fits else ValueType.FLOAT64


def encode_text(text: str, key: str, where: object) -> bytes:
    """UTF-8; `key` names the text in the `WeightsError` for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        refuse_key(where, key, "text of Unicode characters", f"a lone surrogate at {error.start}")


def encode_string(text: str) -> bytes:
    """A text as it stands in a file, after its length."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def refuse_key(where: object, key: str, expected: str, found: str) -> NoReturn:
    raise WeightsError.expected("GGUF metadata", f"{where}, key {quoted(key)}", expected, found)
