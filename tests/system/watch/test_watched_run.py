"""Real runs with a planted stall: the alert names the line, and the run lives."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.view import RunView
from tests.support.kit import Kit
from tests.support.running import engine, engine_here, start, wait_for, wait_until_ended


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run, which is ended after the test."""
    path = tmp_path / "run"
    yield path
    if path.exists() and Follower(RunFolder(path)).run.liveness().supervisor:
        engine_here("stop", path, "--now")
        wait_until_ended(path)


def test_a_step_that_never_ends_is_named_with_its_line_and_goes_on(
    kit: Kit, tmp_path: Path, run: Path
) -> None:
    # One optimizer step of a million forward passes.
    spec = kit.spec(tmp_path, train__accumulation=1_000_000, watch__stall_seconds=1)
    assert engine("distill", spec, "--out", run, "--detach").returncode == 0

    def named(view: RunView) -> bool:
        alert = view.alerts.get("stalled_at_start")
        return alert is not None and "in training" in alert.title

    follower = wait_for(run, named)
    view = follower.view
    alert, dump = view.alerts["stalled_at_start"], view.stack_dump
    assert dump is not None and dump.state == "computing"
    assert "engine/train/trainer.py" in " ".join(dump.python_stack)
    assert dump.python_frame and dump.python_frame in alert.title
    assert dump.python_frame in (run / dump.path).read_text()
    assert follower.alive.trainer, "a stall is reported, not ended"
    done = engine_here("diagnose", run, "--json")
    assert done.returncode == 1, done.stderr
    assert "stalled_at_start" in {a["id"] for a in json.loads(done.stdout)["alerts"]}
    assert "1 alert: stalled_at_start" in engine_here("tail", run).stdout


@dataclass
class Stopped:
    path: Path
    trainer: int
    stalled: RunView
    """While its trainer was stopped by a signal; it went on after that."""


@pytest.fixture(scope="module")
def stopped(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run without readings of the machine, whose trainer was stopped and went on, and that was ended."""
    folder = tmp_path_factory.mktemp("stopped")
    spec = kit.spec(folder, train__steps=100_000, watch__stall_seconds=1, watch__sample_seconds=0)
    launched = start("distill", spec, "--out", folder / "run")
    pid = wait_for(folder / "run", lambda view: view.last_step >= 2).view.trainer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    view = wait_for(folder / "run", lambda view: "stalled" in view.alerts).view
    os.kill(pid, signal.SIGCONT)
    wait_for(folder / "run", lambda later: later.last_step > view.last_step)
    launched.terminate()
    launched.communicate(timeout=240)
    wait_until_ended(folder / "run")
    return Stopped(folder / "run", pid, view)


def test_a_stopped_trainer_is_told_from_a_busy_one(stopped: Stopped) -> None:
    alert = stopped.stalled.alerts["stalled"]
    assert "stopped by a signal" in alert.title
    assert f"kill -CONT {stopped.trainer}" in alert.meaning
    said = engine_here("tail", stopped.path, "-n", 2000).stdout
    assert "ALERT stalled: no step after step" in said


def test_a_run_that_asks_for_no_readings_has_none_and_trains(stopped: Stopped) -> None:
    view = Follower(RunFolder(stopped.path)).read_all()
    assert view.last_step > stopped.stalled.last_step >= 2 and view.facts
    assert len(view.hosts) == 0 and not view.gpu_tables
