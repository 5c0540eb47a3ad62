"""`python -m tests.support.holding MODULE ARGUMENTS`: run that module's `main`, which blocks where it reaches
the function named in HOLD (`module:name` or `module:Class.name`).

It signals this by creating the file HELD, with its process id. HOLD_IN is `sleep`, which a signal interrupts,
or `lock`: native code that holds the GIL, so that no thread can run Python, or `import`: a module that is being
imported, which a signal must not interrupt by an exception.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REACHED = "HELD"


def hold(*_: object, **__: object) -> None:
    if os.environ["HOLD_IN"] == "import":
        importlib.import_module("tests.support.holding_import")
    stand_still()


def stand_still() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    partial = Path(os.environ[REACHED]).with_suffix(".new")
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.rename(os.environ[REACHED])
    if os.environ["HOLD_IN"] == "lock":
        sum(range(10**13))
    time.sleep(1000)


def main() -> int:
    module, _, name = os.environ["HOLD"].partition(":")
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    setattr(owner, last, hold)
    # A suite started under nohup ignores SIGHUP, and its children would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    del sys.argv[0]
    return int(importlib.import_module(sys.argv[0]).main())


if __name__ == "__main__":
    sys.exit(main())
