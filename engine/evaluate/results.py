"""Store the results of an evaluation on disk: one line for each program, written when it is judged.

    {"kind": "evaluation", ...}     model, problems and settings; they must be equal in a resumed evaluation
    {"kind": "result", ...}         one program: its problem, its text, the outcome and the reason

A line is appended and flushed when its program is judged, so a killed evaluation loses no judged
program. An incomplete last line is dropped. The outcome `harness` is not a result of the model; such
a program is run again.
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
_WORDS = ("left_out",)
"""Keys that map problems to reasons. In a resumed evaluation the problems must be equal; the reasons may differ."""


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
    """Reason why the generated text ended: `stop`, `end_of_text`, or `length` if it was cut off."""


class Results:
    """A file of results, open for appending."""

    def __init__(self, path: Path, file: IO[str], done: dict[tuple[str, int], Result]) -> None:
        self.path = path
        self._file = file
        self.done = done
        """Finished results, by problem and sample."""

    def add(self, result: Result) -> None:
        line = json.dumps({"kind": "result", **asdict(result)})
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise write_error("results", self.path, "a file to append to", error) from error
        if result.outcome != "harness":
            self.done[result.task_id, result.sample] = result

    def close(self) -> None:
        self._file.close()


def refuse_other(
    path: str | Path, about: Mapping[str, Any], unknown_keys: Sequence[str] = ()
) -> tuple[list[Result], int]:
    """Return the results in a file of the evaluation `about`, and the size of its complete lines in bytes;
    empty if there is no file. Raises `BadInput` if the file is about another evaluation or is not a file of
    results. `later`: keys of `about` that are not known yet."""
    path = Path(path)
    existing = read_if_any(path)
    if existing is None:
        return [], 0
    recorded, results, keep = existing
    expected = _beginning(about)
    unasked = {*unknown_keys, *_WORDS}
    differing = [
        key
        for key in {**expected, **recorded}
        if key not in unasked and expected.get(key) != recorded.get(key)
    ]
    if differing:
        raise BadInput.expected(
            "results",
            path,
            f"those of this evaluation, with {differing[0]} {expected.get(differing[0])!r}",
            f"{recorded.get(differing[0])!r}",
            hint="name another file, or remove this one",
        )
    return results, keep


def read_if_any(path: Path) -> tuple[dict[str, Any], list[Result], int] | None:
    """Return what a file is about, its results and the bytes of its whole lines; None where there is no file
    or an empty one. Raises `BadInput` where there is something else."""
    if not os.path.exists(path):
        return None
    with open_regular(path, "results") as file:  # opening a FIFO would block
        if not os.fstat(file.fileno()).st_size:
            return None
    return _read(path)


def open_results(path: str | Path, about: Mapping[str, Any]) -> Results:
    """Open a file for appending, exclusively. An existing file is continued when it is `about` the same.

    Raises `BadInput` when it is about another evaluation, is no file of results, or is being written.
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
        raise write_error("results", path, "a file to append to", error) from error
    done = {
        (result.task_id, result.sample): result for result in results if result.outcome != "harness"
    }
    return Results(path, file, done)


def _continue(path: Path, file: IO[str], about: Mapping[str, Any]) -> list[Result]:
    """Return the results in the open file, and cut it to whole lines."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput.expected(
            "results", path, "to be the only one", "another evaluation that writes it"
        ) from None
    results, keep = refuse_other(path, about)
    os.truncate(path, keep)
    if not keep:
        file.write(json.dumps(_beginning(about)) + "\n")
        file.flush()
    return results


def _beginning(about: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "evaluation", "v": VERSION, **about}


def is_results(path: str | Path) -> bool:
    """Whether a path is a file that begins like a file of results; a model's file begins differently."""
    try:
        with open_regular(Path(path), "results") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except (OSError, BadInput):
        return False


def read_results(path: str | Path) -> tuple[dict[str, Any], list[Result]]:
    """Return what a file is about, and its results. Raises `BadInput`."""
    about, results, _ = _read(Path(path))
    return about, results


def _read(path: Path) -> tuple[dict[str, Any], list[Result], int]:
    """Return what a file is about, its results, and the bytes up to the end of the last whole line."""
    raw = read_bytes(path, "results", limits.RESULTS)
    keep = raw.rfind(b"\n") + 1
    lines = raw[:keep].splitlines()
    try:
        records: Sequence[Any] = [parse_json(line, path, "results") for line in lines]
        about = records[0] if records else {}
        if records and about.get("kind") != "evaluation":
            raise ValueError("a first line of something else")
        results = [_result(record) for record in records[1:]]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput.expected("results", path, "results of `engine eval`", str(error)) from None
    return about, results, keep


def _result(record: dict[str, Any]) -> Result:
    if record.pop("kind") != "result":
        raise ValueError("a line that is no result")
    result = Result(**record)
    if result.outcome not in OUTCOMES:
        raise ValueError(f"an outcome {result.outcome!r}")
    return result
