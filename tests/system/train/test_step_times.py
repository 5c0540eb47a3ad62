"""What a whole run logs of the time of its steps."""

from __future__ import annotations

from pathlib import Path

from engine.log.events import STEP_PHASES
from engine.log.fold import Follower
from engine.log.folder import RunFolder


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
