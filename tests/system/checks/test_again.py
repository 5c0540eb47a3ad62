"""Checks that are asked again while a run trains: what begins late is named, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import engine.checks.runner as runner
from engine.checks.catalogue import CATALOGUE
from engine.checks.check import Result, unknown
from engine.checks.runner import SHARE, Again
from engine.drills import defects_late
from engine.drills.catalogue import planted
from engine.drills.defects_training import defect
from engine.errors import SpecError
from engine.log.events import Checked
from engine.log.text import check_lines
from engine.log.view import RunView
from engine.spec import build_spec
from tests.support.checked_runs import Run, World, make_run, make_spec, make_world
from tests.support.kit import Kit
from tests.support.run_events import fold_events, numbered, opened

AGAIN = [about.id for about in CATALOGUE if about.again]
OTHERS = ", ".join(about.id for about in CATALOGUE if not about.again)


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


@dataclasses.dataclass
class Kept(Run):
    """A run that keeps every answer after the first step, and not the newest of each check alone."""

    said: list[tuple[int, str, bool]] = dataclasses.field(default_factory=list)

    def answer(self, results: Iterator[Result]) -> None:
        for result in results:
            self.results[result.id] = result
            if result.step:
                self.said.append((result.step, result.id, result.failed))


def kept(world: World, **changes: object) -> Kept:
    run = make_run(world, **{"checks__skip": OTHERS} | changes)  # type: ignore[arg-type]
    return Kept(run.spec, run.trainer, run.context, run.checks, run.results)


def asked(run: Kept) -> list[tuple[int, str]]:
    return [(step, id) for step, id, _ in run.said if id in AGAIN]


@pytest.mark.parametrize("name", ["rows_dropped_later", "gradient_scaled_later"])
def test_a_defect_that_begins_during_the_run_is_named(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defects_late, "LATE", 5)
    late = planted(name)
    run = kept(world, checks__every=2, train__steps=40)
    with late.plant():
        run.begin()
        run.step(6)
    asked_of = [(step, failed) for step, id, failed in run.said if id == late.named_by]
    assert asked_of == [(2, False), (4, False), (6, True)]
    assert run.checks.ends_run(run.results[late.named_by])


def test_a_loss_that_is_another_one_from_step_6_on_is_named(world: World) -> None:
    run = kept(world, checks__every=5, train__steps=40)
    run.begin()
    run.step(6)
    with defect("t_squared_missing").plant():
        run.step(4)
    said = [(step, failed) for step, id, failed in run.said if id == "loss_gradient"]
    assert said == [(5, False), (10, True)]


def test_asking_again_changes_no_bit_of_the_run(world: World) -> None:
    runs = [kept(world, checks__every=every, train__steps=6) for every in (-1, 1)]
    for run in runs:
        run.begin()
    numbers = [[(s.loss, s.grad_norm, s.position) for s in run.step(6)] for run in runs]
    assert numbers[0] == numbers[1]
    pairs = zip(*(run.trainer.student.parameters() for run in runs), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert runs[1].failures() == {} and runs[1].results["loss_gradient"].step == 6


def test_they_are_asked_after_every_nth_step_of_a_healthy_run_and_hold(world: World) -> None:
    run = kept(world, checks__every=5, train__steps=30)
    run.begin()
    run.step(12)
    assert asked(run) == [(step, id) for step in (5, 10) for id in AGAIN]
    assert not any(failed for *_, failed in run.said)


def test_the_first_minute_is_as_it_was(world: World) -> None:
    never, always = (kept(world, checks__every=n, checks__skip="") for n in (-1, 1))
    first = {}
    for run in (never, always):
        run.begin()
        first[run.spec.checks.every] = {n: str(r.verdict) for n, r in run.results.items()}
    assert first[-1] == first[1]
    never.step(12)
    assert asked(never) == []
    always.step(3)
    times = Counter(id for _, id, _ in always.said)
    assert {id for id, count in times.items() if count > 1} == set(AGAIN)


def test_a_check_that_is_skipped_or_could_not_tell_is_not_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kept(world, checks__every=1, checks__skip=f"{OTHERS}, loss_gradient, rows_in_update")
    run.begin()
    run.step(2)
    assert {id for _, id in asked(run)} == set(AGAIN) - {"loss_gradient", "rows_in_update"}
    monkeypatch.setitem(runner.AT_ONCE, "loss_gradient", lambda _: unknown("no label"))
    run = kept(world, checks__every=1)
    run.begin()
    run.step(2)
    assert {id for _, id in asked(run)} == set(AGAIN) - {"loss_gradient"}
    run = kept(world, checks__every=1, checks__enabled=False)
    run.begin()
    run.step(2)
    assert asked(run) == []


def test_no_step_is_launched_early_where_its_weights_will_be_asked(world: World) -> None:
    run = kept(world, checks__every=6)
    run.begin()
    run.step(4)
    looks = []
    steps = run.trainer.steps()
    for _ in range(4):
        looks.append(run.checks.looks_at_weights)
        run.answer(run.checks.after_step(next(steps)))
    # Asked when step 5, 6, 7, 8 is launched.
    assert looks == [False, True, False, False]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_by_itself_it_takes_no_more_than_its_share_of_the_time(world: World) -> None:
    clock = Clock()
    again = Again(make_spec(world), "cpu", clock=clock)
    again.expects(0.3)
    spent_s, asked_at = 0.0, []
    for step in range(1, 2001):
        clock.now_s += 0.1
        if again.after == step:
            clock.now_s += 0.3
            spent_s += 0.3
            again.spent(0.3)
            asked_at.append(step)
        again.decide(step)
    assert len(asked_at) == 3 and asked_at[0] >= 600
    assert spent_s <= SHARE * clock.now_s


def test_what_asking_again_took_is_told_with_the_answers() -> None:
    def answer(id: str, step: int, level: str = "pass") -> Checked:
        return Checked(id=id, level=level, reason="r", cost_s=0.5, step=step)

    first = [answer("loss_gradient", 0), answer("rows_in_update", 0)]
    again = [answer("loss_gradient", 20), answer("rows_in_update", 20, "fail")]
    view = fold_events(RunView(), "events", numbered([opened(1.0), *first]))
    assert check_lines(view)[0] == "2 pass, 0 unknown, 0 fail; they took 1.0 s"
    view = fold_events(RunView(), "events", numbered([opened(1.0), *first, *again]))
    head, worst, _ = check_lines(view)
    assert head == "1 pass, 0 unknown, 1 fail; they took 1.0 s; 2 repeated answers took 1.0 s"
    assert worst.startswith("x FAIL rows_in_update")
    # Of another session nothing was asked again.
    resumed = fold_events(view, "events", numbered([opened(9.0), *first]))
    assert resumed.checked_again == (0, 0.0)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 1), ("cpu", 2)])
def test_by_itself_it_leaves_gpus_and_several_processes_alone(
    world: World, device: str, gpus: int
) -> None:
    clock = Clock()
    again = Again(make_spec(world, compute__gpus=gpus, compute__device="auto"), device, clock=clock)
    for step in range(1, 50):
        clock.now_s += 1000.0
        again.decide(step)
    assert again.after is None


def test_a_number_of_steps_with_several_gpus_is_refused() -> None:
    values = {
        "student": {"config": "s"},
        "loss": {"alpha": 1.0},
        "compute": {"gpus": 2, "device": "cuda"},
        "checks": {"every": 10},
    }
    with pytest.raises(SpecError, match=r"checks\.every: expected 0 or -1 with 2 GPUs"):
        build_spec(values, check_paths=False)
