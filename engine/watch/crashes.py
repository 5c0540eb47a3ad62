"""The table of crashes in text logs: the text that trainings print, what it proves, and the remedy."""

from __future__ import annotations

import re
from typing import NamedTuple


class Crash(NamedTuple):
    """A kind of crash, with the pattern of the text that it prints."""

    what: str
    words: re.Pattern[str]
    proves: str
    do: str


def _crash(what: str, words: str, proves: str, do: str) -> Crash:
    return Crash(what, re.compile(words), proves, do)


CRASHES = (
    _crash(
        "CUDA out of memory",
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "an allocation on the GPU failed; the line has the requested size and the free memory",
        "a smaller batch, shorter sequences or gradient checkpointing; see who else is on that GPU",
    ),
    _crash(
        "a NCCL collective timed out",
        r"Watchdog caught collective operation timeout|NCCL.{0,40}tim(?:ed ?out|eout)",
        "a rank did not enter the collective in time: it waited elsewhere or had died; the reason is not in this line",
        "look for the rank with the lowest sequence number or the first error in the logs of all ranks",
    ),
    _crash(
        "a DataLoader worker was killed",
        r"DataLoader worker \(pid.{0,60}(?:killed by signal|exited unexpectedly)",
        "a process that reads data died; after `Killed` or `Bus error`, most often because host memory or /dev/shm "
        "was full",
        "fewer workers, or more shared memory (docker: --shm-size); look for the worker's pid in the kernel's log",
    ),
    _crash(
        "a device-side assertion failed",
        r"device-side assert",
        "a kernel got an index out of range, most often a label or a token; the traceback shows a later Python line",
        "run with CUDA_LAUNCH_BLOCKING=1, or on the CPU, and compare labels with the number of classes",
    ),
    _crash(
        "the process was killed",
        r"^Killed$|exitcode *: -9\b|Signal 9 \(SIGKILL\)",
        "it was ended by SIGKILL, sent by the kernel for lack of memory, by a scheduler or by a person; this line "
        "does not tell which",
        "look at the kernel's log (`dmesg`) and at the scheduler's",
    ),
)
"""Known crashes; a crash that explains others comes before them."""
CRASHED = re.compile("|".join(f"(?:{crash.words.pattern})" for crash in CRASHES))
TRACEBACK = "Traceback (most recent call last):"
EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))\b(.*)"
)


def about_crash(reason: str) -> Crash | None:
    """Return the known crash whose text `reason` begins with; None if there is none."""
    return next((crash for crash in CRASHES if reason.startswith(crash.what)), None)
