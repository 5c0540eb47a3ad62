"""How many programming problems a model solves: HumanEval, and MBPP in its format.

    self-test    every reference solution passes, every empty one fails, no hostile program gets out
    generation   the model completes each prompt; greedily, or several times with a temperature
    trial        each program in a sandbox of its own, while the next ones are generated

A program counts as right when its trial says `pass`, and by nothing else. What is not a statement about
the model is none: logits that are not finite, a self-test that fails, a judge that dies, no problem at all
raise `NoAnswer` or make the report unknown, never 0 % and never 100 %.

Greedy results are the same every time and whatever `rows` is: see `engine.models.generate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import BadInput, NoAnswer
from engine.evaluate.hostile import HOSTILES, Hostile, not_contained
from engine.evaluate.model import Model
from engine.evaluate.passk import mean_pass_at_k
from engine.evaluate.problems import STOPS, Problem, Problems
from engine.evaluate.results import Result, Results, read_results
from engine.evaluate.sandbox import Sandbox, Trial
from engine.evaluate.statistics import Interval, mcnemar, wilson
from engine.models.completions import complete
from engine.models.decode import GraphSetting
from engine.models.generate import Sampling

_LISTED = 5
KS = (1, 10, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512


class Progress(NamedTuple):
    done: int
    total: int
    passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an evaluation found."""

    benchmark: str
    problems: int
    samples: int
    attempts: int
    """Programs that were judged."""
    passed: int
    """Of them, those that are right."""
    harness: tuple[str, ...]
    """Problems about which nothing is known, with the reason."""
    pass_at_k: dict[int, float]
    interval: Interval | None
    """Of pass@1: Wilson's, over problems."""

    @property
    def known(self) -> bool:
        """Whether every program was judged; where not, no figure is one of the model."""
        return self.attempts == self.problems * self.samples > 0


def self_test(
    sandbox: Sandbox, problems: Sequence[Problem], hostiles: Sequence[Hostile] = HOSTILES
) -> None:
    """Raises `NoAnswer` where the harness would not tell right from wrong, or harm from neither."""
    wrong: list[str] = []
    for what, wanted, completions in (
        ("its reference solution", "pass", [problem.reference for problem in problems]),
        ("an empty solution", "fail", [""] * len(problems)),
    ):
        for problem, trial in zip(problems, _trials(sandbox, problems, completions), strict=True):
            if trial.outcome != wanted:
                wrong.append(f"{problem.task_id}: {what}: {trial.outcome}, {trial.reason}")
    wrong.extend(f"not contained: {line}" for line in not_contained(sandbox, hostiles))
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong[:_LISTED])
        more = f"\n  ... and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise NoAnswer(
            f"self-test: {len(problems)} problems — expected every reference solution to pass, every "
            f"empty one to fail, every hostile program to be contained, found{listed}{more}",
            hint="a problem that cannot be judged is left out by --without TASK_ID, and the report "
            "says so",
        )


def evaluate(
    model: Model,
    problems: Problems,
    sandbox: Sandbox,
    results: Results,
    settings: Settings,
    *,
    rows: int | None = None,
    cuda_graph: GraphSetting = "auto",
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Generates, tries and records every program that `results` does not have yet.

    Raises `NoAnswer` where the model's logits are not finite, `BadInput`.
    """
    todo = [
        (problem, sample)
        for problem in problems.problems
        for sample in range(settings.samples)
        if (problem.task_id, sample) not in results.done
    ]
    total = len(problems.problems) * settings.samples
    pending: dict[Future[Trial], Result] = {}

    def record(*, wait: bool) -> None:
        for future in [one for one in pending if wait or one.done()]:
            trial, about = future.result(), pending.pop(future)
            results.add(_judged(about, trial))
            if progress is not None:
                passed = sum(one.outcome == "pass" for one in results.done.values())
                progress(Progress(len(results.done), total, passed))

    with ThreadPoolExecutor(_workers()) as pool:
        try:
            for about, program, tests in _generated(
                model, problems, todo, settings, rows, cuda_graph
            ):
                pending[pool.submit(sandbox.try_program, program, tests)] = about
                record(wait=False)
        finally:
            record(wait=True)  # also where the model fails: what is tried is kept


def report(problems: Problems, settings: Settings, results: Sequence[Result]) -> Report:
    """The figures of what was judged; the last line of a program counts."""
    names = {problem.task_id for problem in problems.problems}
    known = [one for one in results if one.task_id in names]
    return _counted(problems.benchmark, len(names), settings.samples, known)


def report_of_file(path: str | Path) -> tuple[Report, dict[str, Any]]:
    """The same from a file of results alone, and what the file is about. Raises `BadInput`."""
    about, results = read_results(path)
    try:
        benchmark, problems = about["benchmark"], about["problems"]
        samples = about["settings"]["samples"]
    except (KeyError, TypeError):
        raise BadInput.expected(
            "results", path, "its benchmark, problems and settings", "a first line without them"
        ) from None
    return _counted(benchmark, problems, samples, results), about


def _counted(benchmark: str, problems: int, samples: int, results: Sequence[Result]) -> Report:
    last = {(one.task_id, one.sample): one for one in results}
    judged = [one for one in last.values() if one.outcome != "harness"]
    right: dict[str, list[int]] = {}
    for one in judged:
        counts = right.setdefault(one.task_id, [0, 0])
        counts[0] += 1
        counts[1] += one.outcome == "pass"
    # A problem without a program is one of no programs, not one less.
    every = [(count, passed) for count, passed in right.values()]
    every += [(0, 0)] * (problems - len(every))
    pass_at = {k: value for k in KS if (value := mean_pass_at_k(every, k)) is not None}
    shares = [passed / count for count, passed in right.values()]
    return Report(
        benchmark=benchmark,
        problems=problems,
        samples=samples,
        attempts=len(judged),
        passed=sum(passed for _, passed in right.values()),
        harness=tuple(
            f"{one.task_id}: {one.reason}" for one in last.values() if one.outcome == "harness"
        ),
        pass_at_k=pass_at,
        interval=wilson(sum(shares), len(shares)),
    )


class Compared(NamedTuple):
    """Two models on the same problems, one program for each."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p: float
    """McNemar's, exact and two-sided."""


def compare(first: Sequence[Result], second: Sequence[Result]) -> Compared:
    """Raises `NoAnswer` where they are not about the same problems, or one is not finished."""
    sides = [
        {one.task_id: one.outcome == "pass" for one in side if one.sample == 0 and _is_said(one)}
        for side in (first, second)
    ]
    if sides[0].keys() != sides[1].keys() or not sides[0]:
        differing = sorted(sides[0].keys() ^ sides[1].keys())
        raise NoAnswer(
            f"compare: results — expected both models on the same problems, found {len(differing)} in one "
            f"alone: {', '.join(differing[:_LISTED])}"
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


def _is_said(result: Result) -> bool:
    return result.outcome != "harness"


def _generated(
    model: Model,
    problems: Problems,
    todo: Sequence[tuple[Problem, int]],
    settings: Settings,
    rows: int | None,
    cuda_graph: GraphSetting,
) -> Iterator[tuple[Result, str, Any]]:
    """What is known of each program before its trial, the program, and its tests."""
    if not todo:
        return
    lengths = model.tokenizer.encode_documents([one.prompt for one in problems.problems])
    texts = [""] * len(todo)
    for piece in complete(
        model.decoder,
        model.tokenizer,
        [problem.prompt for problem, _ in todo],
        max_tokens=settings.max_tokens,
        stops=STOPS[problems.benchmark],
        sampling=settings.sampling,
        # Named for what they are, and as long as for all problems: a resumed evaluation, which has
        # fewer of them to do, computes the same.
        keys=[f"{problem.task_id}/{sample}" for problem, sample in todo],
        capacity=max(len(ids) for ids in lengths) + settings.max_tokens,
        rows=rows,
        cuda_graph=cuda_graph,
    ):
        texts[piece.prompt] += piece.text
        if piece.ended is not None:
            problem, sample = todo[piece.prompt]
            completion = texts[piece.prompt]
            about = Result(
                task_id=problem.task_id,
                sample=sample,
                completion=completion,
                outcome="harness",
                reason="not tried",
                tokens=piece.tokens,
                ended=piece.ended,
            )
            yield about, problem.program(completion), problem.tests


def _judged(about: Result, trial: Trial) -> Result:
    return Result(
        task_id=about.task_id,
        sample=about.sample,
        completion=about.completion,
        outcome=trial.outcome,
        reason=trial.reason,
        tokens=about.tokens,
        ended=about.ended,
    )


def _trials(
    sandbox: Sandbox, problems: Sequence[Problem], completions: Sequence[str]
) -> Iterator[Trial]:
    programs = [one.program(text) for one, text in zip(problems, completions, strict=True)]
    with ThreadPoolExecutor(_workers()) as pool:
        yield from pool.map(sandbox.try_program, programs, [problem.tests for problem in problems])


def _workers() -> int:
    return len(os.sched_getaffinity(0))
