"""A whole run on a GPU: bf16 with fp32 master weights, readings from NVML, and a resume that goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.kit import Kit
from tests.support.running import engine, start, wait_for, wait_until_ended

pytestmark = pytest.mark.gpu


def test_a_run_on_the_gpu_learns_and_shows_the_gpu(kit: Kit, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = kit.spec(
        tmp_path, compute__device="cuda", train__steps=300, train__lr=3e-3, checkpoint__every=0
    )
    done = engine("distill", spec, "--out", run)
    assert done.returncode == 0, done.stderr
    view = Follower(RunFolder(run)).read_all()
    choices = {d.knob: d.choice for d in view.decisions}
    assert choices["student.precision"] == choices["teacher.precision"] == "bf16"
    untrained, student = view.eval_of("untrained"), view.eval_of("student")
    assert untrained and student and untrained.loss and student.loss
    assert student.loss < 0.8 * untrained.loss
    assert view.gpus and view.gpus[0].gpu_mem_used_bytes


def test_a_resume_on_the_gpu_continues_the_same_curve(kit: Kit, tmp_path: Path) -> None:
    losses = []
    for name, stop_at in (("whole", None), ("stopped", 8)):
        folder = tmp_path / name
        folder.mkdir()
        run = folder / "run"
        launched = start(
            "distill", kit.spec(folder, compute__device="cuda", train__steps=400), "--out", run
        )
        if stop_at is not None:
            wait_for(run, lambda view: view.last_step >= 8)
            launched.terminate()
        launched.communicate(timeout=120)
        if wait_until_ended(run).state != "completed":
            assert engine("distill", "--resume", run).returncode == 0
        losses.append(Follower(RunFolder(run)).read_all().steps.values("loss"))
    # bf16 products and their order on a GPU: equal to rounding, not to the bit.
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
