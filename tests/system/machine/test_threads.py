"""How CPU threads wait is decided before torch loads, and reaches the trainer's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.machine.threads import choose_thread_wait
from tests.support.kit import Kit
from tests.support.running import engine

KNOB = "compute.thread_wait"


def test_threads_sleep_unless_somebody_says_otherwise() -> None:
    assert choose_thread_wait("auto", {}).choice == "passive"
    assert choose_thread_wait("auto", {"OMP_WAIT_POLICY": "PASSIVE"}).rejected[0][0] == "active"
    spun = choose_thread_wait("auto", {"OMP_WAIT_POLICY": "ACTIVE"})
    assert (spun.choice, spun.overridden) == ("active", True)
    assert choose_thread_wait("active", {}).choice == "active"


def decided(run: Path) -> str:
    return {d.knob: d.choice for d in Follower(RunFolder(run)).read_all().decisions}[KNOB]


def test_the_logged_choice_is_the_one_that_was_asked_for(whole: Path) -> None:
    assert decided(whole) == "active"


@pytest.mark.soak
def test_the_logged_choice_is_passive_where_none_was_asked_for(kit: Kit, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = engine("distill", kit.spec(tmp_path, train__steps=2), "--out", run)
    assert done.returncode == 0, done.stderr
    assert decided(run) == "passive"
