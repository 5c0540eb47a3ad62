"""What a store of teacher outputs says of itself: `manifest.json`, and whether it fits a run.

`manifest.json` says what the rows of a store are, which teacher gave them, and what was measured of it
while it was there:

    {"sha256": of the rest as JSON with sorted keys, "manifest": {"version": 1, "identity": {...}, ...}}

The identity names a teacher by the hash of its tensors in memory. Who reads the store must not have
to load them, so the manifest also names the files they came from, each with its size, its SHA-256 and
a stamp: device, inode, and the times of its last change of data and of anything. A file with the same
stamp is the one that was hashed (a copy or a touched one has another); one without is hashed again, a
second for every gigabyte or two, and has to be the same. `fitting_manifest` holds it against a run before
anything is loaded. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.files import open_regular, read_json
from engine.formats.open import open_weights
from engine.log.folder import write_whole
from engine.models.config import CONFIG_FILE, ModelConfig
from engine.spec import RunSpec
from engine.spec.divergences import DIVERGENCES, sparse_divergences
from engine.teachers.store.keys import HIDDEN, CacheError, Identity, identity_of

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFile:
    """A file that the teacher was loaded from."""

    name: str
    """Relative to the folder of the weights."""
    bytes: int
    sha256: str
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run would ask the teacher for once, on held-out rows."""

    heldout_sha256: str
    """Of the rows it was measured on (`contents_sha256`)."""
    loss: float
    """Cross entropy in nats per labelled token."""
    labelled: int
    dropped_mean: float | None = None
    """Probability of the ids that are cut, at `temperature`; None where none are."""
    dropped_max: float | None = None
    dropped_tokens: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    identity: Identity
    teacher_ids: int
    """Of its whole vocabulary."""
    files: tuple[TeacherFile, ...]
    measured: Measured
    rows_per_shard: int
    engine: str


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises DiskFull or RunLogError."""
    held = {"version": VERSION, **asdict(manifest)}
    write_whole(
        folder / MANIFEST, json.dumps({"sha256": _digest(held), "manifest": held}, indent=1) + "\n"
    )


def read_manifest(folder: Path) -> Manifest:
    """Raises CacheError."""
    path = folder / MANIFEST
    try:
        if not os.path.lexists(path):
            raise FileNotFoundError
        found = read_json(path, "teacher.cache", limits.MANIFEST, error=CacheError)
        held = found["manifest"]
        if found["sha256"] != _digest(held):
            raise CacheError.expected(
                "teacher.cache", path, f"content of sha256 {found['sha256']}", _digest(held)
            )
        return _manifest_of(path, held)
    except FileNotFoundError:
        raise CacheError.expected(
            "teacher.cache",
            folder,
            "a store of teacher outputs",
            f"no {MANIFEST} in it" if folder.is_dir() else "nothing there",
            hint="`engine prepare` makes one",
        ) from None
    except OSError as error:
        raise CacheError.expected(
            "teacher.cache", path, "a readable file", str(error.strerror)
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CacheError.expected("teacher.cache", path, "a manifest", f"{error!r:.120}") from error


def _digest(held: Any) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _manifest_of(path: Path, held: dict[str, Any]) -> Manifest:
    rest = dict(held)
    version = rest.pop("version")
    if version != VERSION:
        raise CacheError.expected(
            "teacher.cache",
            path,
            f"version {VERSION}",
            f"{version!r:.20}",
            hint="make the store again with `engine prepare`",
        )
    rest["identity"] = identity_of(rest["identity"])
    rest["files"] = tuple(
        TeacherFile(**{**file, "stamp": tuple(file["stamp"])}) for file in rest["files"]
    )
    rest["measured"] = Measured(**rest["measured"])
    return Manifest(**rest)


def teacher_files(path: str | Path) -> tuple[TeacherFile, ...]:
    """Every file that the weights in `path` come from, hashed. Raises WeightsError."""
    return tuple(
        TeacherFile(name=name, bytes=stamp[0], sha256=_file_digest(file), stamp=stamp)
        for name, file, stamp in _named_files(path)
    )


def check_teacher_files(path: str | Path, manifest: Manifest, where: Path) -> str:
    """That the weights in `path` are those that gave the store's rows; how that is known, in words.
    Raises CacheError.
    """
    known = {file.name: file for file in manifest.files}
    found = {name: (file, stamp) for name, file, stamp in _named_files(path)}
    # A model in one file is the same model under another name.
    if len(known) == len(found) == 1:
        found = dict.fromkeys(known, next(iter(found.values())))
    if found.keys() != known.keys():
        raise _other_teacher(where, ", ".join(sorted(known)), ", ".join(sorted(found)))
    hashed = 0
    for name, (file, stamp) in sorted(found.items()):
        if stamp == known[name].stamp:
            continue
        hashed += 1
        if stamp[0] != known[name].bytes:
            raise _other_teacher(where, f"{file} of {known[name].bytes} bytes", f"{stamp[0]}")
        if (digest := _file_digest(file)) != known[name].sha256:
            raise _other_teacher(where, f"{file} with sha256 {known[name].sha256}", digest)
    if not hashed:
        return "its files are those that were hashed when the store was made (inode and times)"
    return f"its files have the hashes of those that the store was made with ({hashed} hashed now)"


def _other_teacher(where: Path, expected: str, found: str) -> CacheError:
    return CacheError.expected(
        "teacher.cache",
        where,
        f"the teacher it was made with: {expected}",
        found,
        hint="name that teacher in teacher.path, or make another store with `engine prepare`",
    )


def _named_files(path: str | Path) -> list[tuple[str, Path, tuple[int, ...]]]:
    """Name, path and stamp of each file with weights, and of the config beside them; the stamp begins
    with the size.
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
    """Whether a run of `spec` takes its teacher's outputs from a store."""
    teacher = spec.teacher
    wanted = teacher.backend == "cached" or (teacher.backend == "auto" and bool(teacher.cache))
    return wanted and spec.has_teacher


def fitting_manifest(spec: RunSpec, teacher: ModelConfig, student: ModelConfig) -> Manifest:
    """The manifest of the spec's store. Raises CacheError for one that has nothing for this run."""
    path = Path(spec.teacher.cache)
    manifest = read_manifest(path)
    identity = manifest.identity
    wanted: list[tuple[str, object, object]] = [
        ("data.seq_len", spec.data.seq_len, identity.seq_len),
        ("the teacher's width", teacher.hidden_size, identity.width),
        ("the teacher's ids", teacher.vocab_size, manifest.teacher_ids),
    ]
    if spec.teacher.precision != "auto":
        wanted.append(("teacher.precision", spec.teacher.precision, identity.precision))
    if identity.form != HIDDEN:
        wanted += [
            ("the student's ids", student.vocab_size, identity.vocabulary),
            ("loss.temperature", spec.loss.temperature, identity.temperature),
        ]
        if not DIVERGENCES[spec.loss.divergence].sparse:
            sparse = " or ".join(sparse_divergences())
            wanted.append(("loss.divergence", spec.loss.divergence, sparse))
    differing = [(name, ours, theirs) for name, ours, theirs in wanted if ours != theirs]
    if differing:
        raise CacheError.expected(
            "teacher.cache",
            path,
            ", ".join(f"{name} {ours}" for name, ours, _ in differing),
            ", ".join(f"{theirs}" for _, _, theirs in differing),
            hint='`engine prepare` with this spec makes a store that fits; teacher.cache="" goes without',
        )
    return manifest
