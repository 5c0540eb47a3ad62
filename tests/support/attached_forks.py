"""Training scripts as forks of one process that has imported torch, which takes longer than their trainings.

Run as a script it is that process: it reads requests from its stdin, and answers each with the script's exit code.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import site
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 300.0
"""Of one script."""
_OF_PYTHON = ("PYTHONPATH", "APR_WATCH_RUN")


def run_fork(folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run `train.py` of a folder as Python run there with this environment would; returns the exit code, negative for
    a signal, the stdout and the stderr. What torch does on being imported has happened before the script begins."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    request = {"folder": str(folder), "environment": dict(environment)}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process that forks ended with {server.wait()}"
    return int(answer), *((folder / f"{name}.txt").read_text() for name in ("stdout", "stderr"))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Of this worker; its stdin closes when the worker ends, and then it ends too."""
    environment = {name: text for name, text in os.environ.items() if name not in _OF_PYTHON}
    server = subprocess.Popen(
        [sys.executable, __file__],
        # Threads are not forked, and a driver of GPUs that has been started is of no use to a fork.
        env={**environment, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # Closes its pipes and waits for its end.
    atexit.register(server.communicate)
    return server


def _fork_for_each_request() -> Path | None:
    """In a fork: its script, when all is as at the start of a Python process. In the process itself: None, when no more
    requests come."""
    import gc

    # The first optimizer imports it, and so would each script.
    import torch._dynamo  # noqa: F401

    # A collection of a fork would copy the pages of what it looks at.
    gc.freeze()
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return _begin(Path(request["folder"]), request["environment"])
        print(_returncode(child), flush=True)
    return None


def _returncode(child: int) -> int:
    ends = os.pidfd_open(child)
    if not select.select([ends], [], [], LIMIT_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ends)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _begin(folder: Path, environment: dict[str, str]) -> Path:
    os.chdir(folder)
    for number, path in enumerate((os.devnull, "stdout.txt", "stderr.txt")):
        mode = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if number else 0)
        file = os.open(path, mode, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # As every Python process does it; that of the probe finds torch imported.
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    sys.path.insert(0, str(folder))
    script = folder / "train.py"
    sys.argv = [script.name]
    sys.orig_argv = [sys.executable, script.name]
    return script


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    script = _fork_for_each_request()
    if script is not None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = str(script)
        exec(compile(script.read_text(), script, "exec"), vars(main))
