"""Turn any error of a command into a one-line message and an exit code, never a traceback.

    def main() -> int:
        return run_command("engine tail", lambda: tail(arguments))

An `EngineError` says what was expected and found, and has its exit code. An error of the operating system about a
file is bad input. Anything else is a bug of the engine: exit 70, one line, and a report with the traceback in a
separate file that can be sent to the maintainers. `debug` shows the traceback instead.

The report holds the command line, versions and the traceback, without secrets and bounded in size; the newest `KEPT`
reports are kept. They are in $XDG_STATE_HOME/apr-workbench/reports (~/.local/state), or in the folder for temporary
files if that folder cannot be written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from engine.errors import (
    EXIT_INTERRUPTED,
    NO_ROOM,
    BadInput,
    DiskFull,
    EngineError,
    InternalError,
    missing_engine,
    missing_module,
)
from engine.signals import Stopped
from engine.terminal import clipped, printable, say
from engine.version import VERSION, has_engine

KEPT = 20
"""Number of newest reports that are kept."""
REPORT_CHARACTERS = 64_000
MESSAGE_CHARACTERS = 300
_FILE_ERRORS = frozenset(
    {
        *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EIO),
        *(errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ETXTBSY),
    }
)
"""Errors of the operating system that concern a file, not the code of the engine."""
_ENGINE_PACKAGES = frozenset({"engine", "torch", "safetensors", "tokenizers"})


def run_command(name: str, command: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command and return its exit code; report any exception on stderr."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe has ended (`engine tail RUN | head`), which is no error. Python would report it again
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:
        if not isinstance(stop, Stopped):
            return EXIT_INTERRUPTED
        # Writing to a closed terminal fails.
        with contextlib.suppress(OSError):
            say(f"{name}: {stop}")
        return stop.exit_code
    except Exception as error:
        if debug:
            raise
        return explain(name, error)


def explain(name: str, error: Exception) -> int:
    """Report the error and return the exit code."""
    known = as_engine_error(error)
    if known is not None:
        say(f"{name}: {known}")
        return known.exit_code
    say(f"{name}: internal error: {_one_line(error)}")
    where = write_report(name, error)
    say(f"report: {where}" if where else "no report could be written")
    return InternalError.exit_code


def as_engine_error(error: BaseException) -> EngineError | None:
    """Convert an error to the EngineError the user should see; None if it is a bug of the engine."""
    if isinstance(error, EngineError):
        return error
    if is_memory_error(error):
        return BadInput.expected(
            "memory", "of this process", "enough for its input", "none left", hint=None
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in _ENGINE_PACKAGES and not has_engine():
            return missing_engine()
        if package in ("engine", "workbench"):
            return missing_module(error.name)
    if not isinstance(error, OSError) or error.errno not in _FILE_ERRORS:
        return None
    if error.errno in NO_ROOM:
        where = "one that was being written" if error.filename is None else error.filename
        found = error.strerror or str(error)
        return DiskFull.expected("disk", where, "room for what is written", found)
    # The error of a failed read has no file name, but EIO always comes from a file or its disk.
    if error.filename is not None or error.errno == errno.EIO:
        where = "one that was being read" if error.filename is None else error.filename
        found = error.strerror or str(error)
        return BadInput.expected("file", where, "a file that can be used", found)
    return None


def is_memory_error(error: BaseException) -> bool:
    """Return whether an allocation failed. Torch raises a special class for a GPU, and a RuntimeError with this text
    for the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)


def write_report(name: str, error: Exception) -> Path | None:
    """Write a report of an error and return its path; None if it cannot be written."""
    text = _report(name, error)
    file = f"{name.split()[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}.txt"
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(
                folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
            )
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as out:
                out.write(text)
            _forget_old(folder)
            return folder / file
    return None


def trace_of(error: BaseException) -> str:
    """Format the traceback of an error without secrets; a long one keeps its beginning and its end."""
    from engine.redact import Redactor

    # The innermost frames are the most informative.
    text = "".join(traceback.format_exception(error, limit=-100))
    if len(text) > REPORT_CHARACTERS:
        half = REPORT_CHARACTERS // 2
        text = f"{text[:half]}\n[... of {len(text):,} characters ...]\n{text[-half:]}"
    return Redactor().text(text).text


def _report(name: str, error: Exception) -> str:
    from engine.redact import Redactor

    command = Redactor().argv(
        [clipped(argument, MESSAGE_CHARACTERS) for argument in sys.argv[:100]]
    )[0]
    lines = [
        f"{name}: {type(error).__name__}",
        f"apr-workbench {VERSION}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {' '.join(command)}",
        "",
        trace_of(error),
    ]
    return "\n".join(lines) + "\n"


def _folders() -> list[Path]:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    own = Path(tempfile.gettempdir()) / f"apr-workbench-{os.getuid()}"
    return [Path(state) / "apr-workbench" / "reports", own]


def _forget_old(folder: Path) -> None:
    reports = sorted(folder.glob("*.txt"), key=lambda file: file.stat().st_mtime)
    for file in reports[:-KEPT]:
        file.unlink()


def _one_line(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {printable(clipped(first, MESSAGE_CHARACTERS))}".rstrip(": ")
