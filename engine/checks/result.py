"""The result of a check. No torch.

A check returns an Answer. Its verdict is UNKNOWN, never PASS, when the check was skipped, could not run, or found
nothing to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.catalogue import About
from engine.verdict import Level, Verdict


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

    def prefixed(self, who: str) -> Result:
        """Return the result with `who` before its reason."""
        return replace(self, verdict=replace(self.verdict, reason=f"{who}: {self.verdict.reason}"))

    def __str__(self) -> str:
        return f"{self.id}: {self.verdict}"
