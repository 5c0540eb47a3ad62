"""Where a log goes on after its writer died, or its machine.

A killed writer leaves at most an unfinished last line. A power loss may leave more: pages of what was not
synced that read as zeros, with later pages behind them. A log goes on in front of the first hole. Nothing
that was acknowledged stands behind it, because an acknowledgement is a sync; whole lines that do are put
into a file beside the log, for people.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import RunLogError, write_error

LOCK_TRIES = 40
LOCK_PAUSE_S = 0.05
TAIL_BYTES = 65536
SCAN_BYTES = 1 << 20


class _Numbered(msgspec.Struct):
    """As much of a line as the next writer must know."""

    seq: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Recovered:
    seq: int
    """The next line's number."""
    end: int
    """Where the last whole line ends."""
    cut: int
    """How many bytes behind it were cut off."""
    aside: Path | None
    """Where those are, when there were whole lines among them."""


def lock(fd: int, path: Path) -> None:
    """Become the one writer of a log; the kernel gives the lock back however the writer ends. Raises
    RunLogError for a log that has one."""
    # A reader that probes for life holds the lock for an instant; a writer holds it for good.
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == LOCK_TRIES - 1:
                raise RunLogError(
                    f"run log: {path} — expected no other writer, found one that is alive",
                    hint="this run is already going on; follow it with `engine tail`",
                ) from None
            time.sleep(LOCK_PAUSE_S)
        except OSError as error:
            raise write_error("run log", path, "to lock it", error) from error


def recover(fd: int, path: Path) -> Recovered:
    """Cut off whatever stands behind the last whole line in front of the first hole. Raises RunLogError,
    DiskFull; a file that is no log is refused and left as it is."""
    try:
        size = os.fstat(fd).st_size
        start = sound = _first_zero(fd, size)
        block = b""
        # Walk back to the last two newlines: the last whole line carries the last sequence number.
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
        # Cut only now: a file that is no log is left as it is.
        aside = None
        if end < size:
            if sound < size:
                aside = _keep_lines(os.pread(fd, size - end, end), path, end)
            os.ftruncate(fd, end)
    except OSError as error:
        raise write_error("run log", path, "to cut off what is not whole", error) from error
    return Recovered(seq + 1, end, size - end, aside)


def _first_zero(fd: int, size: int) -> int:
    """Where the first zero byte is, `size` when there is none.

    No line has one. A page of the file that had not reached the disk when the power went reads as
    zeros, and later pages may be there: a hole in what was written since the last sync.
    """
    for start in range(0, size, SCAN_BYTES):
        at = os.pread(fd, SCAN_BYTES, start).find(0)
        if at >= 0:
            return start + at
    return size


def _keep_lines(lost: bytes, path: Path, begin: int) -> Path | None:
    """Put aside what is cut off at `begin`, when there are lines in it."""
    if b"\n" not in lost:
        return None
    aside = path.with_name(f"{path.name}.lost-{begin}")
    aside.write_bytes(lost)
    return aside


def repair(path: Path) -> str | None:
    """Cut off what the next writer of this log would cut off, so that it can be read before there is
    one; says what that was, or None. Raises RunLogError, DiskFull.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_error("run log", path, "to open it for writing", error) from error
    try:
        lock(fd, path)
        found = recover(fd, path)
    finally:
        os.close(fd)
    if not found.cut:
        return None
    kept = f"; the lines among them are in {found.aside.name}" if found.aside is not None else ""
    return (
        f"{path.name}: its last {found.cut} bytes, from @{found.end}, had not been written whole when the"
        f" run ended and were cut off{kept}"
    )
