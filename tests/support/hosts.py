"""Two hosts of a run, played on one machine: each has a name, an agent and a supervisor of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

from engine.log.write import HOST
from engine.signals import descendants, end
from tests.support.forked import start_python
from tests.support.kit import Kit
from tests.support.running import engine, environment, wait_for

NAMES = ("alder", "birch")


def start_hosts(kit: Kit, folder: Path, **changes: object) -> list[subprocess.Popen[str]]:
    """Make the run `folder / "run"` of two ranks, and start its hosts."""
    spec = kit.spec(folder, **({"train__rows": 2} | changes))
    made = engine("distill", spec, "--gpus", 2, "--out", folder / "run", "--create")
    assert made.returncode == 0, made.stderr
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ("-m", "engine", "distill", "--join", str(folder / "run"), "--meet", meet)
    return [
        start_python(
            *(*words, "--host", f"{number}/{len(NAMES)}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {HOST: name},
        )
        for number, name in enumerate(NAMES)
    ]


def lose_host(run: Path, number: int) -> None:
    """End every process of a host's part of a run at once, as a machine that goes away does."""
    name = NAMES[number]
    view = wait_for(run, lambda view: view.last_step >= 3).view
    clock = (view.hosts_now[name] if number else view).clocks["watch"]
    tree = {clock.pid: os.pidfd_open(clock.pid)} | descendants(clock.pid)
    for process in tree.values():
        # None may notice that another is gone.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGSTOP)
    end(tree.values())
