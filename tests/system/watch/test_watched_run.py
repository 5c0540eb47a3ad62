"""Real runs with a planted stall or crash: the alert names the line, the run lives, and its end has its cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.log.events import StopForwarded
from engine.log.fold import Follower
from engine.log.view import RunView
from tests.support.kit import Kit
from tests.support.running import DEADLINE_S, engine_here, start, wait_for, wait_until_ended


@dataclass
class Stopped:
    path: Path
    trainer: int
    stalled: RunView
    """While its trainer was stopped by a signal; it went on after that."""
    ended: Follower
    """After it crashed with SIGSEGV."""
    code: int
    """Of its launcher, which said `stderr`."""
    stderr: str


@dataclass
class Paused:
    path: Path
    trainer: int
    launched: subprocess.Popen[str]


@pytest.fixture(scope="module")
def paused(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Paused:
    """A run without readings of the machine, whose trainer is stopped by a signal."""
    folder = tmp_path_factory.mktemp("stopped")
    spec = kit.spec(folder, train__steps=100_000, watch__stall_seconds=1, watch__sample_seconds=0)
    launched = start("distill", spec, "--out", folder / "run")
    pid = wait_for(folder / "run", lambda view: view.last_step >= 2).view.trainer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return Paused(folder / "run", pid, launched)


@dataclass
class Endless:
    path: Path
    launched: subprocess.Popen[str]


@pytest.fixture(scope="module")
def endless(
    kit: Kit, paused: Paused, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endless]:
    """A run in one optimizer step of a million forward passes, begun while the other is waited for."""
    folder = tmp_path_factory.mktemp("endless")
    spec = kit.spec(folder, train__accumulation=1_000_000, watch__stall_seconds=1)
    one = Endless(folder / "run", start("distill", spec, "--out", folder / "run"))
    yield one
    if one.launched.poll() is None:
        # Left alone it would keep a core for ever.
        engine_here("stop", one.path, "--now")
        one.launched.communicate(timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def stopped(paused: Paused, endless: Endless) -> Stopped:
    """The paused run, which was seen to stall, went on, and then crashed."""
    view = wait_for(paused.path, lambda view: "stalled" in view.alerts).view
    os.kill(paused.trainer, signal.SIGCONT)
    wait_for(paused.path, lambda later: later.last_step > view.last_step)
    os.kill(paused.trainer, signal.SIGSEGV)
    _, stderr = paused.launched.communicate(timeout=DEADLINE_S)
    ended = wait_until_ended(paused.path)
    code = paused.launched.returncode
    return Stopped(paused.path, paused.trainer, view, ended, code, stderr)


def test_a_step_that_never_ends_is_named_with_its_line_goes_on_and_is_ended_by_a_second_signal(
    stopped: Stopped, endless: Endless
) -> None:
    run, launched = endless.path, endless.launched

    def named(view: RunView) -> bool:
        alert = view.alerts.get("stalled_at_start")
        return alert is not None and "in training" in alert.text

    follower = wait_for(run, named)
    view = follower.view
    alert, dump = view.alerts["stalled_at_start"], view.stack_dump
    assert dump is not None and dump.state == "computing"
    assert "engine/train/trainer.py" in " ".join(dump.python_stack)
    assert dump.python_frame and dump.python_frame in alert.text
    assert dump.python_frame in (run / dump.path).read_text()
    assert follower.alive.trainer, "a stall is reported, not ended"
    done = engine_here("diagnose", run, "--json")
    assert done.returncode == 1, done.stderr
    assert "stalled_at_start" in {a["id"] for a in json.loads(done.stdout)["alerts"]}
    assert "WRONG since step 0: no step and no log line" in engine_here("tail", run).stdout

    trainer = view.trainer_pid
    assert trainer is not None and handles(trainer, signal.SIGTERM)
    launched.send_signal(signal.SIGTERM)
    # Two of one number that wait for a busy process are one: the second is sent when the first was taken.
    wait_for(run, lambda _: not handles(trainer, signal.SIGTERM))
    launched.send_signal(signal.SIGTERM)
    launched.communicate(timeout=DEADLINE_S)
    ended = wait_until_ended(run)
    assert launched.returncode == 143 and ended.state == "terminated"
    assert ended.view.exit is not None and "stop requested: SIGTERM" in ended.view.exit.sentence
    forwarded = [e.event for e in ended.view.lines if isinstance(e.event, StopForwarded)]
    assert [one.signal for one in forwarded] == ["SIGTERM"] * 2


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_stopped_trainer_is_told_from_a_busy_one(stopped: Stopped) -> None:
    alert = stopped.stalled.alerts["stalled"]
    assert "stopped by a signal" in alert.text
    assert f"kill -CONT {stopped.trainer}" in alert.meaning
    said = engine_here("tail", stopped.path, "-n", 2000).stdout
    assert "ALERT stalled: no step after step" in said


def test_a_run_that_asks_for_no_readings_has_none_and_trains(stopped: Stopped) -> None:
    view = stopped.ended.view
    assert view.last_step > stopped.stalled.last_step >= 2 and view.facts
    assert len(view.hosts) == 0 and not view.gpu_tables


def has_crashed_with(
    number: signal.Signals, run: Path, ended: Follower, code: int, stderr: str
) -> None:
    assert ended.state == "crashed" and ended.view.exit is not None
    assert ended.view.exit.signal == number.name
    assert code == 128 + number and number.name in stderr
    for command in (("runs", run.parent), ("diagnose", run)):
        assert f"crashed with {number.name}" in engine_here(*command).stdout
    assert "Fatal Python error" in (run / "stderr.txt").read_text()


def test_a_crashed_trainer_is_told_by_its_signal_with_its_stack_on_stderr(stopped: Stopped) -> None:
    has_crashed_with(signal.SIGSEGV, stopped.path, stopped.ended, stopped.code, stopped.stderr)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGABRT])
def test_a_trainer_that_crashes_otherwise_is_told_the_same_way(
    kit: Kit, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    launched = start("distill", kit.spec(tmp_path, train__steps=100000), "--out", run)
    view = wait_for(run, lambda view: "events" in view.clocks).view
    os.kill(view.clocks["events"].pid, number)
    _, stderr = launched.communicate(timeout=DEADLINE_S)
    has_crashed_with(number, run, wait_until_ended(run), launched.returncode, stderr)
