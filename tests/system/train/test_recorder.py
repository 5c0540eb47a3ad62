"""What is recorded of real steps for a replay: numbers of the models that trained, the same at the same step."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.log.events import Recorded
from engine.train.recorder import FIRST_STEPS, Recorder
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer
from tests.support.checked_runs import World, make_run, make_world
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


class Clock:
    """A clock on which no time passes by itself."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Seen(StepObserver):
    """Keeps the hidden states and gradients of the newest step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.gradients_by_name: dict[str, torch.Tensor] = {}
        trainer.observers = (*trainer.observers, self)

    def begun(self, step: int) -> None:
        self.hidden = []

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: torch.Tensor, teacher: TeacherOutput
    ) -> None:
        assert teacher.hidden_NE is not None
        student_ND = student_hidden_BTD.detach().flatten(0, 1).clone()
        self.hidden.append((student_ND, teacher.hidden_NE.clone()))

    def gradients(self, step: int) -> None:
        named = self._trainer.student.named_parameters()
        self.gradients_by_name = {n: p.grad.clone() for n, p in named if p.grad is not None}


def test_recorded_numbers_are_those_of_the_step_at_the_place_that_is_said(world: World) -> None:
    run = make_run(world, train__accumulation=2)
    trainer = run.trainer
    recorder, seen = Recorder(trainer, run.spec), Seen(trainer)
    tensors, micro_batches = set(), set()
    for step in range(1, 9):
        trainer.finish(trainer.launch())
        (found,) = recorder.take(step)
        student_ND, teacher_NE = seen.hidden[found.micro_batch]
        parameter = dict(trainer.student.named_parameters())[found.tensor]
        state = trainer.optimizer.state[parameter]

        def some(tensor: torch.Tensor, first: int = found.first) -> list[float]:
            return tensor.detach().flatten()[first : first + 4].tolist()

        assert found.student == student_ND[found.token, :4].tolist()
        assert found.teacher == teacher_NE[found.token, :4].tolist()
        assert found.gradient == some(seen.gradients_by_name[found.tensor])
        assert found.mean == some(state["exp_avg"]) and found.square == some(state["exp_avg_sq"])
        assert found.weight == some(parameter)
        tensors.add(found.tensor)
        micro_batches.add(found.micro_batch)
    assert len(tensors) > 4 and micro_batches == {0, 1}


def test_a_replay_records_the_same_places(world: World) -> None:
    def places(steps: int) -> list[tuple[int, int, str, int]]:
        run = make_run(world)
        recorder, found = Recorder(run.trainer, run.spec), []
        for step in range(1, steps + 1):
            run.trainer.finish(run.trainer.launch())
            found += recorder.take(step)
        return [(one.micro_batch, one.token, one.tensor, one.first) for one in found]

    assert places(3) == places(5)[:3]


def recorded_steps(world: World, clock: Clock, steps: int, each_s: float, record: str) -> list[int]:
    run = make_run(world, train__steps=steps, train__rows=1, checks__record=record)
    recorder, found = Recorder(run.trainer, run.spec, clock), list[Recorded]()
    for step in range(1, steps + 1):
        run.trainer.finish(run.trainer.launch())
        clock.now_s += each_s
        found += recorder.take(step)
    return [one.step for one in found]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("some", [*range(1, FIRST_STEPS + 1), 36, 40]),
        ("all", list(range(1, 42))),
        ("off", []),
    ],
)
def test_the_first_steps_are_recorded_and_then_one_a_second(
    world: World, record: str, expected: list[int]
) -> None:
    assert recorded_steps(world, Clock(), 41, 0.25, record) == expected


def test_a_step_that_was_launched_ahead_has_its_own_numbers(world: World) -> None:
    one, other = make_run(world), make_run(world)
    ahead, alone = Recorder(one.trainer, one.spec), Recorder(other.trainer, other.spec)
    launched = one.trainer.launch()
    for step, next_one in enumerate(itertools.repeat(one.trainer.launch, 3), 1):
        following = next_one(launched)
        one.trainer.finish(launched)
        other.trainer.finish(other.trainer.launch())
        assert list(ahead.take(step)) == list(alone.take(step))
        launched = following
