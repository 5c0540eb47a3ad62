"""Silences in which nobody is at work: they are told within a minute, whatever the phase may take.

Synthetic runs in a phase with a long limit of its own, with what the trainer and all that it started did.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.log.events import DecisionMade, Evaluated, Phase, ProcessFound, StackDump
from engine.log.view import RunView
from engine.watch.rules import stall
from engine.watch.rules.rule import Case, Unknown
from engine.watch.rules.stall import silence
from tests.support.diagnosing import START, Log, answer, at, quiet, raised, spec, unknown
from tests.support.judged import numbers_of
from tests.support.run_events import example_of, fold_events

BEGUN_S = 20.0
NOTHING = {"family_cpu_pct": 0.2, "family_io_bytes_per_s": 12.0}
SLOW = ["reading the corpus", "loading the teacher", "compiling", "saving the student"]


def loading(
    silent_s: float,
    did: dict[str, Any] | None = None,
    *,
    before: dict[str, Any] | None = None,
    phase: str = "loading the teacher",
    device: str = "cpu",
    **fields: Any,
) -> Log:
    """Before the first step; `did` is read from the begin of the silence on, ten seconds late as the sampler's
    counts are, and `before` until then."""
    busy = {"family_cpu_pct": 100.0, "family_io_bytes_per_s": 1e6}
    return Log(
        count=0,
        silent_s=silent_s,
        device=device,
        host=lambda t: (NOTHING if did is None else did) if t > BEGUN_S + 10 else before or busy,
        extra=[
            (1.0, DecisionMade(knob="compute.device", choice=device, reason="r")),
            (BEGUN_S, Phase(name=phase)),
        ],
        **fields,
    )


@pytest.mark.parametrize("phase", SLOW)
def test_nobody_at_work_is_told_within_a_minute_in_every_phase(phase: str) -> None:
    log = loading(stall.STILL_S + 1, phase=phase)
    alert = raised("stalled_at_start", log.case())
    assert f"in {phase}" in alert.text
    numbers = {name: (value, held) for name, value, held in numbers_of(alert)}
    assert "50 allowed: nothing was computed, read or written" in numbers["seconds of silence"][1]
    assert numbers["family_cpu_pct"][0] == 0.2
    assert stall.STILL_S + 5 + 2 < 60, "a look every five seconds, and two ticks for the stacks"
    quiet("stalled_at_start", loading(stall.STILL_S - 1, phase=phase).case())


@pytest.mark.parametrize(
    "did",
    [
        {"family_cpu_pct": 99.0, "family_io_bytes_per_s": 0.0},  # a compiler in another process
        {"family_cpu_pct": 0.3, "family_io_bytes_per_s": 2e5},  # a 7B teacher from a slow disk
        {"family_cpu_pct": stall.STILL_CPU_PCT, "family_io_bytes_per_s": 0.0},
        {"family_cpu_pct": 0.0, "family_io_bytes_per_s": stall.STILL_IO_BYTES_PER_S},
        {"family_cpu_pct": 0.0},  # the kernel does not say what was read
        {"family_io_bytes_per_s": 0.0},
        {},
    ],
    ids=["compiles", "reads", "a little", "a few bytes", "no bytes", "no cpu", "unknown"],
)
def test_who_is_at_work_or_may_be_has_the_time_of_its_phase(did: dict[str, Any]) -> None:
    log = loading(stall.PHASE_S["loading the teacher"] - 1, did)
    quiet("stalled_at_start", log.case())
    assert silence(log.case()).is_quiet
    log.silent_s += 2
    assert "600 allowed: phase" in str(numbers_of(raised("stalled_at_start", log.case())))


def test_work_that_goes_on_after_a_pause_is_at_work() -> None:
    log = loading(stall.STILL_S + 40)
    log.host = lambda t: NOTHING if t < 100 else {**NOTHING, "family_cpu_pct": 40.0}
    quiet("stalled_at_start", log.case())


def test_too_few_readings_say_nothing() -> None:
    log = loading(stall.STILL_S + 40)
    log.host = lambda t: NOTHING if t % 4 == 0 else {}
    quiet("stalled_at_start", log.case())


def test_a_gpu_at_work_is_work_and_one_that_is_not_known_is_no_proof() -> None:
    def on_gpu(gpu: Any) -> Any:
        return loading(stall.STILL_S + 1, device="cuda", gpu=gpu).case()

    assert "in loading" in raised("stalled_at_start", on_gpu(lambda _: {"gpu_util_pct": 0.0})).text
    quiet("stalled_at_start", on_gpu(lambda _: {"gpu_util_pct": 3.0}))
    quiet("stalled_at_start", on_gpu(lambda _: {"gpu_power_w": 80.0}))
    quiet("stalled_at_start", on_gpu(None))


def test_in_training_a_long_evaluation_does_not_hide_a_run_that_stands_still() -> None:
    done = [(12.0, Evaluated(step=1, subject="student", loss=1.0, labelled=1, eval_s=60.0))]
    log = Log(
        count=30, silent_s=stall.STILL_S + 1, extra=done, device="cpu", host=lambda _: NOTHING
    )
    assert "in training" in raised("stalled", log.case()).text
    log.host = lambda _: {"family_cpu_pct": 100.0, "family_io_bytes_per_s": 0.0}
    quiet("stalled", log.case())


def test_a_limit_that_was_set_is_kept_for_who_stands_still_too() -> None:
    log = loading(stall.STILL_S + 30, settings=spec(watch__stall_seconds=100))
    quiet("stalled_at_start", log.case())


def test_a_log_without_these_readings_is_judged_as_before() -> None:
    old = Log(count=0, silent_s=119.0, extra=[(BEGUN_S, Phase(name="folding paper"))])
    quiet("stalled_at_start", old.case())
    old.silent_s = 121.0
    raised("stalled_at_start", old.case())


def test_a_stall_is_not_quiet_and_a_short_silence_neither() -> None:
    for seconds, is_quiet in (
        (stall.QUIET_S - 1, False),
        (stall.QUIET_S + 1, True),
        (601.0, False),
    ):
        found = silence(loading(seconds, {"family_cpu_pct": 100.0}).case())
        assert found.is_quiet == is_quiet, seconds


SPINS = {"gpu_util_pct": 100.0}
IDLES = {"gpu_util_pct": 0.0}


def outside(
    seconds: float,
    works_until: float,
    *,
    gpu: dict[str, Any] | None = None,
    opens_gpu: bool | None = False,
    dumped_s: float | None = None,
) -> Case:
    """A process that ran already and is watched from outside, at work until some second."""
    busy = {"family_cpu_pct": 100.0, "family_io_bytes_per_s": 1e6}
    found = example_of(ProcessFound, pid=7, opens_gpu=opens_gpu)
    dump = example_of(
        StackDump, state="waiting for a lock", python_frame="t.py:3 in f", path="stacks/x"
    )
    logs = Log(
        count=0,
        seconds=seconds,
        host=lambda t: busy if t <= works_until else NOTHING,
        gpu=None if gpu is None else lambda t: gpu,
    ).logs()
    view = fold_events(RunView(), "device", logs["device"])
    watch = [*logs["watch"], at(found, 0.0), *([] if dumped_s is None else [at(dump, dumped_s)])]
    lines = [msgspec.structs.replace(event, seq=n) for n, event in enumerate(watch)]
    return Case(view=fold_events(view, "watch", lines), settings=None, now_unix_s=START + seconds)


def test_a_process_in_which_nobody_works_is_told_with_its_stacks_and_without_a_word_of_its_own() -> (
    None
):
    alert = raised("nobody_works", outside(100.0, 40.0, dumped_s=95.0))
    assert alert.text == "no activity for 1m00s in process 7: waiting for a lock at t.py:3 in f (x)"
    # Its stacks are about to be taken, or never come.
    quiet("nobody_works", outside(100.0, 40.0))
    assert "not taken" in raised("nobody_works", outside(130.0, 40.0)).meaning
    quiet("nobody_works", outside(89.0, 40.0, dumped_s=85.0))


def test_any_work_on_any_gpu_is_work_and_a_gpu_that_is_not_read_leaves_it_unknown() -> None:
    raised("nobody_works", outside(130.0, 40.0, gpu=IDLES, opens_gpu=True))
    quiet("nobody_works", outside(130.0, 40.0, gpu=SPINS, opens_gpu=True))
    unknown("nobody_works", outside(130.0, 40.0, opens_gpu=True), "no GPU reading")
    unknown("nobody_works", outside(130.0, 40.0, opens_gpu=None), "no GPU reading")
    unknown(
        "nobody_works", outside(130.0, 40.0, gpu={}, opens_gpu=True), "gpu_util_pct has no reading"
    )


def test_a_process_that_says_nothing_is_never_called_stalled() -> None:
    for name in ("stalled", "stalled_at_start"):
        assert isinstance(answer(name, outside(1000.0, 1000.0)), Unknown)
    unknown("nobody_works", loading(60.0).case(), "reports its steps")
