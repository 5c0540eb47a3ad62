"""A whole run with compiled layers and activation checkpointing: what it says of it, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import STEP_PHASES
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.view import RunView
from tests.support.kit import Kit
from tests.support.running import engine

KNOBS = ("student.compile", "student.attention", "teacher.attention", "student.checkpointing")


def run(kit: Kit, folder: Path, *sets: str) -> RunView:
    folder.mkdir()
    spec = kit.spec(folder, train__steps=12, eval__every=5, checkpoint__at_end=False)
    words = [word for each in sets for word in ("--set", each)]
    done = engine("distill", spec, "--out", folder / "run", *words)
    assert done.returncode == 0, done.stderr
    return Follower(RunFolder(folder / "run")).read_all()


@pytest.mark.soak  # a C++ compiler takes half a minute for one layer
def test_a_compiled_run_says_so_and_trains_as_one_that_is_not(kit: Kit, tmp_path: Path) -> None:
    plain = run(kit, tmp_path / "plain")
    choices = {d.knob: d.choice for d in plain.decisions}
    assert [choices[knob] for knob in KNOBS] == ["off", "masked", "masked", "off"]
    assert all(d.reason and d.rejected for d in plain.decisions if d.knob in KNOBS)

    sets = ("student.compile=on", "student.checkpointing=on")
    other = run(kit, tmp_path / "other", *sets)
    compiled = [c for c in other.compiles if c.compiler == "inductor"]
    assert compiled and not any(c.after_warm_up for c in compiled)
    assert other.checks["no_late_compile"].level == "pass"
    losses = [view.steps.values("loss") for view in (plain, other)]
    assert len(losses[0]) == 12
    for mine, theirs in zip(*losses, strict=True):
        assert mine is not None and theirs is not None and abs(mine - theirs) < 1e-4
    assert any("compiled layers" in str(line.event) for line in other.lines)


def test_the_log_says_where_the_time_of_each_step_went(whole: Path) -> None:
    view = Follower(RunFolder(whole)).read_all()
    steps = [line.event for line in view.lines if type(line.event).__name__ == "StepDone"]
    assert len(steps) == 20
    for step in steps:
        assert set(step.phases) - {"idle"} == set(STEP_PHASES) - {"rollout"}  # type: ignore[union-attr]
    # Ahead only where nobody looks: not in the first steps, nor before an evaluation, nor at the end.
    ahead = [step.step for step in steps if "idle" in step.phases]  # type: ignore[union-attr]
    assert ahead and not {1, 2, 3, 6, 11, 16} & set(ahead), ahead
    assert view.started is not None and view.started.flops_per_token
    assert view.started.costs.keys() == {"teacher", "student", "loss", "backward", "optimizer"}
    assert "CPUs" in view.started.machine and "float32" in view.started.machine
    assert view.started.peak_flops_per_s is None and "CPU" in view.started.peak_source
