"""Define the required contents of a published checkpoint, and check them.

    MANIFEST.json   {"schema": 1, "step": 1000, "files": {name: {"sha256": hex, "size": bytes}}}

A checkpoint verifies when its folder holds exactly the manifest's files, each with its size and sha256.
Published checkpoints are verified from the newest to the oldest. A checkpoint that does not verify is refused
with an error that names it. The caller decides whether to fall back to an older one; the result then lists those
that were refused. Folders that are being written, deleted or set aside are not named `step-NNNNNNNN` and are never
read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine import limits
from engine.checkpoint_folders import PUBLISHED, published, refusal
from engine.errors import CheckpointError
from engine.files import open_regular, read_bytes

MANIFEST = "MANIFEST.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal[1]
    step: int
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoint:
    """A checkpoint whose files have just been compared with its manifest, byte by byte."""

    path: Path
    step: int
    files: Mapping[str, FileRecord]
    manifest_sha256: str
    refused: tuple[tuple[Path, str], ...] = ()
    """Newer checkpoints that were refused, newest first, each with the reason. Report them to the user."""


# contract: checkpoint-protocol-v1
def verify(path: Path) -> VerifiedCheckpoint:
    """Compare every byte of one published checkpoint with its manifest.

    Raises CheckpointError, which names the file and says what was expected and found.
    """
    name = PUBLISHED.fullmatch(path.name)
    if name is None:
        raise refusal(path, "a folder named step-NNNNNNNN", path.name)
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise refusal(path, "a folder", "something else")
        return _verify_folder(path, int(name[1]))
    except OSError as error:
        raise refusal(path, "a readable checkpoint", str(error)) from error


def newest(folder: Path, allow_fallback: bool = False) -> VerifiedCheckpoint | None:
    """Verify the newest published checkpoint and return it; None if the folder has no checkpoint.

    If it does not verify, raises CheckpointError. With `allow_fallback`, returns the newest checkpoint that
    verifies, with the newer ones in `refused`, and raises CheckpointError only if none verifies.
    """
    refused: list[tuple[Path, str]] = []
    for path in published(folder):
        try:
            checkpoint = verify(path)
        except CheckpointError as error:
            if not allow_fallback:
                raise CheckpointError(
                    error.message,
                    hint="`engine distill --resume RUN --allow-fallback` resumes from an older checkpoint that"
                    " verifies and trains the later steps again",
                ) from error
            refused.append((path, error.message))
            continue
        return replace(checkpoint, refused=tuple(refused))
    if refused:
        raise CheckpointError(
            "\n".join(reason for _, reason in refused),
            hint=f"no checkpoint verifies; to start again from step 0, move {folder} away and use"
            " `engine distill --resume RUN --allow-restart`",
        )
    return None


def manifest_bytes(step: int, records: Mapping[str, FileRecord]) -> bytes:
    """Return the content of the manifest file; equal records give equal bytes."""
    manifest = msgspec.to_builtins(Manifest(schema=1, step=step, files=dict(records)))
    return json.dumps(manifest, sort_keys=True, indent=1).encode() + b"\n"


def is_file_name(name: str) -> bool:
    """Return whether a data file may have this name: not a path, not hidden, and not the manifest's name."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST


def _verify_folder(path: Path, step: int) -> VerifiedCheckpoint:
    present = {entry.name: entry for entry in os.scandir(path)}
    if MANIFEST not in present:
        raise refusal(path / MANIFEST, "a manifest", "none: not a checkpoint")
    for entry in present.values():
        if not entry.is_file(follow_symlinks=False):
            raise refusal(path / entry.name, "a plain file", "a link, a folder or a device")
    raw = read_bytes(path / MANIFEST, "checkpoint", limits.MANIFEST, error=CheckpointError)
    records = _read_manifest(path / MANIFEST, raw, step)
    for name in sorted(records.keys() - present.keys()):
        raise refusal(path / name, "the file in the manifest", "no such file")
    for name in sorted(present.keys() - records.keys() - {MANIFEST}):
        raise refusal(path / name, "only files in the manifest", "an extra file")
    names = sorted(records)
    with ThreadPoolExecutor(thread_name_prefix="hash") as pool:
        digests = list(pool.map(digest_of, (path / name for name in names)))
    for name, (size, digest) in zip(names, digests, strict=True):
        record = records[name]
        if size != record.size:
            raise refusal(path / name, f"{record.size} bytes", f"{size}")
        if digest != record.sha256:
            raise refusal(path / name, f"sha256 {record.sha256}", digest)
    return VerifiedCheckpoint(
        path=path, step=step, files=records, manifest_sha256=hashlib.sha256(raw).hexdigest()
    )


def _read_manifest(path: Path, raw: bytes, step: int) -> dict[str, FileRecord]:
    """Return the manifest's files. Every key and type is required and no other key is allowed, so that a flipped bit is
    not read as a new field."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refusal(path, "JSON with schema, step and files", str(error)) from error
    if manifest.step != step:
        raise refusal(path, f"step {step}, as the folder is named", str(manifest.step))
    for name in manifest.files:
        if not is_file_name(name):
            raise refusal(path, "plain file names", repr(name))
    return manifest.files


def digest_of(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the sha256 of a file."""
    with open_regular(path, "checkpoint", error=CheckpointError) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest
