"""`python -m tests.support.holding MODULE ARGUMENTS`: run that module's `main`, which blocks where it reaches
the function named in HOLD (`module:name` or `module:Class.name`); HOLD_AFTER calls of it are let through first.

It signals this by creating the file HELD, with its process id. HOLD_IN says how it blocks:

    sleep     a signal interrupts it
    lock      native code that holds the GIL, so that no thread can run Python
    import    inside a module that is being imported, which a signal must not interrupt by an exception
    stop      as after SIGSTOP
    signal    until SIGTERM was handled; then it goes on
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REACHED = "HELD"


def holding(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Return what takes the function's place."""
    left = after

    def held(*arguments: object, **named: object) -> object:
        nonlocal left
        left -= 1
        if left == -1:
            {"signal": wait_for_sigterm, "stop": stop}.get(os.environ["HOLD_IN"], stand_still)()
        return function(*arguments, **named)

    return held


def stop() -> None:
    say_held(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_sigterm() -> None:
    before, arrived = signal.getsignal(signal.SIGTERM), []

    def handle(number: int, frame: Any) -> None:
        arrived.append(number)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handle)
    say_held(os.getpid())
    while not arrived:
        time.sleep(0.01)


def say_held(*pids: int) -> None:
    partial = Path(os.environ[REACHED]).with_suffix(".new")
    partial.write_text(" ".join(map(str, pids)))
    partial.rename(os.environ[REACHED])


def stand_still() -> None:
    if os.environ["HOLD_IN"] == "import" and "tests.support.holding_import" not in sys.modules:
        importlib.import_module("tests.support.holding_import")  # comes back here
    child = subprocess.Popen(["sleep", "1000"])
    say_held(os.getpid(), child.pid)
    if os.environ["HOLD_IN"] == "lock":
        sum(range(10**13))
    time.sleep(1000)


def main() -> int:
    module, _, name = os.environ["HOLD"].partition(":")
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    after = int(os.environ.get("HOLD_AFTER", "0"))
    setattr(owner, last, holding(getattr(owner, last), after))
    # A suite started under nohup ignores SIGHUP, and its children would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    del sys.argv[0]
    return int(importlib.import_module(sys.argv[0]).main())


if __name__ == "__main__":
    sys.exit(main())
