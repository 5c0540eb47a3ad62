"""What is wrong with a contract file: a rule, a place, and words. All of them at once, in order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    file: str
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""
    rule: str
    severity: str
    path: str
    """Where in the contract: `proof_obligations[0].formal`."""
    text: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{self.file}:{self.line}:{self.column}: {self.severity} {self.rule}: {where}{self.text}"


def counted(problems: Iterable[Problem]) -> str:
    """The last line that the command prints."""
    severities = [problem.severity for problem in problems]
    return f"{severities.count(ERROR)} error(s), {severities.count(WARNING)} warning(s)"


def dotted(path: Iterable[str | int]) -> str:
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or what is known where nothing is near."""
    allowed = sorted(known)
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(allowed)}"
