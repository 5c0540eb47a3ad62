"""How CPU threads wait is decided before torch loads, and reaches the trainer's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.machine.threads import choose_thread_wait
from tests.support.kit import Kit
from tests.support.running import engine


def test_threads_sleep_unless_somebody_says_otherwise() -> None:
    assert choose_thread_wait("auto", {}).choice == "passive"
    assert choose_thread_wait("auto", {"OMP_WAIT_POLICY": "PASSIVE"}).rejected[0][0] == "active"
    spun = choose_thread_wait("auto", {"OMP_WAIT_POLICY": "ACTIVE"})
    assert (spun.choice, spun.overridden) == ("active", True)
    assert choose_thread_wait("active", {}).choice == "active"


@pytest.mark.parametrize("wanted", [pytest.param("auto", marks=pytest.mark.soak), "active"])
def test_the_logged_choice_is_the_one_in_force(kit: Kit, tmp_path: Path, wanted: str) -> None:
    run = tmp_path / "run"
    spec = kit.spec(tmp_path, train__steps=1, train__warmup_steps=0, compute__thread_wait=wanted)
    done = engine("distill", spec, "--out", run)
    assert done.returncode == 0, done.stderr
    decided = {d.knob: d.choice for d in Follower(RunFolder(run)).read_all().decisions}
    assert decided["compute.thread_wait"] == ("passive" if wanted == "auto" else "active")
