"""Rules about the time of a step and about memory: the fault, just below it, and no input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import CheckpointSaved, Compiled, Evaluated, Event
from engine.machine.rates import Rates, keep_rates, kept_rates
from engine.watch.rules import memory, pace
from engine.watch.rules.rule import Case
from tests.support.diagnosing import GIB, Log, quiet, raised, spec, unknown
from tests.support.judged import numbers_of
from tests.support.run_events import example_of

# Data.


def waiting(data_s: float, step_s: float = 0.5) -> Log:
    return Log(count=30, change=lambda n: {"data_s": data_s, "step_s": step_s})


def test_steps_that_wait_for_data_are_named() -> None:
    raised("data_wait", waiting(0.5 * pace.DATA_SHARE).case())
    quiet("data_wait", waiting(0.5 * pace.DATA_SHARE - 0.005).case())


def test_a_wait_that_costs_nothing_is_not_worth_a_word() -> None:
    quiet("data_wait", waiting(0.002, 0.004).case())


def test_one_hiccup_is_no_pattern_and_a_long_one_is() -> None:
    for once, check in ((2.0, quiet), (pace.DATA_BURST_S, raised)):
        log = Log(
            count=30,
            change=lambda n, s=once: {"data_s": s, "step_s": s + 0.1} if n == 25 else {},  # type: ignore[misc]
        )
        check("data_wait", log.case())


MACHINE = "some GPU bfloat16"
NEEDS = {
    "teacher": (10e9, 0.0, 0.0),
    "student": (5e9, 5e7, 0.0),
    "loss": (10e9, 0.0, 0.0),
    "backward": (10e9, 0.0, 1000.0),
    "optimizer": (0.0, 1e8, 0.0),
}
"""Each 10 ms at the rates of `rated`, and as much again for the launches of a backward pass."""


@pytest.fixture
def rated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_rates(MACHINE, Rates(1e12, 1e10))


def timed(times: dict[str, float], **start: Any) -> Log:
    """Steps whose parts take so many times what they need; parts that are not named take as much as that."""
    needs = {part: 0.02 if part == "backward" else 0.01 for part in NEEDS}
    phases = {part: needs_s * times.get(part, 1.0) for part, needs_s in needs.items()}
    return Log(
        count=30,
        change=lambda n: {"phases": phases if n > 3 else {}, "step_s": sum(phases.values())},
        start_changes={"costs": NEEDS, "machine": MACHINE} | start,
    )


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ({}, ""),
        ({"teacher": 3.9}, ""),
        ({"teacher": 4.1}, "teacher"),
        ({"backward": 50.0}, "backward"),
        # As each other: the machine is slow.
        (dict.fromkeys(NEEDS, 30.0), ""),
        (dict.fromkeys(NEEDS, 3.0) | {"loss": 8.5}, ""),
        (dict.fromkeys(NEEDS, 3.0) | {"loss": 9.5}, "loss"),
        # No tenth of the step.
        ({"optimizer": 5.0, "backward": 3.0, "teacher": 3.0, "student": 3.0, "loss": 30.0}, "loss"),
    ],
)
@pytest.mark.usefixtures("rated")
def test_a_part_is_slow_beside_what_it_needs_and_beside_the_others(
    times: dict[str, float], slow: str
) -> None:
    case = timed(times).case()
    if not slow:
        quiet("slow_part", case)
        return
    alert = raised("slow_part", case)
    assert alert.text.startswith(f"{slow} takes {times[slow]:.0f} times what its arithmetic")
    assert numbers_of(alert)[-2][1:] == (1000.0, "measured by `engine doctor`")


@pytest.mark.usefixtures("rated")
def test_a_part_without_two_others_is_slow_by_itself() -> None:
    only = {"teacher": NEEDS["teacher"]}
    quiet("slow_part", timed({"teacher": 9.5}, costs=only).case())
    raised("slow_part", timed({"teacher": 10.5}, costs=only).case())


@pytest.mark.usefixtures("rated")
def test_parts_are_not_judged_without_costs_rates_or_times() -> None:
    every = dict.fromkeys(NEEDS, 50.0)
    unknown(
        "slow_part", timed(every, costs={}).case(), "costs of the phases of a step are not logged"
    )
    unknown("slow_part", timed(every, machine="another").case(), "`engine doctor` measures")
    few, untimed = timed(every), timed(every)
    few.count = pace.PART_WARM_UP + pace.STEPS_KEPT - 1
    untimed.change = lambda n: {"phases": {}}
    unknown("slow_part", few.case(), "needs 12 steps")
    unknown("slow_part", untimed.case(), "not timed")


@pytest.mark.parametrize(
    ("content", "found"),
    [("", None), ("[1]", None), ('{"flops": 1}', None), ('{"flops": "a", "bytes": 1}', None)],
)
def test_kept_rates_are_the_best_and_none_where_they_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, found: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_rates(MACHINE) is None
    assert keep_rates(MACHINE, Rates(2.0, 3.0)) == Rates(2.0, 3.0)
    assert keep_rates(MACHINE, Rates(1.0, 4.0)) == kept_rates(MACHINE) == Rates(2.0, 4.0)
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text(content)
    assert kept_rates(MACHINE) is found
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.touch()
    # What cannot be written is not kept.
    assert keep_rates(MACHINE, Rates(2.0, 3.0)) == Rates(2.0, 3.0) and kept_rates(MACHINE) is None


def beside(eval_s: float, save_s: float = 0.1) -> Log:
    """Evaluations and checkpoints after every fifth of 40 steps of a second, 35 s in all."""
    extra: list[tuple[float, Event]] = []
    for step in range(5, 45, 5):
        t_s = 10.0 + step
        extra += [
            (t_s + 0.1, example_of(Evaluated, step=step, subject="student", eval_s=eval_s)),
            (t_s + 0.2, example_of(CheckpointSaved, step=step, save_s=save_s)),
        ]
    return Log(count=40, every_s=1.0, extra=extra)


def test_a_run_that_is_evaluated_or_saved_most_of_the_time_is_named() -> None:
    # What follows the newest step is not counted: 7 of 8.
    alert = raised("seldom_training", beside(3.0).case())
    assert alert.text.endswith("most of it into evaluations") and "eval.every" in alert.no_flip
    assert numbers_of(alert)[0][1:] == (pytest.approx(21.0), "7 of them")
    saving = raised("seldom_training", beside(0.1, 3.0).case())
    assert saving.text.endswith("most of it into checkpoints")
    assert "checkpoint.every" in saving.no_flip and "eval.rows" not in saving.no_flip
    quiet("seldom_training", beside(2.5).case())
    quiet("seldom_training", Log(count=40).case())
    unknown("seldom_training", Log(count=19).case(), "needs 20 steps")


def test_without_times_or_steps_waiting_cannot_be_judged() -> None:
    unknown("data_wait", Log(count=19).case(), "needs 20 steps, 19 are done")
    unknown("data_wait", Log(count=30, change=lambda n: {"data_s": None}).case(), "not logged")


# Time outside.


def outside(outside_s: float, wall_s: float = 0.6) -> Log:
    host = {"launch": wall_s - outside_s, "observers": 0.25 * outside_s, "log": 0.75 * outside_s}
    values = {"outside_s": outside_s, "wall_s": wall_s, "host": host}
    return Log(count=30, change=lambda n: values)


def test_steps_of_which_a_third_is_in_no_phase_are_named_with_what_takes_it() -> None:
    alert = raised("unaccounted", outside(0.21).case())
    assert alert.text.startswith("35 %") and alert.text.endswith("most in: log")
    quiet("unaccounted", outside(0.19).case())
    quiet("unaccounted", outside(0.02, 0.03).case())
    unknown("unaccounted", Log(count=30).case(), "not logged")


def test_a_newest_step_that_is_unlike_the_others_does_not_say_where_their_time_went() -> None:
    usual = {
        "outside_s": 0.3,
        "wall_s": 0.6,
        "host": {"launch": 0.3, "observers": 0.29, "rest": 0.01},
    }
    unlike = {
        "outside_s": 0.001,
        "wall_s": 0.3,
        "host": {"launch": 0.299, "observers": 0.0, "rest": 0.001},
    }
    quiet("unaccounted", Log(count=30, change=lambda n: unlike if n == 30 else usual).case())
    later = Log(count=31, change=lambda n: unlike if n == 30 else usual)
    assert raised("unaccounted", later.case()).text.endswith("most in: observers")


def test_one_long_pause_outside_is_no_pattern_and_a_longer_one_is() -> None:
    for once, check in ((4.0, quiet), (8.0, raised)):
        log = Log(
            count=30,
            change=lambda n, s=once: {"outside_s": s * (n == 25), "wall_s": 0.1 + s * (n == 25)},  # type: ignore[misc]
        )
        check("unaccounted", log.case())


# Drift.


def drifting(ratio: float, since: int = 90) -> Log:
    return Log(count=190, change=lambda n: {"step_s": 0.2 * ratio if n >= since else 0.2})


def test_a_run_that_slows_down_is_named() -> None:
    raised("step_time_drift", drifting(pace.DRIFT_RATIO).case())
    quiet("step_time_drift", drifting(pace.DRIFT_RATIO - 0.05).case())
    quiet("step_time_drift", drifting(3.0, since=145).case())  # one window: another job passing
    unknown("step_time_drift", Log(count=169).case(), "needs 170 steps")


# Steps that other processes slow down.

ALONE = {"load1": 2.0, "family_cpu_pct": 195.0, "psi_cpu_some_avg10_pct": 1.0}
CROWDED = {"load1": 4.5, "family_cpu_pct": 90.0, "psi_cpu_some_avg10_pct": 80.0}


def on_two_cores(log: Log, host: dict[str, float], since_s: float = 0.0) -> Case:
    readings = {True: host, False: ALONE}
    return dataclasses.replace(
        log, host=lambda t_s: readings[t_s >= since_s], facts={"cpu_count": 2}
    ).case()


SLOW = {
    "step_time_drift": drifting(2.0),
    "unaccounted": outside(0.3),
}


@pytest.mark.parametrize("rule", SLOW)
def test_steps_that_other_processes_slow_down_are_not_held_against_the_run(rule: str) -> None:
    raised(rule, on_two_cores(SLOW[rule], ALONE))
    words = "other processes had 1.1 of 2 cores"
    unknown(rule, on_two_cores(SLOW[rule], CROWDED), words)
    # The load is a mean of a minute, and may come late; where the kernel has no pressure there is it alone.
    for name in ("load1", "psi_cpu_some_avg10_pct"):
        only = {one: value for one, value in CROWDED.items() if one != name}
        unknown(rule, on_two_cores(SLOW[rule], only), words)


@pytest.mark.parametrize("rule", SLOW)
@pytest.mark.parametrize(
    "host",
    [
        # More threads than cores, all of them the run's.
        {"load1": 6.0, "family_cpu_pct": 198.0, "psi_cpu_some_avg10_pct": 90.0},
        # Cores are free: nothing waits for one.
        {"load1": 1.2, "family_cpu_pct": 90.0, "psi_cpu_some_avg10_pct": 2.0},
        {"load1": None, "family_cpu_pct": 90.0, "psi_cpu_some_avg10_pct": None},
        {"load1": 4.5, "family_cpu_pct": None, "psi_cpu_some_avg10_pct": 80.0},
    ],
    ids=["own threads", "free cores", "no load", "no family"],
)
def test_steps_are_judged_where_nothing_shows_that_others_took_the_cpu(
    rule: str, host: dict[str, float]
) -> None:
    raised(rule, on_two_cores(SLOW[rule], host))


def test_only_the_slow_steps_need_others_beside_them() -> None:
    # Steps 90 to 190 end at 55 to 105 s.
    unknown("step_time_drift", on_two_cores(drifting(2.0), CROWDED, since_s=50.0), "other")
    raised("step_time_drift", on_two_cores(drifting(2.0), CROWDED, since_s=95.0))


# Compiles.


def compiled(late: bool, at_s: float = 20.0) -> tuple[float, Compiled]:
    event = example_of(
        Compiled, kernel="q4k", key="q4k[m=32]", after_warm_up=late, compile_s=1.5, differs=["m"]
    )
    return at_s, event


def test_a_compile_after_warm_up_is_named_with_what_differs() -> None:
    alert = raised("compile_after_warm_up", Log(count=30, extra=[compiled(True)]).case())
    assert "q4k; differs in m" in alert.text and alert.no_flip
    off = Log(count=30, extra=[compiled(True)], settings=spec(kernels__prewarm=False))
    assert raised("compile_after_warm_up", off.case()).flip == "--set kernels.prewarm=true"
    quiet("compile_after_warm_up", Log(count=30, extra=[compiled(False)]).case())
    unknown("compile_after_warm_up", Log(extra=[compiled(True)]).case(), "needs 1 steps")


# Memory.


def filling(gib_per_minute: float, start: float = 100.0, **fields: Any) -> Log:
    """Five minutes of a GPU of 141 GiB."""
    return Log(
        count=600,
        gpu=lambda t: {
            "gpu_mem_used_bytes": (start + gib_per_minute * t / 60) * GIB,
            "gpu_mem_total_bytes": 141 * GIB,
            **fields,
        },
        host=lambda t: {"host_available_bytes": 200 * GIB, "host_total_bytes": 256 * GIB},
    )


def test_memory_that_grows_to_its_end_is_named_with_the_time_left() -> None:
    alert = raised("memory_ceiling", filling(2.0).case())
    left_s = numbers_of(alert)[2][1]
    used = 100 + 2.0 * 310 / 60
    assert left_s == pytest.approx((141 - used) / 2.0 * 60, rel=0.2)


def test_memory_of_the_host_that_shrinks_is_named() -> None:
    log = Log(
        device="cpu",
        count=600,
        host=lambda t: {
            "host_available_bytes": (60 - 5 * t / 60) * GIB,
            "host_total_bytes": 128 * GIB,
        },
    )
    assert "memory of the host" in raised("memory_ceiling", log.case()).text


def test_memory_that_other_processes_take_is_not_called_a_leak_of_the_run() -> None:
    def log(rss_gib_per_minute: float, **about: Any) -> Log:
        return Log(
            count=600,
            host=lambda t: {
                "host_available_bytes": (60 - 5 * t / 60) * GIB,
                "host_total_bytes": 128 * GIB,
                "trainer_rss_bytes": (2 + rss_gib_per_minute * t / 60) * GIB,
            },
            **about,
        )

    quiet("memory_ceiling", log(0.1, device="cpu").case())
    assert "memory of the host" in raised("memory_ceiling", log(5.0, device="cpu").case()).text
    # What CUDA takes of shared memory is in no resident size.
    unified = log(0.1, gpu=lambda _: {"gpu_util_pct": 50.0})
    assert "memory of the host" in raised("memory_ceiling", unified.case()).text


@pytest.mark.parametrize(
    "log",
    [
        filling(0.0),
        filling(0.5, start=50.0),  # two hours away
        Log(  # a cache that was filled once
            count=600,
            gpu=lambda t: {
                "gpu_mem_used_bytes": (50 if t < 150 else 130) * GIB,
                "gpu_mem_total_bytes": 141 * GIB,
            },
        ),
        Log(  # a saw tooth
            count=600,
            gpu=lambda t: {
                "gpu_mem_used_bytes": (100 + 30 * (t % 20) / 20) * GIB,
                "gpu_mem_total_bytes": 141 * GIB,
            },
        ),
    ],
    ids=["flat", "far", "jump", "saw"],
)
def test_memory_that_does_not_run_out_is_quiet(log: Log) -> None:
    quiet("memory_ceiling", log.case())


def leaking(mib_per_minute: float, steps: int) -> Log:
    """Two hours of a run whose process grows slowly; steps of 12 s."""

    def host(t: float) -> dict[str, Any]:
        grown = mib_per_minute * t / 60 * 2**20
        return {
            "host_available_bytes": 20 * GIB - grown,
            "host_total_bytes": 64 * GIB,
            "trainer_rss_bytes": 4 * GIB + grown,
        }

    return Log(device="cpu", count=600, every_s=12.0, host=host, start_changes={"steps": steps})


def test_a_slow_leak_that_the_run_will_not_survive_is_named_hours_ahead() -> None:
    # 20 MiB a minute are 0.3 % of 64 GiB in ten minutes, and 20 GiB in 17 hours.
    alert = raised("memory_ceiling", leaking(20.0, steps=10_000).case())
    assert "memory of the host" in alert.text
    assert numbers_of(alert)[2][1] == pytest.approx((20 * 1024 / 20 - 120) * 60, rel=0.1)
    quiet("memory_ceiling", leaking(20.0, steps=2_000).case())  # over before
    quiet("memory_ceiling", leaking(0.0, steps=10_000).case())


def test_memory_without_readings_gives_both_reasons() -> None:
    unknown("memory_ceiling", Log(count=600).case(), "host_available_bytes")
    unknown("memory_ceiling", Log(count=3).case(), "needs 20 steps")


def test_pressure_is_named() -> None:
    def pressed(pct: float) -> Log:
        host = {"psi_memory_full_avg10_pct": pct, "major_faults_per_s": 900.0}
        return Log(count=80, host=lambda _: host)

    alert = raised("memory_pressure", pressed(memory.PRESSURE_PCT).case())
    assert alert.flip == "--set train.rows=2"
    quiet("memory_pressure", pressed(memory.PRESSURE_PCT - 0.1).case())
    log = Log(count=80, host=lambda _: {"absent": {"psi_memory_full_avg10_pct": "no PSI here"}})
    unknown("memory_pressure", log.case(), "no PSI here")
