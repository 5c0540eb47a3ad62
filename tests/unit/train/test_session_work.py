"""What a session does beside its steps: its clocks, its threads, and what it logs on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.log.events import Evaluated, Phase
from engine.train import loop as loops
from engine.train import step as steps
from engine.train.background import Background
from engine.train.data import _Progress
from engine.train.loop import TrainingLoop
from engine.train.step import HostTime


class Clock:
    """Moves when it is told to; the CPU does nothing meanwhile."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return 7.0


def test_after_a_part_within_another_the_outer_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    host = HostTime()
    with host.measure("outer"):
        clock.now_s += 1
        with host.measure("inner"):
            clock.now_s += 2
        clock.now_s += 4
    clock.now_s += 8
    assert host.take() == {"outer": 5, "inner": 2, "rest": 8}
    assert host.take() == {"rest": 0}


def test_eval_s_is_the_time_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, logged = Clock(), []

    def evaluated(*_: Any, **__: Any) -> tuple[float, int]:
        clock.now_s += 3
        return 1.5, 40

    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(loops, "heldout_loss", evaluated)
    loop: Any = SimpleNamespace(
        log=logged.append,
        data=SimpleNamespace(heldout=[]),
        heldout_losses={"student": 2.5},
        _progress=lambda of: lambda number: None,
        _sample=lambda *_: ("", ""),
    )
    trainer: Any = SimpleNamespace(step=6, device=torch.device("cpu"), autocast=None)
    TrainingLoop.evaluate(loop, "student", lambda *_: None, None, trainer)  # type: ignore[arg-type, return-value]
    (made,) = [one for one in logged if isinstance(one, Evaluated)]
    assert (made.step, made.loss, made.labelled, made.eval_s) == (6, 1.5, 40, 3)
    assert loop.heldout_losses == {"student": 1.5}


def test_what_waits_for_a_thread_does_not_poll_it() -> None:
    beside = Background(lambda: 5, "five")
    assert beside.result() == 5
    joined: list[bool] = []
    beside._thread = SimpleNamespace(join=lambda: joined.append(True))  # type: ignore[assignment]
    beside.wait()
    assert joined == [True]


def test_progress_on_the_corpus_is_not_logged_for_every_document() -> None:
    logged: list[Any] = []
    say = _Progress(logged.append, "corpus")
    for done in range(1000):
        say("tokenizing", done, 1000)
    phases = [one.name for one in logged if isinstance(one, Phase)]
    assert phases[:2] == ["reading the corpus", "tokenizing"] and len(phases) < 10
