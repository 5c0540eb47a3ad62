"""The folder of a flip, and its verdict on disk.

    plan.json      written before the first arm
    pairs.jsonl    first line: the hash of the plan, the machine; then one line per pair, append only
    arms/NN-a      ordinary run folders, NN-b likewise; a second try after an interruption is NN-a.2
    out/NN-a       what a watched command wrote to `{out}`
    controls/      folders of the same kind, when the controls were run with the flip
    verdict.json   written at the end; after an interruption it holds the verdict so far

A line is one write and reaches the disk before the next arm starts, so a flip that dies loses only the pair
in progress. Only one process writes: it holds the lock of pairs.jsonl.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine import limits
from engine.errors import BadInput, RunLogError, write_error
from engine.files import parse_json, read_bytes, read_json, read_text
from engine.flips.pair import PROOFS, Pair
from engine.flips.plan import Plan, read_plan
from engine.flips.surroundings import Surroundings
from engine.log.folder import new_folder, write_whole
from engine.log.write import sync_folder, write_fully
from engine.verdict import Level


class FlipFolder:
    """An opened flip: its header, the pairs measured so far, and the lock on pairs.jsonl."""

    def __init__(self, path: Path, fd: int, header: Mapping[str, Any], pairs: list[Pair]) -> None:
        self.path, self._fd, self.header, self.pairs = path, fd, header, pairs

    @property
    def began_with(self) -> Surroundings:
        return Surroundings(**self.header["host"])

    def edited(self) -> str:
        """Return why the plan differs from the registered one; empty if it does not."""
        try:
            found = read_plan_of(self.path).sha256
        except RunLogError as error:
            return f"plan.json cannot be read any more ({error})"
        if found != self.header["plan_sha256"]:
            return "plan.json was changed after the start"
        return ""

    def add(self, pair: Pair) -> None:
        _append(self._fd, self.path, _pair_fields(pair))
        self.pairs.append(pair)

    def run_folder(self, number: int, arm: str) -> Path:
        """Return the path of a new folder for a run of an arm."""
        name = f"{number:02}-{arm.lower()}"
        tries = [name, *(f"{name}.{n}" for n in range(2, 100))]
        # An early interruption may leave only the output or code folder of a run.
        folders = ("arms", "out", "code")
        return next(
            self.path / "arms" / name
            for name in tries
            if not any((self.path / place / name).exists() for place in folders)
        )

    def write(self, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Write verdict.json, and return its fields as they will be read back."""
        text = json.dumps(verdict, indent=2, sort_keys=True, allow_nan=False)
        write_whole(self.path / "verdict.json", f"{text}\n")
        fields: dict[str, Any] = json.loads(text)
        return fields

    def close(self) -> None:
        os.close(self._fd)


def create_flip(path: Path, plan: Plan, surroundings: Surroundings) -> FlipFolder:
    """Register the plan in a new folder. Raises BadInput for a folder that exists."""
    header = {
        "plan_sha256": plan.sha256,
        "order_seed": plan.order_seed,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": dataclasses.asdict(surroundings),
    }
    with contextlib.ExitStack() as undone:
        with new_folder(path, "flip folder", "--resume continues a flip"):
            write_whole(path / "plan.json", plan.to_json() + "\n")
            fd = _open_locked(path / "pairs.jsonl", create=True)
            undone.callback(os.close, fd)
            _append(fd, path, header)
        undone.pop_all()
    return FlipFolder(path, fd, header, [])


def open_flip(path: Path) -> tuple[FlipFolder, Plan]:
    """Open a flip to continue it, with the plan as it is on disk now. A torn last line is cut off."""
    log = path / "pairs.jsonl"
    if not log.is_file():
        raise RunLogError.expected("flip folder", path, "pairs.jsonl in it", "none")
    fd = _open_locked(log, create=False)
    try:
        plan = read_plan_of(path)
        with _expecting(path, "a header and pairs"):
            header, pairs, whole = _read(log)
            os.ftruncate(fd, whole)
    except BaseException:
        os.close(fd)
        raise
    return FlipFolder(path, fd, header, pairs), plan


@contextlib.contextmanager
def _expecting(path: Path, what: str) -> Iterator[None]:
    """Turn any error from reading a foreign or torn file into RunLogError."""
    try:
        yield
    except (BadInput, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunLogError.expected("flip folder", path, what, str(error)) from error


def read_plan_of(path: Path) -> Plan:
    """Read the plan of a flip as it is on disk now. Raises RunLogError."""
    with _expecting(path, "a plan"):
        return read_plan(read_text(path / "plan.json", "plan", limits.FLIP_FILE, error=RunLogError))


def read_pairs(path: Path) -> list[Pair]:
    """Read the pairs of a flip, also while it is running. Raises RunLogError."""
    return read_record(path)[1]


def read_record(path: Path) -> tuple[dict[str, Any], list[Pair]]:
    """Read the header of a flip (the hash of its plan, when it was registered, the machine) and its pairs. Raises
    RunLogError."""
    with _expecting(path, "a header and pairs"):
        header, pairs, _ = _read(path / "pairs.jsonl")
    return header, pairs


def is_flip(path: Path) -> bool:
    return (path / "pairs.jsonl").is_file()


def find_flips(folder: Path) -> list[Path]:
    """Return the flips directly in `folder`, or `folder` itself, newest first; flips of controls are not included."""
    if is_flip(folder):
        return [folder]
    if not folder.is_dir():
        return []
    return sorted(
        filter(is_flip, folder.iterdir()), key=lambda p: (_plan_time_ns(p), p.name), reverse=True
    )


def _plan_time_ns(path: Path) -> int:
    """Return when the plan of a flip was written; 0 if there is none, or it has been deleted meanwhile."""
    try:
        return (path / "plan.json").stat().st_mtime_ns
    except OSError:
        return 0


def read_verdict(path: Path) -> dict[str, Any] | None:
    """Read verdict.json of a flip; None when there is none yet. Raises RunLogError for a malformed one."""
    file = path / "verdict.json"
    if not os.path.lexists(file):
        return None
    fields = read_json(file, "verdict", limits.FLIP_FILE, error=RunLogError)
    if not isinstance(fields, dict) or "verdict" not in fields:
        raise RunLogError.expected("verdict", file, "a verdict", f"{fields!r:.60}")
    return fields


def _read(log: Path) -> tuple[dict[str, Any], list[Pair], int]:
    """Return header, pairs, and the offset at which the last whole line ends."""
    raw = read_bytes(log, "flip", limits.FLIP_FILE, error=RunLogError)
    whole = raw.rfind(b"\n") + 1
    lines = [parse_json(line, log, "flip", error=RunLogError) for line in raw[:whole].splitlines()]
    if not lines or "plan_sha256" not in lines[0]:
        raise ValueError(f"{log} does not begin with the hash of a plan")
    return lines[0], [_read_pair(fields) for fields in lines[1:]], whole


def _pair_fields(pair: Pair) -> dict[str, Any]:
    fields = dataclasses.asdict(pair)
    for proof in filter(None, fields["proofs"].values()):
        proof["level"] = proof["level"].name
    return fields


def _read_pair(fields: dict[str, Any]) -> Pair:
    for proof in filter(None, map(fields["proofs"].__getitem__, PROOFS)):
        proof["level"] = Level[proof["level"]]
    return msgspec.convert(fields, Pair)


def _open_locked(log: Path, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        fd = os.open(log, flags, 0o644)
    except OSError as error:
        raise write_error("flip", log, "to open it for writing", error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RunLogError.expected("flip", log, "no other writer", "one that is alive") from None
    return fd


def _append(fd: int, path: Path, fields: Mapping[str, Any]) -> None:
    line = json.dumps(fields, allow_nan=False).encode() + b"\n"
    try:
        write_fully(fd, line)
        os.fsync(fd)
        sync_folder(path)
    except OSError as error:
        raise write_error("flip", path / "pairs.jsonl", "to write a line", error) from error
