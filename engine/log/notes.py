"""A user's tags (words to filter by) and note (one line of text) on a run.

    <run>/notes.json    {"note": "...", "tags": ["...", "..."]}

`change_notes` is the only writer. It writes atomically under a lock, so that changes from two terminals are both
kept. Neither the trainer nor the supervisor reads the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

from engine import limits
from engine.errors import BadInput, RunLogError, write_error
from engine.files import read_json_object
from engine.log.folder import RunFolder, write_whole

NAME = "notes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    tags: tuple[str, ...] = ()
    text: str = ""


def read_notes(run: RunFolder) -> Notes:
    """Read the tags and the note of a run; empty if there are none. Raises RunLogError for an invalid file."""
    path = run.path / NAME
    if not os.path.lexists(path):
        return Notes()
    fields = read_json_object(path, "notes", limits.NOTES_FILE, error=RunLogError)
    tags, text = fields.get("tags", []), fields.get("note", "")
    if not isinstance(text, str) or not isinstance(tags, list):
        raise RunLogError.expected(
            "notes", path, "a list `tags` and a string `note`", "other types"
        )
    try:
        return Notes(tags=checked_tags(tags), text=checked_note(text))
    except BadInput as error:
        raise RunLogError(f"notes: {path}: {error.message}") from None


def change_notes(
    run: RunFolder,
    *,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    tags: Iterable[str] | None = None,
    note: str | None = None,
) -> Notes:
    """Add and remove tags, or replace all of them, and replace the note; return the new tags and note. Raises
    BadInput for an invalid tag or note, RunLogError and DiskFull if the file cannot be read or written."""
    try:
        lock = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise write_error("notes", run.path / NAME, "to write it", error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_notes(run)
        left_out = set(remove)
        kept = [tag for tag in (before.tags if tags is None else tags) if tag not in left_out]
        after = Notes(
            tags=checked_tags([*kept, *add]),
            text=before.text if note is None else checked_note(note),
        )
        if after != before:
            written = {"note": after.text, "tags": list(after.tags)}
            write_whole(run.path / NAME, json.dumps(written, indent=2) + "\n", "notes")
    finally:
        os.close(lock)
    return after


def checked_tags(tags: Iterable[object]) -> tuple[str, ...]:
    """Return tags without repetitions. Raises BadInput."""
    unique: dict[str, None] = {}
    for tag in tags:
        if not isinstance(tag, str) or not tag or not tag.isprintable() or " " in tag:
            raise BadInput(f"tag: expected one word without spaces, found {ascii(tag)[:80]}")
        if len(tag) > limits.TAG.most:
            raise BadInput(f"tag: expected {limits.TAG}, found {len(tag):,}")
        unique[tag] = None
    if len(unique) > limits.TAGS.most:
        raise BadInput(f"tags: expected {limits.TAGS}, found {len(unique):,}")
    return tuple(unique)


def checked_note(text: str) -> str:
    """Return a note on one line. Raises BadInput."""
    if len(text) > limits.NOTE.most:
        raise BadInput(f"note: expected {limits.NOTE}, found {len(text):,}")
    line = " ".join(text.split())
    if not line.isprintable():
        raise BadInput("note: expected text, found a control character")
    return line
