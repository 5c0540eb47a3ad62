"""A libcuda of our own that answers as a test wants."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import SUPPORT

STUB = SUPPORT / "libcuda_stub.c"


def compiled(folder: Path, *flags: str) -> Path:
    """A folder with a libcuda.so.1 of answers."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a driver library for the test")
    target = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", *flags, str(STUB), "-o", str(target)]
    subprocess.run(command, check=True)
    return folder
