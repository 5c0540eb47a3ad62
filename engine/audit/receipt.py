"""What a receipt says of the files and settings beside it, told by none of the functions that wrote it.

hashes     of the student's files and the others, by `hashlib.file_digest`; of logs, of as much as it names
requested  each setting as `--set` has it last, else spec.toml
times      the last line of the log is no later than it was written
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine import limits
from engine.files import open_plain, parse_json, read_json_object
from engine.spec import parse_set, read_spec

MOST_BYTES = 1 << 30
"""Of the files that are hashed, the smallest first: a second or two."""
AHEAD_S = 0.1
"""What a machine may lose between two readings of its clocks."""


def contradicted(run: Path) -> Iterator[str]:
    """Say what the receipt of a run says that its files and settings do not. Raises `BadInput` for what cannot be
    read."""
    receipt = read_json_object(run / "receipt.json", "receipt", limits.RUN_FILE)
    yield from _other_hashes(run, receipt)
    if "redacted" not in receipt:
        yield from _other_requests(run, receipt)
    yield from _ahead(run / "events.jsonl")


def _other_hashes(run: Path, receipt: Mapping[str, Any]) -> Iterator[str]:
    named = {
        **{f"student/{name}": about for name, about in receipt["student_files"].items()},
        **receipt["files"],
        **{name: about for name, about in receipt["logs"].items() if about is not None},
    }
    room = MOST_BYTES
    for size, name, sha256 in sorted(
        (about["bytes"], name, about["sha256"]) for name, about in named.items()
    ):
        room -= size
        if room < 0:
            return
        try:
            with open_plain(run / name) as file:
                whole = file if name not in receipt["logs"] else io.BytesIO(file.read(size))
                found = hashlib.file_digest(whole, "sha256").hexdigest()
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}"
            continue
        if found != sha256:
            yield f"the sha256 of {name} is not {sha256[:16]}: it is {found[:16]}"


def _other_requests(run: Path, receipt: Mapping[str, Any]) -> Iterator[str]:
    effective = read_json_object(run / "effective.json", "settings", limits.RUN_FILE)
    asked = _flat(read_spec(run / "spec.toml")[0])
    asked |= dict(map(parse_set, effective.get("sets") or ()))
    said: dict[str, list[object]] = {}
    for one in receipt["differences"]:
        said.setdefault(one["key"], []).append(one["requested"])
    for key, value in _flat(effective["spec"]).items():
        if key in asked and asked[key] not in (found := said.get(key, [value])):
            yield f"{key}: it says that {found[0]!r} was requested, and it was {asked[key]!r}"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, settings in tree.items()
        if isinstance(settings, dict)
        for name, value in settings.items()
    }


def _ahead(log: Path) -> Iterator[str]:
    with open_plain(log) as lines:
        newest, openings = b"", []
        for newest in lines:
            if b'"log_opened"' in newest:
                openings.append(parse_json(newest, log, "run log"))
        written_unix_s = os.fstat(lines.fileno()).st_mtime
    ahead_s = openings[-1]["unix_s"] + parse_json(newest, log, "run log")["t_s"] - written_unix_s
    begun_s = max(one["t_s"] for one in openings)
    # The clock of a file system may be another machine's, and that of this one may have been set back.
    if min(begun_s, ahead_s) > AHEAD_S:
        yield (
            f"the last line of {log.name} is {ahead_s:.2g} s later than it was written: times count from "
            f"{begun_s:.2g} s before a session's first line"
        )
