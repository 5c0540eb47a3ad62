"""A signal before the first step ends a command within two seconds, wherever it is: with 128 + n, without
children and without half-written files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.cli.progress import exit_code
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.finished_runs import resumed_here
from tests.support.forked import start_python
from tests.support.kit import Kit
from tests.support.perf import within
from tests.support.run_folders import killed
from tests.support.running import DEADLINE_S, engine_here, environment, wait_for, wait_until_ended

pytestmark = pytest.mark.perf
WITHIN_S = 2.0


class Held:
    """An `engine` command, or the trainer it starts, that stands still at one function."""

    def __init__(
        self, folder: Path, where: str, how: str, *arguments: object, trainer: bool = False
    ) -> None:
        self.reached = folder / "held"
        env = environment() | {"HOLD": where, "HOLD_IN": how, "HELD": str(self.reached)}
        words = ("-m", "tests.support.holding", "engine.cli.main")
        if trainer:
            env["APR_WORKBENCH_TRAINER"] = "tests.support.holding engine.train.__main__"
            words = ("-m", "engine")
        self.process: subprocess.Popen[str] = start_python(
            *(*words, *map(str, arguments)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        deadline = time.monotonic() + DEADLINE_S
        while not self.reached.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it never came there"
            time.sleep(0.01)
        self.pids = [int(word) for word in self.reached.read_text().split()]

    def end(self, number: int) -> str:
        """Ends it by this signal; returns what it said."""
        begun = time.monotonic()
        self.deadline = begun + DEADLINE_S
        self.process.send_signal(number)
        said = self.process.communicate(timeout=DEADLINE_S)[1]
        # A process that a signal ended has the same code in a shell.
        code = self.process.returncode
        assert (code if code >= 0 else 128 - code) == 128 + number, said
        while any(is_running(pid) for pid in self.pids):
            assert time.monotonic() < self.deadline, "a process is left"
            time.sleep(0.01)
        within(time.monotonic() - begun, WITHIN_S)
        assert "Traceback" not in said
        return said


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("where", "how", "number"),
    [
        pytest.param(
            "engine.train.data:prepare_data", "sleep", signal.SIGINT, marks=pytest.mark.soak
        ),
        pytest.param(
            "engine.train.build:Builder.teacher", "lock", signal.SIGTERM, marks=pytest.mark.soak
        ),
        pytest.param(
            "engine.train.loop:TrainingLoop.check", "import", signal.SIGTERM, marks=pytest.mark.soak
        ),
        ("engine.train.build:Builder.student", "sleep", signal.SIGTERM),
    ],
)
def test_a_run_is_ended_before_its_first_step_wherever_its_trainer_is_and_can_be_resumed(
    kit: Kit, tmp_path: Path, where: str, how: str, number: int
) -> None:
    run = tmp_path / "run"
    spec = kit.spec(tmp_path, train__steps=2)
    held = Held(tmp_path, where, how, "distill", spec, "--out", run, trainer=True)
    held.end(number)
    ended = Follower(RunFolder(run))
    ended.read_all()
    assert not ended.alive.trainer and not ended.alive.supervisor
    name = signal.Signals(number).name
    assert ended.view.exit is not None and name in ended.view.exit.sentence
    if how != "lock":
        assert ended.view.finished is not None
        assert ended.view.finished.reason == f"{name} before the first step"
    assert ended.view.last_step == 0 and not list(run.glob("checkpoints/*"))
    if how == "sleep":
        again = resumed_here(run)
        assert again.returncode == 0, again.stderr


def test_what_it_took_to_end_a_run_that_was_asked_to_end_is_not_its_exit_code(
    tmp_path: Path,
) -> None:
    view = Follower(killed(tmp_path / "run")).read_all()
    assert exit_code(view, 128 + signal.SIGTERM) == 143
    assert exit_code(view, 128 + signal.SIGKILL) == 137
    assert exit_code(view, -signal.SIGKILL) == 137, "the supervisor was killed too"


def test_a_signal_while_inputs_are_read_leaves_no_run_folder(kit: Kit, tmp_path: Path) -> None:
    run, spec = tmp_path / "runs" / "run", kit.spec(tmp_path)
    where = "engine.plan.inputs:check_inputs"
    Held(tmp_path, where, "sleep", "distill", spec, "--out", run).end(signal.SIGTERM)
    assert not run.parent.exists()


def test_a_signal_while_a_model_is_converted_leaves_no_part_of_a_file(
    kit: Kit, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    where = "engine.formats.gguf_write:_header"
    held = Held(tmp_path, where, "sleep", "convert", kit.teacher, out / "m.gguf", "--quant", "f32")
    assert list(out.iterdir()), "it had begun to write"
    held.end(signal.SIGHUP)
    assert not list(out.iterdir())


def test_a_second_signal_ends_a_command_in_native_code_that_does_not_return(
    kit: Kit, tmp_path: Path
) -> None:
    where = "engine.formats.gguf_write:_header"
    out = tmp_path / "m.gguf"
    held = Held(tmp_path, where, "lock", "convert", kit.teacher, out, "--quant", "f32")
    held.process.send_signal(signal.SIGINT)
    # Two signals that wait at the same time would be one.
    deadline = time.monotonic() + DEADLINE_S
    while is_caught(held.process.pid, signal.SIGINT):
        assert time.monotonic() < deadline, "its handler was not called"
        time.sleep(0.01)
    # In a terminal Ctrl-C reaches its children too.
    os.kill(held.pids[1], signal.SIGINT)
    held.end(signal.SIGINT)


def is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(mask >> (number - 1) & 1)


@pytest.mark.soak
def test_a_signal_while_a_teacher_is_loaded_ends_prepare(kit: Kit, tmp_path: Path) -> None:
    store = tmp_path / "store"
    where = "engine.train.prepare:_load_teacher"
    held = Held(tmp_path, where, "sleep", "prepare", kit.spec(tmp_path), "--out", store)
    held.end(signal.SIGTERM)
    done = engine_here("prepare", kit.spec(tmp_path), "--out", store)
    assert done.returncode == 0, done.stderr


def test_a_killed_supervisor_ends_a_trainer_that_has_not_begun(kit: Kit, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = kit.spec(tmp_path)
    where = "engine.train.data:prepare_data"
    held = Held(tmp_path, where, "sleep", "distill", spec, "--out", run, trainer=True)
    follower = wait_for(run, lambda view: "watch" in view.clocks)
    os.kill(follower.view.clocks["watch"].pid, signal.SIGKILL)
    held.process.communicate(timeout=DEADLINE_S)
    view = wait_until_ended(run).view
    assert view.finished is not None and "supervisor lost" in view.finished.reason
    os.kill(held.pids[1], signal.SIGKILL)  # a child of the trainer's, which nobody asked to end


def test_a_signal_that_is_ignored_already_stays_so(tmp_path: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from engine.signals import guard_command; guard_command()\n"
        "import os; os.kill(os.getpid(), signal.SIGHUP); print('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment()
    )
    assert done.stdout == "alive\n", done.stderr
