"""Every planted defect of a training run is named by its check."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from engine.checks.catalogue import ABOUT, CATALOGUE
from engine.drills.catalogue import planted
from engine.drills.defects_training import DEFECTS
from engine.drills.planting import Defect
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.train.checkpoint.keeper import Keeper
from engine.train.to_events import write
from tests.support.checked_runs import Run, World, context, make_run, make_world
from tests.support.kit import Kit

RESUMED = ("optimizer_lost", "position_lost")
SETS: dict[str, dict[str, object]] = {"denominator_per_pass": {"train__accumulation": 2}}
"""What a defect needs of the run, where the common settings hide it."""


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


SAID = [
    ("labels_unshifted", "step_labels", "the label is"),
    ("t_squared_missing", "step_gradients", "the gradient of the hidden states is"),
    ("denominator_per_pass", "step_gradients", "the gradient of the hidden states is"),
    ("last_row_only", "step_gradients", "(relative) from the plain decoder's"),
    ("last_position_only", "step_gradients", "(relative) from the plain decoder's"),
    ("norm_eps_fixed", "step_student", "from a plain forward pass"),
    ("frozen_embedding", "step_weights", "embed.weight is not in the optimizer"),
    ("random_teacher", "teacher_knows_text", "guessing at random"),
]
"""What is said of a defect, and by which check."""


@pytest.mark.parametrize(
    "one",
    [
        # That its check fails is seen below of those of which it is said how.
        pytest.param(d, id=d.id, marks=[pytest.mark.soak] if d.id in {s[0] for s in SAID} else [])
        for d in DEFECTS
        if d.id not in RESUMED
    ],
)
def test_a_planted_defect_is_named(world: World, one: Defect, tmp_path: Path) -> None:
    # a student of the teacher's shape, where the defect is that they are the same
    student = {"hidden_size": 48} if one.id == "identical_teacher" else None
    with one.plant():
        run = make_run(world, student=student, **SETS.get(one.id, {})).begin()
        run.step(2)
        run.save(tmp_path / "checkpoints")
    assert one.named_by in run.failures(), (run.failures(), run.unknowns())
    ends = any(run.checks.ends_run(result) for result in run.results.values())
    assert ends and (run.checks.ends_run(run.results[one.named_by]) or one.id == "ends_masked")


@pytest.mark.parametrize(("name", "check", "text"), SAID)
def test_a_failure_says_what_it_saw(world: World, name: str, check: str, text: str) -> None:
    others = ", ".join(about.id for about in CATALOGUE if about.id != check)
    with planted(name).plant():
        run = make_run(world, checks__skip=others, **SETS.get(name, {})).begin()
        run.step(1)
    assert text in run.failures()[check]


def test_every_defect_is_undone(world: World) -> None:
    for one in DEFECTS:
        with one.plant():
            pass
    run = make_run(world).begin()
    run.step(1)
    assert run.failures() == {}


def test_defects_say_where_they_happened_and_who_names_them() -> None:
    assert len({d.id for d in DEFECTS}) == len(DEFECTS)
    for one in DEFECTS:
        assert one.what and one.happened and one.named_by in ABOUT


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
    again.context = context(world, again.spec, again.trainer, resumed=keeper.resumed)
    return again


def test_a_sound_resume_raises_nothing(world: World, tmp_path: Path) -> None:
    run = resumed(world, tmp_path).begin()
    run.step(2)
    assert run.trainer.step == 5 and run.failures() == {}
    assert run.results["resume_continues"].numbers["updates_max"] == 3


@pytest.mark.parametrize("name", RESUMED)
def test_a_poisoned_resume_is_named(world: World, name: str, tmp_path: Path) -> None:
    lost = planted(name)
    with lost.plant():
        run = resumed(world, tmp_path).begin()
    assert lost.named_by in run.failures()
