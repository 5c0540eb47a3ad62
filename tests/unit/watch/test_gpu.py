"""Rules about the GPU: each on a run that has the fault, one just below it, and one without the input."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from engine.log.events import DecisionMade, Phase, RunFinished, StackDump
from engine.log.view import RunView
from engine.watch.rules.gpu import (
    CPU_PCT,
    IDLE_PCT,
    SLOWED_SHARE,
    TEACHER_SHARE,
)
from engine.watch.rules.rule import Case
from tests.support.diagnosing import Log, at, quiet, raised, unknown
from tests.support.judged import numbers_of
from tests.support.run_events import fold_events

WORKING: dict[str, Any] = {
    "gpu_util_pct": 95.0,
    "gpu_power_w": 500.0,
    "gpu_power_limit_w": 700.0,
    "tensor_util_pct": 30.0,
    "clock_event_reasons": "none",
}


def gpu(steps: int = 80, **changes: Any) -> Log:
    """Forty seconds of work with these readings."""
    cpu = changes.pop("cpu", 100.0)
    return Log(
        count=steps,
        gpu=lambda _: WORKING | changes,
        host=lambda _: {"trainer_cpu_pct": cpu},
    )


def test_an_idle_gpu_during_steps_is_named_with_the_flip_of_the_backend() -> None:
    log = gpu(gpu_util_pct=IDLE_PCT)
    log.extra = [(7.0, DecisionMade(knob="teacher.backend", choice="quantized", reason="r"))]
    alert = raised("gpu_idle", log.case())
    assert alert.flip == "--set teacher.backend=dequantized"
    assert numbers_of(alert)[0][1] == IDLE_PCT
    quiet("gpu_idle", gpu(gpu_util_pct=IDLE_PCT + 0.1).case())


def test_an_idle_gpu_at_step_zero_is_named_before_any_step() -> None:
    log = gpu(steps=0, gpu_util_pct=0.0)
    log.silent_s = 31.0
    assert "step 1 should be computed" in raised("gpu_idle", log.case()).text
    log.silent_s = 29.0
    unknown("gpu_idle", log.case(), "30 s of work")


def measuring(device: str, *, silent_s: float = 40.0, phase: str = "measuring the cut") -> Case:
    """A run that has loaded its teacher and asks it something, before it has said what it will do."""
    log = gpu(steps=0, gpu_util_pct=0.0, cpu=400.0)
    log.silent_s = silent_s
    logs = log.logs()
    decided = [
        DecisionMade(knob="compute.device", choice=device, reason="r"),
        DecisionMade(knob="teacher.backend", choice="quantized", reason="r"),
    ]
    begun = [at(event, 2.0) for event in decided] + [at(Phase(name=phase), 10.0)]
    view = fold_events(RunView(), "events", [logs["events"][0], *begun])  # type: ignore[list-item]
    for source in ("device", "watch"):
        view = fold_events(view, source, logs[source])  # type: ignore[arg-type, index]
    return dataclasses.replace(log.case(), view=view)


def test_an_idle_gpu_is_named_before_the_run_has_said_what_it_will_do() -> None:
    alert = raised("gpu_idle", measuring("cuda"))
    assert alert.flip == "--set teacher.backend=dequantized"
    unknown("gpu_idle", measuring("cuda", silent_s=29.0), "30 s of work")
    unknown("gpu_idle", measuring("cpu"), "computes on cpu")
    unknown("gpu_idle", measuring("cuda", phase="loading the teacher"), "no model is computing")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (Log(device="cpu", count=80), "computes on cpu"),
        (Log(count=80), "no GPU reading"),
        (
            Log(count=80, gpu=lambda _: {"absent": {"gpu_util_pct": "NVML: Not Supported"}}),
            "Not Supp",
        ),
        (Log(count=80, gpu=lambda t: WORKING if t > 45 else {}), "needs 10 readings"),
    ],
)
def test_without_a_reading_the_reason_is_given(log: Log, words: str) -> None:
    for rule in ("gpu_idle", "cpu_bound_teacher"):
        unknown(rule, log.case(), words)


def test_loading_and_saving_may_leave_the_gpu_idle() -> None:
    log = gpu(gpu_util_pct=0.0)
    log.extra = [(51.0, Phase(name="saving the student")), (95.0, Phase(name="saving the student"))]
    unknown("gpu_idle", log.case(), "no model is computing: saving the student")


def test_a_run_that_has_ended_is_not_idle() -> None:
    log = gpu(gpu_util_pct=0.0)
    log.extra = [(51.0, RunFinished(state="completed", reason="r", exit_code=0, step=80))]
    for rule in ("gpu_idle", "cpu_bound_teacher", "throttled"):
        unknown(rule, log.case(), "has ended")


def test_a_gpu_among_several_is_known_by_the_facts_or_not_at_all() -> None:
    log = gpu(gpu_util_pct=0.0)
    logs = log.logs()
    view = log.view()
    other = [e for e in logs["device"] if getattr(e, "index", None) == 0]
    view = fold_events(view, "device", [msgspec.structs.replace(e, index=1) for e in other])  # type: ignore[misc]
    case = dataclasses.replace(log.case(), view=view)
    raised("gpu_idle", case)
    blind = dataclasses.replace(case, view=dataclasses.replace(view, facts={}))
    unknown("gpu_idle", blind, "which of 2 GPUs")


def teacher_heavy(share: float, *, steps: int = 80, util: float = 1.0, cpu: float = 400.0) -> Log:
    log = gpu(steps, gpu_util_pct=util, cpu=cpu)
    log.change = lambda _: {"step_s": 0.5, "teacher_s": 0.5 * share}
    return log


def test_a_teacher_on_the_cpu_is_named() -> None:
    log = teacher_heavy(TEACHER_SHARE)
    log.extra = [(7.0, DecisionMade(knob="teacher.backend", choice="quantized", reason="r"))]
    alert = raised("cpu_bound_teacher", log.case())
    assert alert.flip == "--set teacher.backend=dequantized" and "quantized" in alert.meaning


@pytest.mark.parametrize(
    "log",
    [
        teacher_heavy(TEACHER_SHARE - 0.02),
        teacher_heavy(0.9, cpu=CPU_PCT - 1),
        teacher_heavy(0.9, util=IDLE_PCT + 1),
    ],
)
def test_a_teacher_that_is_no_burden_is_not_named(log: Log) -> None:
    quiet("cpu_bound_teacher", log.case())


def test_before_the_first_step_the_stacks_tell_whether_it_is_the_teacher() -> None:
    log = teacher_heavy(1.0, steps=0)
    log.silent_s = 40.0
    case = log.case()
    unknown("cpu_bound_teacher", case, "or the stacks")
    for frame, seen in (("engine/teachers/frozen.py", True), ("engine/data/batches.py", False)):
        stack = ["/x/torch/functional.py:3 in norm", f"/x/{frame}:9 in hidden"]
        dump = StackDump(
            path="p", state="s", summary="s", python_frame="f", native_frame="", python_stack=stack
        )
        with_stack = dataclasses.replace(case, view=fold_events(case.view, "watch", [dump]))
        (raised if seen else quiet)("cpu_bound_teacher", with_stack)


def test_a_teacher_on_the_cpu_is_named_with_its_line_where_the_stacks_are_known() -> None:
    case = measuring("cuda")
    dump = StackDump(
        path="stacks/7.txt",
        state="computing",
        summary="s",
        python_frame="/x/softmax.py:66 in attend",
        native_frame="",
        python_stack=["/x/softmax.py:66 in attend", "/x/engine/teachers/frozen.py:47 in hidden"],
    )
    case = dataclasses.replace(case, view=fold_events(case.view, "watch", [dump]))
    alert = raised("cpu_bound_teacher", case)
    assert alert.text.endswith("% CPU, at /x/softmax.py:66 in attend")
    assert "stacks/7.txt" in alert.meaning and alert.flip == "--set teacher.backend=dequantized"


def test_clocks_held_down_by_heat_are_named_and_a_power_cap_is_not() -> None:
    log = Log(count=120, gpu=lambda t: WORKING | {"clock_event_reasons": hot(t, 5)})
    assert "hw_thermal_slowdown" in raised("throttled", log.case()).text
    assert SLOWED_SHARE == 0.2
    log.gpu = lambda t: WORKING | {"clock_event_reasons": hot(t, 6)}
    quiet("throttled", log.case())
    log.gpu = lambda t: WORKING | {"clock_event_reasons": "sw_power_cap"}
    quiet("throttled", log.case())
    log.gpu = lambda t: {"absent": {"clock_event_reasons": "NVML: Not Supported"}}
    unknown("throttled", log.case(), "Not Supported")


def hot(second: float, every: int) -> str:
    """Every n-th reading is too hot, the last one (second 70) among them."""
    return "hw_thermal_slowdown" if (70 - second) % every == 0 else "sw_power_cap"


def test_a_lost_gpu_is_named() -> None:
    log = Log(
        count=80,
        gpu=lambda t: WORKING if t < 45 else {"absent": {"gpu_power_w": "NVML: GPU is lost"}},
    )
    raised("gpu_lost", log.case())
    log.gpu = lambda t: WORKING | {"absent": {"gpu_energy_j": "NVML: Not Supported"}}
    quiet("gpu_lost", log.case())
    unknown("gpu_lost", Log(device="cpu", count=3).case(), "computes on cpu")
