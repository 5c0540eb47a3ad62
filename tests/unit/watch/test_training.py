"""Rules about loss, gradient, rate and batch: the fault, just below it, and no input."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.log.events import (
    Evaluated,
    Judged,
    ModelReady,
)
from engine.watch.rules import loss, update
from tests.support.diagnosing import (
    LN_V,
    Log,
    quiet,
    raised,
    unknown,
)
from tests.support.judged import number_event
from tests.support.run_events import example_of

NO_MODEL = (6.5, example_of(ModelReady, role="student", vocab_size=1))


def steady(count: int = 120, **values: Any) -> Log:
    return Log(count=count, change=lambda _: values)


def test_a_number_that_is_not_finite_is_named() -> None:
    log = Log(count=30, extra=[(20.0, number_event(step=20, field="loss", value="nan"))])
    alert = raised("non_finite", log.case())
    assert "loss was nan at step 20" in alert.text and alert.flip == "--set train.lr=0.0001"
    quiet("non_finite", Log(count=1).case())
    unknown("non_finite", Log().case(), "needs 1 steps")


def test_a_loss_of_guessing_is_named() -> None:
    raised("loss_not_below_guessing", steady(ce=LN_V).case())
    quiet("loss_not_below_guessing", steady(ce=LN_V - 1e-3).case())
    unknown("loss_not_below_guessing", steady(99, ce=9.0).case(), "needs 100 steps")
    unknown("loss_not_below_guessing", steady(ce=None).case(), "ce is not logged")
    log = steady(ce=9.0)
    log.extra = [NO_MODEL]
    unknown("loss_not_below_guessing", log.case(), "vocabulary")


def test_text_that_a_teacher_does_not_know_is_a_warning_where_the_check_leaves_it_open() -> None:
    def asked(level: str, ce: float) -> Log:
        numbers = {"ce": ce, "frequencies": 4.0, "ln_vocabulary": LN_V}
        check = example_of(
            Judged, by="check", id="teacher_knows_text", level=level, numbers=numbers
        )
        return Log(count=1, extra=[(9.5, check)])

    alert = raised("teacher_off_text", asked("unknown", 4.0).case())
    assert alert.level == "suspicion" and "does not know this kind of text" in alert.text
    quiet("teacher_off_text", asked("pass", 3.99).case())
    quiet("teacher_off_text", asked("fail", LN_V).case())
    unknown("teacher_off_text", Log(count=1).case(), "no numbers")


def spiking(height: float) -> Log:
    return Log(
        count=120,
        change=lambda n: {"loss": height if n == 100 else 2.0 + 0.05 * math.sin(n)},
    )


def test_a_jump_of_the_loss_is_named_with_its_step() -> None:
    alert = raised("loss_spike", spiking(2.0 * loss.SPIKE_RATIO + 0.1).case())
    assert "at step 100" in alert.text
    quiet("loss_spike", spiking(2.0 * loss.SPIKE_RATIO - 0.1).case())
    noisy = Log(count=120, change=lambda n: {"loss": 2.0 + (n % 5)})
    quiet("loss_spike", noisy.case())
    unknown("loss_spike", Log(count=50).case(), "needs 51 steps")


def evaluated(losses: list[float | None]) -> Log:
    log = Log(count=200)
    log.extra = [
        (
            log.begun_s + 0.5 * 20 * (i + 1) + 0.1,
            Evaluated(step=20 * (i + 1), subject="student", loss=x, labelled=9, eval_s=1.0),
        )
        for i, x in enumerate(losses)
    ]
    return log


def test_a_held_out_loss_that_rises_while_training_falls_is_named() -> None:
    alert = raised("heldout_diverging", evaluated([3.0, 2.5, 2.6, 2.7, 2.8]).case())
    assert alert.flip == "--set train.steps=40"
    quiet("heldout_diverging", evaluated([3.0, 2.5, 2.52, 2.7, 2.8]).case())
    quiet("heldout_diverging", evaluated([3.0, 2.5, 2.6, 2.7]).case())
    unknown("heldout_diverging", evaluated([3.0, 2.5, None]).case(), "needs 4 held-out losses")
    both = evaluated([3.0, 2.5, 2.6, 2.7, 2.8])
    both.change = lambda n: {"ce": 2.0 + 0.001 * n}
    quiet("heldout_diverging", both.case())


# The update.


def test_a_gradient_of_zero_is_named() -> None:
    assert raised("gradient_zero", steady(10, grad_norm=0.0).case()).flip == "--set loss.alpha=1"
    quiet("gradient_zero", steady(10, grad_norm=2 * update.ZERO_NORM).case())
    unknown("gradient_zero", steady(9, grad_norm=0.0).case(), "needs 10 steps")
    unknown("gradient_zero", steady(10, grad_norm=None).case(), "not logged")


def test_a_gradient_that_explodes_is_named() -> None:
    def grown(times: float) -> Log:
        return Log(count=60, change=lambda n: {"grad_norm": times if n > 50 else 1.0})

    raised("gradient_exploding", grown(update.EXPLODING_RATIO).case())
    quiet("gradient_exploding", grown(update.EXPLODING_RATIO - 1).case())
    unknown("gradient_exploding", Log(count=29).case(), "needs 30 steps")


# A rate that is far too large.


def bumped(number: int, *, top: float, stays: float, start: float = LN_V) -> dict[str, float]:
    """A loss that rises to `top` in ten updates, and falls from it to `stays`, with noise of a tenth."""
    noise = 1 + 0.1 * math.sin(7.3 * number)
    if number <= 11:
        return {"loss": noise * (start + (top - start) * (number - 1) / 10)}
    return {"loss": noise * (stays + (top - stays) * math.exp(-(number - 11) / 20))}


def test_a_loss_that_rises_at_the_start_and_stays_up_is_named_with_the_rate() -> None:
    log = Log(count=200, change=lambda n: bumped(n, top=30.0, stays=9.0))
    alert = raised("loss_rose_for_good", log.case())
    assert alert.flip == "--set train.lr=1e-05" and "has not come back in 200 steps" in alert.text
    # From the second step on: the first loss alone has the level of the start.
    sudden = Log(count=200, change=lambda n: {"loss": 2.0 if n == 1 else 9 + math.sin(3.7 * n)})
    assert raised("loss_rose_for_good", sudden.case()).text.startswith(
        "the loss rose from 2 to 8.96"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda n: {},
        lambda n: bumped(n, top=30.0, stays=4.0),
        # A warm-up that hardly moves it, and batches of which one is three times the other.
        lambda n: {"loss": LN_V * (1 + 0.02 * math.sin(n))},
        lambda n: {"loss": math.exp(0.6 * math.sin(2.3 * n) + 0.5 * math.sin(11.1 * n))},
        # The first few happen to be easy.
        lambda n: {"loss": (0.5 if n <= 4 else 1.2) * math.exp(0.6 * math.sin(2.3 * n))},
        # From a model that was trained: the learning rate is warmed up again.
        lambda n: {"loss": 1.5 + 0.25 * (1 - math.exp(-n / 30)) + 0.05 * math.sin(n)},
    ],
    ids=["healthy", "comes back", "flat", "noisy", "easy start", "warmed up again"],
)
def test_a_loss_that_comes_back_or_only_varies_is_quiet(change: Any) -> None:
    quiet("loss_rose_for_good", Log(count=300, change=change).case())


def test_a_rise_is_judged_with_its_start_and_enough_steps() -> None:
    up = lambda n: bumped(n, top=30.0, stays=9.0)  # noqa: E731
    unknown("loss_rose_for_good", Log(count=29, change=up).case(), "needs 30 steps")
    unknown("loss_rose_for_good", Log(count=99, change=up).case(), "needs 100 steps")
    none = Log(count=200, change=lambda n: {"loss": None})
    unknown("loss_rose_for_good", none.case(), "not logged")


def near_guessing(share: float, count: int = 520) -> Log:
    return Log(count=count, change=lambda n: {"ce": share * LN_V + 0.01 * math.sin(n)})


def test_a_loss_that_stays_at_guessing_is_named() -> None:
    alert = raised("loss_stays_at_guessing", near_guessing(0.99).case())
    assert alert.flip == "--set train.lr=1e-05" and f"ln V = {LN_V:.3f}" in alert.text
    quiet("loss_stays_at_guessing", near_guessing(0.95).case())
    quiet("loss_stays_at_guessing", near_guessing(1.01).case())
    quiet("loss_stays_at_guessing", Log(count=520).case())
    unknown("loss_stays_at_guessing", near_guessing(0.99, 499).case(), "needs 500 steps")
