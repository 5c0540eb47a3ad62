"""What a flip concludes (verdict.json): its verdict, the grade that says how far to trust it, and what to do next.

measured      registered beforehand, both controls passed, flipped, equal and parity proved
screen        anything less: good enough to drop a hypothesis, not to quote a number
exploratory   the plan was changed after the start, or the flip continued on another machine, device or engine
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.flips.answer import CONTROLS, answer
from engine.flips.arms import Outcome
from engine.flips.flip_folder import FlipFolder
from engine.flips.plan import MARGIN, STEPS, Plan
from engine.flips.surroundings import Surroundings
from engine.flips.verdict import (
    DECIDED,
    DID_NOT_COMPLETE,
    ENDS_IT,
    EQUIVALENT,
    FASTER,
    INCONCLUSIVE,
    KEEPS_IT,
    NOT_SEEN,
    PARITY_FAIL,
    SLOWER,
    Judgement,
    count_of,
    guards_of,
    proofs_of,
)
from engine.units import format_bytes
from engine.verdict import Level, Verdict

MEASURED, SCREEN, EXPLORATORY = "measured", "screen", "exploratory"
_NOT_ASKED = "the setting may change what is computed"
FOREIGN_BYTES = 1 << 30
"""Less than this is what a driver and a display hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipVerdict:
    """The content of verdict.json. Ratios are B over A; an open end of the interval is None."""

    prereg_sha: str
    grade: str
    """Called `class` in the file: measured, screen or exploratory."""
    why_grade: list[str]
    """What keeps the verdict from being measured; empty when nothing does."""
    verdict: str
    reason: str
    interrupted: bool
    hypothesis: str
    changes: list[str]
    metric: str
    margin: float
    effect: float | None
    interval: list[float | None]
    level: float
    method: str
    n_pairs: int
    """Number of pairs in which both arms completed."""
    pairs_run: int
    pairs_needed: int | None
    order_seed: int
    raw_runs: list[dict[str, Any]]
    censored: dict[str, Any]
    diagnostics: dict[str, Any]
    controls: dict[str, Any]
    """By the names in CONTROLS; each has its level and reason."""
    guards: dict[str, Any]
    """The other metrics, tested together (Holm)."""
    host: dict[str, Any]
    cost_s: float
    receipts: list[str]
    next: list[str] = field(default_factory=list)
    """The commands for what to do next."""

    @property
    def answer(self) -> Verdict:
        """PASS when the flip decided, FAIL when the arms compute different things, otherwise UNKNOWN."""
        if self.verdict in DECIDED:
            return Verdict(Level.PASS, self.reason)
        return Verdict(Level.FAIL if self.verdict == PARITY_FAIL else Level.UNKNOWN, self.reason)

    def to_json(self) -> str:
        fields = self.fields()
        said = answer(fields)
        fields |= {"sentence": said.sentence, "action": said.action}
        return json.dumps(fields, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def fields(self) -> dict[str, Any]:
        """The fields by their names in the file."""
        fields = dataclasses.asdict(self)
        return fields | {"class": fields.pop("grade")}


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
    """Put the verdict together from the judgement, the controls and the record."""
    proofs = proofs_of(flip.pairs)
    answers = {**controls, "manipulation": proofs.pop("flipped"), **proofs}
    if plan.observed is not None:
        # An arm that shows it beside one that does not needs no control of how exactly anything is measured.
        answers = {name: answers[name] for name in answers if name not in controls}
    outcomes = [outcome for pair in flip.pairs for outcome in pair.outcomes.values()]
    changed = [edited] if (edited := flip.edited()) else []
    if flip.began_with != surroundings:
        changed.append("it went on with another machine, device or engine than it began with")
    missing = _why_no_measurement(judgement, answers) + _foreign(outcomes)
    interval = judgement.interval
    verdict = FlipVerdict(
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
        effect=interval.ratio if interval else None,
        interval=interval.ends if interval else [None, None],
        level=plan.level,
        method=f"anytime-valid paired t mixture of ln(B/A), g = {plan.prior_weight:g}; one process a run",
        n_pairs=interval.pairs if interval else 0,
        pairs_run=len(flip.pairs),
        pairs_needed=judgement.pairs_needed,
        order_seed=plan.order_seed,
        raw_runs=[
            {"pair": pair.number}
            | {name: getattr(o, name) for name in ("arm", "run", "state", "value", "seconds")}
            for pair in flip.pairs
            for o in ((pair.b, pair.a) if pair.b_first else (pair.a, pair.b))
        ],
        censored=judgement.censored,
        diagnostics=_diagnostics(flip, judgement, outcomes),
        controls={
            name: {"level": "not asked", "reason": _NOT_ASKED}
            if answer is None
            else {"level": answer.level.name.lower(), "reason": answer.reason}
            for name, answer in answers.items()
        },
        guards=guards_of(plan, flip.pairs),
        host=dataclasses.asdict(surroundings),
        cost_s=cost_s,
        receipts=[
            receipt
            for receipt in (f"{outcome.run}/receipt.json" for outcome in outcomes)
            if (flip.path / receipt).is_file()
        ],
    )
    return dataclasses.replace(verdict, next=_next(plan, flip, verdict))


def _why_no_measurement(judgement: Judgement, answers: Mapping[str, Verdict | None]) -> list[str]:
    if judgement.verdict not in DECIDED:
        return [f"{judgement.verdict} measures nothing"]
    found = []
    if judgement.is_screen:
        found.append(f"{count_of(judgement.censored['pairs'])} alone, which chance may do")
    # An arm that did not finish has not logged everything that would be compared.
    stopped = judgement.verdict in (ENDS_IT, KEEPS_IT, *DID_NOT_COMPLETE.values())
    for name in ["manipulation"] if stopped else answers:
        answer = answers[name]
        if answer is not None and answer.level != Level.PASS:
            found.append(f"{CONTROLS[name]}: {answer.reason}")
    return found


def _foreign(outcomes: Sequence[Outcome]) -> list[str]:
    """Other users of the GPU, as far as the logs show them."""
    held = max((outcome.gpu_used_before_bytes or 0.0 for outcome in outcomes), default=0.0)
    if held <= FOREIGN_BYTES:
        return []
    return [f"others on the GPU: {format_bytes(held)} of it were in use before a run began"]


def _diagnostics(
    flip: FlipFolder, judgement: Judgement, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    odd = {
        name: {outcome.run: value for outcome in outcomes if (value := getattr(outcome, name))}
        for name in ("late_compiles", "slowed", "alerts")
    }
    return odd | {
        "findings": {finding.id: finding.text for finding in judgement.findings},
        "deviation": None if judgement.interval is None else judgement.interval.deviation,
        "left_out": [
            f"pair {pair.number}: {o.arm} {o.in_words()}"
            for pair in flip.pairs
            for o in pair.outcomes.values()
            if o.ended_from_outside
        ],
        "neighbour_load": {
            o.run: o.neighbour_load for o in outcomes if o.neighbour_load is not None
        },
    }


def _next(plan: Plan, flip: FlipFolder, verdict: FlipVerdict) -> list[str]:
    """The commands for the next action and for a look at the runs that did not complete."""
    if verdict.interrupted:
        return [f"go on: engine flip --resume {flip.path}"]
    failed = [run["run"] for run in verdict.raw_runs if run["state"] != "completed"]
    out = []
    if options := answer(verdict.fields()).options:
        usual = {"metric": "step_s", "margin": MARGIN, "steps": STEPS}
        texts = {"metric": plan.metric, "margin": f"{100 * plan.margin:g}%", "steps": plan.steps}
        same = [
            f" --{name} {text}"
            for name, text in texts.items()
            if getattr(plan, name) != usual[name] and f"--{name}" not in options
        ]
        out.append(f"run: {plan.command_line(' '.join((''.join(same), options)))}")
    if verdict.verdict in DID_NOT_COMPLETE.values():
        arm = verdict.censored["arm"]
        failed = [run["run"] for run in verdict.raw_runs if run["arm"] == arm]
    numbers = (FASTER, SLOWER, EQUIVALENT, INCONCLUSIVE, ENDS_IT, KEEPS_IT, NOT_SEEN)
    if verdict.verdict not in numbers and flip.pairs:
        # The first failed run is the place to look.
        run = failed[0] if failed else flip.pairs[-1].b.run
        out.append(f"look: engine tail {flip.path / run}")
    return out
