"""The estimator of pass@k, against every pick of every small case."""

from __future__ import annotations

import itertools
import math

from contracts.proofs.methods import enumerated
from engine.contracts.proving import Proved
from engine.evaluate.passk import pass_at_k

MOST = 9


def unbiased() -> Proved:
    cases = (
        (count, right, k)
        for count in range(1, MOST + 1)
        for right in range(count + 1)
        for k in range(1, count + 1)
    )
    return enumerated(cases, _fault)


def _fault(case: tuple[int, int, int]) -> str | None:
    count, right, k = case
    picks = list(itertools.combinations(range(count), k))
    share = sum(min(pick) < right for pick in picks) / len(picks)
    found = pass_at_k(count, right, k)
    # One division of integers each: half a last bit on either side.
    if not math.isclose(found, share, rel_tol=1e-15, abs_tol=1e-15):
        return f"pass@{k} of {right} in {count}: {found}, the share of picks is {share}"
    return None
