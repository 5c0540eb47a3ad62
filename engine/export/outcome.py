"""The result of one gate, or of one implementation that loads a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from engine.verdict import Level, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    id: str
    verdict: Verdict | None
    """The gate's verdict; None if the gate does not apply."""
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """`pass`, `unknown`, `fail`, or `n/a`."""
        return "n/a" if self.verdict is None else self.verdict.level.name.lower()

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON record. JSON has no NaN or infinity, so such a number is written by name."""
        numbers = {n: x if isfinite(x) else str(x) for n, x in self.numbers.items()}
        return {"id": self.id, "level": self.level, "reason": self.reason, "numbers": numbers}


def answered(id_: str, level: Level, reason: str, **numbers: float) -> Outcome:
    """Return an outcome with a verdict."""
    floats = {name: float(value) for name, value in numbers.items()}
    return Outcome(id=id_, verdict=Verdict(level, reason), reason=reason, numbers=floats)


def unknown(id_: str, reason: str, **numbers: float) -> Outcome:
    return answered(id_, Level.UNKNOWN, reason, **numbers)
