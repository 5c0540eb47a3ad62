"""Define the verdict of a check, `Fail < Unknown < Pass`, and its answer: a verdict with its numbers.

A check that is skipped, stale or not run, or whose tool is absent, is UNKNOWN, never PASS. The verdict of a set is
the lowest of its members. An empty set is UNKNOWN, because nothing was checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from engine.errors import EXIT_FAIL, EXIT_PASS, EXIT_UNKNOWN


class Level(IntEnum):
    FAIL = 0
    UNKNOWN = 1
    PASS = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    reason: str

    @property
    def exit_code(self) -> int:
        return {Level.PASS: EXIT_PASS, Level.FAIL: EXIT_FAIL, Level.UNKNOWN: EXIT_UNKNOWN}[
            self.level
        ]

    def __str__(self) -> str:
        return f"{self.level.name.lower()}: {self.reason}"


# contract: verdict-lattice-v1
def lowest(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the lowest verdict of a set; UNKNOWN if it is empty."""
    return min(
        verdicts, key=lambda v: v.level, default=Verdict(Level.UNKNOWN, "nothing was checked")
    )


@dataclass(frozen=True, slots=True)
class Answer:
    verdict: Verdict
    numbers: dict[str, float] = field(default_factory=dict)


class Numbers(dict[str, float]):
    """The numbers that a check has measured so far, by name; they are included in its answer."""

    def passed(self, reason: str, **more: float) -> Answer:
        return self._answer(Level.PASS, reason, more)

    def unknown(self, reason: str, **more: float) -> Answer:
        return self._answer(Level.UNKNOWN, reason, more)

    def failed(self, reason: str, **more: float) -> Answer:
        return self._answer(Level.FAIL, reason, more)

    def _answer(self, level: Level, reason: str, extra: dict[str, float]) -> Answer:
        numbers = {**self, **extra}
        return Answer(Verdict(level, reason), {name: float(x) for name, x in numbers.items()})


def passed(reason: str, **numbers: float) -> Answer:
    return Numbers().passed(reason, **numbers)


def unknown(reason: str, **numbers: float) -> Answer:
    return Numbers().unknown(reason, **numbers)


def failed(reason: str, **numbers: float) -> Answer:
    return Numbers().failed(reason, **numbers)
