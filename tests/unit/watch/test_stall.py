"""Stalls: how long a run may be silent in what it does, and what is said when it is silent longer."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from engine.log.events import (
    CheckpointSaved,
    DecisionMade,
    Evaluated,
    Note,
    Phase,
    RunFinished,
    StackDump,
    TrainerStarted,
)
from engine.log.view import RunView
from engine.watch.rules import stall
from engine.watch.rules.rule import Case
from engine.watch.rules.stall import silence
from tests.support.diagnosing import START, Log, at, quiet, raised, spec, unknown
from tests.support.judged import numbers_of
from tests.support.run_events import example_of, fold_events, opened

BOTH = ("stalled", "stalled_at_start")


def silent(seconds: float, count: int = 30, every_s: float = 0.5, **fields: object) -> Log:
    return Log(count=count, every_s=every_s, silent_s=seconds, **fields)  # type: ignore[arg-type]


def test_no_step_for_much_longer_than_usual_is_a_stall() -> None:
    alert = raised("stalled", silent(stall.LEAST_S + 1).case())
    assert "no step after step 30 for 31.0 s in training" in alert.text
    quiet("stalled", silent(stall.LEAST_S - 1).case())


def test_slow_steps_may_be_silent_for_longer() -> None:
    quiet("stalled", silent(99.0, every_s=20.0).case())
    raised("stalled", silent(101.0, every_s=20.0).case())


def test_a_long_evaluation_and_checkpoint_count() -> None:
    done = [
        (20.0, Evaluated(step=1, subject="student", loss=1.0, labelled=1, eval_s=20.0)),
        (21.0, example_of(CheckpointSaved, save_s=10.0)),
    ]
    quiet("stalled", silent(89.0, extra=done).case())
    raised("stalled", silent(91.0, extra=done).case())


def test_a_limit_that_was_set_is_the_limit() -> None:
    settings = spec(watch__stall_seconds=7)
    raised("stalled", silent(8.0, settings=settings).case())
    quiet("stalled", silent(6.0, settings=settings).case())


def test_before_the_first_step_the_phase_is_named() -> None:
    alert = raised("stalled_at_start", silent(stall.FIRST_STEP_S + 1, count=0).case())
    assert "in training" in alert.text
    quiet("stalled_at_start", silent(stall.FIRST_STEP_S - 1, count=0).case())
    unknown("stalled", silent(99.0, count=0).case(), "see stalled_at_start")
    quiet("stalled_at_start", silent(99.0).case())


@pytest.mark.parametrize(
    ("phase", "limit_s"), [*stall.PHASE_S.items(), ("folding paper", stall.OTHER_PHASE_S)]
)
def test_each_phase_has_its_own_limit(phase: str, limit_s: float) -> None:
    log = silent(limit_s + 1, count=0)
    log.extra = [(20.0, Phase(name=f"{phase} x", detail="/data"))]
    assert f"{phase} x (/data)" in raised("stalled_at_start", log.case()).text
    log.silent_s = limit_s - 1
    quiet("stalled_at_start", log.case())


def test_a_checkpoint_has_its_own_limit_and_the_step_after_it_that_of_a_step() -> None:
    log = silent(0.0)
    log.extra = [(25.2, Phase(name="saving a checkpoint"))]
    log.silent_s = stall.LEAST_S + 1
    quiet("stalled", log.case())
    log.silent_s = stall.PHASE_S["saving"] + 1
    assert "in saving a checkpoint" in raised("stalled", log.case()).text
    log.extra = [(20.2, Phase(name="saving a checkpoint"))]
    log.silent_s = stall.LEAST_S + 1
    assert "in training" in raised("stalled", log.case()).text


def test_a_first_evaluation_that_hangs_is_at_the_start() -> None:
    """It comes before the phase of training, after the run has said what it will do."""
    log = silent(stall.FIRST_STEP_S + 1, count=0)
    view = log.view()
    begun = view.started_unix_s
    assert begun is not None
    earlier = dataclasses.replace(
        view, phase=Phase(name="making the student"), phase_unix_s=begun - 4
    )
    raised("stalled_at_start", dataclasses.replace(log.case(), view=earlier))


def test_a_note_is_no_heartbeat_and_any_other_line_is() -> None:
    log = silent(0.0)
    log.extra = [(log.last_s + 31, Note(level="info", text="a thread that only watches"))]
    assert log.case().view.heartbeat_unix_s == START + 25
    raised("stalled", log.case())
    log.extra = [(56.0, DecisionMade(knob="a.b", choice="c", reason="d"))]
    quiet("stalled", log.case())


def test_a_trainer_that_never_wrote_a_line_is_silent_since_it_was_started() -> None:
    view = fold_events(
        RunView(),
        "watch",
        [opened(START), at(TrainerStarted(trainer_pid=1, supervisor_pid=2), 1.0)],
    )  # type: ignore[list-item]
    case = Case(view=view, settings=None, now_unix_s=START + 1 + stall.FIRST_LINE_S + 1)
    assert "in starting" in raised("stalled_at_start", case).text
    quiet("stalled_at_start", dataclasses.replace(case, now_unix_s=START + stall.FIRST_LINE_S))
    nothing = Case(view=RunView(), settings=None, now_unix_s=START)
    unknown("stalled_at_start", nothing, "no trainer was started")


def test_a_run_that_ended_is_not_stalled() -> None:
    log = silent(9999.0)
    log.extra = [(26.0, RunFinished(state="completed", reason="r", exit_code=0, step=30))]
    unknown("stalled", log.case(), "has ended")


def test_a_resumed_run_is_not_silent_since_its_last_session() -> None:
    log = silent(0.0)
    hour = 3600.0
    view = fold_events(
        log.view(),
        "watch",
        [opened(START + hour), at(TrainerStarted(trainer_pid=1, supervisor_pid=2), 0.5)],  # type: ignore[list-item]
    )
    assert view.heartbeat_unix_s is None
    case = dataclasses.replace(log.case(), view=view, now_unix_s=START + hour + 3)
    assert silence(case).silent_s == pytest.approx(2.5)


DUMP = StackDump(
    path="stacks/5.txt",
    state="computing",
    summary="the main thread is computing (99 % CPU)",
    python_frame="/x/engine/models/decoder.py:88 in norm",
    native_frame="mkl_blas",
    python_stack=[
        "/x/engine/models/decoder.py:88 in norm",
        "/x/engine/teachers/frozen.py:9 in f",
    ],
)


def test_the_alert_names_the_line_and_the_flip_when_it_is_the_teacher() -> None:
    log = silent(40.0)
    log.extra = [(7.0, DecisionMade(knob="teacher.backend", choice="quantized", reason="r"))]
    case = log.case()
    clock = [opened(START), at(DUMP, log.last_s + 35)]
    seen = dataclasses.replace(case, view=fold_events(case.view, "watch", clock))  # type: ignore[arg-type]
    alert = raised("stalled", seen)
    assert "decoder.py:88 in norm (mkl_blas)" in alert.text and "stacks/5.txt" in alert.meaning
    assert alert.flip == "--set teacher.backend=dequantized"
    # Stacks of an earlier silence say nothing of this one.
    old = [opened(START), at(DUMP, log.last_s - 5)]
    blind = dataclasses.replace(case, view=fold_events(case.view, "watch", old))  # type: ignore[arg-type]
    assert "not taken" in raised("stalled", blind).meaning


@pytest.mark.parametrize(
    ("python", "native", "words"),
    [
        ("/x/torch/cuda/streams.py:254 in synchronize", "", "waiting for the GPU at "),
        ("/x/trainer.py:9 in item", "cuStreamSynchronize (libcuda.so.580)", "waiting for the GPU"),
        ("/x/trainer.py:9 in synchronize_clocks", "cublasCreate (libcublas.so)", "computing at"),
    ],
)
def test_a_wait_for_the_gpu_is_told_from_work(python: str, native: str, words: str) -> None:
    log = silent(40.0)
    dump = msgspec.structs.replace(
        DUMP, python_frame=python, native_frame=native, python_stack=[python]
    )
    clock = [opened(START), at(dump, log.last_s + 35)]
    case = log.case()
    seen = dataclasses.replace(case, view=fold_events(case.view, "watch", clock))  # type: ignore[arg-type]
    assert words in raised("stalled", seen).text


def test_gpu_and_cpu_are_told_with_a_stall() -> None:
    log = silent(
        40.0, gpu=lambda _: {"gpu_util_pct": 0.0}, host=lambda _: {"trainer_cpu_pct": 1320.0}
    )
    numbers = {name: value for name, value, _ in numbers_of(raised("stalled", log.case()))}
    assert numbers["trainer_cpu_pct"] == 1320.0 and numbers["gpu_util_pct"] == 0.0
