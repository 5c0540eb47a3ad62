"""Compile a C file of this package to a shared library at first use, and cache it.

The library is in the user's cache (`$XDG_CACHE_HOME/apr-workbench/c`, else `~/.cache/...`) under a name that
contains a hash of the source, the compiler's version output, the flags and the machine, so a change of any of
them gives another file.

The library is written to a temporary file in the same folder and renamed once. If two processes compile at
the same time, the later rename wins, and both files are the same library. Where the cache cannot be
written, the library is compiled into a temporary folder that is removed with the process.

Nothing here loads torch or the library itself.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput, EngineError
from engine.files import user_cache

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-shared", "-fPIC")
# Before glibc 2.34 these were separate libraries; since then they are empty.
LIBRARIES = ("-ldl", "-lpthread")
LONGEST_COMPILE_S = 120
"""Seconds after which a compiler is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLibrary:
    """Record of a compilation for the log; when `cached`, nothing was compiled."""

    name: str
    path: Path
    compiler: str
    """The compiler's path and the first line of its version output."""
    seconds: float
    """Seconds for finding and, unless cached, compiling the library."""
    cached: bool
    note: str
    """Reason why it was compiled, and its place; empty when cached."""


def compiled_library(source: Path, folder: Path | None = None) -> CompiledLibrary:
    """Return the library of `source`, compiling it when `folder` (default: the user's cache) has no intact one.
    Raises BadInput without a compiler, EngineError when it fails."""
    begun_s = time.perf_counter()
    compiler, version = _find_compiler(source.name)
    text = source.read_bytes()
    key = hashlib.sha256()
    for part in (text, version.encode(), " ".join(FLAGS).encode(), platform.machine().encode()):
        key.update(len(part).to_bytes(8, "little") + part)
    folder = folder or user_cache("c")
    path = folder / f"{source.stem}-{key.hexdigest()[:20]}.so"
    cached = path.exists()
    note = ""
    if not cached:
        library = _compile(compiler, text, source.name)
        try:
            _publish(library, path)
            note = f"compiled at first use, kept in {folder}"
        except OSError as error:
            private = Path(tempfile.mkdtemp(prefix="apr-workbench-"))
            atexit.register(shutil.rmtree, private, ignore_errors=True)
            path = private / path.name
            path.write_bytes(library)
            why = error.strerror or error
            note = f"compiled for this process alone: {folder}: {why}"
    return CompiledLibrary(
        name=source.stem,
        path=path,
        compiler=f"{compiler}: {version.splitlines()[0]}",
        seconds=time.perf_counter() - begun_s,
        cached=cached,
        note=note,
    )


def _find_compiler(name: str) -> tuple[str, str]:
    """Return the compiler's path and its full version output."""
    for command in COMPILERS:
        path = shutil.which(command)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if version.returncode == 0 and version.stdout.strip():
            return path, version.stdout
    raise BadInput.expected(
        "C compiler",
        name,
        f"one of {', '.join(COMPILERS)} on the PATH",
        "none that answers",
        hint="install one (Debian: apt-get install gcc libc6-dev), or set memory.allocator=native",
    )


def _compile(compiler: str, text: bytes, name: str) -> bytes:
    """Compile and return the library's bytes."""
    with tempfile.TemporaryDirectory(prefix="apr-workbench-") as folder:
        target = Path(folder) / "library.so"
        command = [compiler, *FLAGS, "-x", "c", "-", "-o", str(target), *LIBRARIES]
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, check=False, timeout=LONGEST_COMPILE_S
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"C compiler: {name} — expected an end within {LONGEST_COMPILE_S} s, found none"
            ) from error
        if done.returncode != 0:
            message = done.stderr.decode(errors="replace").strip()
            raise EngineError(
                f"C compiler: {name} — expected exit code 0 of {' '.join(command)}, "
                f"found {done.returncode}: {message[:2000]}",
                hint="headers of the C library may be missing (Debian: apt-get install libc6-dev); "
                "memory.allocator=native needs no compiler",
            )
        return target.read_bytes()


def _publish(library: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(library)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
