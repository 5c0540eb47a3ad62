"""Start the watch from a line of the script, with the same hooks as `engine watch`. A separate process creates the run
folder and the observer, so that `engine` is never imported into the script's process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from .folders import rank_and_world

RUN = "APR_WATCH_RUN"
_START_S = 30.0


class Begun:
    """A watch that was started: run folder of this process, and connection to its observer."""

    def __init__(self, run: str, observer: int) -> None:
        """`observer`: descriptor of a socket that stays open as long as the process lives."""
        self.run, self._pid, self._observer = run, os.getpid(), observer

    def end(self) -> None:
        """Notify the observer that the process is no longer watched."""
        if os.getpid() != self._pid:
            return  # a forked child
        os.environ.pop(RUN, None)
        with socket.socket(fileno=self._observer) as observer:
            try:
                # A pipe would raise SIGPIPE if the observer is gone.
                observer.sendall(b"over\n", socket.MSG_NOSIGNAL)
            except OSError:
                pass


def begin(out: str) -> Begun | None:
    """Create the run folder `out` (`out`-2, ... if it exists; a new folder in `runs` if `out` is empty). Return None on
    all ranks except rank 0, which alone writes a log. Raises OSError, subprocess.TimeoutExpired, or RuntimeError with
    the engine's message."""
    if rank_and_world(sys.modules.get("torch"))[0]:
        return None
    own_end, engine_end = socket.socketpair()
    # -P: the folder of the script, which may have an engine.py, must not come first in sys.path.
    command = [sys.executable, "-P", "-m", "engine.attach.command", f"{os.getpid()}", out]
    with engine_end:
        own_end.sendall(f"{os.getpid()}\n".encode())
        done = subprocess.run(
            [*command, sys.executable, *sys.orig_argv[1:]],
            env=_environment(),
            stdin=engine_end.fileno(),
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
    if done.returncode:
        own_end.close()
        raise RuntimeError(f"the engine could not make a run folder: {done.stderr.strip()}")
    if done.stderr:
        print(done.stderr.strip(), file=sys.stderr)
    begun = Begun(done.stdout.rstrip("\n"), own_end.detach())
    # Child processes belong to this run, as under `engine watch`.
    os.environ[RUN] = begun.run
    return begun


def _environment() -> dict[str, str]:
    """Return the same environment as `engine.child.environment`, which must not be imported into this process."""
    variables = dict(os.environ)
    users = variables.pop("PYTHONPATH", None)
    variables["APR_WORKBENCH_PYTHONPATH"] = "" if users is None else f"={users}"
    entries = (users or "").split(os.pathsep)
    child = os.path.join("engine", "child.py")
    engines = [entry for entry in entries if os.path.isfile(os.path.join(entry, child))]
    return {**variables, "PYTHONPATH": engines[0]} if engines else variables
