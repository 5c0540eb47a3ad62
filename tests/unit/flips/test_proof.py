"""Planted lies about what ran: a flip that did not flip, one that fell back, one that computes otherwise."""

from __future__ import annotations

import pytest

from engine.flips.pair import FACTS as FACT_NAMES
from engine.flips.pair import equal, flipped, parity
from engine.flips.plan import Change
from engine.verdict import Level
from tests.support.flip_pairs import FACTS, outcome, plan

THREADS = Change(key="compute.threads", a=2, b=1)
WAIT = Change(key="compute.thread_wait", a="auto", b="passive")


def test_settings_that_differ_as_planned_and_decisions_that_followed_them_are_proof() -> None:
    made = plan(THREADS)
    assert flipped(made, outcome("A"), outcome("B")).level == Level.PASS


def test_an_arm_that_decided_otherwise_than_it_was_told_was_not_flipped() -> None:
    made = plan(THREADS)
    liar = outcome("B", choices={"compute.threads": "2"})
    said = flipped(made, outcome("A"), liar)
    assert said.level == Level.FAIL
    assert said.reason == "NotFlipped: compute.threads is 2 in arm B, where 1 was set"


def test_auto_that_comes_to_the_value_of_the_other_arm_was_not_flipped() -> None:
    made = plan(WAIT)
    a, b = (outcome(arm, choices={WAIT.key: "passive"}) for arm in "AB")
    said = flipped(made, a, b)
    assert said.reason == "NotFlipped: compute.thread_wait is passive in both arms"


def test_an_arm_that_never_came_to_decide_is_not_proved() -> None:
    made = plan(THREADS)
    early = outcome("B", None, state="over the limit", choices={})
    assert flipped(made, outcome("A"), early).level == Level.UNKNOWN


@pytest.mark.parametrize("fact", [name for name in FACT_NAMES])
def test_an_arm_that_fell_back_unseen_is_found(fact: str) -> None:
    other = outcome("B", facts=FACTS | {fact: "something else"})
    said = equal(plan(THREADS), outcome("A"), other)
    assert said.level == Level.FAIL and said.reason.startswith(f"SilentFallback: {fact} is ")


def test_what_the_changed_setting_is_there_to_change_may_differ() -> None:
    other = outcome("B", facts=FACTS | {"rows per step": 8, "tokens per step": [256] * 3})
    change = Change(key="train.rows", a=4, b=8)
    assert equal(plan(change), outcome("A"), other).level == Level.PASS
    assert equal(plan(THREADS), outcome("A"), other).level == Level.FAIL


def test_a_log_that_says_too_little_proves_nothing() -> None:
    brief = outcome("B", facts={"device": "cpu"})
    assert equal(plan(THREADS), outcome("A"), brief).level == Level.UNKNOWN


def test_clocks_held_down_in_one_arm_make_the_pair_worthless() -> None:
    hot = outcome("B", slowed=0.5)
    said = equal(plan(THREADS), outcome("A", slowed=0.0), hot)
    assert said.level == Level.FAIL and "held down 0% of the time in A and 50% in B" in said.reason
    assert equal(plan(THREADS), outcome("A", slowed=0.5), hot).level == Level.PASS


def test_a_gpu_whose_clocks_were_not_read_is_not_proved_equal() -> None:
    a, b = (outcome(arm, facts=FACTS | {"device": "cuda"}) for arm in "AB")
    assert equal(plan(THREADS), a, b).level == Level.UNKNOWN


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"losses": [5.0, 4.2, 3.0]}, "the loss of step 2 is 4 in A and 4.2 in B"),
        ({"teacher_loss": 2.1}, "the teacher's held-out loss is 2 in A and 2.1 in B"),
        ({"losses": [5.0, None, 3.0]}, "the loss of step 2 is finite in one arm only"),
    ],
)
def test_an_arm_that_computes_something_else_fails_parity(
    fields: dict[str, object], said: str
) -> None:
    answer = parity(plan(THREADS), outcome("A"), outcome("B", **fields))
    assert answer is not None and answer.level == Level.FAIL and said in answer.reason


def test_parity_passes_within_the_tolerance_and_says_how_far_apart() -> None:
    answer = parity(plan(THREADS), outcome("A"), outcome("B", losses=[5.0, 4.04, 3.0]))
    assert answer is not None and answer.level == Level.PASS
    assert "0.0099 of their value (the loss of step 2)" in answer.reason


def test_parity_is_not_asked_of_a_setting_that_may_change_the_losses() -> None:
    change = Change(key="loss.alpha", a=0.3, b=0.5)
    assert parity(plan(change), outcome("A"), outcome("B", losses=[1.0])) is None


def test_arms_without_losses_have_no_parity() -> None:
    silent = outcome("B", losses=[], teacher_loss=None)
    answer = parity(plan(THREADS), outcome("A"), silent)
    assert answer is not None and answer.level == Level.UNKNOWN


def test_an_arm_that_ended_early_has_fewer_steps_to_compare_and_no_other_ones() -> None:
    begun = outcome("B", facts=FACTS | {"tokens per step": [128, 128]})
    assert equal(plan(THREADS), outcome("A"), begun).level == Level.PASS
    before_any = outcome("B", facts=FACTS | {"tokens per step": []})
    assert equal(plan(THREADS), outcome("A"), before_any).level == Level.PASS
    other = outcome("B", facts=FACTS | {"tokens per step": [128, 64]})
    assert equal(plan(THREADS), outcome("A"), other).level == Level.FAIL


def test_clocks_that_are_not_read_on_purpose_are_no_doubt() -> None:
    made = plan(Change(key="watch.sample_seconds", a=1.0, b=0.0))
    a, b = (outcome(arm, facts=FACTS | {"device": "cuda"}) for arm in "AB")
    assert equal(made, a, b).level == Level.PASS


def test_more_gpus_have_more_rows_and_have_not_fallen_back() -> None:
    change = Change(key="compute.gpus", a=1, b=2)
    other = outcome("B", facts=FACTS | {"rows per step": 8, "tokens per step": [256] * 3})
    assert equal(plan(change), outcome("A"), other).level == Level.PASS
