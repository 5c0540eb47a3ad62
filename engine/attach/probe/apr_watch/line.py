"""Start the watch from a line of the script: the run folder and the observer are made by the engine, in a process of
its own, so that `engine` never gets into this one. The hooks are those of `engine watch`.
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
_MOST = 10_000


class Begun:
    """The run folder of this process, and the line to its observer."""

    def __init__(self, run: str, observer: int | None = None, alone: str = "") -> None:
        """`observer`: a socket's descriptor, open as long as the process. `alone`: why nobody watches from outside;
        empty where somebody does."""
        self.run, self.alone, self._pid = run, alone, os.getpid()
        self._observer = observer

    def end(self) -> None:
        """Tell the observer that the process is watched no longer."""
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
    """Make the run folder `out`, or `out`-2, ... where it exists; empty: a new one in `runs`. None in a process that
    has no part in the log: of several ranks that a launcher has started, all but the first. Raises OSError."""
    if rank_and_world(sys.modules.get("torch"))[0]:
        return None
    ours, theirs = socket.socketpair()
    # Neither the folder of `-m` nor PYTHONPATH may come first there: the script's may have an engine.py.
    command = [sys.executable, "-P", "-m", "engine.attach.command", f"{os.getpid()}", out]
    try:
        ours.sendall(f"{os.getpid()}\n".encode())
        done = subprocess.run(
            [*command, sys.executable, *sys.orig_argv[1:]],
            env=_environment(),
            stdin=theirs.fileno(),
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
        said = done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        done, said = None, str(error)
    theirs.close()
    if done is not None and done.returncode == 0:
        if said:
            print(said, file=sys.stderr)
        begun = Begun(done.stdout.rstrip("\n"), ours.detach())
    else:
        ours.close()
        begun = Begun(_made_here(out), None, said.splitlines()[-1] if said else "no answer")
    # What this process starts belongs to it, as below `engine watch`.
    os.environ[RUN] = begun.run
    return begun


def _environment() -> dict[str, str]:
    """As `engine.child.environment`, which cannot be imported here: the engine never gets into this process."""
    made = dict(os.environ)
    users = made.pop("PYTHONPATH", None)
    made["APR_WORKBENCH_PYTHONPATH"] = "" if users is None else f"={users}"
    entries = (users or "").split(os.pathsep)
    child = os.path.join("engine", "child.py")
    engines = [entry for entry in entries if os.path.isfile(os.path.join(entry, child))]
    return {**made, "PYTHONPATH": engines[0]} if engines else made


def _made_here(out: str) -> str:
    """The run folder where the engine cannot be run: without the arguments, which may hold secrets."""
    script = sys.argv[0] or "python"
    word = os.path.splitext(os.path.basename(script))[0]
    out = os.path.abspath(out or os.path.join("runs", f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"))
    os.makedirs(os.path.dirname(out), exist_ok=True)
    for number in range(1, _MOST):
        run = out if number == 1 else f"{out}-{number}"
        try:
            os.mkdir(run)
        except FileExistsError:
            continue
        settings = unknown_command()
        settings["command"] |= {"arguments": [sys.executable, script], "pid": os.getpid()}
        fill(run, settings)
        return run
    raise OSError(f"{_MOST} runs named {out}")
