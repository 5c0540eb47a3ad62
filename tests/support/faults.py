"""Failing and recording file operations of a whole process: `faults.c`, preloaded, and its controls.

A child started with `environment(library)` may ask for `Shim()`; nothing else can.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.running import environment as plain_environment

HERE = Path(__file__).resolve().parent
KILL = -1
CODES = {name: getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EINTR")}
WAYS = ("once", "persistent", "short")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def compiled(folder: Path) -> Path:
    """The library, made by the C compiler of this machine; the test is skipped where there is none."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler here: operations of the C library cannot be made to fail")
    library = folder / "faults.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "faults.c"), "-ldl"],
        check=True,
    )
    return library


def environment(library: Path) -> dict[str, str]:
    """That of `running.environment`, with the library in front of the C library's own functions."""
    known = plain_environment()
    path = os.pathsep.join([str(HERE), known["PYTHONPATH"]])
    return known | {"LD_PRELOAD": str(library), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


class Shim:
    """The library as this process has it loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_names.restype = ctypes.c_char_p
        self._library.faults_calls.restype = self._library.faults_hits.restype = ctypes.c_long

    @property
    def calls(self) -> int:
        """Operations seen since `armed`."""
        return int(self._library.faults_calls())

    @property
    def hits(self) -> int:
        """Those that were made to fail."""
        return int(self._library.faults_hits())

    @property
    def kinds(self) -> str:
        """A letter for each kind of operation seen."""
        return str(self._library.faults_names().decode())

    @contextmanager
    def armed(self, root: Path, nth: int, code: int = 0, *, how: str = "once") -> Iterator[None]:
        """The `nth` operation below `root` fails with errno `code`; 0 fails none. `persistent`: all
        after it too. `short`: a write takes half, and what comes next fails. `KILL` ends the process.
        """
        self._library.faults_arm(str(root).encode(), ctypes.c_long(nth), code, WAYS.index(how))
        try:
            yield
        finally:
            self._library.faults_disarm()

    def journal(self, path: Path) -> None:
        """From now until the end of `armed`, write every change into `path`."""
        self._library.faults_journal(str(path).encode())

    def mark(self, number: int) -> None:
        self._library.faults_mark(ctypes.c_long(number))
