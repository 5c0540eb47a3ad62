"""Two ways to prove a claim: check every case of a finite domain, or have z3 search for a counterexample.

z3 proves statements about a model of the code. So its harness also compares the model with the code on cases that both
can compute (`agrees`). A solver that gives up proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from engine.contracts.proving import PROVED, REFUTED, UNKNOWN, Proved

Case = TypeVar("Case")


def enumerated(cases: Iterable[Case], fault: Callable[[Case], str | None]) -> Proved:
    """Check every case; `fault` says what is wrong with one, or returns None."""
    count = 0
    for case in cases:
        count += 1
        if (found := fault(case)) is not None:
            return Proved(result=REFUTED, cases=count, detail=f"{case}: {found}")
    return Proved(result=PROVED, cases=count, detail=f"all of {count:,} cases")


def unsatisfiable(claims: dict[str, Any], *, limit_s: float, agrees: int) -> Proved:
    """Have z3 search for a counterexample of each claim. The values are z3 expressions of the negated claims;
    `agrees` is the number of cases on which model and code were compared."""
    import z3

    begin = time.perf_counter()
    for name, negation in claims.items():
        solver = z3.Solver()
        solver.set("timeout", int(limit_s * 1000))
        solver.add(negation)
        answer = solver.check()
        if answer == z3.sat:
            return Proved(result=REFUTED, cases=len(claims), detail=f"{name}: {solver.model()}")
        if answer != z3.unsat:
            why = f"{name}: z3 gave up ({solver.reason_unknown()})"
            return Proved(result=UNKNOWN, cases=len(claims), detail=why)
    took_ms = (time.perf_counter() - begin) * 1e3
    detail = (
        f"z3 {z3.get_version_string()}: no counterexample of {len(claims)} claims in {took_ms:.0f} ms; "
        f"model and code agree on {agrees:,} cases"
    )
    if not agrees:
        return Proved(
            result=UNKNOWN, cases=len(claims), detail="the model was never compared with the code"
        )
    return Proved(result=PROVED, cases=len(claims), detail=detail)
