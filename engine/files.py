"""Read untrusted files safely: regular files only, and never more than a limit.

A path that a user gives may name a FIFO, on which `open` blocks, a device without an end, or a sparse file of a
terabyte. So a file is checked before it is opened, opened non-blocking, checked again, and read up to its limit,
whatever its size was reported to be. Files that the kernel makes up (those below /proc and /sys) are refused: they
report the size 0, change from read to read, and may block, fail or do something when they are read. The engine itself
reads /proc and /sys by `engine.machine.kernel_files`.

    open_regular(path, "corpus")                       a binary file, to be streamed or mapped
    read_bytes(path, "spec", limits.SPEC_FILE)         all of a small file
    read_json(path, "receipt", limits.RUN_FILE)        its parsed content

Each raises BadInput (or the given subclass) with the path, what was expected and what was found.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput
from engine.limits import Limit

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_MADE_UP = ("proc", "sys")
"""Folders of the root in which the kernel makes up files."""


def open_regular(path: Path, what: str, *, error: type[BadInput] = BadInput) -> BufferedReader:
    """Open a regular file for reading in binary."""
    try:
        return open_plain(path)
    except NotRegular as failure:
        raise error.expected(what, path, "a regular file", failure.strerror) from None
    except FileNotFoundError:
        found = "nothing there"
        if path.is_symlink():
            found = f"a link to {os.readlink(path)}, which is not there"
        raise error.expected(what, path, "a file", found) from None
    except OSError as failure:
        found = failure.strerror or str(failure)
        raise error.expected(what, path, "a file that can be read", found) from None
    except ValueError as failure:  # a NUL in the path
        raise error.expected(what, _ascii(path), "a path", str(failure)) from None


class NotRegular(OSError):
    """A path that is not a regular file; `strerror` names what it is, such as `a FIFO`."""

    strerror: str


def open_plain(path: Path) -> BufferedReader:
    """Open a file as `open_regular` does, but raise OSError, for callers with messages of their own."""
    # Opening a device may have side effects, so the path is checked first; it is checked again afterwards,
    # because another file may have replaced it.
    _refuse_irregular(path, os.stat(path))
    root, _, rest = os.path.realpath(path)[1:].partition("/")
    if rest and root in _MADE_UP:
        raise NotRegular(errno.EINVAL, f"a file of {root}fs, which the kernel makes up", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_irregular(path, os.fstat(descriptor))
        # O_NONBLOCK is needed only to open: a non-blocking read may return None where bytes are expected.
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_bytes(path: Path, what: str, limit: Limit, *, error: type[BadInput] = BadInput) -> bytes:
    """Read a whole file of at most `limit` bytes."""
    with open_regular(path, what, error=error) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit.most:
            try:
                # Read one byte more, to detect a file that grows.
                data = file.read(limit.most + 1)
            except OSError as failure:
                found = failure.strerror or str(failure)
                raise error.expected(what, path, "a file that can be read", found) from None
            size = len(data)
    if size > limit.most:
        raise error.expected(what, path, str(limit), f"{size:,}")
    return data


def read_text(path: Path, what: str, limit: Limit, *, error: type[BadInput] = BadInput) -> str:
    """Read a whole UTF-8 file of at most `limit` bytes."""
    try:
        return read_bytes(path, what, limit, error=error).decode("utf-8")
    except UnicodeDecodeError as failure:
        found = f"byte {failure.start:,} that is not"
        raise error.expected(what, path, "UTF-8", found) from None


def read_json(path: Path, what: str, limit: Limit, *, error: type[BadInput] = BadInput) -> Any:
    """Parse a JSON file, nested at most `limits.JSON_DEPTH` levels deep."""
    return parse_json(read_bytes(path, what, limit, error=error), path, what, error=error)


def read_json_object(
    path: Path,
    what: str,
    limit: Limit,
    *,
    having: Iterable[str] = (),
    error: type[BadInput] = BadInput,
) -> dict[str, Any]:
    """Parse a JSON file that must be an object with the keys `having`."""
    value = read_json(path, what, limit, error=error)
    if not isinstance(value, dict):
        raise error.expected(what, path, "a JSON object", f"a {_json_name(value)}")
    if lacking := [key for key in having if key not in value]:
        raise error.expected(what, path, f"the key {lacking[0]!r}", "none")
    return value


def parse_json(
    data: bytes | str, where: object, what: str, *, error: type[BadInput] = BadInput
) -> Any:
    """Parse JSON text, nested no deeper than `limits.JSON_DEPTH` and without numbers that Python refuses to parse."""
    try:
        value = json.loads(data)
        depth = depth_of(value)
    except RecursionError:
        depth = limits.JSON_DEPTH.most + 1
    except (ValueError, UnicodeDecodeError) as failure:
        raise error.expected(what, where, "JSON", str(failure)[:200]) from None
    if depth > limits.JSON_DEPTH.most:
        raise error.expected(what, where, f"JSON nested {limits.JSON_DEPTH}", "more")
    return value


def depth_of(value: object) -> int:
    """Return the depth of the innermost value in lists and tables."""
    deepest = 0
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list | tuple):
            deepest = max(deepest, depth)
            inner = item.values() if isinstance(item, dict) else item
            waiting += [(child, depth + 1) for child in inner]
    return deepest


def user_cache(what: str) -> Path:
    """Return a folder of the user's cache, whose content can be recomputed."""
    return _xdg_folder("XDG_CACHE_HOME", ".cache") / what


def user_state(what: str) -> Path:
    """Return a folder or file of the user's state: results of earlier runs, which cannot be recomputed."""
    return _xdg_folder("XDG_STATE_HOME", ".local/state") / what


def user_config(what: str) -> Path:
    """Return a file of the user's configuration."""
    return _xdg_folder("XDG_CONFIG_HOME", ".config") / what


def _xdg_folder(variable: str, default: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    # A relative path is invalid and ignored, as XDG specifies.
    return (base if base.is_absolute() else Path.home() / default) / "apr-workbench"


def _refuse_irregular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotRegular(errno.EINVAL, kind, str(path))


def _ascii(path: Path) -> str:
    return ascii(str(path))[1:-1]


def _json_name(value: object) -> str:
    names = {bool: "boolean", str: "string", list: "list", type(None): "null"}
    return names.get(type(value), "number")
