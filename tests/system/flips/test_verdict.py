"""What is concluded from pairs: each verdict from pairs that call for it, and from none that do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.flips.judge import guards_of, judge
from engine.flips.pair import Pair, parity
from engine.flips.plan import Change, Plan
from engine.log.observed import Observed
from engine.verdict import Level, Verdict
from tests.support.flip_experiments import experiment, judged
from tests.support.flip_pairs import hang, incomplete, outcome, pair, plan, timed

STEADY = [0.001, -0.002, 0.0015, -0.001]


def verdict_of(plan: Plan, pairs: list[Pair], ended: str = "") -> str | None:
    judgement = judge(plan, pairs, ended)
    return judgement.verdict if judgement else None


def test_an_interval_outside_or_inside_the_margin_decides() -> None:
    assert verdict_of(plan(), timed([x - 0.3 for x in STEADY])) == "B_FASTER"
    assert verdict_of(plan(), timed([x + 0.3 for x in STEADY])) == "B_SLOWER"
    assert verdict_of(plan(), timed(STEADY)) == "EQUIVALENT"


def test_fewer_pairs_than_registered_decide_nothing() -> None:
    assert verdict_of(plan(), timed([-1.0, -1.0, -1.0])) is None
    assert verdict_of(plan(), []) is None


def test_an_end_without_a_decision_is_inconclusive() -> None:
    judgement = judged(plan(), timed([0.2, -0.1, 0.15, -0.12]), "out of budget")
    assert judgement.verdict == "INCONCLUSIVE" and judgement.reason == "out of budget"
    assert verdict_of(plan(), [], "interrupted") == "INCONCLUSIVE"


def test_hang_against_progress_is_decided_by_one_pair_as_a_screen() -> None:
    judgement = judged(plan(), [pair(1, hang("A"), outcome("B", steps=57, seconds=290.0))])
    assert judgement.verdict == "A_DID_NOT_COMPLETE" and judgement.censored["p"] > plan().alpha
    assert "A made 0 steps in 300 s" in judgement.reason
    assert "B made 57 in 290 s" in judgement.reason
    assert judgement.interval is None, "a time that was not measured is not made up"
    assert judgement.censored["bound_ln_b_over_a"] == pytest.approx(math.log(290 / 300))
    assert judgement.censored["p"] == 0.5


def test_the_bound_of_a_hang_of_b_points_the_other_way() -> None:
    judgement = judged(plan(), [pair(1, outcome("A", seconds=30.0), hang("B"))])
    assert judgement.verdict == "B_DID_NOT_COMPLETE"
    assert judgement.censored["bound_ln_b_over_a"] == pytest.approx(math.log(10))


def test_a_crash_is_repeated_until_chance_would_rarely_do_it() -> None:
    one = pair(1, outcome("A"), incomplete("B", "alloc_failed", reason="no memory"))
    assert verdict_of(plan(), [one] * 4) is None
    judgement = judged(plan(), [one] * 5)
    assert judgement.verdict == "B_DID_NOT_COMPLETE" and judgement.censored["p"] <= plan().alpha
    assert judgement.censored["p"] == 1 / 32 and judgement.censored["bound_ln_b_over_a"] is None
    assert "alloc_failed after 0 steps: no memory" in judgement.reason


def test_a_crash_that_ends_early_is_reported_as_a_screen() -> None:
    one = pair(1, outcome("A"), incomplete("B", "oom_memcg"))
    judgement = judged(plan(), [one], "out of budget")
    assert judgement.verdict == "B_DID_NOT_COMPLETE" and judgement.censored["p"] > plan().alpha


def test_a_kill_from_outside_is_left_out_and_does_not_end_the_flip() -> None:
    killed = pair(1, outcome("A"), incomplete("B", "killed_external"))
    rest = [replace(p, number=p.number + 1) for p in timed([x - 0.3 for x in STEADY])]
    assert verdict_of(plan(), [killed]) is None
    assert verdict_of(plan(), [killed, *rest[:3]]) is None
    judgement = judged(plan(), [killed, *rest])
    assert judgement.verdict == "B_FASTER"
    assert judgement.interval is not None and judgement.interval.pairs == 4


def test_one_kill_from_outside_proves_nothing_of_the_arm() -> None:
    killed = pair(1, outcome("A"), incomplete("B", "killed_external"))
    assert verdict_of(plan(), [killed], "interrupted") == "INCONCLUSIVE"


def test_an_arm_that_is_killed_every_time_did_not_complete() -> None:
    killed = pair(1, outcome("A"), incomplete("B", "killed_external", reason="not the OOM killer"))
    judgement = judged(plan(), [killed] * 5)
    assert judgement.verdict == "B_DID_NOT_COMPLETE"
    assert "killed_external after 0 steps: not the OOM killer" in judgement.reason


def test_an_arm_that_fails_by_itself_now_and_then_makes_the_flip_invalid() -> None:
    pairs = [*timed([-0.3] * 4), pair(5, outcome("A"), incomplete("B", "crashed"))]
    judgement = judged(plan(), pairs)
    assert judgement.verdict == "INVALID" and "1 of 5 pairs" in judgement.reason


@pytest.mark.parametrize("state", ["over the limit", "failed"])
def test_a_pair_in_which_neither_arm_completes_is_invalid(state: str) -> None:
    pairs = [pair(1, incomplete("A", state), incomplete("B", state))]
    assert "neither arm" in judged(plan(), pairs).reason


@pytest.mark.parametrize(
    ("proof", "verdict"), [("parity", "PARITY_FAIL"), ("flipped", "INVALID"), ("equal", "INVALID")]
)
def test_a_proof_that_fails_ends_the_flip_whatever_the_times_say(proof: str, verdict: str) -> None:
    pairs = timed([-0.5] * 4)
    proofs = {**pairs[1].proofs, proof: Verdict(Level.FAIL, "as planted")}
    pairs[1] = replace(pairs[1], proofs=proofs)
    judgement = judged(plan(), pairs)
    assert judgement.verdict == verdict and judgement.reason == "as planted (pair 2)"


def test_a_metric_that_is_not_measured_is_said_with_its_reason() -> None:
    a = outcome("A", None, no_value="torch keeps no peak of CPU memory")
    judgement = judged(plan(metric="peak_memory_bytes"), [pair(1, a, outcome("B"))])
    assert judgement.verdict == "INVALID"
    assert judgement.reason == ("no peak_memory_bytes of arm A: torch keeps no peak of CPU memory")


def test_pairs_that_depend_on_their_order_are_invalid_not_decided() -> None:
    b_first = [True, False] * 4
    pairs = timed([0.4 + 0.05 * first + 0.001 * i for i, first in enumerate(b_first)], b_first)
    judgement = judged(plan(pairs_min=8), pairs)
    assert judgement.verdict == "INVALID" and "began with B" in judgement.reason


def test_other_metrics_are_asked_together() -> None:
    guards = guards_of(plan(), timed([x - 0.3 for x in STEADY]))
    assert guards["tokens_per_s"]["differs"]
    assert guards["tokens_per_s"]["ratio"] == pytest.approx(math.exp(0.3), rel=0.01)
    assert not guards_of(plan(), timed(STEADY))["tokens_per_s"]["differs"]


# The whole judge under the noise of a real host


@pytest.mark.parametrize("drift", ["ramp", pytest.param("walk", marks=pytest.mark.soak)])
def test_equal_arms_are_called_different_in_at_most_two_percent_of_experiments(drift: str) -> None:
    said = [experiment(seed, 1.0, drift)[0] for seed in range(500)]
    assert sum(s in ("B_FASTER", "B_SLOWER") for s in said) <= 10
    assert said.count("EQUIVALENT") >= 450
    assert said.count("INVALID") <= 15


@pytest.mark.parametrize("drift", ["ramp", pytest.param("walk", marks=pytest.mark.soak)])
@pytest.mark.parametrize("ratio", [pytest.param(0.5, marks=pytest.mark.soak), 0.8, 1.25])
def test_large_effects_are_decided_in_four_to_eight_pairs(drift: str, ratio: float) -> None:
    found = [experiment(seed, ratio, drift) for seed in range(200)]
    expected = "B_FASTER" if ratio < 1 else "B_SLOWER"
    assert sum(s == expected and n <= 8 for s, n in found) >= 190


@pytest.mark.parametrize("ratio", [0.9, pytest.param(1.1, marks=pytest.mark.soak)])
def test_an_effect_of_ten_percent_is_decided_in_eight_pairs_and_never_wrongly(ratio: float) -> None:
    expected = "B_FASTER" if ratio < 1 else "B_SLOWER"
    found = [experiment(seed, ratio, "ramp") for seed in range(400)]
    assert {s for s, _ in found} <= {expected, "INCONCLUSIVE", "INVALID"}
    assert sum(s == expected and n <= 8 for s, n in found) >= 380


@pytest.mark.parametrize("drift", ["ramp", pytest.param("walk", marks=pytest.mark.soak)])
def test_an_effect_as_large_as_the_margin_is_called_larger_in_at_most_five_percent(
    drift: str,
) -> None:
    """The worst case of a one-sided claim: the effect is where the claim stops being true."""
    said = [experiment(seed, 1.05, drift)[0] for seed in range(120)]
    assert said.count("B_SLOWER") <= 6 and said.count("EQUIVALENT") <= 6
    assert "B_FASTER" not in said


def of_losses(change: Change, losses_of_b: list[float]) -> list[Pair]:
    """Four pairs in which B takes the same time and has other losses, proved as the engine proves them."""
    made = plan(change)
    pairs = []
    for one in timed(STEADY):
        b = replace(one.b, losses=losses_of_b)
        proofs = {**one.proofs, "parity": parity(made, one.a, b)}
        pairs.append(replace(one, b=b, proofs=proofs))
    return pairs


@pytest.mark.parametrize(
    "change",
    [
        Change(key="loss.divergence", a="forward_kl", b="reverse_kl"),
        Change(key="loss.beta", a=0.5, b=0.9),
        Change(key="compute.gpus", a=1, b=2),
        Change(key="eval.rows", a=64, b=32),
    ],
    ids=lambda change: change.key,
)
def test_another_objective_is_judged_by_its_time_and_not_by_its_losses(change: Change) -> None:
    assert verdict_of(plan(change), of_losses(change, [9.0, 8.0, 7.0])) == "EQUIVALENT"


def test_an_update_that_computes_something_else_fails_parity() -> None:
    change = Change(key="train.update", a="torch", b="fused")
    assert verdict_of(plan(change), of_losses(change, [5.0, 4.5, 3.9])) == "PARITY_FAIL"
    assert verdict_of(plan(change), of_losses(change, [5.0, 4.0, 3.0])) == "EQUIVALENT"


OBSERVED = Observed(
    kind="alert",
    id="gpu_idle",
    text="the GPU does nothing",
    run="r",
    run_id="0123456789abcdef",
    log="watch",
    seq=3,
    sha256="0" * 64,
    step=2,
    after_s=9.0,
)
ASKED = plan(observed=OBSERVED, metric="shown", pairs_min=3, pairs_max=8)


def shows(*pairs: tuple[bool | None, bool | None]) -> list[Pair]:
    return [
        pair(
            number,
            outcome("A", None, shown=a, state="answered"),
            outcome("B", None, shown=b, state="answered"),
        )
        for number, (a, b) in enumerate(pairs, 1)
    ]


@pytest.mark.parametrize(
    ("pairs", "ended", "expected"),
    [
        ([(True, False)] * 2, "", None),
        ([(True, False)] * 3, "", "B_ENDS_IT"),
        ([(True, False)] * 2, "out of budget", "INCONCLUSIVE"),
        # One run of B that shows it is enough, whatever A does.
        ([(True, False), (True, True)], "", "B_KEEPS_IT"),
        ([(False, True)], "", "B_KEEPS_IT"),
        ([(False, False)] * 3, "", "NOT_SEEN"),
        ([(None, False)] * 2, "", "NOT_TESTED"),
        # What A shows now and then takes nine pairs.
        ([(True, False), (False, False)] * 3, "", None),
        ([(True, False)] * 2 + [(False, False)] + [(True, False)] * 7, "", "B_ENDS_IT"),
        ([(False, False)] + [(True, False)] * 8, "", None),
        ([(False, False)] + [(True, False)] * 9, "", "B_ENDS_IT"),
        # A run of B that tells nothing never counts as one without it.
        ([(True, False), (True, False), (True, None)], "", None),
    ],
)
def test_a_change_ends_what_was_observed_only_where_a_alone_shows_it(
    pairs: list[tuple[bool | None, bool | None]], ended: str, expected: str | None
) -> None:
    assert verdict_of(ASKED, shows(*pairs), ended) == expected


def test_a_run_that_was_ended_from_outside_is_left_out_of_what_was_shown() -> None:
    killed = [
        pair(4, outcome("A", None, shown=True), outcome("B", None, shown=None, state="terminated"))
    ]
    assert verdict_of(ASKED, shows((True, False), (True, False)) + killed) is None
    assert verdict_of(ASKED, killed + shows(*[(True, False)] * 3)) == "B_ENDS_IT"


def test_by_chance_alone_a_change_rarely_ends_what_both_arms_show_now_and_then() -> None:
    """Every probability of showing it, summed over all outcomes of the pairs: at most 5 % end it."""

    def ended_by_chance(p: float, pairs: list[tuple[bool | None, bool | None]]) -> float:
        said = verdict_of(ASKED, shows(*pairs), "" if len(pairs) < 8 else "no more")
        if said is not None:
            return float(said == "B_ENDS_IT")
        return sum(
            (p if a else 1 - p) * (p if b else 1 - p) * ended_by_chance(p, [*pairs, (a, b)])
            for a in (True, False)
            for b in (True, False)
        )

    worst = max(ended_by_chance(p / 20, []) for p in range(1, 20))
    assert worst < 0.05, worst
