"""The verdict of a flip (verdict.json), from its plan, its pairs and the controls.

`judge` checks the pairs after each one and returns one of VERDICTS, or None while more pairs are needed:

    PARITY_FAIL           the arms computed different things; ends the flip
    INVALID               the pairs do not test the setting: not flipped, fell back, no metric, dependent
    A_DID_NOT_COMPLETE    in every pair A did not finish and B did (or the other way round); its time is
    B_DID_NOT_COMPLETE    at least the limit, and is never estimated
    B_FASTER, B_SLOWER    the interval lies outside the margin ("faster": less of the metric)
    EQUIVALENT            the interval lies inside the margin
    B_ENDS_IT             A shows the observation and B does not; this verdict and the next two answer a flip that
                          asks whether a change ends an observation
    B_KEEPS_IT            B shows the observation
    NOT_SEEN              neither A nor B shows the observation
    INCONCLUSIVE          pairs or budget ran out, or the user stopped, before any of these

One pair decides a hang, because a limit of minutes without progress needs no statistics. Any other failure is
repeated until chance alone would produce it in at most alpha of experiments, which takes five pairs. A run
that was ended from outside stays in the record but is left out of the comparison, unless it is always the
same arm. When an arm fails by itself in some pairs and finishes in others, the finished runs are no fair
sample of it, and the flip is INVALID with the count.

`conclude` adds how far to trust it, as `class`:

    measured      registered beforehand, and every control and proof that its verdict needs passed: A against A,
                  A made slower, the setting was flipped, nothing else differs, and the losses agree
    screen        anything less: good enough to drop a hypothesis, not to quote a number
    exploratory   the plan was changed after the start, or the flip continued on another machine, device or engine
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.flips.arms import OVER_THE_LIMIT, Outcome
from engine.flips.flip_folder import FlipFolder
from engine.flips.pair import PROOFS, Pair, count_of
from engine.flips.plan import MARGIN, STEPS, Plan
from engine.flips.statistics import (
    Interval,
    anytime_interval,
    anytime_p,
    decide,
    diagnose,
    pairs_needed,
    pairs_to_confirm,
    shown_to_confirm,
    sign_bound,
)
from engine.flips.surroundings import Surroundings
from engine.flips.verdicts import (
    CONTROLS,
    DID_NOT_COMPLETE,
    ENDS_IT,
    ENDS_IT_HERE,
    INCONCLUSIVE,
    INVALID,
    KEEPS_IT,
    NOT_SEEN,
    PARITY_FAIL,
    UNTESTED,
    VERDICTS,
    answer,
)
from engine.units import format_bytes
from engine.verdict import Level, Verdict, lowest

_NOT_ASKED = {"level": "not asked", "reason": "the setting may change what is computed"}
FOREIGN_BYTES = 1 << 30
"""GPU memory, in bytes, that a driver and a display may hold; more than this belongs to other programs."""
UNTESTABLE = 2
"""Number of pairs without a result after which a test ends."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: str
    """One of VERDICTS."""
    reason: str
    interval: Interval | None = None
    censored: dict[str, Any] = field(default_factory=dict)
    """About an arm that did not complete: which, how often, how, the bound on ln(y_B / y_A), and p."""
    findings: dict[str, str] = field(default_factory=dict)
    """Reasons to distrust the interval, by name."""


# contract: flip-statistics-v1
def judge(plan: Plan, pairs: Sequence[Pair], ended: str = "") -> Judgement | None:
    """Return the verdict, or None while more pairs are needed. `ended` says why there will be no more."""
    for pair in pairs:
        for name, proof in pair.proofs.items():
            if proof is not None and proof.level == Level.FAIL:
                word = PARITY_FAIL if name == "parity" else INVALID
                return Judgement(word, f"{proof.reason} (pair {pair.number})")
    if plan.observed is not None:
        return _judge_shown(plan, pairs, ended)
    interval = interval_of(plan, pairs)
    if (incomplete := _did_not_complete(plan, pairs, interval, ended)) is not None:
        return incomplete
    for outcome in outcomes_of(pairs):
        if outcome.completed and not (outcome.value and outcome.value > 0):
            reason = outcome.no_value or f"{outcome.value:g} is no amount"
            return Judgement(INVALID, f"no {plan.metric} of arm {outcome.arm}: {reason}", interval)
    if interval is not None and (interval.pairs >= plan.pairs_min or _is_exact(plan, pairs)):
        decided = decide(interval, plan.margin)
        if decided is not None or ended:
            findings = _findings(pairs, interval)
            if findings:
                text = "; ".join(findings.values())
                return Judgement(INVALID, text, interval, findings=findings)
        if decided is not None:
            return Judgement(decided, _describe_interval(plan, interval), interval)
    return Judgement(INCONCLUSIVE, ended, interval) if ended else None


def _judge_shown(plan: Plan, pairs: Sequence[Pair], ended: str) -> Judgement | None:
    """Judge whether B's change ends what was observed.

    One run of B that shows the observation decides: the change does not end it. A pair has no result if one of its
    runs failed in another way, was ended from outside or made too few steps; UNTESTABLE such pairs end the test. Of
    the other pairs, those in which only A shows the observation count. `pairs_to_confirm` of them in a row confirm that
    the change ends it, or `shown_to_confirm` of them if not every run of A shows it. Pairs whose runs are bit-identical
    count as one; if all pairs are bit-identical, the verdict holds for this seed alone.
    """
    counted, spoilt = [], []
    for pair in pairs:
        if pair.b.shown:
            return Judgement(KEEPS_IT, f"B shows it too, in pair {pair.number}: {pair.b.reason}")
        if why := _why_no_result(pair):
            spoilt.append(f"pair {pair.number}: {why}")
        else:
            counted.append(pair)
    if len({one.code for one in outcomes_of(pairs)}) > 1:
        return Judgement(INVALID, "the files of the script changed between the runs")
    if len(spoilt) >= UNTESTABLE:
        return Judgement(UNTESTED, "; ".join(spoilt))
    shown = [pair for pair in counted if pair.a.shown]
    # Plans of earlier versions have no attempt, and their runs no trace.
    traces = {(pair.a.trace, pair.b.trace) for pair in shown}
    distinct = len(traces if plan.attempt else shown)
    always = len(shown) == len(counted)
    text = f"A shows it in {len(shown)} of {count_of(len(counted))}, B in none"
    needed = pairs_to_confirm(plan.attempt) if always else shown_to_confirm(plan.attempt)
    if distinct >= needed:
        return Judgement(ENDS_IT, text)
    if always and distinct == 1 and len(shown) >= needed:
        return Judgement(
            ENDS_IT_HERE, f"{text}; all pairs are bit-identical, so this holds for this seed alone"
        )
    if not shown and (ended or len(counted) >= pairs_to_confirm(plan.attempt)):
        why = f": {counted[-1].a.reason}" if counted else ""
        return Judgement(NOT_SEEN, f"no run of A shows it either{why}")
    if not ended:
        return None
    also = f"; {'; '.join(spoilt)}" if spoilt else ""
    return Judgement(INCONCLUSIVE, f"{text}; a verdict needs {needed} such pairs; {ended}{also}")


def _why_no_result(pair: Pair) -> str:
    """Return why a pair has no result; empty if it has one."""
    for outcome in pair.arms:
        if outcome.shown is None:
            return f"{outcome.arm}: {outcome.reason}"
        if outcome.ended_from_outside and not outcome.shown:
            return f"{outcome.arm} was ended from outside: {outcome.reason}"
    return ""


def interval_of(plan: Plan, pairs: Sequence[Pair]) -> Interval | None:
    """Return the interval over the pairs in which both arms completed."""
    differences = [d for p in pairs if (d := p.difference) is not None]
    if not differences:
        return None
    if _is_exact(plan, pairs):
        # Copies of one measurement have no error.
        d, n = differences[0], len(differences)
        return Interval(mean=d, low=d, high=d, pairs=n, deviation=0.0)
    return anytime_interval(differences, alpha=1 - plan.level, prior_weight=plan.prior_weight)


def _is_exact(plan: Plan, pairs: Sequence[Pair]) -> bool:
    """Return whether all pairs have the same seed, so that a further pair is a copy of the first: both runs of the only
    pair begin with the same loss, or, with several pairs, all runs of each arm have the same metric."""
    if not plan.has_one_seed or not all(pair.complete for pair in pairs):
        return False
    first = pairs[0]
    if len(pairs) == 1:
        return bool(first.a.losses) and first.a.losses[0] == first.b.losses[0]
    return all((p.a.value, p.b.value) == (first.a.value, first.b.value) for p in pairs)


def outcomes_of(pairs: Sequence[Pair]) -> list[Outcome]:
    return [outcome for pair in pairs for outcome in pair.arms]


def _did_not_complete(
    plan: Plan, pairs: Sequence[Pair], interval: Interval | None, ended: str
) -> Judgement | None:
    own_failures = [o for o in outcomes_of(pairs) if not o.completed and not o.ended_from_outside]
    neither = [p for p in pairs if not p.a.completed and not p.b.completed]
    if neither and own_failures:
        how = f"A {neither[0].a.in_words()}, B {neither[0].b.in_words()}"
        text = f"neither arm completed in pair {neither[0].number}: {how}"
        return Judgement(INVALID, text, interval)
    for sides in ([(p.a, p.b) for p in pairs], [(p.b, p.a) for p in pairs]):
        if sides and all(not mine.completed and its.completed for mine, its in sides):
            hang = sides[0][0].state == OVER_THE_LIMIT
            enough = sign_bound(len(sides)) <= plan.alpha
            return (
                _always_failed(plan, sides) if hang or enough or (ended and own_failures) else None
            )
    if own_failures:
        arm = own_failures[0].arm
        count = sum(o.arm == arm for o in own_failures)
        text = f"{arm} did not complete in {count} of {count_of(len(pairs))} ({own_failures[0].in_words()})"
        text += ": its other runs are not a fair sample"
        return Judgement(INVALID, text, interval)
    return None


def _always_failed(plan: Plan, sides: Sequence[tuple[Outcome, Outcome]]) -> Judgement:
    """Judge an arm that completed in no pair; `sides` holds its outcome and that of the other arm in each pair."""
    n = len(sides)
    mine, other = sides[0]
    bound = None
    if all(failed.state == OVER_THE_LIMIT for failed, _ in sides):
        longest_s = max(its.seconds for _, its in sides)
        bound = math.log(longest_s / plan.run_limit_s) * (1 if mine.arm == "A" else -1)
    p = sign_bound(n)
    censored = {
        "arm": mine.arm,
        "pairs": n,
        "states": sorted({failed.state for failed, _ in sides}),
        "steps": [failed.steps for failed, _ in sides],
        "bound_ln_b_over_a": bound,
        "p": p,
    }
    text = f"{mine.arm} {mine.in_words()}; {other.arm} made {other.steps} in {other.seconds:.0f} s"
    text += f" ({n}/{n} pairs, p <= {p:.3g})"
    return Judgement(DID_NOT_COMPLETE[mine.arm], text, censored=censored)


def _findings(pairs: Sequence[Pair], interval: Interval) -> dict[str, str]:
    used = [(p, d) for p in pairs if (d := p.difference) is not None]
    if interval.deviation == 0:
        return {}  # a value that is the same every time has no noise that could be dependent
    return diagnose(
        [d for _, d in used], [p.b_first for p, _ in used], [p.begun_unix_s for p, _ in used]
    )


def _describe_interval(plan: Plan, interval: Interval) -> str:
    change, low, high = (math.expm1(end) for end in (interval.mean, interval.low, interval.high))
    text = f"{change:+.1%} [{low:+.1%}, {high:+.1%}] after {count_of(interval.pairs)}"
    return f"{plan.metric} of B and A: {text}"


# verdict.json


def conclude(
    plan: Plan,
    flip: FlipFolder,
    judgement: Judgement,
    controls: Mapping[str, Verdict],
    surroundings: Surroundings,
    *,
    interrupted: bool,
    cost_s: float,
) -> dict[str, Any]:
    """Return the content of verdict.json. Ratios are B over A; an open end of the interval is None."""
    # Whether an arm shows an observation needs no control of the precision of a measurement.
    verdicts: dict[str, Verdict | None] = {} if plan.observed is not None else {**controls}
    counted = [p for p in flip.pairs if p.complete] or flip.pairs
    for proof, name in PROOFS.items():
        asked = [verdict for p in counted if (verdict := p.proofs[proof]) is not None]
        verdicts[name] = lowest(asked) if asked or not counted else None
    outcomes = outcomes_of(flip.pairs)
    changed = [edited] if (edited := flip.edited()) else []
    if flip.began_with != surroundings:
        changed.append("it was continued on another machine, device or engine")
    missing = _why_no_measurement(plan, judgement, verdicts, outcomes)
    interval, needed = judgement.interval, None
    if interval is not None and judgement.verdict == INCONCLUSIVE:
        needed = pairs_needed(interval, plan.margin)
    fields = {
        "prereg_sha": flip.header["plan_sha256"],
        "class": "exploratory" if changed else "screen" if missing else "measured",
        # What keeps the verdict from being measured; empty when nothing does.
        "why_grade": changed + missing,
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "interrupted": interrupted,
        "hypothesis": plan.hypothesis,
        "changes": [str(change) for change in plan.changes],
        "metric": plan.metric,
        "margin": plan.margin,
        "effect": interval.ratio if interval else None,
        "interval": interval.ends if interval else [None, None],
        "level": plan.level,
        "method": f"anytime-valid paired t mixture of ln(B/A), g = {plan.prior_weight:g}; one process a run",
        # Pairs in which both arms completed.
        "n_pairs": interval.pairs if interval else 0,
        "pairs_run": len(flip.pairs),
        "pairs_needed": needed,
        "order_seed": plan.order_seed,
        "raw_runs": [
            {"pair": pair.number}
            | {name: getattr(o, name) for name in ("arm", "run", "state", "value", "seconds")}
            for pair in flip.pairs
            for o in (reversed(pair.arms) if pair.b_first else pair.arms)
        ],
        "censored": judgement.censored,
        "diagnostics": {
            name: {outcome.run: value for outcome in outcomes if (value := getattr(outcome, name))}
            for name in ("late_compiles", "slowed", "alerts")
        }
        | {
            "findings": judgement.findings,
            "deviation": interval.deviation if interval else None,
            "left_out": [
                f"pair {pair.number}: {outcome.arm} {outcome.in_words()}"
                for pair in flip.pairs
                for outcome in pair.arms
                if outcome.ended_from_outside
            ],
            "neighbour_load": {
                outcome.run: outcome.neighbour_load
                for outcome in outcomes
                if outcome.neighbour_load is not None
            },
        },
        # By the names in CONTROLS.
        "controls": {
            name: _NOT_ASKED
            if proved is None
            else {"level": proved.level.name.lower(), "reason": proved.reason}
            for name, proved in verdicts.items()
        },
        # The other metrics, tested together.
        "guards": guards_of(plan, flip.pairs),
        "host": dataclasses.asdict(surroundings),
        "cost_s": cost_s,
        "receipts": [
            receipt
            for receipt in (f"{outcome.run}/receipt.json" for outcome in outcomes)
            if (flip.path / receipt).is_file()
        ],
    }
    words = answer(fields)
    return fields | {
        "sentence": words.sentence,
        "action": words.action,
        "next": _commands(plan, flip, fields, words.options),
    }


def guards_of(plan: Plan, pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """Return the other metrics: B over A, and whether they differ, corrected for testing all of them at once."""
    ratios: dict[str, list[float]] = {}
    complete = [p for p in pairs if p.complete]
    for pair in complete:
        for name in pair.a.metrics.keys() & pair.b.metrics.keys():
            a, b = pair.a.metrics[name], pair.b.metrics[name]
            if name != plan.metric and a > 0 and b > 0:
                ratios.setdefault(name, []).append(math.log(b / a))
    whole = {name: d for name, d in sorted(ratios.items()) if len(d) == len(complete)}
    p_values = {name: anytime_p(d) for name, d in whole.items()}
    return {
        name: {
            "ratio": math.exp(sum(d) / len(d)),
            "p": p_values[name],
            "differs": p_values[name] <= plan.alpha / len(whole),
        }
        for name, d in whole.items()
    }


def _why_no_measurement(
    plan: Plan,
    judgement: Judgement,
    verdicts: Mapping[str, Verdict | None],
    outcomes: Sequence[Outcome],
) -> list[str]:
    required, censored = VERDICTS[judgement.verdict].requires, judgement.censored
    reasons = [] if required else [f"{judgement.verdict} measures nothing"]
    if required and censored and censored["p"] > plan.alpha:
        reasons.append(f"{count_of(censored['pairs'])} alone may be chance")
    reasons += [
        f"{CONTROLS[name]}: {proved.reason}"
        for name, proved in verdicts.items()
        if name in required and proved is not None and proved.level != Level.PASS
    ]
    # Other users of the GPU, as far as the logs show them.
    others = max((outcome.gpu_used_before_bytes or 0.0 for outcome in outcomes), default=0.0)
    if others > FOREIGN_BYTES:
        text = f"{format_bytes(others)} of its memory were in use before a run began"
        reasons.append(f"other programs on the GPU: {text}")
    return reasons


def _commands(plan: Plan, flip: FlipFolder, fields: Mapping[str, Any], options: str) -> list[str]:
    """Return the commands for the next action, and for reading the log of a run that did not complete."""
    if fields["interrupted"]:
        return [f"continue: engine flip --resume {flip.path}"]
    commands = []
    if options:
        defaults = {"metric": "step_s", "margin": MARGIN, "steps": STEPS}
        texts = {"metric": plan.metric, "margin": f"{100 * plan.margin:g}%", "steps": plan.steps}
        options_kept = [
            f" --{name} {text}"
            for name, text in texts.items()
            if getattr(plan, name) != defaults[name] and f"--{name}" not in options
        ]
        commands.append(f"run: {plan.command_line(' '.join((''.join(options_kept), options)))}")
    if VERDICTS[fields["verdict"]].is_in_logs and flip.pairs:
        arms = fields["censored"].get("arm", "AB")
        failed = [
            run["run"]
            for run in fields["raw_runs"]
            if run["state"] != "completed" and run["arm"] in arms
        ]
        run = failed[0] if failed else flip.pairs[-1].b.run
        commands.append(f"look: engine tail {flip.path / run}")
    return commands
