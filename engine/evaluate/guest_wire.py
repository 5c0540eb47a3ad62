"""The protocol between a program under test and its judge: lines of JSON with plain data only.

This module runs inside the sandbox with the standard library alone.

    null, true, 1, 1.5, "text", [..]      themselves, a list being a list
    {"int": "1f.."}                       an integer of many digits, in base 16
    {"tuple": [..]}                       tuple; also set, frozenset, bytes, complex
    {"dict": [[key, value], ..]}          dict, whose keys need not be text
    {"type": "int"}                       a built-in type, by its name
    {"object": 3}                         the program's object number 3 of a class that the tests name

An instance of a subclass is sent as its built-in base type (a Counter as a dict). Objects of the program stay
in its process; only their numbers are sent. Anything else cannot be sent: neither an object that claims to
equal everything nor code is a valid reply. The judge learns only the truth value of such a result.

Data has limits, so that reading it costs no more than its size: the length of a line, the depth of nesting,
the bits of an integer. Long integers use base 16, because Python converts long decimal numbers in quadratic
time.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

MOST_BYTES = 4 << 20
"""Largest size of one line."""
MOST_DEPTH = 100
MOST_BITS = 1 << 16
"""Largest integer: about 20,000 decimal digits."""
_SHORT_BITS = 1 << 10
_MOST_DIGITS = 640
"""Largest number of decimal digits of an integer: more than the short ones have, and the smallest limit that
Python allows."""

TYPES = {one.__name__: one for one in vars(builtins).values() if isinstance(one, type)}


class NotPlain(Exception):
    """A value that is no plain data."""


def _no_object(value: object) -> int | None:
    return None


def pack(value: object, number: Callable[[object], int | None] = _no_object, depth: int = 0) -> Any:
    """Convert a value to JSON data. `number` returns the number of a program's object, None for any other
    value. Raises `NotPlain`."""
    if depth > MOST_DEPTH:
        raise NotPlain(f"value nested more than {MOST_DEPTH} deep")
    if (object_number := number(value)) is not None:
        return {"object": object_number}
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int | float | str):
        # Call the method of the built-in type: that of a subclass belongs to the program.
        if isinstance(value, int):
            return _packed_int(int.__add__(value, 0))
        # Multiply by one: adding zero would drop the sign of -0.0.
        return float.__mul__(value, 1.0) if isinstance(value, float) else str.__str__(value)
    inner = depth + 1
    if isinstance(value, list):
        return [pack(item, number, inner) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [pack(item, number, inner) for item in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"set": [pack(item, number, inner) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"frozenset": [pack(item, number, inner) for item in frozenset.__iter__(value)]}
    if isinstance(value, dict):
        items = dict.items(value)
        return {
            "dict": [[pack(key, number, inner), pack(item, number, inner)] for key, item in items]
        }
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    raise NotPlain(type(value).__name__)


def _packed_int(value: int) -> int | dict[str, str]:
    bits = value.bit_length()
    if bits > MOST_BITS:
        raise NotPlain(f"number of {bits:,} bits, more than {MOST_BITS:,}")
    return value if bits <= _SHORT_BITS else {"int": f"{value:x}"}


def _object(number: object) -> object:
    raise ValueError("an object where none is known")


def unpack(value: Any, object_of: Callable[[Any], object] = _object, depth: int = 0) -> Any:
    """Convert JSON data back to a value. `of` returns the object with a given number. Raises whatever Python
    raises for malformed data."""
    if depth > MOST_DEPTH:
        raise ValueError(f"data nested more than {MOST_DEPTH} deep")
    depth += 1
    if isinstance(value, list):
        return [unpack(item, object_of, depth) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "int":
        if len(inner) > MOST_BITS // 4 + 1:
            raise ValueError(f"an integer of more than {MOST_BITS:,} bits")
        return int(inner, 16)
    if kind == "dict":
        return {
            unpack(key, object_of, depth): unpack(item, object_of, depth) for key, item in inner
        }
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "type":
        return TYPES[inner]
    if kind == "object":
        return object_of(inner)
    items: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return items(unpack(item, object_of, depth) for item in inner)


def send(file: IO[bytes], record: Mapping[str, object]) -> None:
    file.write(json.dumps(record).encode() + b"\n")
    file.flush()


def receive(file: IO[bytes]) -> dict[str, Any] | None:
    """Return the next record; None at the end. Raises ValueError for a line that is no record."""
    line = file.readline(MOST_BYTES)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise ValueError("a line that is too long or cut short")
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(_MOST_DIGITS)
    try:
        record = json.loads(line)
    finally:
        sys.set_int_max_str_digits(digits)
    if not isinstance(record, dict):
        raise ValueError("something else than a record")
    return record


def limit(limits: Mapping[str, int]) -> None:
    """Set this process's limits. None of them can be raised again, because that needs a capability."""
    import resource

    sys.set_int_max_str_digits(0)
    for name, value in limits.items():
        # At the limit of CPU time the process gets SIGXCPU, which names the cause. If it ignores the signal,
        # it is killed one second later.
        hard = value + 1 if name == "CPU" else value
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))


def read_task(number: str) -> dict[str, Any]:
    """Read the task from an open file descriptor, and close it."""
    with open(int(number), "rb") as file:
        task: dict[str, Any] = json.load(file)
    return task
