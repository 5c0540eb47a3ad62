"""`manifest.json` of a store of teacher outputs, and the check whether a store fits a run.

`manifest.json` records the form of the rows, the teacher that produced them, and measurements of the
teacher:

    {"sha256": SHA-256 of the manifest as JSON with sorted keys, "manifest": {"version": 1, "identity": {...}, ...}}

The identity holds the hash of the teacher's tensors in memory. To recognise the teacher without
loading its tensors, the manifest also lists the files they came from, each with its size, its
SHA-256 and a stamp: size, device, inode, mtime and ctime. A file with the same stamp is the file that
was hashed (a copied or touched file has another stamp). A file with another stamp is hashed again, at
one or two gigabytes per second, and must have the same hash. `fitting_manifest` checks the manifest
against a run before anything is loaded. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.divergences import DIVERGENCES, sparse_divergences
from engine.files import open_regular, read_json
from engine.formats.open import open_weights
from engine.log.folder import write_whole
from engine.models.config import CONFIG_FILE, ModelConfig
from engine.spec import RunSpec
from engine.teachers.store.keys import HIDDEN, CacheError, Identity, identity_of

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFile:
    """A file that the teacher was loaded from."""

    name: str
    """Path relative to the folder of the weights."""
    bytes: int
    sha256: str
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the teacher on held-out rows, which a run without a store makes itself."""

    heldout_sha256: str
    """Digest of the held-out rows (`contents_sha256`)."""
    loss: float
    """Cross entropy in nats per labelled token."""
    labelled: int
    dropped_mean: float | None = None
    """Mean probability, at `temperature`, of the teacher's ids beyond the student's vocabulary; None without such
    ids."""
    dropped_max: float | None = None
    dropped_tokens: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    identity: Identity
    teacher_ids: int
    """Size of the teacher's whole vocabulary."""
    files: tuple[TeacherFile, ...]
    measured: Measured
    rows_per_shard: int
    engine: str


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`. Raises DiskFull or RunLogError."""
    content = {"version": VERSION, **asdict(manifest)}
    write_whole(
        folder / MANIFEST,
        json.dumps({"sha256": _digest(content), "manifest": content}, indent=1) + "\n",
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in `folder` and verify its digest. Raises CacheError."""
    path = folder / MANIFEST
    try:
        if not os.path.lexists(path):
            raise FileNotFoundError
        document = read_json(path, "teacher.cache", limits.MANIFEST, error=CacheError)
        content = document["manifest"]
        if document["sha256"] != _digest(content):
            raise CacheError.expected(
                "teacher.cache",
                path,
                f"content with sha256 {document['sha256']}",
                _digest(content),
            )
        return _manifest_of(path, content)
    except FileNotFoundError:
        raise CacheError.expected(
            "teacher.cache",
            folder,
            "a store of teacher outputs",
            f"a folder without {MANIFEST}" if folder.is_dir() else "no folder",
            hint="`engine prepare` makes one",
        ) from None
    except OSError as error:
        raise CacheError.expected(
            "teacher.cache", path, "a readable file", str(error.strerror)
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CacheError.expected("teacher.cache", path, "a manifest", f"{error!r:.120}") from error


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifest_of(path: Path, content: dict[str, Any]) -> Manifest:
    fields = dict(content)
    version = fields.pop("version")
    if version != VERSION:
        raise CacheError.expected(
            "teacher.cache",
            path,
            f"version {VERSION}",
            f"{version!r:.20}",
            hint="make the store again with `engine prepare`",
        )
    fields["identity"] = identity_of(fields["identity"])
    fields["files"] = tuple(
        TeacherFile(**{**file, "stamp": tuple(file["stamp"])}) for file in fields["files"]
    )
    fields["measured"] = Measured(**fields["measured"])
    return Manifest(**fields)


def teacher_files(path: str | Path) -> tuple[TeacherFile, ...]:
    """Return every file that the weights in `path` come from, with its hash. Raises WeightsError."""
    return tuple(
        TeacherFile(name=name, bytes=stamp[0], sha256=_file_digest(file), stamp=stamp)
        for name, file, stamp in _named_files(path)
    )


def check_teacher_files(path: str | Path, manifest: Manifest, where: Path) -> str:
    """Check that the weights in `path` are those that produced the store's rows. Return words for the
    kind of check, inode and times or hashes. Raises CacheError.
    """
    recorded = {file.name: file for file in manifest.files}
    present = {name: (file, stamp) for name, file, stamp in _named_files(path)}
    # A model of one file may have been renamed.
    if len(recorded) == len(present) == 1:
        present = dict.fromkeys(recorded, next(iter(present.values())))
    if present.keys() != recorded.keys():
        raise _other_teacher(where, ", ".join(sorted(recorded)), ", ".join(sorted(present)))
    hashed = 0
    for name, (file, stamp) in sorted(present.items()):
        if stamp == recorded[name].stamp:
            continue
        hashed += 1
        if stamp[0] != recorded[name].bytes:
            raise _other_teacher(where, f"{file} of {recorded[name].bytes} bytes", f"{stamp[0]}")
        if (digest := _file_digest(file)) != recorded[name].sha256:
            raise _other_teacher(where, f"{file} with sha256 {recorded[name].sha256}", digest)
    if not hashed:
        return "its files are unchanged since the store was made (by inode and times)"
    return f"its files have the hashes that the manifest records ({hashed} hashed now)"


def _other_teacher(where: Path, expected: str, found: str) -> CacheError:
    return CacheError.expected(
        "teacher.cache",
        where,
        f"the teacher that the store was made with: {expected}",
        found,
        hint="name that teacher in teacher.path, or make another store with `engine prepare`",
    )


def _named_files(path: str | Path) -> list[tuple[str, Path, tuple[int, ...]]]:
    """Return name, path and stamp of each weight file, and of the config.json of safetensors files. The
    stamp is size, device, inode, mtime and ctime.
    """
    with open_weights(Path(path)) as weights:
        files = {info.file for info in weights.tensors.values()}
        folder = weights.path if os.path.isdir(weights.path) else weights.path.parent
        if weights.format == "safetensors":
            files.add(folder / CONFIG_FILE)
    named: list[tuple[str, Path, tuple[int, ...]]] = []
    for file in sorted(files):
        status = file.stat()
        stamp = (
            status.st_size,
            status.st_dev,
            status.st_ino,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        named.append((os.path.relpath(file, folder), file, stamp))
    return named


def _file_digest(path: Path) -> str:
    with open_regular(path, "teacher.cache", error=CacheError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def uses_cache(spec: RunSpec) -> bool:
    """Return whether a run of `spec` reads its teacher's outputs from a store."""
    teacher = spec.teacher
    chosen = teacher.backend == "cached" or (teacher.backend == "auto" and bool(teacher.cache))
    return chosen and spec.has_teacher


def fitting_manifest(spec: RunSpec, teacher: ModelConfig, student: ModelConfig) -> Manifest:
    """Return the manifest of the spec's store. Raises CacheError if the store does not fit this
    run.
    """
    path = Path(spec.teacher.cache)
    manifest = read_manifest(path)
    identity = manifest.identity
    settings: list[tuple[str, object, object]] = [
        ("data.seq_len", spec.data.seq_len, identity.seq_len),
        ("the teacher's width", teacher.hidden_size, identity.width),
        ("the teacher's ids", teacher.vocab_size, manifest.teacher_ids),
    ]
    if spec.teacher.precision != "auto":
        settings.append(("teacher.precision", spec.teacher.precision, identity.precision))
    if identity.form != HIDDEN:
        settings += [
            ("the student's ids", student.vocab_size, identity.vocabulary),
            ("loss.temperature", spec.loss.temperature, identity.temperature),
        ]
        if not DIVERGENCES[spec.loss.divergence].sparse:
            sparse = " or ".join(sparse_divergences())
            settings.append(("loss.divergence", spec.loss.divergence, sparse))
    differing = [
        (name, expected, stored) for name, expected, stored in settings if expected != stored
    ]
    if differing:
        raise CacheError.expected(
            "teacher.cache",
            path,
            ", ".join(f"{name} {expected}" for name, expected, _ in differing),
            ", ".join(f"{stored}" for _, _, stored in differing),
            hint='`engine prepare` with this spec makes a store that fits; with teacher.cache="" the run uses no store',
        )
    return manifest
