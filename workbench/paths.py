"""Paths: as they are shown, which is as they would be typed from the current folder where that is shorter, and whether
what lies there has changed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

PATH = re.compile(r"(?<![^\s(=\[{'\"`])/[\w.@+-][^\s:;,)\]}'\"`]*")
"""An absolute path in a text."""


def stamps(paths: Iterable[Path]) -> frozenset[tuple[Path, int, int, int]]:
    """Return path, time of change, size and inode of each file that exists; it differs once a file has changed."""
    stamps_found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            stamps_found.add((path, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return frozenset(stamps_found)


def path_text(value: str | Path, here: Path | None = None) -> str:
    """Return a value as it would be typed from `here`, by default the current folder: an absolute path is relative
    where that is shorter; any other text stays as it is."""
    text = str(value)
    if not text.startswith("/"):
        return text
    relative = os.path.relpath(text, here or Path.cwd())
    # A path of dots alone is short and names nothing.
    return text if not relative.strip("./") else min((relative, text), key=len)


def with_short_paths(text: str, here: Path | None = None) -> str:
    """Return a text with each absolute path in it as `path_text` has it."""
    if "/" not in text:
        return text
    return PATH.sub(lambda found: path_text(found[0], here), text)
