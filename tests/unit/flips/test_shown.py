"""What confirms a cause: distinct pairs in which A alone shows the same failure, few enough to be chance in 2 % of
findings, however many causes are tried."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from engine.flips.arms import Outcome
from engine.flips.judge import judge
from engine.flips.pair import Pair
from engine.flips.plan import SHOWN, Plan
from engine.flips.statistics import pairs_to_confirm, shown_to_confirm
from engine.flips.verdicts import ENDS_IT, ENDS_IT_HERE, INCONCLUSIVE, INVALID, KEEPS_IT, UNTESTED
from tests.support.flip_pairs import SEEN, outcome, pair, plan


@cache
def asking(attempt: int = 1) -> Plan:
    pairs = pairs_to_confirm(attempt)
    most = max(pairs, shown_to_confirm(attempt))
    return plan(metric=SHOWN, observed=SEEN, attempt=attempt, pairs_min=pairs, pairs_max=most)


def arm(name: str, shown: bool | None, trace: str = "", **more: object) -> Outcome:
    state = "failed" if shown is None else "answered"
    return replace(outcome(name, None, state=state, shown=shown, trace=trace), **more)


def made(*shows: tuple[bool | None, bool | None], copies: bool = False) -> list[Pair]:
    return [
        pair(n, arm("A", a, "a" if copies else f"a{n}"), arm("B", b, "b" if copies else f"b{n}"))
        for n, (a, b) in enumerate(shows, 1)
    ]


def said(pairs: list[Pair], attempt: int = 1, ended: str = "") -> str:
    found = judge(asking(attempt), pairs, ended)
    return "" if found is None else found.verdict


ALONE, NEITHER, BOTH, OTHER = (True, False), (False, False), (True, True), (True, None)


def test_three_distinct_pairs_confirm_the_first_cause() -> None:
    assert said(made(ALONE, ALONE)) == ""
    assert said(made(ALONE, ALONE, ALONE)) == ENDS_IT


def test_copies_of_one_run_confirm_for_this_seed_alone() -> None:
    assert said(made(*[ALONE] * 3, copies=True)) == ENDS_IT_HERE


def test_a_failure_of_another_kind_counts_for_nothing_and_two_end_the_test() -> None:
    assert said(made(ALONE, OTHER, ALONE)) == ""
    assert said(made(ALONE, OTHER, ALONE, ALONE)) == ENDS_IT
    assert said(made(OTHER, OTHER)) == UNTESTED
    assert said(made(OTHER, (None, False))) == UNTESTED


def test_one_run_of_b_that_shows_it_refutes() -> None:
    assert said(made(ALONE, ALONE, BOTH)) == KEEPS_IT
    assert said(made((None, True))) == KEEPS_IT


def test_a_run_that_was_ended_from_outside_counts_for_nothing() -> None:
    killed = [arm("A", False, "x", state="killed_external")]
    killed.append(arm("B", False, "y"))
    assert said([pair(1, *killed), pair(2, *killed)]) == UNTESTED


def test_each_further_test_of_a_finding_takes_more_pairs() -> None:
    assert [pairs_to_confirm(n) for n in (1, 2, 3, 4)] == [3, 5, 6, 7]
    assert said(made(*[ALONE] * 4), attempt=2) == ""
    assert said(made(*[ALONE] * 5), attempt=2) == ENDS_IT
    chances = sum(4.0 ** -pairs_to_confirm(n) + 2.0 ** -shown_to_confirm(n) for n in range(1, 60))
    assert chances < 0.02


def test_a_failure_now_and_then_takes_ten_pairs_that_show_it() -> None:
    some = [ALONE, NEITHER]
    assert said(made(*some * 4)) == ""
    assert said(made(*some * 4), ended="no more") == INCONCLUSIVE
    assert said(made(*some * 10)) == ENDS_IT


def test_other_files_of_the_script_are_another_experiment() -> None:
    pairs = made(ALONE, ALONE, ALONE)
    pairs[2] = replace(pairs[2], b=replace(pairs[2].b, code="other"))
    assert said(pairs) == INVALID


@cache
def one_pair(number: int, a: bool | None, b: bool | None) -> Pair:
    return pair(number, arm("A", a, f"a{number}"), arm("B", b, f"b{number}"))


def opponent(coin: random.Random, show: float, fail: float, causes: int) -> bool:
    """Whether an opponent closes a finding with causes that change nothing: each run shows the failure by chance, or
    fails otherwise; he ends a test as soon as a run speaks against it, and tries the next cause."""

    def run() -> bool | None:
        draw = coin.random()
        return True if draw < show else None if draw < show + fail else False

    for attempt in range(1, causes + 1):
        asked, pairs = asking(attempt), []
        for number in range(1, asked.pairs_max + 1):
            pairs.append(one_pair(number, run(), run()))
            if pairs[-1].b.shown:
                break  # interrupted: the test is spent
            verdict = judge(asked, pairs)
            if verdict is not None and verdict.verdict == ENDS_IT:
                return True
            if verdict is not None:
                break
    return False


@pytest.mark.parametrize(("show", "fail"), [(0.3, 0.0), (0.7, 0.0), (0.5, 0.1)])
def test_a_coin_closes_few_findings_however_many_causes_are_tried(show: float, fail: float) -> None:
    coin, findings = random.Random(f"{show} {fail}"), 600
    wrong = sum(opponent(coin, show, fail, 50) for _ in range(findings))
    # Three standard deviations beyond a share of 2 %; with three pairs for each cause it is half of them.
    assert wrong <= findings * 0.02 + 3 * (findings * 0.02 * 0.98) ** 0.5
