"""Programming problems from the published files: HumanEval's and MBPP's, plain or gzipped.

    HumanEval   task_id, prompt, entry_point, canonical_solution, test
    MBPP        task_id, text (or prompt), code, test_list, test_setup_code (or test_imports)

A file holds one JSON object per line for each problem, or one JSON array of all problems, as MBPP's sanitized subset.

The model gets `Problem.prompt` and nothing else. The reference solution is used in the self-test only, and no
generated program can read it. The tests alone decide whether a program is right.

HumanEval's prompt is the beginning of the program. MBPP's prompt is the task with its first test, as a docstring, and
the model writes the whole program. The tests run after the program, in its module, as in the benchmarks' own code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput
from engine.files import parse_json, read_bytes

_GZIP = b"\x1f\x8b"
_DISTINCT_KEYS = {"humaneval": "canonical_solution", "mbpp": "test_list"}
"""A key that only the records of this benchmark have, by benchmark."""

STOPS = {
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint", "\nassert"),
    "mbpp": ("\nclass Test", "\nassert", '\n"""', "\nprint", "\nif __name__", "\n```"),
}
"""Strings that end a completion, by benchmark. A line that begins in the first column comes after the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    task_id: str
    prompt: str
    head: str
    """Beginning of a program: the prompt, or empty if the model writes the whole program."""
    reference: str
    tests: str

    def program(self, completion: str) -> str:
        return self.head + completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    benchmark: str
    problems: tuple[Problem, ...]
    sha256: str
    """SHA-256 of the decompressed content of the file."""


def read_problems(path: str | Path, benchmark: str) -> Problems:
    """Read the problems of a file; `benchmark` is `humaneval` or `mbpp`. Raises `BadInput`."""
    path = Path(path)
    raw = _decompress(read_bytes(path, "problems", limits.PROBLEM_FILE), path)
    make = {"humaneval": _humaneval, "mbpp": _mbpp}[benchmark]
    by_id: dict[str, Problem] = {}
    for where, record in _records(raw, path):
        problem = _problem(record, where, benchmark, make)
        if len(by_id) == limits.PROBLEMS.most:
            raise BadInput.expected("problems", path, str(limits.PROBLEMS), "more")
        if problem.task_id in by_id:
            raise BadInput.expected(
                "problems", where, "each task_id once", f"{problem.task_id} again"
            )
        by_id[problem.task_id] = problem
    if not by_id:
        raise BadInput.expected("problems", path, "at least one problem", "none")
    return Problems(
        benchmark=benchmark,
        problems=tuple(by_id.values()),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _decompress(raw: bytes, path: Path) -> bytes:
    if not raw.startswith(_GZIP):
        return raw
    limit = limits.PROBLEM_TEXT.most
    try:
        # Bounded, because a few megabytes of gzip can decompress to gigabytes.
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            text = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput.expected("problems", path, "a readable file", reason) from error
    if len(text) > limit:
        raise BadInput.expected("problems", path, f"{limits.PROBLEM_TEXT}, decompressed", "more")
    return text


class _Malformed(Exception):
    """A malformed problem: what was expected, and what was found."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__()
        self.expected, self.found = expected, found


def _records(raw: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each record, after words for its line or index in the file."""
    if raw.lstrip().startswith(b"["):
        for number, record in enumerate(_json(raw, str(path)), 1):
            yield f"{path}, problem {number}", record
        return
    for number, line in enumerate(io.BytesIO(raw), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json(line, where)


def _json(text: bytes, where: str) -> Any:
    try:
        return parse_json(text, where, "problems")
    except BadInput as error:
        raise BadInput(
            error.message,
            hint="a file has one JSON object per line, or is one JSON array of objects; both may be gzipped",
        ) from None


def _problem(
    record: Any, where: str, benchmark: str, make: Callable[[Mapping[str, Any]], Problem]
) -> Problem:
    if not isinstance(record, dict):
        raise BadInput.expected("problems", where, "an object", type(record).__name__)
    try:
        return make(record)
    except _Malformed as error:
        benchmark_found = next(
            (name for name, key in _DISTINCT_KEYS.items() if key in record), benchmark
        )
        raise BadInput.expected(
            "problems",
            where,
            f"{error.expected}, as in {benchmark}",
            error.found,
            hint=None
            if benchmark_found == benchmark
            else f"it looks like a problem of `engine eval {benchmark_found}`",
        ) from None


def _humaneval(record: Mapping[str, Any]) -> Problem:
    prompt, entry = _text(record, "prompt"), _text(record, "entry_point")
    if not entry.isidentifier():
        raise _Malformed("entry_point to be a Python identifier", repr(entry[:80]))
    return Problem(
        task_id=_text(record, "task_id"),
        prompt=prompt,
        head=prompt,
        reference=_text(record, "canonical_solution"),
        tests=f"{_text(record, 'test')}\n\ncheck({entry})\n",
    )


def _mbpp(record: Mapping[str, Any]) -> Problem:
    tests = _texts(record, "test_list")
    if not tests:
        raise _Malformed("test_list with at least one test", "none")
    code = _text(record, "code")
    text = _text(record, "text" if "text" in record else "prompt")
    setup = "\n".join(_texts(record, "test_imports")) if "test_imports" in record else ""
    if "test_setup_code" in record:
        setup = _text(record, "test_setup_code")
    # Triple quotes in the task would end the docstring.
    shown = f"{text}\n{tests[0]}".replace('"""', "'''")
    return Problem(
        task_id=_number_or_text(record, "task_id"),
        prompt=f'"""\n{shown}\n"""\n',
        head="",
        reference=code,
        tests="\n".join([setup, *tests]) + "\n",
    )


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _Malformed(f"{key} to be a string", _found(record, key))
    return value


def _number_or_text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if type(value) is int or (isinstance(value, str) and value):
        return str(value)
    raise _Malformed(f"{key} to be an integer or a string", _found(record, key))


def _texts(record: Mapping[str, Any], key: str) -> list[str]:
    value = record.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _Malformed(f"{key} to be a list of strings", _found(record, key))
    return value


def _found(record: Mapping[str, Any], key: str) -> str:
    if key in record:
        return f"{json.dumps(record[key])[:80]}"
    return f"keys {', '.join(sorted(record))}" if record else "no keys"
