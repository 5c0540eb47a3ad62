"""Measure the fraction of programming problems that a model solves, for HumanEval and MBPP.

    self-test    every reference solution must pass and every empty one must fail. With `unfit`, a few problems
                 whose reference solution does not pass here are excluded, and named in the report
    generation   the model completes each prompt: greedily, or several times with a temperature
    trial        each program runs in a separate sandbox while the next programs are generated

A program counts as right only when its trial returns `pass`. If the evaluation itself fails (non-finite logits, a
failed self-test, a sandbox that does not start, no problem at all), it raises `NoAnswer` or the report is
unknown: it never reports 0 % or 100 % then.

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


def token_limit(model: Model, problems: Problems, wanted: int | None) -> int:
    """Return the maximum number of tokens of each program: `wanted`; by default 512, or fewer if the longest
    prompt leaves fewer of the model's positions. All problems share one limit, because results depend on it.

    Raises `BadInput` naming the problems whose prompt leaves fewer than `wanted` positions, or no position.
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
            f"prompts that leave {needed:,} of the model's {positions:,} positions for the program",
            f"too long: {', '.join(too_long[:_LISTED])}{rest}",
            hint="set a smaller --max-tokens, or exclude a problem with --without TASK_ID; the report "
            "names it",
        )
    return min(MOST_TOKENS, positions - max(lengths)) if wanted is None else wanted


def self_test(
    sandbox: Sandbox,
    problems: Sequence[Problem],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    unfit: int = 0,
) -> dict[str, str]:
    """Return the reason why a problem cannot be judged here (its reference solution fails), by task_id.

    Raises `NoAnswer` if more than `unfit` problems, or all of them, cannot be judged: that points to a broken
    sandbox rather than to the problems. Raises it also if an empty solution does not fail.
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
            hint="--without TASK_ID excludes a problem that cannot be judged, --unfit N up to N of them; the "
            "report names them",
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

    Raises `NoAnswer` if the model's logits are not finite, and `BadInput` if a prompt is too long.
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
            record(wait=True)  # also if generation raises, so that finished trials are kept


def _generated(
    model: Model,
    problems: Problems,
    todo: Sequence[tuple[Problem, int]],
    settings: Settings,
    rows: int | None,
) -> Iterator[tuple[Result, str, str]]:
    """Yield for each generated program its result before the trial, its source and its tests."""
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
        # Random numbers depend on these keys, not on the batch: a resumed evaluation samples the same programs.
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
    """Run one completion of each problem, and yield the trials in the order of the problems. As many trials run
    at once as there are processors."""
    programs = [problem.program(text) for problem, text in zip(problems, completions, strict=True)]
    with ThreadPoolExecutor(_workers()) as pool:
        yield from pool.map(sandbox.try_program, programs, [problem.tests for problem in problems])


def _workers() -> int:
    return len(os.sched_getaffinity(0))
