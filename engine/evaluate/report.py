"""Compute the figures of judged programs: pass@k, its interval, and the comparison of two models.

If a file has several results of one program, the last one counts, because a program whose trial failed (outcome
`harness`) is run again. If any program of any problem was not judged, no figure is valid for the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import BadInput, NoAnswer
from engine.evaluate.passk import mean_pass_at_k
from engine.evaluate.problems import Problems
from engine.evaluate.results import Result, read_results
from engine.evaluate.statistics import Interval, mcnemar, wilson

_LISTED = 5
KS = (1, 10, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of an evaluation."""

    benchmark: str
    problems: int
    samples: int
    attempts: int
    """Number of programs that were judged."""
    passed: int
    """Number of judged programs that are right."""
    harness: tuple[str, ...]
    """Programs without a verdict because the trial itself failed: `task_id: reason`."""
    pass_at_k: dict[int, float]
    interval: Interval | None
    """Interval of pass@1: Wilson's, over problems."""
    known: bool
    """Whether every program of every problem was judged; if not, no figure is valid for the model."""


def latest(problems: Problems, results: Iterable[Result]) -> list[Result]:
    """Return the last result of each program, in the order of the problems."""
    order = {problem.task_id: place for place, problem in enumerate(problems.problems)}
    by_program = {
        (result.task_id, result.sample): result for result in results if result.task_id in order
    }
    return sorted(by_program.values(), key=lambda result: (order[result.task_id], result.sample))


def report(problems: Problems, samples: int, results: Sequence[Result]) -> Report:
    """Compute the figures of the judged programs."""
    judged = latest(problems, results)
    return _count(problems.benchmark, len(problems.problems), samples, judged)


def report_of_file(path: str | Path) -> tuple[Report, dict[str, Any]]:
    """Return the figures computed from a file of results, and the file's first line. Raises `BadInput`."""
    about, results = read_results(path)
    try:
        benchmark, problems = about["benchmark"], about["problems"]
        samples = about["settings"]["samples"]
        if not (isinstance(problems, int) and isinstance(samples, int)):
            raise TypeError
    except (KeyError, TypeError):
        raise BadInput.expected(
            "results",
            path,
            "a first line with benchmark, problems and settings",
            "one without them",
        ) from None
    return _count(benchmark, problems, samples, results), about


def _count(benchmark: str, problems: int, samples: int, results: Sequence[Result]) -> Report:
    by_program = {(result.task_id, result.sample): result for result in results}
    judged = [result for result in by_program.values() if result.outcome != "harness"]
    by_problem: dict[str, list[int]] = {}
    for result in judged:
        counts = by_problem.setdefault(result.task_id, [0, 0])
        counts[0] += 1
        counts[1] += result.outcome == "pass"
    # A problem without any judged program stays in the total, as 0 passed of 0.
    all_counts = [(count, passed) for count, passed in by_problem.values()]
    all_counts += [(0, 0)] * (problems - len(all_counts))
    pass_at = {k: value for k in KS if (value := mean_pass_at_k(all_counts, k)) is not None}
    shares = [passed / count for count, passed in by_problem.values()]
    return Report(
        benchmark=benchmark,
        problems=problems,
        samples=samples,
        attempts=len(judged),
        passed=sum(passed for _, passed in by_problem.values()),
        harness=tuple(
            f"{result.task_id}: {result.reason}"
            for result in by_program.values()
            if result.outcome == "harness"
        ),
        pass_at_k=pass_at,
        interval=wilson(sum(shares), len(shares)),
        known=len(by_problem) == problems > 0
        and all(count == samples for count, _ in by_problem.values()),
    )


class Compared(NamedTuple):
    """Numbers of problems that both, one or none of two models solve, with one program per problem."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p: float
    """McNemar's exact two-sided p value."""


def compare(first: Sequence[Result], second: Sequence[Result]) -> Compared:
    """Compare the results of two models. Raises `NoAnswer` if their judged problems differ or there are none."""
    sides = [
        {
            result.task_id: result.outcome == "pass"
            for result in side
            if result.sample == 0 and result.outcome != "harness"
        }
        for side in (first, second)
    ]
    if sides[0].keys() != sides[1].keys() or not sides[0]:
        differing = sorted(sides[0].keys() ^ sides[1].keys())
        raise NoAnswer(
            f"compare: results — expected both models on the same problems, found {len(differing)} problems "
            f"judged for only one of them: {', '.join(differing[:_LISTED])}"
        )
    pairs = [(sides[0][name], sides[1][name]) for name in sides[0]]
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    return Compared(
        both=pairs.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        neither=pairs.count((False, False)),
        p=mcnemar(only_first, only_second),
    )
