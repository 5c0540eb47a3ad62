"""Commands of the engine as forks of one process that has imported torch, which takes longer than most of them.

A command that such a fork starts with `python -m engine...` is a fork of it in turn: a child of the process that
started it, with the standard files, descriptors, group and environment that were asked for, and with modules of the
engine of its own. The command line in /proc is not its own, nor what torch reads of its environment when imported.

Run as a module it is that process. It reads requests from its stdin: to start a command, and to tell the exit code of
one that has ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.running import DEADLINE_S, environment

_OWN = ("engine", "workbench", "tests")


class Forked:
    """A command that was started, with what tests use of a `Popen`. It is a child of the process that forks."""

    def __init__(
        self, words: list[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        request = {
            "words": words,
            "cwd": str(cwd or Path.cwd()),
            # Threads are not forked, and a command that has some starts its own as always.
            "environment": {**(env or environment()), "TOKENIZERS_PARALLELISM": "false"},
            "outputs": [str(path) for path in self._outputs],
        }
        self.pid = _ask(request)
        self._ends = os.pidfd_open(self.pid)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def communicate(self, timeout: float = DEADLINE_S) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._reap()
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        self._folder.cleanup()
        return out, err

    def _reap(self) -> None:
        os.close(self._ends)
        self.returncode = _ask({"reap": self.pid})


def engine_forked(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `engine ...` to its end as `running.engine` does, where what counts is what it writes and returns."""
    return _to_its_end(Forked(["-m", "engine", *map(str, arguments)], cwd))


def start_forked(*arguments: object) -> Forked:
    """Start `engine ...` as `running.start` does."""
    return Forked(["-m", "engine", *map(str, arguments)])


def script_forked(script: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script of Python to its end; the commands of the engine that it starts are forks."""
    return _to_its_end(Forked([str(script), *map(str, arguments)]))


def _to_its_end(command: Forked) -> subprocess.CompletedProcess[str]:
    out, err = command.communicate()
    assert command.returncode is not None
    return subprocess.CompletedProcess(command.args, command.returncode, out, err)


def _ask(request: Mapping[str, object]) -> int:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process that forks ended with {server.wait()}"
    return int(answer)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Of this worker; its stdin closes when the worker ends, and then it ends too."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked_commands"],
        # A driver of GPUs that has been started is of no use to a fork.
        env={**environment(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # Closes its pipes and waits for its end.
    atexit.register(server.communicate)
    return server


class ForkedPopen(subprocess.Popen[Any]):
    """A command of the engine is a fork of this process; any other is started as always."""

    def _execute_child(self, args: Any, executable: Any, *more: Any) -> None:
        words = None if isinstance(args, str | bytes | os.PathLike) else [*map(os.fspath, args)]
        # A lock that another thread holds would be held in a fork for ever. That of a command's guard only waits.
        waiting = sum(thread.name == "guard" for thread in threading.enumerate())
        threads = len(os.listdir("/proc/self/task")) - 1 - waiting
        if words is None or not is_of_engine(words) or threads or more[0] is not None:
            super()._execute_child(args, executable, *more)  # type: ignore[misc]
            return
        pipes, session, group = more[8:14], more[19], more[20]
        files = [
            number if wanted == -1 else wanted
            for number, wanted in enumerate(pipes[i] for i in (0, 3, 5))
        ]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if session:
                os.setsid()
            elif group >= 0:
                os.setpgid(0, group)
            begin(words[1:], more[3], os.environ if more[4] is None else more[4], files, [*more[2]])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def is_of_engine(words: Sequence[str]) -> bool:
    """Whether it is `python -m engine...`, or a module of the tests that runs it."""
    return words[0] == sys.executable and any(
        first == "-m" and second.partition(".")[0] in _OWN for first, second in pairwise(words)
    )


def begin(
    words: list[str], cwd: Any, env: Any, files: Sequence[int], passed: Sequence[int]
) -> None:
    """In a fork: be the process that Python with these words would be. Does not return, so that no object of the
    process that it was forked from is ever finalised here."""
    code = 1
    try:
        gc.freeze()
        atexit._clear()
        tempfile.tempdir = None
        for one in signal.valid_signals():
            if signal.getsignal(one) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(one, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # First out of the way of one another.
        copies = [os.dup(number) for number in files]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        kept = sorted({2, *passed})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        if cwd is not None:
            os.chdir(cwd)
        variables = {os.fsdecode(name): os.fsdecode(text) for name, text in dict(env).items()}
        os.environ.clear()
        os.environ.update(variables)
        code = carry_out(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - what Python does with it
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


def carry_out(words: list[str]) -> int:
    """Run a module or a script as Python with these words would."""
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
        del sys.modules[name]
    # As `-m` and a script have it.
    sys.path[0] = os.getcwd() if "-m" in words else str(Path(words[0]).parent)
    sys.orig_argv = [sys.executable, *words]
    while words[0] in ("-X", "-u"):
        if words[0] == "-X":
            assert words[1] == "faulthandler", words
            faulthandler.enable()
            del words[0]
        else:
            sys.stdout.reconfigure(write_through=True)
        del words[0]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    return 0


def main() -> None:
    # What most commands that compute import.
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    null = os.open(os.devnull, os.O_RDONLY)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "reap" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            files = [
                null,
                *(os.open(path, os.O_WRONLY | os.O_CREAT) for path in request["outputs"]),
            ]
            begin(request["words"], request["cwd"], request["environment"], files, [])
        print(child, flush=True)


if __name__ == "__main__":
    main()
