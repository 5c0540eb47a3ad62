"""The training loop of a real run: in which order steps are launched, finished, logged and stopped, and what an
observer sees of them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint_folders import published, step_of
from engine.log.events import HOST_PARTS, Judged, RunFinished, StepDone
from engine.log.fold import Follower
from engine.log.folder import create_run
from engine.log.read import LogReader
from engine.spec import load_spec
from engine.train import loop
from engine.train import run as trainer_module
from engine.train.checkpoint import manifest
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.stop_request import StopRequest
from engine.train.trainer import Trainer
from tests.support.finished_runs import carried_out, carry_out
from tests.support.kit import Kit
from tests.support.trainers import TRAIN, build, run_ahead

STEPS = 8


def order_of(kit: Kit, folder: Path, *, stop_in: int = 0, **settings: Any) -> list[str]:
    """Run in a process of its own, and return which steps it launched and finished, in order. It is asked to stop
    while it finishes step `stop_in`."""
    plain: dict[str, Any] = {"train__steps": STEPS, "checks__enabled": False}
    plain |= {"eval__every": 0, "checkpoint__every": 0}
    spec, text = load_spec(kit.spec(folder, **(plain | settings)), [])
    run = folder / "run"
    create_run(run, text, {"spec": spec.to_dict(), "spec_sha256": spec.sha256})

    def work() -> None:
        order: list[str] = []
        stop: list[StopRequest] = []
        launch, finish, begin = Trainer.launch, Trainer.finish, StopRequest.steps_begin

        def launched(self: Trainer, *before: Any) -> Any:
            order.append(f"launch {self.step + 1}")
            return launch(self, *before)

        def finished(self: Trainer, step: Any) -> Any:
            order.append(f"finish {step.step}")
            if step.step == stop_in:
                stop[0]._request("asked", 143)
            return finish(self, step)

        def begun(self: StopRequest) -> None:
            stop.append(self)
            begin(self)

        Trainer.launch, Trainer.finish = launched, finished  # type: ignore[method-assign]
        StopRequest.steps_begin = begun  # type: ignore[method-assign]
        code = trainer_module.run(run, resume=False, allow_fallback=False, keep_alive_fd=None)
        (folder / "order.json").write_text(json.dumps(order))
        sys.exit(code)

    # A fork has torch already, and may change signal handlers.
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == (143 if stop_in else 0)
    found: list[str] = json.loads((folder / "order.json").read_text())
    return found


def pairs(first: int, last: int) -> list[str]:
    return [f"{word} {n}" for n in range(first, last + 1) for word in ("launch", "finish")]


AHEAD_FROM_4 = [*pairs(1, 3), *("launch 4", "launch 5", "finish 4", "launch 6", "finish 5")]


def test_a_step_is_launched_before_the_one_before_it_is_read_once_memory_has_settled(
    kit: Kit, tmp_path: Path
) -> None:
    rest = ["launch 7", "finish 6", "launch 8", "finish 7", "finish 8"]
    assert order_of(kit, tmp_path) == [*AHEAD_FROM_4, *rest]


def test_a_step_that_is_saved_or_evaluated_is_finished_first(kit: Kit, tmp_path: Path) -> None:
    rest = ["finish 6", "launch 7", "launch 8", "finish 7", "finish 8"]
    assert order_of(kit, tmp_path, checkpoint__every=6) == [*AHEAD_FROM_4, *rest]


def test_a_control_that_waits_never_runs_ahead(kit: Kit, tmp_path: Path) -> None:
    assert order_of(kit, tmp_path, compute__slow_by=0.01) == pairs(1, STEPS)


def test_a_run_that_is_asked_to_stop_finishes_what_it_launched_and_saves_it(
    kit: Kit, tmp_path: Path
) -> None:
    assert order_of(kit, tmp_path, stop_in=5) == [*AHEAD_FROM_4, "finish 6"]
    events = LogReader(tmp_path / "run" / "events.jsonl").poll()
    assert [e.step for e in events if isinstance(e, StepDone)] == [1, 2, 3, 4, 5, 6]
    (last,) = [e for e in events if isinstance(e, RunFinished)]
    assert (last.state, last.step) == ("stopped", 6)
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


class Recorder(StepObserver):
    """Copies what it sees of each step."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.points: list[str] = []
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.rows: list[Any] = []

    def weights(self) -> dict[str, Tensor]:
        assert self.trainer is not None
        return {n: p.detach().clone() for n, p in self.trainer.student.named_parameters()}

    def begun(self, step: int) -> None:
        self.points.append(f"begun {step}")
        self.copies[f"before {step}"] = self.weights()

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        self.points.append("forwarded")
        assert teacher.hidden_NE is not None
        self.rows.append((micro, student_hidden_BTD.detach().clone(), teacher.hidden_NE.clone()))

    def gradients(self, step: int) -> None:
        self.points.append(f"gradients {step}")
        assert self.trainer is not None
        named = self.trainer.student.named_parameters()
        self.copies[f"gradients {step}"] = {n: p.grad.clone() for n, p in named}

    def updated(self, step: int) -> None:
        self.points.append(f"updated {step}")
        self.copies[f"after {step}"] = self.weights()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_observer_sees_the_step_that_trains_and_changes_nothing(kit: Kit, ahead: bool) -> None:
    train = dataclasses.replace(TRAIN, steps=3, rows=2, accumulation=2)
    plain, trainer, seen = build(kit, train), build(kit, train), Recorder()
    seen.trainer, trainer.observers = trainer, (seen,)
    numbers = [
        [(s.loss, s.grad_norm, s.position) for s in run_ahead(one, lambda step: ahead)]
        for one in (plain, trainer)
    ]
    assert numbers[0] == numbers[1]
    wanted = [
        [f"begun {n}", "forwarded", "forwarded", f"gradients {n}", f"updated {n}"]
        for n in (1, 2, 3)
    ]
    assert seen.points == [point for step in wanted for point in step]
    # Two observations of the same weights, one by each neighbour.
    for n in (1, 2):
        after, before = seen.copies[f"after {n}"], seen.copies[f"before {n + 1}"]
        assert all(torch.equal(after[name], before[name]) for name in after)
        assert any(not torch.equal(after[k], seen.copies[f"before {n}"][k]) for k in after)
    for n, (_, norm, _) in enumerate(numbers[1], start=1):
        grads = seen.copies[f"gradients {n}"].values()
        assert float(torch.nn.utils.get_total_norm(list(grads))) == pytest.approx(norm, rel=1e-6)
    micro, hidden_BTD, teacher_NE = seen.rows[0]
    assert micro.position == 0 and hidden_BTD.shape[:2] == micro.tokens_BT.shape
    assert len(teacher_NE) == micro.tokens_BT.numel()
    again = build(kit, train).student.hidden(micro.tokens_BT, micro.documents_BT)
    assert torch.equal(again, hidden_BTD)


def test_the_time_between_two_step_lines_is_divided_among_what_the_host_did(
    kit: Kit, tmp_path: Path
) -> None:
    run, code = carried_out(kit, tmp_path, eval__every=2, checkpoint__every=3, train__steps=8)
    assert code == 0
    steps = [e for e in LogReader(run.events).poll(1 << 30) if isinstance(e, StepDone)]
    for step in steps:
        assert set(step.host) <= set(HOST_PARTS) and min(step.host.values()) >= 0
        assert step.wall_s == pytest.approx(sum(step.host.values()))
        assert ("evaluate" in step.host) == (step.step in (2, 3, 4, 5, 7))
        assert ("save" in step.host) == (step.step in (4, 7))
    first, *others = steps
    lasted = sum(step.wall_s or 0.0 for step in others)
    # Threads of others may come between the two clocks of a line, once or twice.
    assert lasted == pytest.approx(others[-1].t_s - first.t_s, abs=0.5)


def test_a_large_checkpoint_is_read_back_while_the_run_goes_on(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "READ_IN_BACKGROUND_BYTES", 0)
    sets = ("train.steps=6", "checkpoint.every=2", "checkpoint.keep_last=1")
    run, code = carry_out(kit.spec(tmp_path), tmp_path / "run", *sets)
    view = Follower(run).read_all()
    read = [
        (line.event.step, line.event.level)
        for line in view.lines
        if isinstance(line.event, Judged) and line.event.id == "checkpoint_reloads"
    ]
    assert code == 0 and read == [(2, "pass"), (4, "pass"), (6, "pass")]
    best = next(one.step for one in reversed(view.checkpoints) if one.best)
    assert {step_of(path) for path in published(run.checkpoints)} == {6, best}


def test_a_large_checkpoint_that_cannot_be_resumed_from_ends_the_run(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "READ_IN_BACKGROUND_BYTES", 0)
    monkeypatch.setattr(manifest, "digest_of", lambda path: (path.stat().st_size, "0" * 64))
    run, code = carry_out(kit.spec(tmp_path), tmp_path / "run", "train.steps=6")
    view = Follower(run).read_all()
    assert code == 1 and view.checks["checkpoint_reloads"].level == "fail"
    assert view.finished is not None and "checkpoint_reloads" in view.finished.reason
