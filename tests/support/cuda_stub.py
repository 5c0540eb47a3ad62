"""A stub libcuda that returns what a test wants."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.lacks import skip_for
from tests.support.paths import SUPPORT

STUB = SUPPORT / "libcuda_stub.c"


def compiled(folder: Path, *flags: str) -> Path:
    """Compile the stub; returns a folder with its libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        skip_for("a C compiler")
    target = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", *flags, str(STUB), "-o", str(target)]
    subprocess.run(command, check=True)
    return folder
