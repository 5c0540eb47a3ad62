"""The laws of the verdict lattice, exhaustively, and what an Unknown may not become."""

from __future__ import annotations

import itertools

import pytest

from engine.contracts.status import Answer, Rank, meet, meet_all
from engine.verdict import Level, Verdict, lowest


def test_the_laws_hold_for_every_triple() -> None:
    for triple in itertools.product(Rank, repeat=3):
        a, b, c = (Answer(rank, rank.name) for rank in triple)
        assert meet(a, b).rank == meet(b, a).rank == min(a.rank, b.rank)
        assert meet(meet(a, b), c) == meet(a, meet(b, c))
        assert meet(a, a) == a
        assert meet_all(iter((a, b, c))).rank == min(triple)


def test_fail_absorbs_and_pass_is_the_identity() -> None:
    fail, passed = Answer(Rank.FAIL, "broken"), Answer(Rank.PASS, "ran")
    for rank in Rank:
        answer = Answer(rank, "said")
        assert meet(fail, answer) is fail
        assert meet(passed, answer) is (passed if rank is Rank.PASS else answer)


def test_nothing_asked_is_unknown() -> None:
    assert meet_all(()).rank is Rank.NOT_RUN and meet_all(()).level is Level.UNKNOWN
    assert lowest(()).level is Level.UNKNOWN


def test_only_pass_exits_0() -> None:
    codes = {rank: Answer(rank, "").verdict.exit_code for rank in Rank}
    assert codes.pop(Rank.PASS) == 0 and codes.pop(Rank.FAIL) == 1
    assert set(codes.values()) == {2}


def test_the_verdict_of_a_set_is_that_of_its_lowest() -> None:
    for levels in itertools.product(Level, repeat=3):
        assert lowest(Verdict(level, "") for level in levels).level == min(levels)


@pytest.mark.parametrize("rank", Rank)
def test_an_unknown_says_its_reason(rank: Rank) -> None:
    answer = Answer(rank, "because")
    named = {Rank.FAIL: "because", Rank.PASS: "because", Rank.TOOL_ABSENT: "ToolAbsent: because"}
    assert str(answer) == named.get(rank, f"{answer.label}: because")
    assert (answer.level is Level.UNKNOWN) == (rank not in (Rank.FAIL, Rank.PASS))
