"""Drills as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.drills.carry import Drilled
from engine.terminal import aligned, clipped
from engine.units import format_seconds
from engine.verdict import Level

HEAD = ("verdict", "drill", "must be named by", "was named by", "after", "happened")
EVIDENCE_LETTERS = 180


def _when(drilled: Drilled) -> str:
    """Return the delay after which the incident was named."""
    if drilled.named is None:
        return "-"
    if drilled.after_s is None:
        return "before step 1"
    return format_seconds(drilled.after_s)


def table(results: Sequence[Drilled]) -> list[str]:
    """Return a line for each drill under a heading, aligned; then the reasons why drills did not pass; last the counts
    of the verdicts."""
    why = [
        f"{result.verdict.level.name} {result.drill.id}: {clipped(result.verdict.reason, EVIDENCE_LETTERS)}"
        for result in results
        if result.verdict.level is not Level.PASS
    ]
    lines = aligned([HEAD, *map(_row, results)])
    return [*lines, *why, count_of([drilled.verdict.level.name for drilled in results])]


def _row(drilled: Drilled) -> tuple[str, ...]:
    drill = drilled.drill
    return (
        drilled.verdict.level.name,
        drill.id,
        " or ".join(expected.id for expected in drill.expected),
        drilled.named.name if drilled.named is not None else "-",
        _when(drilled),
        drill.happened,
    )


def count_of(levels: Sequence[str]) -> str:
    """Count the verdicts: `31 PASS, 1 UNKNOWN`."""
    return ", ".join(
        f"{levels.count(name)} {name}" for name in ("PASS", "FAIL", "UNKNOWN") if name in levels
    )


def lines_of(drilled: Drilled) -> list[str]:
    """Return the lines of one drill with its evidence."""
    drill = drilled.drill
    lines = [f"{drilled.verdict.level.name:7}  {drill.id}: {drill.what}"]
    if drilled.named is not None:
        begun = format_seconds(drilled.after_start_s)
        after = "before step 1" if drilled.after_s is None else f"{_when(drilled)} after its effect"
        lines.append(f"         {drilled.named.name}, {after}, {begun} after the start")
    return [*lines, f"         {clipped(drilled.verdict.reason, EVIDENCE_LETTERS)}"]


def as_json(drilled: Drilled) -> dict[str, Any]:
    drill, named = drilled.drill, drilled.named
    return {
        "drill": drill.id,
        "what": drill.what,
        "happened": drill.happened,
        "must_be_named_by": [expected.name for expected in drill.expected],
        "level": drilled.verdict.level.name.lower(),
        "named_by": named.name if named is not None else None,
        "certainty": named.certainty if named is not None else "",
        "flip": named.flip if named is not None else "",
        "before_step_1": named is not None and drilled.after_s is None,
        "after_s": _rounded(drilled.after_s),
        "after_start_s": _rounded(drilled.after_start_s),
        "steps": drilled.steps,
        "evidence": drilled.verdict.reason,
        "also_said": list(drilled.others),
        "state": drilled.state,
        "cost_s": _rounded(drilled.cost_s),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
