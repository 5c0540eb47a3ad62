"""Made-up plans and pairs for tests of the conclusions from them; no process runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.flips.arms import Outcome
from engine.flips.pair import Pair
from engine.flips.plan import Change, Plan
from engine.flips.statistics import LEVEL, PRIOR_WEIGHT
from engine.log.observed import Observed
from engine.spec import RunSpec
from engine.verdict import Level, Verdict

PASS = Verdict(Level.PASS, "proved")
FACTS: dict[str, Any] = {
    "device": "cpu",
    "student precision": "fp32",
    "teacher precision": "fp32",
    "teacher": "abc",
    "rows per step": 4,
    "tokens per step": [128, 128, 128],
    "seq_len": 32,
    "training tokens": "t",
    "held-out tokens": "h",
    "trainable parameters": 10,
    "engine": "1",
    "torch": "2",
}

SEEN = Observed(
    kind="exit",
    id="failed",
    text="it ended",
    run="bad",
    run_id="0" * 16,
    log="watch",
    seq=3,
    sha256="0" * 64,
    step=40,
    after_s=9.0,
    sign="failed ValueError at train.py:7: no such thing",
)


def plan(*changes: Change, **fields: Any) -> Plan:
    tree = RunSpec().to_dict()
    tree["student"]["config"] = "/student.json"
    tree["teacher"]["path"] = "/teacher"
    changes = changes or (Change(key="compute.threads", a=2, b=1),)
    for change in changes:
        section, key = change.key.split(".")
        tree[section][key] = change.a
    known: dict[str, Any] = {
        "hypothesis": "h",
        "changes": changes,
        "metric": "step_s",
        "margin": 0.05,
        "alpha": 0.05,
        "level": LEVEL,
        "prior_weight": PRIOR_WEIGHT,
        "pairs_min": 4,
        "pairs_max": 16,
        "steps": 12,
        "warm_up_steps": 3,
        "run_limit_s": 300.0,
        "budget_s": 3600.0,
        "parity": 0.02,
        "order_seed": 1,
        "slow_a_by": 0.0,
        "spec": tree,
        "source": "/kd.toml",
    }
    return Plan(**(known | fields))


def outcome(arm: str, value: float | None = 1.0, **fields: Any) -> Outcome:
    known: dict[str, Any] = {
        "arm": arm,
        "run": f"arms/01-{arm.lower()}",
        "state": "completed",
        "reason": "every step done",
        "steps": 12,
        "seconds": 10.0,
        "value": value,
        "metrics": {} if value is None else {"step_s": value, "tokens_per_s": 1 / value},
        "losses": [5.0, 4.0, 3.0],
        "teacher_loss": 2.0,
        "choices": {"compute.threads": "2" if arm == "A" else "1"},
        "facts": FACTS,
    }
    return Outcome(**(known | fields))


def incomplete(arm: str, state: str, *, steps: int = 0, reason: str = "") -> Outcome:
    return outcome(arm, None, state=state, steps=steps, reason=reason or state)


def hang(arm: str) -> Outcome:
    reason = "0 steps in 300 s, the last phase was training"
    return replace(incomplete(arm, "over the limit", reason=reason), seconds=310.0)


def pair(number: int, a: Outcome, b: Outcome, *, b_first: bool = False, **proofs: Any) -> Pair:
    return Pair(
        number=number,
        b_first=b_first,
        begun_unix_s=1000.0 * number,
        seconds=a.seconds + b.seconds,
        a=a,
        b=b,
        proofs={"flipped": PASS, "equal": PASS, "parity": PASS} | proofs,
    )


def timed(differences: list[float], b_first: list[bool] | None = None) -> list[Pair]:
    """Make pairs in which both arms completed, with these ln(y_B / y_A)."""
    first = b_first or [bool(i % 3) for i in range(len(differences))]
    return [
        pair(i + 1, outcome("A", 1.0), outcome("B", math.exp(d)), b_first=first[i])
        for i, d in enumerate(differences)
    ]
