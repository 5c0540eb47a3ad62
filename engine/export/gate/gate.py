"""What a gate answers. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.verdict import Level, Verdict, lowest

IDS = ("smoke", "teacher", "cache", "heldout", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    id: str
    verdict: Verdict | None
    """None where the gate does not apply."""
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """`pass`, `unknown`, `fail`, or `n/a`."""
        return "n/a" if self.verdict is None else self.verdict.level.name.lower()


def answered(id_: str, level: Level, reason: str, **numbers: float) -> Gate:
    floats = {name: float(value) for name, value in numbers.items()}
    return Gate(id=id_, verdict=Verdict(level, reason), reason=reason, numbers=floats)


def does_not_apply(id_: str, reason: str) -> Gate:
    return Gate(id=id_, verdict=None, reason=reason)


# contract: phase-gates-v1
def verdict_of(gates: Iterable[Gate]) -> Verdict:
    """The lowest of those that apply; unknown where none does."""
    return lowest(gate.verdict for gate in gates if gate.verdict is not None)
