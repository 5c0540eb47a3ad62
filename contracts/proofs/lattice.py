"""The laws of the verdict lattice, over all triples of its elements."""

from __future__ import annotations

import itertools

from contracts.proofs.methods import enumerated
from engine.contracts.proving import Proved
from engine.contracts.status import Answer, Rank, meet


def laws() -> Proved:
    return enumerated(itertools.product(Rank, repeat=3), _fault)


def _fault(triple: tuple[Rank, Rank, Rank]) -> str | None:
    a, b, c = (Answer(rank, "") for rank in triple)
    if meet(a, b).rank is not meet(b, a).rank:
        return "not commutative"
    if meet(meet(a, b), c).rank is not meet(a, meet(b, c)).rank:
        return "not associative"
    if meet(a, a) != a:
        return "not idempotent"
    if meet(a, b).rank > min(triple[:2]):
        return "above an operand"
    return None
