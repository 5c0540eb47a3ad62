"""Find the runs, flips and findings in the served folders. Files outside these folders are never read, even through
links.

A page is requested by a key, the hash of its folder's path, so that a request cannot name a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import BadInput
from engine.findings.bundle import is_bundle
from engine.flips.flip_folder import is_flip
from engine.log.folder import find_all, is_run

MOST_FILES = 20_000
"""Maximum number of files of a run, a flip or a finding that has a page."""
NOT_READ = frozenset({"checkpoints", "student"})
"""Folders of a run that no page reads, and that may therefore contain links: a model may be a link into a cache."""


class Folders:
    """The folders that are served."""

    def __init__(self, given: Sequence[Path]) -> None:
        for path in given:
            if not path.is_dir():
                problem = "something else" if os.path.lexists(path) else "nothing there"
                raise BadInput.expected("serve", path, "a folder of runs, or one run", problem)
        self.given = tuple(given)
        self._roots = tuple(os.path.realpath(path) for path in given)
        self._by_key: dict[str, Path] = {}

    def find(self, key: str) -> Path | None:
        """Return the folder of a run, a flip or a finding by its key."""
        path = self._by_key.get(key)
        if path is None or not path.is_dir():
            runs = [run.folder.path for folder in self.given for run in find_all(folder)]
            self._by_key = {key_of(path): path for path in [*runs, *self.flips_and_findings()]}
            path = self._by_key.get(key)
        return path

    def flips_and_findings(self) -> Iterator[Path]:
        """Yield the flips and findings in the folders and one level below, like the runs."""
        for folder in self.given:
            yield from _flips_and_findings(folder, 2)

    def holds(self, path: str | Path) -> bool:
        """Return whether a path, with its links resolved, is in one of the folders."""
        real = os.path.realpath(path)
        return any(os.path.commonpath([real, root]) == root for root in self._roots)

    def stamp(self, folder: Path) -> frozenset[tuple[str, int, int]]:
        """Return path, modification time and size of each file and folder of a run, a flip or a finding, except those
        called as in NOT_READ. Raises BadInput if a link in it leads out of the folders, or if it has more files than
        MOST_FILES."""
        stamps: set[tuple[str, int, int]] = set()
        unread_folders = [str(folder)]
        self._must_hold(unread_folders[0])
        while unread_folders:
            with (
                contextlib.suppress(FileNotFoundError),
                os.scandir(unread_folders.pop()) as entries,
            ):
                for entry in entries:
                    if entry.name in NOT_READ:
                        continue
                    if entry.is_symlink():
                        self._must_hold(entry.path)
                    elif entry.is_dir():
                        unread_folders.append(entry.path)
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        stamps.add((entry.path, status.st_mtime_ns, status.st_size))
            if len(stamps) > MOST_FILES:
                expected = f"at most {MOST_FILES:,} files"
                raise BadInput.expected("serve", folder, expected, "more")
        return frozenset(stamps)

    def accepts(self, folder: Path) -> bool:
        """Return whether a folder can be read, has at most MOST_FILES files, and no link out of the served folders;
        NOT_READ is left out."""
        try:
            self.stamp(folder)
        except (BadInput, OSError):
            return False
        return True

    def _must_hold(self, path: str) -> None:
        if not self.holds(path):
            raise BadInput.expected(
                "serve", path, "no link out of the folders that are served", "one"
            )


def key_of(path: Path) -> str:
    """Return the key of a folder, the same after a restart."""
    return hashlib.blake2b(os.fsencode(os.path.realpath(path)), digest_size=8).hexdigest()


def _flips_and_findings(folder: Path, levels: int) -> Iterator[Path]:
    if is_flip(folder) or is_bundle(folder):
        yield folder
    elif levels and not is_run(folder):
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir(), reverse=True):
                if not path.name.startswith(".") and path.is_dir():
                    yield from _flips_and_findings(path, levels - 1)
