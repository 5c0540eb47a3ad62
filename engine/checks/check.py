"""The types of a check and its results. No torch.

A check returns a Verdict with the numbers behind it. The verdict is UNKNOWN, never PASS, when the check
was skipped, could not run, or found nothing to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.catalogue import About
from engine.verdict import Level, Verdict


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

    def _answer(self, level: Level, reason: str, more: dict[str, float]) -> Answer:
        known = {**self, **more}
        return Answer(Verdict(level, reason), {name: float(x) for name, x in known.items()})


def passed(reason: str, **numbers: float) -> Answer:
    return Numbers().passed(reason, **numbers)


def unknown(reason: str, **numbers: float) -> Answer:
    return Numbers().unknown(reason, **numbers)


def failed(reason: str, **numbers: float) -> Answer:
    return Numbers().failed(reason, **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result of one check, as it is logged."""

    about: About
    verdict: Verdict
    numbers: dict[str, float]
    cost_s: float
    step: int
    """Number of optimizer steps done when the check ran."""

    @property
    def id(self) -> str:
        return self.about.id

    @property
    def failed(self) -> bool:
        return self.verdict.level is Level.FAIL

    def said_by(self, who: str) -> Result:
        """Return the result with the one whose it is."""
        return replace(self, verdict=replace(self.verdict, reason=f"{who}: {self.verdict.reason}"))

    def __str__(self) -> str:
        return f"{self.id}: {self.verdict}"
