"""evidence/distill/cached_runs.py reads what a step says of its phases."""

from __future__ import annotations

import runpy

from tests.support.paths import ROOT


def test_a_phase_that_only_some_steps_have_is_the_median_of_those() -> None:
    medians_ms = runpy.run_path(str(ROOT / "evidence/distill/cached_runs.py"))["medians_ms"]
    steps = [{"data": 0.001, "idle": 0.004}, {"data": 0.003}, {"data": 0.002, "idle": 0.006}]
    assert medians_ms(steps) == {"data": 2.0, "idle": 5.0}
    assert medians_ms(steps[::-1]) == medians_ms(steps)
    assert medians_ms([steps[1], steps[0]]) == {"data": 2.0, "idle": 4.0}
