"""Healthy runs of every shape are resumed from each of their checkpoints, wrong gradients are never passed,
and whatever becomes of a run's checkpoints, it goes on from what is there or says what is not.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.train import run as trainer_module
from tests.support.checked_runs import World, make_world
from tests.support.finished_runs import carried_out
from tests.support.healthy_runs import asked, drawn, killed_after_each_step
from tests.support.kit import Kit

pytestmark = [pytest.mark.attack, pytest.mark.soak]

STEPS = 6
SEEDS = range(1000, 1012)
"""Not those of evidence/resume; all shapes and both precisions are among them."""


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_check_refuses_a_healthy_run_at_any_checkpoint(
    world: World, tmp_path: Path, seed: int
) -> None:
    run = drawn(world, seed, STEPS)
    saved, _ = run.train(tmp_path)
    assert len(saved) == STEPS
    for path in saved:
        refused = [str(a) for a in asked(run.resume(path)) if a.failed and a.about.stops]
        assert not refused, (path.name, refused)


def test_a_run_that_is_killed_after_each_step_is_resumed_each_time(
    kit: Kit, world: World, tmp_path: Path
) -> None:
    for seed in random.Random(2).sample(range(2000, 3000), 2):
        ended = list(killed_after_each_step(kit, drawn(world, seed), tmp_path / str(seed), 8))
        assert [one.step for one in ended if one.saved] == list(range(1, 9)), (seed, ended[-1])


def test_whatever_becomes_of_checkpoints_a_run_goes_on_from_what_is_there_or_says_what_is_not(
    kit: Kit, tmp_path: Path
) -> None:
    settings = {"train__steps": 5, "train__stop_after": 4, "train__rows": 3, "eval__rows": 2}
    settings |= {"checkpoint__every": 1, "checkpoint__keep_last": 4, "checks__enabled": False}
    made, code = carried_out(kit, tmp_path, **settings)
    assert code == 0
    rng = random.Random(7)
    for case in range(16):
        run = RunFolder(tmp_path / str(case))
        shutil.copytree(made.path, run.path)
        fates = {step: rng.choice(["kept", "gone", "damaged"]) for step in (1, 2, 3, 4)}
        if case % 4 == 0:
            fates = dict.fromkeys(fates, "gone")
        for step, fate in fates.items():
            path = run.checkpoints / f"step-{step:08d}"
            if fate == "gone":
                shutil.rmtree(path)
            elif fate == "damaged":
                victim = rng.choice(sorted(path.iterdir()))
                victim.write_bytes(victim.read_bytes()[: -rng.randrange(2, 9)])
        fallback, restart = rng.random() < 0.5, rng.random() < 0.5
        there = [step for step, fate in fates.items() if fate != "gone"]
        good = [step for step, fate in fates.items() if fate == "kept"]
        if not there:
            expected = 0 if restart else None
        elif good and (fallback or max(there) == max(good)):
            expected = max(good)
        else:
            expected = None
        code = trainer_module.run(
            run.path,
            resume=True,
            allow_fallback=fallback,
            allow_restart=restart,
            keep_alive_fd=None,
        )
        view, about = Follower(run).read_all(), (fates, fallback, restart)
        assert view.finished is not None, about
        if expected is None:
            assert code == 65 and view.finished.step == 4, about
            needed = "--allow-restart" if not good else "--allow-fallback"
            assert needed in view.finished.reason or "--allow-fallback" in view.finished.reason, (
                about
            )
            continue
        assert code == 0 and view.started is not None, (about, view.finished.reason)
        assert view.started.resumed_from == expected, about
        noted = [note.text for note in view.notes if "step 4" in note.text]
        assert bool(noted) == (fates[4] == "gone"), (about, noted)
