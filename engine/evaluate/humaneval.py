"""Measure the fraction of programming problems that a model solves, for HumanEval and MBPP.

    self-test    every empty solution must fail; a problem whose reference solution does not pass here is left out of
    the
                 count, and named in the report
    generation   the model completes each prompt: greedily, or several times with a temperature
    trial        each program runs in a separate sandbox while the next programs are generated

A program counts as right only when its trial returns `pass`. Failures of the harness are not counted against
the model: non-finite logits, a failed self-test, a sandbox that does not start, or no problem at all raise
`NoAnswer` or make the report unknown, never 0 % and never 100 %.

Greedy results are deterministic and do not depend on `rows`: see `engine.generation.generate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.errors import BadInput, NoAnswer
from engine.evaluate.model import Model
from engine.evaluate.problems import STOPS, Problem, Problems
from engine.evaluate.results import Result, Results
from engine.evaluate.sandbox import Sandbox, Trial
from engine.generation.complete import complete
from engine.generation.sampling import Sampling

_LISTED = 5
MOST_TOKENS = 512
UNFIT = "its reference solution does not pass here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = MOST_TOKENS


class Progress(NamedTuple):
    done: int
    total: int
    passed: int


def room(model: Model, problems: Problems, wanted: int | None) -> int:
    """Return the token limit of each program: `wanted`, or as many up to 512 as the longest prompt leaves
    within the model's positions. All problems share one limit, because it is part of what is measured.

    Raises `BadInput` with the problems whose prompts leave fewer tokens than that, or none.
    """
    prompts = [problem.prompt for problem in problems.problems]
    lengths = [len(ids) for ids in model.tokenizer.encode_documents(prompts)]
    positions = model.decoder.config.max_position_embeddings
    needed = 1 if wanted is None else wanted
    too_long = [
        f"{problem.task_id} ({length:,})"
        for problem, length in zip(problems.problems, lengths, strict=True)
        if length + needed > positions
    ]
    if too_long:
        rest = f", and {len(too_long) - _LISTED} more" if len(too_long) > _LISTED else ""
        raise BadInput.expected(
            "prompts",
            model.path,
            f"at most {positions:,} tokens, the positions of the model, with {needed:,} to come",
            f"too long: {', '.join(too_long[:_LISTED])}{rest}",
            hint="ask for fewer --max-tokens, or leave a problem out by --without TASK_ID, and the "
            "report says so",
        )
    return min(MOST_TOKENS, positions - max(lengths)) if wanted is None else wanted


def self_test(
    sandbox: Sandbox,
    problems: Sequence[Problem],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    unfit: int = 0,
) -> dict[str, str]:
    """Return the problems that cannot be judged here, by task_id, with the reason.

    Raises `NoAnswer` when they are more than `unfit` or all of them, which points to the harness rather than
    to the problems. Raises it also when an empty solution does not fail.
    """
    left_out: dict[str, str] = {}
    wrong: list[str] = []
    done, total = 0, 2 * len(problems)

    def try_all(
        chosen: Sequence[Problem], completions: Sequence[str]
    ) -> Iterator[tuple[str, Trial]]:
        nonlocal done
        for problem, trial in zip(chosen, trials(sandbox, chosen, completions), strict=True):
            done += 1
            progress(done, total)
            yield problem.task_id, trial

    for name, trial in try_all(problems, [problem.reference for problem in problems]):
        if trial.outcome != "pass":
            left_out[name] = f"{UNFIT}: {trial.outcome}, {trial.reason}"
    if left_out and len(left_out) > min(unfit, len(problems) - 1):
        wrong = [f"{name}: {reason}" for name, reason in left_out.items()]
    judgeable = [problem for problem in problems if problem.task_id not in left_out]
    total -= len(left_out)
    for name, trial in try_all(judgeable, [""] * len(judgeable)):
        if trial.outcome != "fail":
            wrong.append(f"{name}: an empty solution: {trial.outcome}, {trial.reason}")
    progress(total, total)
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong[:_LISTED])
        rest = f"\n  ... and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise NoAnswer(
            f"self-test: {len(problems)} problems — expected every reference solution to pass"
            + (f" but {unfit}" if unfit else "")
            + f" and every empty one to fail, found{listed}{rest}",
            hint="a problem that cannot be judged is left out by --without TASK_ID, or up to N of them by "
            "--unfit N, and the report says so",
        )
    return left_out


def evaluate(
    model: Model,
    problems: Problems,
    sandbox: Sandbox,
    results: Results,
    settings: Settings,
    *,
    rows: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Generate, run and record every program that is not in `results` yet.

    Raises `NoAnswer` when the model's logits are not finite, and `BadInput`.
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
        for future in [future for future in pending if wait or future.done()]:
            trial, about = future.result(), pending.pop(future)
            results.add(replace(about, outcome=trial.outcome, reason=trial.reason))
            if progress is not None:
                passed = sum(result.outcome == "pass" for result in results.done.values())
                progress(Progress(len(results.done), total, passed))

    with ThreadPoolExecutor(_workers()) as pool:
        try:
            for about, program, tests in _generated(model, problems, todo, settings, rows):
                pending[pool.submit(sandbox.try_program, program, tests)] = about
                record(wait=False)
        finally:
            record(wait=True)  # also when the model fails: finished trials are kept


def _generated(
    model: Model,
    problems: Problems,
    todo: Sequence[tuple[Problem, int]],
    settings: Settings,
    rows: int | None,
) -> Iterator[tuple[Result, str, str]]:
    """Yield each program with its result so far (before the trial) and its tests."""
    if not todo:
        return
    texts = [""] * len(todo)
    for piece in complete(
        model.decoder,
        model.tokenizer,
        [problem.prompt for problem, _ in todo],
        max_tokens=settings.max_tokens,
        stops=STOPS[problems.benchmark],
        sampling=settings.sampling,
        # Keys identify the programs, so that a resumed evaluation with fewer problems left draws the same.
        keys=[f"{problem.task_id}/{sample}" for problem, sample in todo],
        rows=rows,
    ):
        texts[piece.prompt] += piece.text
        if piece.ended is not None:
            problem, sample = todo[piece.prompt]
            about = Result(
                task_id=problem.task_id,
                sample=sample,
                completion=texts[piece.prompt],
                outcome="harness",
                reason="not tried",
                tokens=piece.tokens,
                ended=piece.ended,
            )
            yield about, problem.program(about.completion), problem.tests


def trials(
    sandbox: Sandbox, problems: Sequence[Problem], completions: Sequence[str]
) -> Iterator[Trial]:
    """Try one completion of each problem, in their order, with one trial per processor at a time."""
    programs = [problem.program(text) for problem, text in zip(problems, completions, strict=True)]
    with ThreadPoolExecutor(_workers()) as pool:
        yield from pool.map(sandbox.try_program, programs, [problem.tests for problem in problems])


def _workers() -> int:
    return len(os.sched_getaffinity(0))
