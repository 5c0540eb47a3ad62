"""What --smoke says of a whole run is the arithmetic of what its log holds, and what was not seen is
named.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.spec import RunSpec
from engine.watch.projection import project, projection_lines
from tests.support.finished_runs import train_here
from tests.support.kit import Kit
from tests.support.run_folders import Scene
from tests.support.running import engine, engine_here


def _spec(**train: int) -> RunSpec:
    spec = RunSpec()
    return dataclasses.replace(
        spec,
        train=dataclasses.replace(spec.train, steps=100, **train),
        eval=dataclasses.replace(spec.eval, every=30),
        checkpoint=dataclasses.replace(spec.checkpoint, every=50),
    )


def test_a_run_that_made_no_step_has_no_pace(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(100)
    scene.close()
    found = project(Follower(scene.run).read_all(), _spec())
    assert found.total_s is None and found.tokens_per_s is None
    assert "no pace" in projection_lines(found)[0]


def test_warm_up_steps_are_not_the_pace_and_what_was_not_seen_is_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(100)
    scene.steps(1, 8)
    scene.close()
    view = Follower(scene.run).read_all()
    found = project(view, _spec())
    assert found.measured_steps == 5 and found.step_s == view.steps.value("step_s", 4)
    assert found.steps == 100
    # Steps 30, 50, 60, 90, 100 and the saved student are evaluated, 50 and 100 are saved.
    assert (found.evaluations, found.checkpoints) == (6, 2)
    assert "checkpoints" in found.missing
    assert "at least, without" in projection_lines(found)[0]


@given(steps=st.integers(1, 300), evals=st.integers(0, 50), saves=st.integers(0, 50))
def test_every_point_where_a_run_pauses_is_counted_once(steps: int, evals: int, saves: int) -> None:
    from engine.watch.projection import _points

    due = [
        n
        for n in range(1, steps + 1)
        if n == steps or (evals and n % evals == 0) or (saves and n % saves == 0)
    ]
    assert _points(steps, evals, saves) == len(due)


@pytest.fixture(scope="module")
def smoke(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("smoke")
    spec = kit.spec(folder, train__steps=30, eval__every=10, checkpoint__every=10)
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        done = engine_here("distill", spec, "--smoke", 6, "--out", folder / "run", "--json")
    # A CPU has no peak of an allocator to compare with the plan: that check stays unknown.
    assert done.returncode in (0, 2), done.stderr
    return folder / "run", json.loads(done.stdout)


def test_smoke_stops_after_its_steps_and_projects_the_whole(
    smoke: tuple[Path, dict[str, object]],
) -> None:
    run, found = smoke
    view = Follower(RunFolder(run)).read_all()
    assert view.last_step == 6 and view.finished is not None and view.finished.state == "stopped"
    assert [c.step for c in view.checkpoints] == [6]
    assert found["steps"] == 30 and found["measured_steps"] == 3 and found["failed"] == []
    assert found["missing"] == [] and found["evaluations"] == 4 and found["checkpoints"] == 3
    total, step_s = found["total_s"], found["step_s"]
    assert isinstance(total, float) and isinstance(step_s, float) and total > 30 * step_s


def test_the_schedule_of_smoke_is_that_of_the_whole_run(
    smoke: tuple[Path, dict[str, object]],
) -> None:
    rates = Follower(RunFolder(smoke[0])).read_all().steps.values("lr")
    # Peak at the end of two warm-up steps, then a cosine over all 30.
    assert rates[1] == pytest.approx(3e-4)
    assert rates[5] is not None and rates[5] > 2.8e-4


@pytest.mark.soak  # as any run whose steps are changed, which is a test of test_fault_rows
def test_a_smoke_run_can_be_continued_to_its_end(smoke: tuple[Path, dict[str, object]]) -> None:
    key = "train.stop_after"
    done = engine("distill", "--resume", smoke[0], "--set", f"{key}=0", "--allow-change", key)
    assert done.returncode == 0, done.stderr
    assert Follower(RunFolder(smoke[0])).read_all().last_step == 30


def test_smoke_does_not_go_with_detach_or_resume(kit: Kit, tmp_path: Path) -> None:
    spec = kit.spec(tmp_path)
    for arguments in (
        ("distill", spec, "--smoke", 2, "--detach"),
        ("distill", "--resume", tmp_path, "--smoke", 2),
    ):
        refused = engine_here(*arguments)
        assert refused.returncode == 64 and "--smoke" in refused.stderr
