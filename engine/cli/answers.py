"""The answers of `--json`, and the one function that prints them; `docs/json_answers.py` says what each is.

Every object on stdout begins with `schema`, `apr-workbench/NAME-VERSION`, and its fields follow. An answer that is a
list has it in each entry, and a stream in each line, so that an entry can be kept alone. A version grows when a field
is removed or changes its type or meaning; a new field leaves it as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import EXIT_PASS
from engine.terminal import clipped, put

VERSIONS = {
    "contract-problems": 2,
    "receipt": 3,
    "run": 2,
    "diagnosis": 2,
    "distill": 3,
    "step": 2,
    "doctor": 2,
    "data": 2,
    "distill-check": 2,
}
"""Version of each kind of object that is not at its first."""
OF_LOGS = frozenset(
    {"run", "log-line", "diagnosis", "diagnoses", "verdict", "checks", "identities"}
)
"""Answers with texts from logs; every text in them is cut at `limits.LOG_TEXT` characters."""


def schema_of(name: str) -> str:
    return f"apr-workbench/{name}-{VERSIONS.get(name, 1)}"


def answer(
    arguments: argparse.Namespace,
    name: str,
    value: Mapping[str, Any] | Sequence[Any],
    lines: Iterable[object],
    code: int = EXIT_PASS,
) -> int:
    """Print the answer of a command, with --json as JSON and else as lines; returns its exit code."""
    if arguments.json:
        put_json(name, value)
    else:
        for line in lines:
            put(line)
    return code


def put_json(name: str, value: Mapping[str, Any] | Sequence[Any], *, flush: bool = False) -> None:
    """Write an answer to stdout as one line: an object, or a list of objects, each with its schema first."""
    head, longest = {"schema": schema_of(name)}, limits.LOG_TEXT.most if name in OF_LOGS else None
    if isinstance(value, Mapping):
        document: Any = head | plain(value, longest)
    else:
        document = [head | plain(entry, longest) for entry in value]
    put(json.dumps(document, allow_nan=False), exact=True, flush=flush)


def plain(value: Any, longest: int | None = limits.LOG_TEXT.most) -> Any:
    """Return a value for JSON: events and dataclasses as objects, paths as text, levels and non-finite numbers by
    name, texts of more than `longest` characters cut."""
    import msgspec

    from engine.log.events import name_of_non_finite

    if isinstance(value, str):
        return value if longest is None else clipped(value, longest)
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, float) and not math.isfinite(value):
        return name_of_non_finite(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(k, longest): plain(v, longest) for k, v in value.items()}
    return [plain(v, longest) for v in value] if isinstance(value, list | tuple) else value
