"""A script that is not ours and hangs: which process it is, and at which of its lines, before its first step or
later."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.attach.command import PROBE, RUN_VARIABLE
from engine.attach.supervisor import training_process
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run
from engine.log.view import RunView
from engine.watch.rules.rule import Case
from engine.watch.rules.stall import UNSEEN_WORK_S, silence
from engine.watch.stacks import LOCK, WAITING, Capture, sample_threads
from tests.system.watch.test_stacks import wait_until_ready

HANGS = """
import sys, threading
import torch

def step(optimizer, parameter):
    parameter.square().sum().backward()
    optimizer.step()

def wait_for_ever():
    lock = threading.Lock()
    lock.acquire()
    print("hangs", flush=True)
    lock.acquire()  # HERE

parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for number in range(int(sys.argv[1])):
    step(optimizer, parameter)
wait_for_ever()
"""


class Hanging:
    """A script of a shell, as `engine watch` starts it, that hangs after some steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        script = folder / "hangs.py"
        script.write_text(HANGS)
        self.line = HANGS.splitlines().index("    lock.acquire()  # HERE") + 1
        self.run = create_run(folder / "run", "", {"spec": {}, "command": {"arguments": ["sh"]}})
        words = f"{sys.executable} {script} {steps}; exit 3"
        environment = os.environ | {"PYTHONPATH": str(PROBE), RUN_VARIABLE: str(self.run.path)}
        self.process = subprocess.Popen(
            ["sh", "-c", words], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "hangs\n"
        self.view = Follower(self.run).read_all()
        self.pid, self.file = training_process(self.run, self.process.pid, self.view)

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.pid != self.process.pid:
            os.kill(self.pid, 9)
        self.process.communicate(timeout=60)


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_a_hanging_script_is_named_by_its_own_line_and_is_a_stall_after_what_an_evaluation_may_take(
    tmp_path: Path, steps: int
) -> None:
    with Hanging(tmp_path, steps) as script:
        assert len(script.view.steps) == steps
        # Not the shell that started it.
        assert script.pid != script.process.pid
        while sample_threads(script.pid).threads[script.pid].letter != "S":
            os.sched_yield()
        capture = Capture(
            run=script.run.path, pid=script.pid, dump_file=script.file, name="x", why="silent"
        )
        capture.begin()
        # The handler runs when the process is next scheduled; its file grows then.
        grown = Path(script.file)
        while "most recent call first" not in grown.read_text():
            os.sched_yield()
        wait_until_ready(capture)
        dump = capture.finish()
        assert dump.python_frame == f"{tmp_path / 'hangs.py'}:{script.line} in wait_for_ever"
        # On a busy machine the handler that wrote the dump may still be running, or on its way back to the lock.
        assert dump.state in (LOCK, WAITING) or "running" in dump.summary
        assert "in <module>" in dump.python_stack[-1] and not dump.missing[1:]
    if steps:
        now = (script.view.heartbeat_unix_s or 0.0) + UNSEEN_WORK_S
        case = Case(view=script.view, settings=None, now_unix_s=now - 1)
        assert not silence(case).is_stall
        found = silence(replace(case, now_unix_s=now + 1))
        assert found.is_stall and found.doing == "training" and "not seen" in found.limit_source


def test_a_process_that_is_not_there_any_more_is_never_signalled(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", "", {"spec": {}})
    (run.path / "stacks").mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    (run.path / "stacks" / f"{gone.pid}.txt").write_text("main thread 0x1\n")
    assert training_process(run, os.getpid(), RunView()) == (
        os.getpid(),
        str(run.path / "stacks" / f"{os.getpid()}.txt"),
    )


def test_a_signal_that_the_script_handles_itself_stays_its_own(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os, signal\n"
        "number = signal.SIGRTMIN + 3\n"
        "signal.signal(number, lambda n, f: print('mine', flush=True))\n"
        "import torch\n"
        "os.kill(os.getpid(), number)\n"
    )
    run = create_run(tmp_path / "run", "", {"spec": {}})
    environment = os.environ | {"PYTHONPATH": str(PROBE), RUN_VARIABLE: str(run.path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert not list(RunFolder(run.path).path.glob("stacks/*"))
