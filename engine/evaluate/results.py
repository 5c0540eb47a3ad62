"""Store the results of an evaluation on disk: one line for each program, written when it is judged.

    {"kind": "evaluation", ...}     model, problems and settings; they must be equal in a resumed evaluation
    {"kind": "result", ...}         one program: its task_id, the generated text, the outcome and the reason

A line is appended and flushed when its program is judged, so a killed evaluation loses no judged program. An
incomplete last line is dropped. The outcome `harness` means that the trial itself failed, so that nothing is known
about the program: a resumed evaluation runs the program again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from engine import limits
from engine.errors import BadInput, write_error
from engine.files import open_regular, parse_json, read_bytes

VERSION = 1
OUTCOMES = ("pass", "fail", "harness")
_BEGINNING = b'{"kind": "evaluation"'
_NOT_COMPARED = ("left_out",)
"""Keys of the first line that may differ in a resumed evaluation. `left_out` maps problems that the self-test excluded
to its reasons; the names of these problems are also in `without`, which is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    task_id: str
    sample: int
    completion: str
    outcome: str
    """`pass`, `fail` or `harness` (`engine.evaluate.sandbox`)."""
    reason: str
    tokens: int
    ended: str
    """Reason why generation ended: `stop`, `end_of_text`, or `length` at the token limit."""


class Results:
    """A file of results, open for appending."""

    def __init__(self, path: Path, file: IO[str], done: dict[tuple[str, int], Result]) -> None:
        self.path = path
        self._file = file
        self.done = done
        """Results other than `harness`, by task_id and sample."""

    def add(self, result: Result) -> None:
        line = json.dumps({"kind": "result", **asdict(result)})
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise write_error("results", self.path, "a writable file", error) from error
        if result.outcome != "harness":
            self.done[result.task_id, result.sample] = result

    def close(self) -> None:
        self._file.close()


def results_of(
    path: str | Path, about: Mapping[str, Any], unknown_keys: Sequence[str] = ()
) -> tuple[list[Result], int]:
    """Return the results of the evaluation `about` in a file, and the size of the file's complete lines in bytes; no
    results and 0 if there is no file. Raises `BadInput` if the file is of another evaluation or not a file of
    results. `unknown_keys` are keys of `about` that are not known yet and therefore not compared."""
    path = Path(path)
    existing = read_if_exists(path)
    if existing is None:
        return [], 0
    recorded, results, keep = existing
    expected = _beginning(about)
    not_compared = {*unknown_keys, *_NOT_COMPARED}
    differing = [
        key
        for key in {**expected, **recorded}
        if key not in not_compared and expected.get(key) != recorded.get(key)
    ]
    if differing:
        raise BadInput.expected(
            "results",
            path,
            f"results of this evaluation, with {differing[0]} {expected.get(differing[0])!r}",
            f"{recorded.get(differing[0])!r}",
            hint="name another file with --results, or remove this file",
        )
    return results, keep


def read_if_exists(path: Path) -> tuple[dict[str, Any], list[Result], int] | None:
    """Return a file's first line, its results and the size of its complete lines in bytes; None if there is no
    file or it is empty. Raises `BadInput` if it is not a file of results."""
    if not os.path.exists(path):
        return None
    with open_regular(path, "results") as file:  # opening a FIFO would block
        if not os.fstat(file.fileno()).st_size:
            return None
    return _read(path)


def open_results(path: str | Path, about: Mapping[str, Any]) -> Results:
    """Open a file for appending, and lock it. An existing file is continued if it is of the evaluation `about`.

    Raises `BadInput` if it is of another evaluation, is not a file of results, or another process writes it.
    """
    path = Path(path)
    try:
        file = path.open("a", encoding="utf-8")
        try:
            results = _continue(path, file, about)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise write_error("results", path, "a writable file", error) from error
    done = {
        (result.task_id, result.sample): result for result in results if result.outcome != "harness"
    }
    return Results(path, file, done)


def _continue(path: Path, file: IO[str], about: Mapping[str, Any]) -> list[Result]:
    """Lock the open file, return its results, and truncate it to complete lines."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput.expected(
            "results",
            path,
            "a file that no other process writes",
            "another evaluation that writes it",
        ) from None
    results, keep = results_of(path, about)
    os.truncate(path, keep)
    if not keep:
        file.write(json.dumps(_beginning(about)) + "\n")
        file.flush()
    return results


def _beginning(about: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "evaluation", "v": VERSION, **about}


def is_results(path: str | Path) -> bool:
    """Return whether a path is a file of results, from its first bytes."""
    try:
        with open_regular(Path(path), "results") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except (OSError, BadInput):
        return False


def read_results(path: str | Path) -> tuple[dict[str, Any], list[Result]]:
    """Return the first line of a file of results, and the results. Raises `BadInput`."""
    about, results, _ = _read(Path(path))
    return about, results


def _read(path: Path) -> tuple[dict[str, Any], list[Result], int]:
    """Return a file's first line, its results, and the size of its complete lines in bytes."""
    raw = read_bytes(path, "results", limits.RESULTS)
    keep = raw.rfind(b"\n") + 1
    lines = raw[:keep].splitlines()
    try:
        records: Sequence[Any] = [parse_json(line, path, "results") for line in lines]
        about = records[0] if records else {}
        if records and about.get("kind") != "evaluation":
            raise ValueError("a first line of another kind")
        results = [_result(record) for record in records[1:]]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput.expected("results", path, "results of `engine eval`", str(error)) from None
    return about, results, keep


def _result(record: dict[str, Any]) -> Result:
    if record.pop("kind") != "result":
        raise ValueError("a line that is not a result")
    result = Result(**record)
    if result.outcome not in OUTCOMES:
        raise ValueError(f"an outcome {result.outcome!r}")
    return result
