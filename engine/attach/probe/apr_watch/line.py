"""Start the watch from a line of the script. The engine creates the run folder and the observer in a separate process,
so that `engine` is never imported into this one. The hooks are those of `engine watch`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from .folders import fill, rank_and_world, unknown_command

RUN = "APR_WATCH_RUN"
_START_S = 30.0
_MAX_RUNS = 10_000


class Begun:
    """Run folder of this process, and the connection to its observer."""

    def __init__(self, run: str, observer: int | None = None, why_none: str = "") -> None:
        """Keep the connection. `observer`: a socket's descriptor, open as long as the process lives. `why_none`: the
        reason if there is no observer, else empty."""
        self.run, self.why_none, self._pid = run, why_none, os.getpid()
        self._observer = observer

    def end(self) -> None:
        """Notify the observer that the process is no longer watched."""
        if os.getpid() != self._pid:
            return  # a forked child
        os.environ.pop(RUN, None)
        if self._observer is not None:
            with socket.socket(fileno=self._observer) as observer:
                try:
                    # Not a pipe, which would raise SIGPIPE if the observer is gone.
                    observer.sendall(b"over\n", socket.MSG_NOSIGNAL)
                except OSError:
                    pass


def begin(out: str) -> Begun | None:
    """Create the run folder `out`, or `out`-2, ... where it exists; if `out` is empty, a new one in `runs`. Return None
    on all ranks but the first, since these write no log. Raises OSError."""
    if rank_and_world(sys.modules.get("torch"))[0]:
        return None
    own_end, engine_end = socket.socketpair()
    # -P: the folder of the script, which may have an engine.py, must not come first in sys.path.
    command = [sys.executable, "-P", "-m", "engine.attach.command", f"{os.getpid()}", out]
    try:
        own_end.sendall(f"{os.getpid()}\n".encode())
        done = subprocess.run(
            [*command, sys.executable, *sys.orig_argv[1:]],
            env=_environment(),
            stdin=engine_end.fileno(),
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
        errors = done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        done, errors = None, str(error)
    engine_end.close()
    if done is not None and done.returncode == 0:
        if errors:
            print(errors, file=sys.stderr)
        begun = Begun(done.stdout.rstrip("\n"), own_end.detach())
    else:
        own_end.close()
        begun = Begun(_create_folder(out), None, errors.splitlines()[-1] if errors else "no answer")
    # Child processes belong to this run, as under `engine watch`.
    os.environ[RUN] = begun.run
    return begun


def _environment() -> dict[str, str]:
    """Return the environment of `engine.child.environment`, which must not be imported into this process."""
    variables = dict(os.environ)
    users = variables.pop("PYTHONPATH", None)
    variables["APR_WORKBENCH_PYTHONPATH"] = "" if users is None else f"={users}"
    entries = (users or "").split(os.pathsep)
    child = os.path.join("engine", "child.py")
    engines = [entry for entry in entries if os.path.isfile(os.path.join(entry, child))]
    return {**variables, "PYTHONPATH": engines[0]} if engines else variables


def _create_folder(out: str) -> str:
    """Create the run folder without the engine. The arguments are left out: they may hold secrets that only the engine
    redacts."""
    script = sys.argv[0] or "python"
    word = os.path.splitext(os.path.basename(script))[0]
    out = os.path.abspath(out or os.path.join("runs", f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"))
    os.makedirs(os.path.dirname(out), exist_ok=True)
    for number in range(1, _MAX_RUNS):
        run = out if number == 1 else f"{out}-{number}"
        try:
            os.mkdir(run)
        except FileExistsError:
            continue
        settings = unknown_command()
        settings["command"] |= {"arguments": [sys.executable, script], "pid": os.getpid()}
        fill(run, settings)
        return run
    raise OSError(f"{_MAX_RUNS} runs named {out}")
