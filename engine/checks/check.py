"""What a check is, and what it answers. No torch.

A check's answer is a Verdict with the numbers it was read from. It is UNKNOWN, never PASS, when the
check was skipped, could not be made, or found nothing to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.verdict import Level, Verdict


class When(Enum):
    """When a check is asked."""

    BEFORE = "before"
    """Before a model is asked: settings and data."""
    AT_START = "at_start"
    """Before the first step of a session."""
    FIRST_STEPS = "first_steps"
    """After one of the first steps, as soon as it can tell."""
    AT_CHECKPOINT = "at_checkpoint"
    """When the first checkpoint of a session is there."""
    ALWAYS = "always"
    """After the first steps, and again whenever it no longer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A check in words."""

    id: str
    question: str
    means: str
    """What a failure means."""
    remedy: str
    """What to do about one."""
    when: When
    stops: bool
    """Whether a failure makes the run worthless: it is stopped then, unless checks.on_fail is
    report."""
    again: bool = False
    """Whether it is asked again while the run trains (`engine.checks.runner`)."""


@dataclass(frozen=True, slots=True)
class Answer:
    verdict: Verdict
    numbers: dict[str, float] = field(default_factory=dict)


class Numbers(dict[str, float]):
    """What a check has measured so far, by name; the answers it gives hold them."""

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
    """One answer of one check, as it is logged."""

    about: About
    verdict: Verdict
    numbers: dict[str, float]
    cost_s: float
    step: int
    """Optimizer steps done when it was asked."""

    @property
    def id(self) -> str:
        return self.about.id

    @property
    def failed(self) -> bool:
        return self.verdict.level is Level.FAIL

    def __str__(self) -> str:
        return f"{self.id}: {self.verdict}"
