"""The answer of a contract: `Fail < Unknown(reason) < Pass`, with the reasons of Unknown in order.

    Fail  <  NotRun  <  Skip  <  ...  <  PositiveControlFailed  <  Pass

The meet of two answers is the lower. Fail absorbs, Pass is the identity, and two Unknowns meet at the
lower reason. Only Pass arms a gate: whatever was skipped, is stale, was not collected or needs a tool
that is absent has the exit code 2.

The order and the names of the reasons are those of the upstream lattice, the first nine of its fifteen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from engine.verdict import Level, Verdict


class Rank(IntEnum):
    """Every element of the lattice, lowest first."""

    FAIL = 0
    NOT_RUN = 1
    """Nobody asked."""
    SKIP = 2
    """The test was skipped, deselected or expected to fail."""
    REPORT = 3
    """It was reported and decides nothing."""
    WARN = 4
    """It warned and decides nothing."""
    TOOL_ABSENT = 5
    """The tool that would answer is not here."""
    NOT_ARMED = 6
    """It is there and nothing calls for it."""
    NO_CHECKABLE = 7
    """Nothing was collected, or the tool gave up: no answer either way."""
    WITNESS_STALE = 8
    """The receipt is of another contract or of other code."""
    POSITIVE_CONTROL_FAILED = 9
    """The planted bug was not caught, or could not be planted: a green test proves nothing."""
    PASS = 10


@dataclass(frozen=True, slots=True)
class Answer:
    rank: Rank
    text: str

    @property
    def level(self) -> Level:
        if self.rank in (Rank.FAIL, Rank.PASS):
            return Level[self.rank.name]
        return Level.UNKNOWN

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.level, str(self))

    @property
    def label(self) -> str:
        """`Fail`, `Pass` or the reason of Unknown, as receipts hold it: `ToolAbsent`."""
        return self.rank.name.title().replace("_", "")

    def __str__(self) -> str:
        if self.level is Level.UNKNOWN:
            return f"{self.label}: {self.text}"
        return self.text


# contract: verdict-lattice-v1
def meet(a: Answer, b: Answer) -> Answer:
    """The lower of the two; the first where they are equal."""
    return min(a, b, key=lambda answer: answer.rank)


# contract: verdict-lattice-v1
def meet_all(answers: Iterable[Answer]) -> Answer:
    """The answer of a set. That of none is NotRun, not Pass: nothing was asked."""
    found = list(answers)
    if not found:
        return Answer(Rank.NOT_RUN, "nothing was asked")
    return functools.reduce(meet, found)
