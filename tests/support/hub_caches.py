"""Caches of the Hugging Face hub, laid out as its library does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

NAME = "Org/Tiny-1.5B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def cached(
    cache: Path,
    files: Mapping[str, bytes],
    *,
    name: str = NAME,
    commit: str = COMMIT,
    refs: tuple[str, ...] = ("main",),
) -> Path:
    """Put one commit of a model into a cache; returns the folder of its snapshot."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir(exist_ok=True)
    for file, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        (model / "blobs" / digest).write_bytes(content)
        (snapshot / file).symlink_to(Path("../../blobs", digest))
    for ref in refs:
        path = model / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a model's folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
