"""Let the observer get the stacks of a hanging process, as `engine/watch/stacks.py` does for the engine's own trainer.
On a signal that no library uses, a C handler writes the stacks to RUN/stacks/PID.txt, even while a call holds the GIL.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

DUMP_SIGNAL = signal.SIGRTMIN + 3


def register(folder: str) -> None:
    """Install the handler, unless the script handles the signal itself. Raises OSError."""
    if signal.getsignal(DUMP_SIGNAL) != signal.SIG_DFL:
        return
    stacks = os.path.join(folder, "stacks")
    os.makedirs(stacks, exist_ok=True)
    path = os.path.join(stacks, f"{os.getpid()}.txt")
    # The handler writes to this descriptor, which stays open until the process ends.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(fd, f"main thread 0x{threading.main_thread().ident or 0:016x}\n".encode())
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True)


def unregister() -> None:
    """Remove the handler, so that another run of this process can register. The descriptor stays open."""
    faulthandler.unregister(DUMP_SIGNAL)
