"""The operating-system calls that change a checkpoint folder, in one place: a test can fail any one of
them, or cut the power after it.
"""

from __future__ import annotations

import os
from pathlib import Path


class FileCalls:
    """Each method is one call, and raises its OSError."""

    def free_bytes(self, folder: Path) -> int:
        room = os.statvfs(folder)
        return room.f_bavail * room.f_frsize

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o755)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def open_folder(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


OS_CALLS = FileCalls()


def sync_folder(path: Path, calls: FileCalls) -> None:
    """Returns when the names in a folder are on disk: a file that was synced is found again only then."""
    descriptor = calls.open_folder(path)
    try:
        calls.sync(descriptor)
    finally:
        calls.close(descriptor)
