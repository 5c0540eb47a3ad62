"""Rules about the loss and the gradients of a script that is watched and not ours: its settings are in no file of ours,
and what there is to know of them is in what the probe has seen."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from engine.log.events import Evaluated, Imported, Judged, Watched
from engine.watch.rules import loss
from engine.watch.rules.rule import Case
from tests.support.diagnosing import LN_V, VOCABULARY, Log, quiet, raised, unknown
from tests.support.judged import identity_event
from tests.support.run_events import example_of

CROSS_ENTROPY = identity_event(
    id="label_coverage", level="fact", step=1, text="", numbers={"vocabulary": float(VOCABULARY)}
)


def case(change: Any, *seen: Judged, count: int = 150, **more: Any) -> Case:
    def alone(number: int) -> dict[str, Any]:
        return {"ce": None, "kd": None, **change(number)}

    made = Log(count=count, change=alone, **more).case()
    watched: Any = example_of(Watched)
    view = dataclasses.replace(made.view, watched=watched, started=None, identities=seen)
    return dataclasses.replace(made, view=view, settings=None)


def test_a_loss_that_is_not_finite_for_good_is_named_and_one_that_a_scaler_leaves_out_is_not() -> (
    None
):
    nan = case(lambda n: {"loss": math.nan} if n > 140 else {})
    alert = raised("non_finite", nan)
    assert alert.text == "the loss has been nan for 10 steps" and "10 times lower" in alert.no_flip
    assert "unknown" in alert.meaning
    for level, labels, meaning, advice in (
        ("fail", 9.0, "weights are NaN", "10 times lower"),
        ("pass", 9.0, "weights are finite", "logarithm"),
        ("pass", 0.0, "weights are finite", "masks the labels"),
    ):
        seen = identity_event("finite_weights", level, 142, "", numbers={})
        few = identity_event("label_coverage", "suspicion", 1, "", numbers={"labels": labels})
        alert = raised(
            "non_finite", case(lambda n: {"loss": math.nan} if n > 140 else {}, seen, few)
        )
        assert meaning in alert.meaning and advice in alert.no_flip
    quiet("non_finite", case(lambda n: {"loss": math.inf} if n in (80, 150) else {}))


def test_a_jump_of_the_loss_and_gradients_that_explode_or_are_zero_say_what_to_try() -> None:
    jump = case(lambda n: {"loss": 50.0 if n == 140 else 2.0 + 0.01 * math.sin(n)})
    spike = raised("loss_spike", jump)
    assert "2 times lower in the script" in spike.no_flip and spike.first_step == 140
    exploded = case(lambda n: {"grad_norm": 500.0 if n > 140 else 0.5})
    assert "10 times lower in the script" in raised("gradient_exploding", exploded).no_flip
    assert "detach()" in raised("gradient_zero", case(lambda n: {"grad_norm": 0.0})).no_flip


def test_a_loss_of_guessing_is_named_where_it_is_known_to_be_one_cross_entropy() -> None:
    def guessing(number: int) -> dict[str, Any]:
        return {"loss": LN_V + 0.01}

    alert = raised("loss_not_below_guessing", case(guessing, CROSS_ENTROPY))
    assert f"ln V = {LN_V:.3f}" in alert.text and alert.first_step == 1
    unlearnt = case(lambda n: {"loss": step_up(n, 201, 2.0, LN_V + 0.01)}, CROSS_ENTROPY, count=300)
    assert raised("loss_not_below_guessing", unlearnt).first_step == 201
    quiet("loss_not_below_guessing", case(lambda n: {"loss": 2.0}, CROSS_ENTROPY))
    unknown("loss_not_below_guessing", case(guessing), "one cross entropy")


def test_steps_as_large_as_the_weights_are_named_where_the_loss_does_not_fall() -> None:
    def size(share: float) -> Judged:
        return identity_event("update_size", "fact", 16, "", numbers={"share": share})

    def falls(number: int) -> dict[str, Any]:
        return {"loss": 4.0 - 0.001 * number}

    def stays(number: int) -> dict[str, Any]:
        return {"loss": 4.0 + 0.1 * math.sin(number)}

    alert = raised("update_too_large", case(stays, size(0.5)))
    assert "by 50 % of their size, and nothing is learnt" in alert.text and alert.first_step == 16
    assert "10 times lower in the script" in alert.no_flip
    # Guessing is below a first loss that was worse than that.
    worse = case(lambda n: {"loss": LN_V + 0.5 / n}, size(0.5), CROSS_ENTROPY)
    raised("update_too_large", worse)
    quiet("update_too_large", case(falls, size(0.5)))
    quiet("update_too_large", case(stays, size(0.09)))
    quiet("update_too_large", case(stays))
    unknown("update_too_large", case(stays, size(0.5), count=99), "needs 100 steps")


def test_a_held_out_loss_that_rises_while_the_loss_falls_is_named() -> None:
    losses = [2.0, 1.5, *[1.5 + 2 * loss.HELDOUT_WORSE_NATS] * loss.HELDOUT_IN_A_ROW]
    extra = [
        (10.0 + 15 * n, example_of(Evaluated, step=30 * n, loss=value, subject="student"))
        for n, value in enumerate(losses, 1)
    ]
    found = case(lambda n: {"loss": 3.0 - 0.01 * n}, extra=extra)
    alert = raised("heldout_diverging", found)
    assert alert.no_flip.startswith("stop at step 60")
    # Whether a script keeps its best checkpoint is not known.
    assert alert.meaning == "the model memorises its training set"


def as_imported(found: Case) -> Case:
    made: Any = example_of(Imported)
    view = dataclasses.replace(found.view, watched=None, imported=made)
    return dataclasses.replace(found, view=view)


def test_the_probe_can_change_a_script_that_waits_for_data_and_no_table() -> None:
    waiting = case(lambda n: {"data_s": 0.3, "step_s": 0.5})
    assert raised("data_wait", waiting).flip == "--set loader.workers=4"
    alert = raised("data_wait", as_imported(waiting))
    assert alert.no_flip == "give the DataLoader more workers in the script"


def test_advice_to_a_script_speaks_of_the_script() -> None:
    def slower(number: int) -> dict[str, Any]:
        return {"step_s": 0.4 if number >= 90 else 0.2}

    def paging(t_s: float) -> dict[str, Any]:
        return {"psi_memory_full_avg10_pct": 90.0}

    drift = raised("step_time_drift", case(slower, count=190))
    assert drift.no_flip.startswith("start the script again")
    pressure = raised("memory_pressure", case(lambda n: {}, host=paging))
    assert pressure.no_flip == "lower the batch size in the script, or use a smaller model"


def up(number: int) -> dict[str, Any]:
    updates = number - 1
    top = 20 * min(updates, 10) / 10 * math.exp(-max(0, updates - 10) / 15)
    return {"loss": 2.3 + top + 4 * min(1.0, updates / 20) + 0.3 * math.sin(7 * number)}


def test_a_loss_that_rises_at_the_start_and_stays_up_says_what_to_try() -> None:
    for seen in ((), (CROSS_ENTROPY,)):
        alert = raised("loss_rose_for_good", case(up, *seen))
        assert "100 times lower in the script" in alert.no_flip


def test_a_loss_that_may_be_meant_to_rise_is_left_alone() -> None:
    quiet("loss_rose_for_good", case(lambda n: {"loss": 0.02 * n + 0.1}))
    quiet("loss_rose_for_good", case(lambda n: {"loss": -0.1 + 0.002 * n}))
    quiet("loss_rose_for_good", case(lambda n: {"loss": 2.0 + 1.5 * min(1.0, n / 50)}))
    found = case(up)
    rewards = dataclasses.replace(found.view, logged={"train/reward": (1, 0.5)})
    unknown("loss_rose_for_good", dataclasses.replace(found, view=rewards), "train/reward")


def noisy(level: Any, share: float = 0.03) -> Any:
    """A loss of this level for each step, with Gaussian noise of `share` of it."""
    return lambda n, chance: level(n) * (1 + share * chance.gauss(0, 1))


def step_up(n: int, at: int, low: float, high: float) -> float:
    return low if n < at else high


RISEN: dict[str, Any] = {
    "at step 2": noisy(lambda n: step_up(n, 2, 4.7, 6.2)),
    "at step 4": noisy(lambda n: step_up(n, 4, 4.7, 6.2)),
    "within eight steps": noisy(lambda n: 4.7 + 1.5 * min(1.0, (n - 1) / 8)),
    "without noise": lambda n, chance: step_up(n, 3, 4.7, 6.2),
    "much noise": noisy(lambda n: step_up(n, 3, 4.7, 8.5), 0.07),
    "after a peak": noisy(lambda n: step_up(n, 3, 4.7, 6.2 + 25 * math.exp(-n / 12))),
    "after it had learnt a little": noisy(lambda n: step_up(n, 7, 4.7 - 0.1 * n, 6.5)),
    "to a hundred times": lambda n, chance: (
        step_up(n, 3, 0.5, 50.0) * chance.lognormvariate(0, 0.3)
    ),
    "and goes on rising": noisy(lambda n: step_up(n, 3, 4.7, 12 + 0.05 * n)),
}
HEALTHY: dict[str, Any] = {
    "falls": noisy(lambda n: 1.5 + 3 * math.exp(-n / 40)),
    "hardly learns": noisy(lambda n: 4.7 - 0.001 * n, 0.1),
    "noise of unlike batches": lambda n, chance: chance.lognormvariate(0, 0.6),
    "easy first batches": lambda n, chance: (
        (0.5 if n <= 4 else 1.2) * chance.lognormvariate(0, 0.6)
    ),
    "wiggle of a warm-up": noisy(
        lambda n: 2 + 2.7 * math.exp(-n / 60) + 2 * math.exp(-(((n - 8) / 6) ** 2))
    ),
    "warmed up again": noisy(lambda n: 1.5 + 0.4 * (1 - math.exp(-n / 30))),
    "comes back slowly": noisy(lambda n: step_up(n, 3, 4.7, 3 + 8 * math.exp(-n / 60))),
    "harder after a third": noisy(lambda n: step_up(n, 100, 1.0 + math.exp(-n / 20), 2.6)),
    "harder after a tenth": noisy(lambda n: step_up(n, 30, 1.0, 1.5)),
    "harder in stairs": noisy(lambda n: 1.0 + 0.2 * (n // 30)),
    "a term is annealed": noisy(lambda n: 2.0 + 1.5 * min(1.0, n / 50)),
    "a term is annealed, no noise": lambda n, chance: 2.0 + 1.5 * min(1.0, n / 50),
    "values grow": noisy(lambda n: 0.01 + 0.004 * n, 0.2),
    "around zero": lambda n, chance: chance.gauss(0.05 + 0.001 * n, 0.3),
    "around zero, positive": lambda n, chance: abs(chance.gauss(0.0, 0.02 + 0.0005 * n)),
    "falls below zero": lambda n, chance: 2.0 - 0.03 * n + chance.gauss(0, 0.2),
    "rises from below zero": lambda n, chance: step_up(n, 5, -4.0, 3.0) + chance.gauss(0, 0.2),
    "negative once": lambda n, chance: -0.1 if n == 90 else step_up(n, 3, 0.5, 1.5),
    "rate in waves": noisy(lambda n: 2.0 + 0.4 * math.sin(n / 16)),
    "rare spikes": lambda n, chance: (30 if n % 40 == 3 else 3) * (1 + 0.05 * chance.gauss(0, 1)),
    "a lucky first batch": lambda n, chance: (
        4.7 * (0.75 if n == 1 else 1 + 0.1 * chance.gauss(0, 1))
    ),
    "overfits late": noisy(lambda n: 1 + 2 * math.exp(-n / 20) + max(0, n - 200) / 40),
}


def series(loss: Any, seed: int, count: int = 300) -> Case:
    chance = random.Random(seed)
    losses = [loss(n, chance) for n in range(1, count + 1)]
    return case(lambda n: {"loss": losses[n - 1]}, count=count)


@pytest.mark.parametrize("shape", RISEN)
def test_a_rise_beyond_the_noise_of_the_run_that_stays_is_named_whatever_the_loss_is(
    shape: str,
) -> None:
    for seed in range(10):
        alert = raised("loss_rose_for_good", series(RISEN[shape], seed))
        assert "the learning rate is far too large" in alert.meaning


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", HEALTHY)
def test_a_healthy_loss_of_an_unknown_kind_is_left_alone(shape: str, seeds: range) -> None:
    for seed in seeds:
        for count in (100, 300):
            quiet("loss_rose_for_good", series(HEALTHY[shape], seed, count))


def test_a_loss_that_stays_at_guessing_is_named_where_its_level_is_known() -> None:
    flat = case(lambda n: {"loss": 0.99 * LN_V}, CROSS_ENTROPY, count=520)
    assert "100 times lower" in raised("loss_stays_at_guessing", flat).no_flip
    unknown("loss_stays_at_guessing", case(lambda n: {"loss": 0.99 * LN_V}), "one cross entropy")


def test_a_classifier_that_guesses_is_named_after_500_steps() -> None:
    classes = identity_event("one_class", "pass", 1, "", numbers={"classes": 5.0})
    flat = case(lambda n: {"loss": 0.99 * math.log(5)}, classes, count=520)
    assert "do not depend on the inputs" in raised("loss_stays_at_guessing", flat).meaning
    quiet("loss_stays_at_guessing", case(lambda n: {"loss": 0.9}, classes, count=520))
    early = case(lambda n: {"loss": 0.99 * math.log(5)}, classes, count=480)
    unknown("loss_stays_at_guessing", early, "one cross entropy")


def test_noise_of_a_loss_near_zero_is_no_spike() -> None:
    def noisy(n: int) -> dict[str, float]:
        return {"loss": 2.0 if n < 20 else 0.2 if n == 140 else 0.001}

    quiet("loss_spike", case(noisy))
    raised("loss_spike", case(lambda n: {"loss": 2.0} if n < 20 or n == 140 else {"loss": 0.001}))


def test_a_norm_that_no_step_uses_is_no_gradient_of_zero() -> None:
    late = identity_event("clipping", "suspicion", 3, "after steps 1 and 2")
    quiet("gradient_zero", case(lambda n: {"grad_norm": 0.0}, late))
