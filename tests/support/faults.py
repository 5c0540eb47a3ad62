"""Fail and record the file operations of a whole process: `faults.c`, preloaded, and its controls.

Only a child started with `environment(library)` can use `Shim()`.
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

from tests.support.lacks import skip_for
from tests.support.running import environment as plain_environment

HERE = Path(__file__).resolve().parent
KILL = -1
CODES = {name: getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EINTR")}
WAYS = ("once", "persistent", "short")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def compiled(folder: Path) -> Path:
    """Compile the library with this machine's C compiler; the test is skipped where there is none."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        skip_for("a C compiler")
    library = folder / "faults.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "faults.c"), "-ldl"],
        check=True,
    )
    return library


def environment(library: Path) -> dict[str, str]:
    """Return the environment of `running.environment` with the library preloaded."""
    known = plain_environment()
    path = os.pathsep.join([str(HERE), known["PYTHONPATH"]])
    return known | {"LD_PRELOAD": str(library), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


class Shim:
    """The library as loaded in this process."""

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
        """Operations that were made to fail."""
        return int(self._library.faults_hits())

    @property
    def kinds(self) -> str:
        """One letter for each operation seen, by kind."""
        return str(self._library.faults_names().decode())

    @contextmanager
    def armed(self, root: Path, nth: int, code: int = 0, *, how: str = "once") -> Iterator[None]:
        """Make the `nth` operation below `root` fail with errno `code`; 0 fails none. `persistent`: all later
        ones fail too. `short`: a write takes half, and the next operation fails. `KILL` ends the process."""
        self._library.faults_arm(str(root).encode(), ctypes.c_long(nth), code, WAYS.index(how))
        try:
            yield
        finally:
            self._library.faults_disarm()

    def journal(self, path: Path) -> None:
        """Write every change into `path`, from now until the end of `armed`."""
        self._library.faults_journal(str(path).encode())

    def mark(self, number: int) -> None:
        self._library.faults_mark(ctypes.c_long(number))
