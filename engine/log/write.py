"""Append to a log: one writer per file, one line per event.

The writer holds the file with an exclusive `flock` for as long as it lives. The lock does three things at
once: a second writer is refused, a reader can tell a living writer from a dead one without trusting a pid,
and the kernel releases it however the writer dies. A forked child drops its copy of the lock at once, so that
the lock cannot outlive the writer in it.

The writer knows where its last whole line ends. A line that was not written completely (disk full, an exception
raised by a signal handler) is cut off, at the latest before the next line is written, so readers never see it and
`seq` never repeats or jumps.

A killed writer leaves at most an unfinished last line. A power loss may leave more: unsynced pages that read as
zeros, followed by later pages with data. The next writer continues the log before the first hole (`recover`). No
synced line is lost by that, because a sync leaves no hole before it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.errors import RunLogError, write_error
from engine.limits import LOG_TEXT
from engine.log.events import Event, LogOpened, is_written, kind_of, name_of_non_finite
from engine.terminal import clipped

HOST = "APR_WORKBENCH_HOST"
"""Environment variable with the name of this host, for hosts with the same host name, such as containers of one
image."""
_ENVELOPE = ("v", "seq", "t_s", "nf")


def read_boot_id() -> str:
    """Return the kernel's boot id; 'unknown' if /proc has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def read_host() -> str:
    """Return the name of this machine, from the environment variable of HOST if it is set; each
    character other than ASCII letters, digits and `_.-` becomes `-`, and the name is cut to 64 characters."""
    return re.sub(r"[^\w.-]", "-", os.environ.get(HOST) or os.uname().nodename, flags=re.ASCII)[:64]


# contract: run-log-v1
def encode(event: Event, seq: int, t_s: float) -> bytes:
    """Encode one line of a log, with its newline; floats that are non-finite or out of range are named under `nf`.

    Lone surrogates in a string, as from a file name that is not UTF-8, are escaped (`\\udcff`). A string longer than
    LOG_TEXT is truncated.
    """
    record: dict[str, Any] = {
        "v": event.v,
        "seq": seq,
        "t_s": round(t_s, 6),
        "kind": kind_of(event),
    }
    non_finite: dict[str, str] = {}
    for name in event.__struct_fields__:
        if name not in _ENVELOPE:
            record[name] = _as_json(getattr(event, name), name, non_finite)
    if non_finite:
        record["nf"] = non_finite
    return msgspec.json.encode(record) + b"\n"


def _as_json(value: Any, path: str, non_finite: dict[str, str]) -> Any:
    """Convert `value` for JSON; add the paths of floats that a log cannot hold to `non_finite`."""
    match value:
        case float():
            if is_written(value):
                return float(value)
            non_finite[path] = name_of_non_finite(value)
            return None
        case str():
            return _as_utf8(value)
        case dict():
            named = {_as_utf8(str(name)): inner for name, inner in value.items()}
            return {
                name: _as_json(inner, f"{path}/{_pointer_part(name)}", non_finite)
                for name, inner in named.items()
            }
        case list() | tuple():
            return [_as_json(v, f"{path}/{i}", non_finite) for i, v in enumerate(value)]
        case _:
            return value


def _as_utf8(text: str) -> str:
    return clipped(text, LOG_TEXT.most).encode("utf-8", "backslashreplace").decode()


def _pointer_part(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# contract: run-log-v1
class LogWriter:
    """The one writer of one log. It is thread-safe and usable as a context manager; it must not be called from a
    signal handler."""

    def __init__(
        self,
        path: Path,
        *,
        writer: str,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._monotonic = monotonic
        self._guard = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_error("run log", path, "to open it for writing", error) from error
        _open_writers.add(self)
        try:
            lock(self._fd, path)
            torn = self._recover()
            self._origin = monotonic()
            self.write(
                LogOpened(
                    unix_s=wall(),
                    boot_id=read_boot_id(),
                    pid=os.getpid(),
                    writer=writer,
                    host=read_host(),
                    torn_bytes_dropped=torn,
                )
            )
        except BaseException:
            self.close()
            raise

    def _recover(self) -> int:
        """Prepare to continue after the last whole line; return the number of bytes cut off after it."""
        recovered = recover(self._fd, self.path)
        self._seq, self._end = recovered.seq, recovered.end
        return recovered.cut

    def write(self, event: Event) -> None:
        """Append one event. Raises DiskFull if the line does not fit, RunLogError if it cannot be written for
        another reason; the unfinished line is cut off."""
        with self._guard:
            assert self._fd >= 0, "a log is not written after it was closed"
            if os.fstat(self._fd).st_size != self._end:
                # An earlier write was interrupted by an exception after it had written bytes: read the next
                # number from the file.
                self._recover()
            line = encode(event, self._seq, self._monotonic() - self._origin)
            try:
                write_fully(self._fd, line)
            except OSError as error:
                # If this fails too, the unfinished line is cut off before the next line is written.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                raise write_error(
                    "run log",
                    self.path,
                    f"to write {len(line)} bytes",
                    error,
                    when_full="make room there, then `engine distill --resume` the run folder",
                ) from error
            self._end += len(line)
            self._seq += 1

    def sync(self) -> None:
        """Make everything written so far, and the file's name in its folder, survive a power loss."""
        with self._guard:
            try:
                os.fsync(self._fd)
                sync_folder(self.path.parent)
            except OSError as error:
                raise write_error("run log", self.path, "to reach the disk", error) from error

    def close(self) -> None:
        """Close the log; closing twice is fine."""
        with self._guard:
            self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        _open_writers.discard(self)
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_fully(fd: int, line: bytes) -> None:
    """Write all of `line`, in one write if possible; if the kernel takes only a part, the rest is written next. Raises
    OSError."""
    left = memoryview(line)
    while left:
        written = os.write(fd, left)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[written:]


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_open_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _release_in_child() -> None:
    # The lock belongs to the open file, which a forked child shares: if the child kept it, the writer would
    # look alive after its death. No mutex is taken, because the thread that held it at the fork does not exist in the
    # child.
    for writer in list(_open_writers):
        writer._release()


os.register_at_fork(after_in_child=_release_in_child)


# Recovery: find the position at which a log continues after its writer or its machine has died.


LOCK_TRIES = 40
LOCK_PAUSE_S = 0.05
"""Seconds between two attempts to take the lock."""
TAIL_BYTES = 65536
"""Bytes that are read at a time, backwards, to find the last line."""
SCAN_BYTES = 1 << 20
"""Bytes that are searched for zeros at a time."""


class _Numbered(msgspec.Struct):
    """The field of the last line that the next writer needs."""

    seq: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Recovered:
    seq: int
    """Number of the next line."""
    end: int
    """End of the last complete line, in bytes."""
    cut: int
    """Number of bytes after it that were cut off."""


def lock(fd: int, path: Path) -> None:
    """Take the writer's lock of a log; the kernel releases it however the writer ends. Raises RunLogError if the log
    still has a writer after LOCK_TRIES attempts."""
    # A reader that tests for a writer holds the lock for an instant, so try again.
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == LOCK_TRIES - 1:
                raise RunLogError(
                    f"run log: {path} — expected no other writer, found one that is alive",
                    hint="this run is already running; follow it with `engine tail`",
                ) from None
            time.sleep(LOCK_PAUSE_S)
        except OSError as error:
            raise write_error("run log", path, "to lock it", error) from error


def recover(fd: int, path: Path) -> Recovered:
    """Cut off everything after the last whole line before the first hole. Raises RunLogError and DiskFull; a file
    whose last whole line is not a record is left unchanged."""
    try:
        size = os.fstat(fd).st_size
        start = _first_zero(fd, size)
        block = b""
        # Search backwards for the last two newlines: the last whole line has the last sequence number.
        while start > 0 and block.count(b"\n") < 2:
            step = min(TAIL_BYTES, start)
            start -= step
            block = os.pread(fd, step, start) + block
        last_newline = block.rfind(b"\n")
        end = start + last_newline + 1
        seq = -1
        if last_newline >= 0:
            line = block[:last_newline].rsplit(b"\n", 1)[-1]
            try:
                seq = msgspec.json.decode(line, type=_Numbered).seq
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise RunLogError(
                    f"run log: {path} @{end - len(line) - 1} — expected a record on the last "
                    f"line, found {line[:60]!r}"
                ) from None
        # Cut only now, so that a file whose last line is not a record stays unchanged.
        if end < size:
            os.ftruncate(fd, end)
    except OSError as error:
        raise write_error("run log", path, "to cut off its unfinished end", error) from error
    return Recovered(seq + 1, end, size - end)


def _first_zero(fd: int, size: int) -> int:
    """Return the offset of the first zero byte; `size` if there is none.

    No line contains a zero byte. A page that had not reached the disk at a power loss reads as zeros, and later pages
    may be present: a hole in the bytes that were written since the last sync.
    """
    for start in range(0, size, SCAN_BYTES):
        at = os.pread(fd, SCAN_BYTES, start).find(0)
        if at >= 0:
            return start + at
    return size


def repair(path: Path) -> str | None:
    """Cut off the bytes that the next writer of this log would cut off, so that the log can be read before that.

    Returns a description of what was cut, or None. Raises RunLogError, DiskFull.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_error("run log", path, "to open it for writing", error) from error
    try:
        lock(fd, path)
        recovered = recover(fd, path)
    finally:
        os.close(fd)
    if not recovered.cut:
        return None
    return (
        f"{path.name}: its last {recovered.cut} bytes, from @{recovered.end}, had not been written whole when the"
        " run ended and were cut off"
    )
