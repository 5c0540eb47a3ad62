"""What all workers of a suite share: whoever asks first makes it, and the others wait until it is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled. Nobody may write into it later."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # holds the folders of all workers
    folder, made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        # Released by the kernel, also where a worker dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder)
        made.touch()
    return folder
