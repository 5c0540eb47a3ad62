"""What the kernel's own log says of a process that it killed for memory.

`/dev/kmsg` is read where it may be, else `dmesg` is asked. Both are denied to ordinary users on most machines: then
there is a reason, and `engine.watch.attribution` goes by the counters alone.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

_DMESG_LIMIT_S = 5.0


def find_kernel_line(
    pid: int, *, since_s: float = 0.0, kmsg: Path = Path("/dev/kmsg")
) -> tuple[str | None, str | None]:
    """(The kernel's line on killing `pid` for memory or None, why the kernel log cannot be read or
    None).

    `since_s` is the monotonic time at which the process started: pids are used again, so older
    lines speak of another one. The kernel numbers processes as the host does, so that inside a
    container the pid of the host is needed.
    """
    try:
        return _match_kernel_line(_read_kmsg(kmsg), pid, since_s), None
    except OSError as error:
        reason = f"{kmsg}: {error.strerror}"
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=_DMESG_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{reason}; dmesg: {error}"
    if done.returncode != 0:
        return None, f"{reason}; {done.stderr.decode('utf-8', 'replace').strip()}"
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return _match_kernel_line(lines, pid, since_s), None


def _read_kmsg(path: Path) -> Iterator[str]:
    """Records as `[seconds] text`, oldest first.

    Each read of the device gives one record, `priority,number,microseconds,flags;text`, and lines
    of details that begin with a space. At the end a read would wait, so the device is not blocking.
    """
    device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                text = os.read(device, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # a record was overwritten before it was read; the next read goes on
            if not text:
                return
            for record in re.finditer(r"(?m)^\d+,\d+,(\d+),[^;]*;(.*)$", text):
                yield f"[{int(record[1]) / 1e6:.6f}] {record[2]}"
    finally:
        os.close(device)


def _match_kernel_line(lines: Iterable[str], pid: int, since_s: float) -> str | None:
    """The last line that names `pid` as the victim; the line with the constraint is preferred to
    the one that follows it.
    """
    victim = re.compile(rf"oom-kill:constraint=.*\bpid={pid}\b|\bKilled process {pid} \(")
    named = None
    for line in lines:
        stamp = re.match(r"\[\s*(\d+\.\d+)\]", line)
        if stamp is not None and float(stamp[1]) < since_s:
            continue
        if victim.search(line) and not (named and "oom-kill:" in named and "Killed" in line):
            named = line
    return named
