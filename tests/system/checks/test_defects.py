"""Every planted defect of a training run is named by its check."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from engine.catalogue import BY_ID, CHECKS
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.train.checkpoint.keeper import Keeper
from engine.train.to_events import write
from tests.support.checked_runs import Run, World, context, make_run, make_world
from tests.support.defects import BETWEEN_PARTS, DEFECTS
from tests.support.kit import Kit

SETS: dict[str, dict[str, object]] = {"denominator_per_pass": {"train__accumulation": 2}}
"""What a defect needs of the run, where the common settings hide it."""


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


SAID = [
    ("t_squared_missing", "step_gradients", "the relative error of the hidden states' gradient"),
    ("denominator_per_pass", "step_gradients", "the relative error of the hidden states' gradient"),
    ("last_row_only", "step_gradients", "to the plain decoder's is"),
    ("norm_eps_fixed", "step_student", "to a plain forward pass is"),
    ("frozen_embedding", "step_weights", "embed.weight is not in the optimizer"),
]
"""What is said of a defect, and by which check."""


@pytest.mark.parametrize(
    "name",
    [
        # That its check fails is seen below of those of which it is said how.
        pytest.param(id, marks=[pytest.mark.soak] if id in {s[0] for s in SAID} else [])
        for id in DEFECTS
    ],
)
def test_a_planted_defect_is_named(world: World, name: str, tmp_path: Path) -> None:
    one = DEFECTS[name]
    with one.plant():
        run = make_run(world, **SETS.get(name, {})).begin()
        run.step(2)
        run.save(tmp_path / "checkpoints")
    assert one.named_by in run.failures(), (run.failures(), run.unknowns())
    # Labels without the end of a text may be meant.
    assert run.checks.ends_run(run.results[one.named_by]) or name == "ends_masked"


@pytest.mark.parametrize(("name", "check", "text"), SAID)
def test_a_failure_says_what_it_saw(world: World, name: str, check: str, text: str) -> None:
    others = ", ".join(about.id for about in CHECKS if about.id != check)
    with DEFECTS[name].plant():
        run = make_run(world, checks__skip=others, **SETS.get(name, {})).begin()
        run.step(1)
    assert text in run.failures()[check]


def test_every_defect_is_undone(world: World) -> None:
    for one in (*DEFECTS.values(), *BETWEEN_PARTS.values()):
        with one.plant():
            pass
    run = make_run(world).begin()
    run.step(1)
    assert run.failures() == {}


def test_what_must_name_a_defect_exists() -> None:
    assert {one.named_by for one in (*DEFECTS.values(), *BETWEEN_PARTS.values())} <= BY_ID[
        "check"
    ].keys()


def resumed(world: World, folder: Path) -> Run:
    """A run of three steps that is saved, and begun again from what was saved."""
    first = make_run(world).begin()
    first.step(3)
    run_folder = RunFolder(folder)
    run_folder.effective.write_text(
        json.dumps({"spec": first.spec.to_dict(), "spec_sha256": first.spec.sha256})
    )
    first.save(run_folder.checkpoints)
    again = make_run(world)
    with LogWriter(run_folder.events, writer="trainer") as log:
        keeper = Keeper(run_folder, again.spec, log=partial(write, log), sync_log=log.sync)
        keeper.restore(again.trainer, RunView(), False)
    again.context = context(world, again.spec, again.trainer)
    return again


def test_a_sound_resume_raises_nothing(world: World, tmp_path: Path) -> None:
    run = resumed(world, tmp_path).begin()
    run.step(2)
    assert run.trainer.step == 5 and run.failures() == {}
