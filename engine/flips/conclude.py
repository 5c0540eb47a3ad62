"""From a judgement to the verdict that is written down: how far it may be believed, and what to do next.

measured      registered beforehand, both controls passed, flipped, equal and parity proved
screen        anything less: good enough to drop a hypothesis, not to quote a number
exploratory   the plan was changed after the start, or another engine went on with it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.flips.judge import (
    DECIDED,
    DID_NOT_COMPLETE,
    EQUIVALENT,
    FASTER,
    INCONCLUSIVE,
    INVALID,
    PARITY_FAIL,
    SLOWER,
    Judgement,
    Pair,
    count_of,
    guards_of,
    proofs_of,
)
from engine.flips.plan import Plan
from engine.flips.record import (
    EXPLORATORY,
    MEASURED,
    SCREEN,
    FlipFolder,
    FlipVerdict,
    raw_runs,
)
from engine.flips.statistics import Interval
from engine.flips.surroundings import Surroundings
from engine.units import format_bytes
from engine.verdict import Level, Verdict

FOREIGN_BYTES = 1 << 30
"""Less is what a driver and a display hold."""
METHOD = "anytime-valid paired t mixture of ln(B/A), g = {:g}; one process a run"


def conclude(
    plan: Plan,
    flip: FlipFolder,
    judgement: Judgement,
    controls: Mapping[str, Verdict],
    surroundings: Surroundings,
    *,
    interrupted: bool,
    cost_s: float,
) -> FlipVerdict:
    """The verdict as it is written down."""
    proofs = proofs_of(flip.pairs)
    changed = _why_exploratory(flip, surroundings)
    missing = _why_no_measurement(judgement, controls, proofs) + _foreign(flip.pairs)
    interval = judgement.interval
    return FlipVerdict(
        prereg_sha=flip.header["plan_sha256"],
        grade=EXPLORATORY if changed else SCREEN if missing else MEASURED,
        why_grade=changed + missing,
        verdict=judgement.verdict,
        reason=judgement.reason,
        interrupted=interrupted,
        hypothesis=plan.hypothesis,
        changes=[str(change) for change in plan.changes],
        metric=plan.metric,
        margin=plan.margin,
        effect=None if interval is None else interval.ratio,
        interval=_ends(interval),
        level=plan.level,
        method=METHOD.format(plan.prior_weight),
        n_pairs=0 if interval is None else interval.pairs,
        pairs_run=len(flip.pairs),
        pairs_needed=judgement.pairs_needed,
        order_seed=plan.order_seed,
        raw_runs=raw_runs(flip.pairs),
        censored=judgement.censored,
        diagnostics=_diagnostics(flip, judgement),
        controls=_as_fields({**controls, **_named(proofs)}),
        guards=guards_of(plan, flip.pairs),
        host=dataclasses.asdict(surroundings),
        cost_s=cost_s,
        receipts=_receipts(flip),
        next=_next(plan, flip, judgement, controls, interrupted=interrupted),
    )


def _why_exploratory(flip: FlipFolder, surroundings: Surroundings) -> list[str]:
    found = [edited] if (edited := flip.edited()) else []
    if flip.began_with != surroundings:
        found.append("it went on with another machine, device or engine than it began with")
    return found


def _why_no_measurement(
    judgement: Judgement, controls: Mapping[str, Verdict], proofs: Mapping[str, Verdict | None]
) -> list[str]:
    if judgement.verdict not in DECIDED:
        return [f"{judgement.verdict} measures nothing"]
    found = []
    if judgement.is_screen:
        found.append(f"{count_of(judgement.censored['pairs'])} alone, which chance may do")
    asked: dict[str, Verdict | None] = dict(proofs)
    if judgement.verdict not in DID_NOT_COMPLETE.values():
        asked = {**controls, **asked}
    else:
        # An arm that did not finish has not said all that would be compared.
        asked = {"flipped": proofs["flipped"]}
    for name, answer in asked.items():
        if answer is not None and answer.level != Level.PASS:
            found.append(f"{_WORDS[name]}: {answer.reason}")
    return found


def _foreign(pairs: Sequence[Pair]) -> list[str]:
    """Others on the GPU, as far as the logs show them."""
    held = max((o.gpu_used_before_bytes or 0.0 for p in pairs for o in (p.a, p.b)), default=0.0)
    if held <= FOREIGN_BYTES:
        return []
    return [f"others on the GPU: {format_bytes(held)} of it were in use before a run began"]


_WORDS = {
    "AA": "control A against A",
    "positive": "control with A made slower",
    "flipped": "proof that the setting was flipped",
    "equal": "proof that nothing else differs",
    "parity": "parity of the losses",
}


def _named(proofs: Mapping[str, Verdict | None]) -> dict[str, Verdict | None]:
    names = {"flipped": "manipulation", "equal": "equal", "parity": "parity"}
    return {names[name]: proof for name, proof in proofs.items()}


def _as_fields(verdicts: Mapping[str, Verdict | None]) -> dict[str, Any]:
    return {
        name: {"level": "not asked", "reason": "the setting may change what is computed"}
        if verdict is None
        else {"level": verdict.level.name.lower(), "reason": verdict.reason}
        for name, verdict in verdicts.items()
    }


def _ends(interval: Interval | None) -> list[float | None]:
    """Both ends as ratios; None for one that is open."""
    if interval is None:
        return [None, None]
    return [math.exp(x) if math.isfinite(x) else None for x in (interval.low, interval.high)]


def _diagnostics(flip: FlipFolder, judgement: Judgement) -> dict[str, Any]:
    outcomes = [outcome for pair in flip.pairs for outcome in (pair.a, pair.b)]
    return {
        "findings": {finding.id: finding.text for finding in judgement.findings},
        "deviation": None if judgement.interval is None else judgement.interval.deviation,
        "left_out": [
            f"pair {pair.number}: {o.arm} {o.in_words()}"
            for pair in flip.pairs
            for o in (pair.a, pair.b)
            if o.ended_from_outside
        ],
        "late_compiles": {o.run: o.late_compiles for o in outcomes if o.late_compiles},
        "slowed": {o.run: o.slowed for o in outcomes if o.slowed},
        "alerts": {o.run: o.alerts for o in outcomes if o.alerts},
        "neighbour_load": {
            o.run: o.neighbour_load for o in outcomes if o.neighbour_load is not None
        },
    }


def _receipts(flip: FlipFolder) -> list[str]:
    runs = [outcome.run for pair in flip.pairs for outcome in (pair.a, pair.b)]
    return [f"{run}/receipt.json" for run in runs if (flip.path / run / "receipt.json").is_file()]


def _next(
    plan: Plan,
    flip: FlipFolder,
    judgement: Judgement,
    controls: Mapping[str, Verdict],
    *,
    interrupted: bool,
) -> list[str]:
    sets = " ".join(f"--set {change.key}={change.b}" for change in plan.changes)
    again = f"engine flip {plan.source} {sets}"
    out = []
    if interrupted:
        out.append(f"go on: engine flip --resume {flip.path}")
    elif judgement.verdict == INCONCLUSIVE:
        pairs = judgement.pairs_needed
        wanted = f"about {pairs} pairs would decide" if pairs else "more pairs would decide"
        out.append(f"{wanted}; longer runs vary less: {again} --steps {2 * plan.steps}")
    elif judgement.verdict in (PARITY_FAIL, INVALID):
        # The first failed run is the place to look.
        runs = [o.run for p in flip.pairs for o in (p.a, p.b) if not o.completed]
        runs = runs or [flip.pairs[-1].b.run] if flip.pairs else []
        out += [f"look: engine tail {flip.path / run}" for run in runs[:1]]
    elif judgement.verdict == FASTER:
        out.append(f"{sets} is better for {plan.metric}")
    elif judgement.verdict == SLOWER:
        out.append(f"the setting of A is the better one for {plan.metric}")
    elif judgement.verdict == EQUIVALENT:
        out.append(f"{sets or 'nothing'} does not matter for {plan.metric}: look for another cause")
    elif judgement.verdict in DID_NOT_COMPLETE.values():
        arm = judgement.censored["arm"]
        run = next(
            o.run for p in flip.pairs for o in (p.a, p.b) if o.arm == arm and not o.completed
        )
        out.append(f"what {arm} was doing: engine tail {flip.path / run}")
    if judgement.verdict in (FASTER, SLOWER, EQUIVALENT):
        for name, verdict in controls.items():
            if verdict.level == Level.UNKNOWN and "no positive" not in verdict.reason:
                out.append(
                    f"to have it measured: {again} --controls run ({_WORDS[name]} is missing)"
                )
                break
    return out
