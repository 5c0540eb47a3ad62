"""A folder that appears whole or not at all, although a kill may come at any moment.

It is written as `.NAME.publish` beside its place and locked for as long as its writer lives. The kernel
drops the lock however that ends, so what a killed one left is known to be nobody's, and begun anew.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import BadInput, write_error
from engine.files import open_regular
from engine.formats.safetensors import fsync_folder
from engine.signals import partial_output


# contract: publication-v1
@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write to, ours alone. It becomes `folder` when all of it is on the disk, and is
    gone when anything fails. Raises `BadInput`, `DiskFull`.
    """
    partial = folder.with_name(f".{folder.name}.publish")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise write_error("publish", partial, "a folder to write to", error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput.expected(
                "publish", folder, "to be the only one", "another that is publishing to it"
            ) from None
        with partial_output(partial):
            try:
                for path in partial.iterdir():
                    path.unlink()  # of one that was killed
                yield partial
                for path in partial.iterdir():
                    _fsync(path)
                fsync_folder(partial)
                partial.rename(folder)
                fsync_folder(folder.parent)
            except OSError as error:
                raise write_error("publish", partial, "to write it", error) from error
    finally:
        os.close(lock)


def _fsync(path: Path) -> None:
    with open_regular(path, "file") as file:
        os.fsync(file.fileno())
