"""Steps that are audited while a run trains: what begins late is named, on the same steps in every session."""

from __future__ import annotations

import pytest

from engine.catalogue import STAGES
from engine.log.events import Judged
from engine.log.text import audit_text, check_lines
from engine.log.view import RunView
from engine.train import to_events
from engine.train.auditing import is_due
from tests.support.checked_runs import World, make_run, make_spec, make_world
from tests.support.defects import DEFECTS
from tests.support.judged import check_event
from tests.support.kit import Kit
from tests.support.run_events import fold_events, numbered, opened


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", ["last_row_only", "t_squared_missing"])
def test_a_defect_that_begins_during_the_run_is_named(world: World, name: str) -> None:
    run, late = make_run(world, checks__every=5, train__steps=40), DEFECTS[name]
    run.step(6)
    assert run.results[late.named_by].step == 5 and run.failures() == {}
    with late.plant():
        run.step(4)
    assert run.results[late.named_by].step == 10 and late.named_by in run.failures()
    assert run.checks.ends_run(run.results[late.named_by])


def test_the_first_two_steps_of_a_session_and_the_last_of_a_run_are_audited(world: World) -> None:
    def due(after: int = 0, **changes: object) -> list[int]:
        spec = make_spec(world, train__steps=30, **changes)
        return [step for step in range(after + 1, 31) if is_due(spec, step, after=after)]

    assert due() == [1, 2, 30]
    assert due(after=6) == [7, 8, 30]
    assert due(checks__every=10) == [1, 2, 10, 20, 30]
    assert due(checks__every=-1) == [1, 30]
    assert due(checks__enabled=False) == []


def test_what_asking_again_took_is_told_with_the_answers() -> None:
    def answer(id: str, step: int, level: str = "pass") -> Judged:
        return check_event(id=id, level=level, text="r", cost_s=0.5, step=step)

    first = [answer("step_loss", 1), answer("step_rows", 1)]
    again = [answer("step_loss", 20), answer("step_rows", 20, "fail")]
    view = fold_events(RunView(), "events", numbered([opened(1.0), *first]))
    assert check_lines(view)[0] == "2 pass, 0 unknown, 0 fail; they took 1.0 s"
    view = fold_events(RunView(), "events", numbered([opened(1.0), *first, *again]))
    head, audited, worst, _ = check_lines(view)
    assert audited == "audited: steps 1, 20; stages 2 of 2"
    assert head == "1 pass, 0 unknown, 1 fail; they took 1.0 s"
    assert worst.startswith("x FAIL step_rows")


def test_a_stage_that_is_skipped_is_not_judged(world: World) -> None:
    run = make_run(world, checks__skip="step_teacher")
    run.step(1)
    assert run.results.keys() == {about.id for about in STAGES} - {"step_teacher"}


def test_how_much_of_a_run_was_audited_is_told(world: World) -> None:
    run = make_run(world, checks__every=2)
    said: list[Judged] = []
    for _ in range(5):
        before = dict(run.results)
        run.step(1)
        new = [result for id, result in run.results.items() if before.get(id) is not result]
        said += [to_events.checked(result) for result in new]
    view = fold_events(RunView(), "events", numbered([opened(1.0), *said]))
    assert view.audited_steps == (1, 2, 4)
    assert audit_text(view) == (
        "audited: steps 1, 2, 4; stages 5 of 5; positions 192 of 192; parameters 100 %"
    )
