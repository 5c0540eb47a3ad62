"""The results of an evaluation on the disk: one line for each program, as it is judged.

    {"kind": "evaluation", ...}     what is evaluated with what; a resumed evaluation must say the same
    {"kind": "result", ...}         one program: its problem, its text, the outcome and the reason

A line is appended and flushed when its program is judged, so that one that is killed loses nothing that
was finished; a last line that was cut short is dropped. An outcome `harness` says nothing about the model:
such a program is run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from engine.errors import BadInput, write_error

VERSION = 1
_BEGINNING = b'{"kind": "evaluation"'


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
    """How the text ended: `stop`, `end_of_text`, or `length`: it was cut."""


class Results:
    """An open file of results, to append to."""

    def __init__(self, path: Path, file: IO[str], done: dict[tuple[str, int], Result]) -> None:
        self.path = path
        self._file = file
        self.done = done
        """What is finished, by problem and sample."""

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


def open_results(path: str | Path, about: Mapping[str, Any]) -> Results:
    """A file to append to: one that is there is continued where it is `about` the same.

    Raises `BadInput` where it is about something else, or is no file of results.
    """
    path = Path(path)
    about = {"kind": "evaluation", "v": VERSION, **about}
    done: dict[tuple[str, int], Result] = {}
    keep = 0
    if path.exists() and path.stat().st_size:
        found, results, keep = _read(path)
        other = [key for key in {**about, **found} if about.get(key) != found.get(key)]
        if other:
            raise BadInput.expected(
                "results",
                path,
                f"those of this evaluation, with {other[0]} {about.get(other[0])!r}",
                f"{found.get(other[0])!r}",
                hint="name another file, or remove this one",
            )
        done = {(one.task_id, one.sample): one for one in results if one.outcome != "harness"}
    try:
        file = path.open("a", encoding="utf-8")
        if keep:
            os.truncate(path, keep)
        else:
            os.truncate(path, 0)
            file.write(json.dumps(about) + "\n")
            file.flush()
    except OSError as error:
        raise write_error("results", path, "a file to append to", error) from error
    return Results(path, file, done)


def is_results(path: str | Path) -> bool:
    """Whether a path is a file that begins as one of results does; a model's begins otherwise."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def read_results(path: str | Path) -> tuple[dict[str, Any], list[Result]]:
    """What a file is about, and its results. Raises `BadInput`."""
    about, results, _ = _read(Path(path))
    return about, results


def _read(path: Path) -> tuple[dict[str, Any], list[Result], int]:
    """And the bytes up to the end of the last whole line."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        found = error.strerror or str(error)
        raise BadInput.expected("results", path, "a readable file", found) from error
    keep = raw.rfind(b"\n") + 1
    lines = raw[:keep].splitlines()
    try:
        records: Sequence[Any] = [json.loads(line) for line in lines]
        about = records[0] if records else {}
        if records and about.get("kind") != "evaluation":
            raise ValueError("a first line of something else")
        results = [Result(**_without_kind(record)) for record in records[1:]]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput.expected("results", path, "results of `engine eval`", str(error)) from None
    return about, results, keep


def _without_kind(record: dict[str, Any]) -> dict[str, Any]:
    if record.pop("kind") != "result":
        raise ValueError("a line that is no result")
    return record
