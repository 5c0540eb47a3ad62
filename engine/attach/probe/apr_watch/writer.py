"""Write a run log in the engine's format (`engine/log/write.py`), with the standard library only.

The file lock is the engine's too: its holder is the log's only writer, and readers check the lock to see whether the
writer is alive. The kernel releases it, so that a killed process leaves no stale lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from typing import Any

VERSION = 2
_LARGEST_NUMBER = 1e100
"""Largest number in a line (`LOG_NUMBER` of engine/limits.py)."""
_TEXT = 64 * 1024
_encode = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.002
_EARLY, _TOGETHER, _WITHIN_S = 64, 32, 0.02
"""Number of first lines that are written immediately; maximum number of later lines that are buffered; maximum time in
seconds that they are buffered. A killed process loses no more than these lines."""


class NotTheWriter(Exception):
    """Exception: another process writes this log, or it already has lines."""


class Log:
    """events.jsonl of one run folder. Raises NotTheWriter if it has another writer or has lines; OSError."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, "events.jsonl")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _lock(self._fd)
            status = os.fstat(self._fd)
            if status.st_size:
                raise NotTheWriter
        except BaseException:
            os.close(self._fd)
            raise
        self._file = (status.st_dev, status.st_ino)
        self._seq = self._end = 0
        self._lines: list[tuple[str, dict[str, Any], float]] = []
        """Buffered lines, each with its time."""
        self.judged: set[tuple[str, str]] = set()
        """Identities and levels that the log already has."""
        self._origin = self._flushed_s = time.monotonic()
        self.write(
            "log_opened",
            unix_s=time.time(),
            boot_id=_boot_id(),
            pid=os.getpid(),
            writer="probe",
            host=os.uname().nodename,
            torn_bytes_dropped=0,
        )

    def write(self, kind: str, **fields: Any) -> None:
        """Append the buffered lines and this one by one system call. Raises OSError; the file is then unchanged."""
        self._lines.append((kind, fields, time.monotonic()))
        self._flush()

    def write_soon(self, kind: str, fields: dict[str, Any]) -> None:
        """Append one line, perhaps later: encoding and writing many lines together costs less."""
        now_s = time.monotonic()
        self._lines.append((kind, fields, now_s))
        if (
            self._seq < _EARLY
            or len(self._lines) >= _TOGETHER
            or now_s - self._flushed_s >= _WITHIN_S
        ):
            self._flush()

    def _flush(self) -> None:
        status = os.fstat(self._fd)
        if (status.st_dev, status.st_ino) != self._file:
            raise OSError(errno.EBADF, "the script closed the log's file descriptor")
        if status.st_size != self._end:
            raise OSError(errno.EIO, f"expected a log of {self._end} bytes, found {status.st_size}")
        data = b"".join(
            encode(kind, fields, self._seq + at, now_s - self._origin)
            for at, (kind, fields, now_s) in enumerate(self._lines)
        )
        if os.write(self._fd, data) != len(data):
            os.ftruncate(self._fd, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._seq += len(self._lines)
        self._end += len(data)
        self._lines = []
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Close the file, unless the script has reused its descriptor for another file."""
        try:
            status = os.fstat(self._fd)
            if (status.st_dev, status.st_ino) == self._file:
                os.close(self._fd)
        except OSError:
            pass


def encode(kind: str, fields: dict[str, Any], seq: int, t_s: float) -> bytes:
    """Return one line. NaN and infinities are encoded as null, with their names under `nf`."""
    record = {"v": VERSION, "seq": seq, "t_s": round(t_s, 6), "kind": kind, **fields}
    try:
        text = _encode(record)
    except (ValueError, TypeError):
        text = ""
    # Too large numbers, lone surrogates (a path may hold bytes that are not UTF-8), and long strings.
    if not text or "e+" in text or "\\ud" in text or len(text) > _TEXT:
        non_finite: dict[str, str] = {}
        record = _plain(record, "", non_finite)
        text = _encode({**record, "nf": non_finite} if non_finite else record)
    return text.encode() + b"\n"


def _plain(value: Any, path: str, non_finite: dict[str, str]) -> Any:
    """Return a value that JSON can represent; `path`: its JSON pointer (RFC 6901) without the first slash."""
    if isinstance(value, float) and not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        non_finite[path] = "nan" if math.isnan(value) else "+inf" if value > 0 else "-inf"
        return None
    if value is None or isinstance(value, (float, int)):
        return value
    if isinstance(value, (dict, list)):
        prefix = path and path + "/"
        converted = {}
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            pointed = str(name).replace("~", "~0").replace("/", "~1")
            converted[_plain(name, "", {})] = _plain(item, prefix + pointed, non_finite)
        return converted if isinstance(value, dict) else list(converted.values())
    return str(value)[:_TEXT].encode("utf-8", "backslashreplace").decode()


def _lock(fd: int) -> None:
    # A reader holds the lock for an instant to check for a writer, a writer as long as it lives.
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == _LOCK_TRIES - 1:
                raise NotTheWriter from None
            time.sleep(_LOCK_PAUSE_S)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(64).strip()
    except OSError:
        return "unknown"
