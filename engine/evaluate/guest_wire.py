"""How a program under test and its judge speak: lines of JSON, plain data only.

Runs inside the sandbox, with the standard library alone.

    null, true, 1, 1.5, "text", [..]      themselves, a list being a list
    {"tuple": [..]}                       tuple; also set, frozenset, bytes, complex
    {"dict": [[key, value], ..]}          dict, whose keys need not be text

An instance of a subclass goes as the type it is derived from (a Counter as a dict). Anything else does not
cross: an object that says it equals everything is no answer, and neither is code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import IO, Any

MOST_BYTES = 16 << 20
"""Of one line."""


class NotPlain(Exception):
    """A value that is no plain data."""


def pack(value: object, depth: int = 0) -> Any:
    if depth > 100:
        raise NotPlain("data nested more than 100 deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int | float | str):
        # The method of the type itself: that of a subclass is the program's.
        if isinstance(value, int):
            return int.__add__(value, 0)
        # Times one and not plus zero, which would take the sign from -0.0.
        return float.__mul__(value, 1.0) if isinstance(value, float) else str.__str__(value)
    inner = depth + 1
    if isinstance(value, list):
        return [pack(one, inner) for one in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [pack(one, inner) for one in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"set": [pack(one, inner) for one in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"frozenset": [pack(one, inner) for one in frozenset.__iter__(value)]}
    if isinstance(value, dict):
        items = dict.items(value)
        return {"dict": [[pack(key, inner), pack(one, inner)] for key, one in items]}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise NotPlain(type(value).__name__)


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {unpack(key): unpack(one) for key, one in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    made: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return made(unpack(one) for one in inner)


def send(file: IO[bytes], record: Mapping[str, object]) -> None:
    file.write(json.dumps(record).encode() + b"\n")
    file.flush()


def receive(file: IO[bytes]) -> dict[str, Any] | None:
    """The next record; None at the end. ValueError for what is none."""
    line = file.readline(MOST_BYTES)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise ValueError("a line that is too long or cut short")
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("something else than a record")
    return record


def limit(limits: Mapping[str, int]) -> None:
    """Sets this process's limits; none of them can be raised again, there is no capability to."""
    import resource

    sys.set_int_max_str_digits(0)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def read_task(number: str) -> dict[str, Any]:
    """The task in an open file, which is closed."""
    with open(int(number), "rb") as file:
        task: dict[str, Any] = json.load(file)
    return task
