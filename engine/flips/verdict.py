"""The verdict on the pairs measured so far: a pure function of the plan and the pairs.

    PARITY_FAIL           the arms computed different things; ends the flip
    INVALID               the pairs do not test the setting: not flipped, fell back, no metric, dependent
    A_DID_NOT_COMPLETE    in every pair A did not finish and B did (or the other way round); its time is
    B_DID_NOT_COMPLETE    at least the limit, and is never estimated
    B_FASTER, B_SLOWER    the interval lies outside the margin ("faster": less of the metric)
    EQUIVALENT            the interval lies inside the margin
    B_ENDS_IT, B_KEEPS_IT of a flip that asks whether a change ends what was observed: A shows it and B does not,
                          B shows it too
    NOT_SEEN              A does not show it either
    INCONCLUSIVE          pairs or budget ran out, or the user stopped, before any of these

One pair decides a hang, because a limit of minutes without progress needs no statistics. Any other failure is
repeated until chance alone would produce it in at most alpha of experiments, which takes five pairs. A run
that was ended from outside stays in the record but is left out of the comparison, unless it is always the
same arm. When an arm fails by itself in some pairs and finishes in others, the finished runs are no fair
sample of it, and the flip is INVALID with the count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.flips.arms import OVER_THE_LIMIT, Outcome
from engine.flips.plan import Plan
from engine.flips.statistics import (
    Finding,
    Interval,
    anytime_interval,
    anytime_p,
    decide,
    diagnose,
    holm,
    pairs_needed,
    sign_bound,
    sign_flip_p,
)
from engine.verdict import Level, Verdict, lowest

FASTER, SLOWER, EQUIVALENT = "B_FASTER", "B_SLOWER", "EQUIVALENT"
INCONCLUSIVE, PARITY_FAIL, INVALID = "INCONCLUSIVE", "PARITY_FAIL", "INVALID"
DID_NOT_COMPLETE = {"A": "A_DID_NOT_COMPLETE", "B": "B_DID_NOT_COMPLETE"}
ENDS_IT, KEEPS_IT, NOT_SEEN = "B_ENDS_IT", "B_KEEPS_IT", "NOT_SEEN"
DECIDED = frozenset({FASTER, SLOWER, EQUIVALENT, ENDS_IT, KEEPS_IT, *DID_NOT_COMPLETE.values()})
PROOFS = ("flipped", "equal", "parity")


def count_of(pairs: int) -> str:
    """Format a number of pairs: `1 pair`, `4 pairs`."""
    return f"{pairs} pair{'' if pairs == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One run of each arm, and the proofs about the two."""

    number: int
    b_first: bool
    begun_unix_s: float
    seconds: float
    a: Outcome
    b: Outcome
    proofs: Mapping[str, Verdict | None]
    """By the names in PROOFS; None for a proof that does not apply."""

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The outcomes by arm."""
        return {"A": self.a, "B": self.b}

    @property
    def complete(self) -> bool:
        return self.a.completed and self.b.completed

    @property
    def difference(self) -> float | None:
        """ln(y_B / y_A) of the plan's metric."""
        if not self.a.value or not self.b.value or min(self.a.value, self.b.value) <= 0:
            return None
        return math.log(self.b.value / self.a.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    verdict: str
    reason: str
    interval: Interval | None = None
    pairs_needed: int | None = None
    censored: dict[str, Any] = field(default_factory=dict)
    """About an arm that did not complete: which, how often, how, the bound on ln(y_B / y_A), and p."""
    findings: tuple[Finding, ...] = ()
    is_screen: bool = False
    """True when the pairs are too few for a measurement even with every control."""


# contract: flip-statistics-v1
def judge(plan: Plan, pairs: Sequence[Pair], ended: str = "") -> Judgement | None:
    """Return the verdict, or None while more pairs are needed. `ended` says why there will be no more."""
    bad = _proof_that_failed(pairs)
    if bad is not None:
        return bad
    if plan.observed is not None:
        return _judge_shown(plan, pairs, ended)
    interval = interval_of(plan, pairs)
    if (said := _did_not_complete(plan, pairs, interval, ended)) is not None:
        return said
    for pair in pairs:
        for outcome in pair.outcomes.values():
            if outcome.completed and not (outcome.value and outcome.value > 0):
                reason = outcome.no_value or f"{outcome.value:g} is no amount"
                text = f"no {plan.metric} of arm {outcome.arm}: {reason}"
                return Judgement(verdict=INVALID, reason=text, interval=interval)
    if interval is not None and interval.pairs >= plan.pairs_min:
        word = decide(interval, plan.margin)
        if word is not None or ended:
            findings = tuple(_findings(plan, pairs, interval, word))
            if findings:
                text = "; ".join(finding.text for finding in findings)
                return Judgement(verdict=INVALID, reason=text, interval=interval, findings=findings)
        if word is not None:
            return Judgement(
                verdict=word, reason=_in_words(plan, word, interval), interval=interval
            )
    if not ended:
        return None
    needed = pairs_needed(interval, plan.margin) if interval is not None else None
    return Judgement(verdict=INCONCLUSIVE, reason=ended, interval=interval, pairs_needed=needed)


def _judge_shown(plan: Plan, pairs: Sequence[Pair], ended: str) -> Judgement | None:
    """Judge whether B's change ends what was observed.

    One run of B that shows it decides: the change does not end it. Otherwise pairs in which A alone shows it count.
    If the change made no difference, runs of both arms would show it with one probability p, so n pairs in a row would
    come out so by chance with (p (1 - p))^n, at most 4^-n: 1.6 % for the three of `pairs_min`. Where A shows it in some
    runs only, `sign_bound` of the pairs that tell decides.
    """
    assert plan.observed is not None, "the flip asks about an observation"
    asked = [(p.number, p.a, p.b) for p in pairs if not _ended_from_outside(p)]
    for number, _, b in asked:
        if b.shown:
            text = f"B shows it too, in pair {number}: {b.reason}"
            return Judgement(verdict=KEEPS_IT, reason=text)
        if b.shown is None:
            return Judgement(
                verdict=INVALID, reason=f"nobody knows of B, in pair {number}: {b.in_words()}"
            )
    told = sum(a.shown is True for _, a, _ in asked)
    text = f"A shows it in {told} of {count_of(len(asked))}, B in none"
    if told >= plan.pairs_min and (told == len(asked) or sign_bound(told) <= plan.alpha):
        return Judgement(verdict=ENDS_IT, reason=text)
    if not told and (ended or len(asked) >= plan.pairs_min):
        why = f": {asked[-1][1].reason}" if asked else ""
        return Judgement(verdict=NOT_SEEN, reason=f"no run of A shows it either{why}")
    return Judgement(verdict=INCONCLUSIVE, reason=f"{text}; {ended}") if ended else None


def _ended_from_outside(pair: Pair) -> bool:
    return any(o.ended_from_outside and not o.shown for o in pair.outcomes.values())


def interval_of(plan: Plan, pairs: Sequence[Pair]) -> Interval | None:
    """The interval over the pairs in which both arms completed."""
    differences = [d for p in pairs if p.complete and (d := p.difference) is not None]
    if not differences:
        return None
    return anytime_interval(differences, alpha=1 - plan.level, prior_weight=plan.prior_weight)


def proofs_of(pairs: Sequence[Pair]) -> dict[str, Verdict | None]:
    """The lowest verdict of each proof over all pairs that count; None for a proof that does not apply."""
    counted = [p for p in pairs if p.complete] or list(pairs)
    found: dict[str, Verdict | None] = {}
    for name in PROOFS:
        asked = [proof for p in counted if (proof := p.proofs[name]) is not None]
        found[name] = lowest(asked) if asked or not counted else None
    return found


def guards_of(plan: Plan, pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """The other metrics: B over A, and whether they differ, corrected for testing all of them at once."""
    ratios: dict[str, list[float]] = {}
    complete = [p for p in pairs if p.complete]
    for pair in complete:
        for name in pair.a.metrics.keys() & pair.b.metrics.keys():
            a, b = pair.a.metrics[name], pair.b.metrics[name]
            if name != plan.metric and a > 0 and b > 0:
                ratios.setdefault(name, []).append(math.log(b / a))
    whole = {name: d for name, d in sorted(ratios.items()) if len(d) == len(complete)}
    p_values = {name: anytime_p(d) for name, d in whole.items()}
    differ = holm(p_values, alpha=plan.alpha)
    return {
        name: {
            "ratio": math.exp(sum(d) / len(d)),
            "p": p_values[name],
            "differs": name in differ,
        }
        for name, d in whole.items()
    }


def _proof_that_failed(pairs: Sequence[Pair]) -> Judgement | None:
    for pair in pairs:
        for name, proof in pair.proofs.items():
            if proof is not None and proof.level == Level.FAIL:
                verdict = PARITY_FAIL if name == "parity" else INVALID
                return Judgement(verdict=verdict, reason=f"{proof.reason} (pair {pair.number})")
    return None


def _did_not_complete(
    plan: Plan, pairs: Sequence[Pair], interval: Interval | None, ended: str
) -> Judgement | None:
    by_itself = [
        outcome
        for pair in pairs
        for outcome in pair.outcomes.values()
        if not outcome.completed and not outcome.ended_from_outside
    ]
    both = [p for p in pairs if not p.a.completed and not p.b.completed]
    if both and by_itself:
        how = f"A {both[0].a.in_words()}, B {both[0].b.in_words()}"
        text = f"neither arm completed in pair {both[0].number}: {how}"
        return Judgement(verdict=INVALID, reason=text, interval=interval)
    for arm, other in ("AB", "BA"):
        sides = [(pair.outcomes[arm], pair.outcomes[other]) for pair in pairs]
        if sides and all(not mine.completed and its.completed for mine, its in sides):
            hang = sides[0][0].state == OVER_THE_LIMIT
            enough = sign_bound(len(sides)) <= plan.alpha
            return _always_failed(plan, sides) if hang or enough or (ended and by_itself) else None
    if by_itself:
        arm = by_itself[0].arm
        count = sum(o.arm == arm for o in by_itself)
        text = f"{arm} did not complete in {count} of {count_of(len(pairs))} ({by_itself[0].in_words()})"
        text += ": the times of the others are no fair sample of it"
        return Judgement(verdict=INVALID, reason=text, interval=interval)
    return None


def _always_failed(plan: Plan, sides: Sequence[tuple[Outcome, Outcome]]) -> Judgement:
    """Judge an arm that completed in no pair; `sides` holds its outcome in each beside that of the other arm."""
    n = len(sides)
    mine, other = sides[0]
    bound = None
    if all(failed.state == OVER_THE_LIMIT for failed, _ in sides):
        longest_s = max(its.seconds for _, its in sides)
        bound = math.log(longest_s / plan.run_limit_s) * (1 if mine.arm == "A" else -1)
    how = f"made {mine.reason}" if mine.state == OVER_THE_LIMIT else mine.in_words()
    text = f"{mine.arm} {how}; {other.arm} made {other.steps} in {other.seconds:.0f} s"
    if bound is not None:
        text += f": {mine.arm} takes at least {math.exp(abs(bound)):.1f} times as long"
    p = sign_bound(n)
    return Judgement(
        verdict=DID_NOT_COMPLETE[mine.arm],
        reason=f"{text} ({n}/{n} pairs, p <= {p:.3g})",
        censored={
            "arm": mine.arm,
            "pairs": n,
            "states": sorted({failed.state for failed, _ in sides}),
            "steps": [failed.steps for failed, _ in sides],
            "bound_ln_b_over_a": bound,
            "p": p,
        },
        is_screen=p > plan.alpha,
    )


def _findings(
    plan: Plan, pairs: Sequence[Pair], interval: Interval, word: str | None
) -> list[Finding]:
    used = [(p, d) for p in pairs if p.complete and (d := p.difference) is not None]
    differences = [d for _, d in used]
    if interval.deviation == 0:
        return []  # a value that is the same every time has no noise that could be dependent
    found = diagnose(differences, [p.b_first for p, _ in used], [p.begun_unix_s for p, _ in used])
    # With fewer pairs there are too few sign patterns for any of them to be rare.
    enough = 2 * sign_bound(len(differences)) <= plan.alpha
    p = sign_flip_p(differences)
    if word in (FASTER, SLOWER) and enough and p > plan.alpha:
        text = f"the signs of the pairs do not agree with the interval (p = {p:.3f})"
        found.append(Finding(id="signs", text=text))
    return found


def _in_words(plan: Plan, word: str, interval: Interval) -> str:
    change = math.expm1(interval.mean)
    low, high = math.expm1(interval.low), math.expm1(interval.high)
    seen = f"{change:+.1%} [{low:+.1%}, {high:+.1%}] after {count_of(interval.pairs)}"
    if word == EQUIVALENT:
        return f"B's {plan.metric} is the same as A's within {100 * plan.margin:g} %: {seen}"
    return f"B's {plan.metric} is {'less' if word == FASTER else 'more'} than A's: {seen}"
