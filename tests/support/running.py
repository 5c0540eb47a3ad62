"""Start real runs in tests and wait for what their logs contain, never for time to pass."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.text import has_ended
from engine.log.view import RunView
from tests.support.forked import run_new, run_python, start_python
from tests.support.paths import ROOT

DEADLINE_S = 240.0


def engine(
    *arguments: object, cwd: Path | None = None, forked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `engine ...` to its end, as a user would; `forked`: in forks of a process that has imported torch."""
    words = ("-m", "engine", *map(str, arguments))
    run = run_python if forked else run_new
    return run(*words, folder=cwd, environment=environment())


def engine_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `engine ...` in this process, where another would only add its start-up time."""
    from engine.cli.main import main

    words = [*map(str, arguments)]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as usage:
            code = int(usage.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def environment() -> dict[str, str]:
    root = str(ROOT)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start `engine ...` in the background, attached to us."""
    return start_python(
        *("-m", "engine", *map(str, arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def wait_for(run: Path, seen: Callable[[RunView], bool]) -> Follower:
    """Follow a run until `seen` accepts its view; fails with the log when the run ends or time runs out first."""
    follower = Follower(RunFolder(run))
    deadline = time.monotonic() + DEADLINE_S
    while True:
        follower.poll()
        if seen(follower.view):
            return follower
        ended = follower.view.clocks and has_ended(follower.state)
        if time.monotonic() > deadline or (ended and not follower.poll()):
            events = [type(line.event).__name__ for line in follower.view.lines][-12:]
            text = (
                run.joinpath("stderr.txt").read_text()
                if run.joinpath("stderr.txt").exists()
                else ""
            )
            raise AssertionError(f"{run}: {follower.state}, last events {events}\n{text}")
        time.sleep(0.02)


def wait_until_ended(run: Path) -> Follower:
    """Wait until no process of the run is left."""
    follower = wait_for(run, lambda view: view.finished is not None or view.exit is not None)
    deadline = time.monotonic() + DEADLINE_S
    while follower.alive.trainer or follower.alive.supervisor:
        assert time.monotonic() < deadline, f"{run}: still alive: {follower.alive}"
        time.sleep(0.02)
        follower.poll()
    follower.read_all()
    return follower


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(checkpoint.iterdir())}
