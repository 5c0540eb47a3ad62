"""That an interval gives one verdict at most, and exchanged arms the mirrored one: z3 over the reals,
with the conditions of `decide`, compared with it over a grid.
"""

from __future__ import annotations

import itertools
import math

from contracts.proofs.methods import unsatisfiable
from engine.contracts.proving import Proved
from engine.flips.statistics import Interval, decide

ENDS = tuple(x / 20 for x in range(-6, 7))
MARGINS = (0.02, 0.05, 0.1)


def one_verdict() -> Proved:
    import z3

    low, high, delta = z3.Reals("low high delta")
    faster, slower = high < -delta, low > delta
    equal = z3.And(-delta < low, high < delta)
    known = z3.And(low <= high, delta > 0)
    two = z3.Or(z3.And(faster, slower), z3.And(faster, equal), z3.And(slower, equal))
    # Exchanged arms have the interval (-high, -low).
    mirrored = z3.And(faster == (-high > delta), slower == (-low < -delta))
    exchanged = z3.And(-delta < -high, -low < delta)
    return unsatisfiable(
        {
            "two verdicts at once": z3.And(known, two),
            "exchanged arms that are not mirrored": z3.And(known, z3.Not(mirrored)),
            "exchanged arms that are no longer equivalent": z3.And(known, equal != exchanged),
        },
        limit_s=30,
        agrees=_cases_that_agree(),
    )


def _cases_that_agree() -> int:
    """Intervals of a grid that `decide` answers as the model does; 0 where one is answered otherwise."""
    count = 0
    for low, high, margin in itertools.product(ENDS, ENDS, MARGINS):
        if low > high:
            continue
        delta = math.log1p(margin)
        words = {
            "B_FASTER": high < -delta,
            "B_SLOWER": low > delta,
            "EQUIVALENT": -delta < low and high < delta,
        }
        expected = [word for word, holds in words.items() if holds]
        interval = Interval(mean=(low + high) / 2, low=low, high=high, pairs=5, deviation=0.1)
        if decide(interval, margin) != (expected[0] if expected else None):
            return 0
        count += 1
    return count
