"""Evaluate a model: perplexity on held-out text, or programming problems solved.

engine eval ppl MODEL --data texts/                      held-out loss and perplexity, file by file
engine eval ppl STUDENT --data texts/ --against TEACHER  both, their difference, KL, top-1 agreement
engine eval humaneval MODEL --data HumanEval.jsonl.gz    pass@1, greedy
engine eval mbpp MODEL --data mbpp.jsonl --samples 20 --temperature 0.8
engine eval humaneval STUDENT --data HumanEval.jsonl.gz --against TEACHER      both, McNemar's exact test
engine eval humaneval STUDENT --data HumanEval.jsonl.gz --against t.jsonl      with the teacher's stored results

Programs run in a sandbox (bubblewrap), which is tested first; without a sandbox
nothing is run. Each result is appended to --results as soon as it is judged, so repeating the command continues
where it stopped. Exit 2 when nothing is known about the model: no sandbox, a harness that fails its self-test,
or non-finite logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine import limits
from engine.cli.answers import put_json
from engine.cli.arguments import (
    add_json,
    add_model,
    add_number,
    add_path,
    add_repeated,
    add_sampling,
    model_argument,
    prepare_threads,
)
from engine.cli.eval_text import (
    ProgressLines,
    figures_json,
    no_answer_json,
    perplexity_json,
    perplexity_lines,
    report_json,
    report_lines,
)
from engine.cli.generate import open_asked, sampling_of
from engine.errors import EXIT_PASS, EXIT_UNKNOWN, NoAnswer, UsageError
from engine.terminal import put, say

if TYPE_CHECKING:
    from engine.evaluate.problems import Problems
    from engine.evaluate.results import Result
    from engine.evaluate.sandbox import Sandbox

_COMPARED = ("settings", "stops", "precision", "weights", "sandbox")
"""Properties of two sets of results; a comparison mentions those that differ."""


class Side(NamedTuple):
    """The results of one model."""

    about: dict[str, Any]
    lines: list[Result]


HELP = "evaluate a model: perplexity, programming problems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    text = kinds.add_parser("ppl", help="held-out loss and perplexity")
    add_model(text)
    text.add_argument("--data", required=True, metavar="FILE|FOLDER", help="held-out text")
    add_path(text, "--against", "MODEL", "a second model, the teacher")
    add_number(
        text,
        "--length",
        limits.POSITIONS,
        "tokens of a row (1024)",
        default=1024,
        metavar="N",
        least=1,
    )
    add_json(text)
    for name, what in (("humaneval", "HumanEval's format"), ("mbpp", "MBPP's format")):
        code = kinds.add_parser(name, help=f"programming problems in {what}")
        add_model(code)
        add_path(code, "--data", "FILE", ".jsonl or .json, or gzipped", required=True)
        add_number(
            code,
            "--samples",
            limits.SAMPLES,
            "programs of each problem (1)",
            default=1,
            metavar="N",
            least=1,
        )
        add_sampling(code)
        add_path(code, "--results", "FILE", "file of results (default: MODEL-WHAT.jsonl)")
        add_path(
            code,
            "--against",
            "MODEL|RESULTS",
            "a second model, or its file of results: McNemar's test",
        )
        add_repeated(code, "--without", "TASK_ID", "leave out a problem; may be repeated")
        code.add_argument(
            "--unfit",
            type=int,
            choices=range(1000),
            default=0,
            metavar="N",
            help="leave out up to N whose reference solution does not pass on this machine, and name them (0)",
        )
        code.add_argument(
            "--rows", type=int, choices=range(1, 9), metavar="1..8", help="sequences at once (8)"
        )
        add_json(code)


def run(arguments: argparse.Namespace) -> int:
    prepare_threads()
    if arguments.benchmark == "ppl":
        return _perplexity(arguments)
    return _problems(arguments)


def _perplexity(arguments: argparse.Namespace) -> int:
    from engine.evaluate.perplexity import documents_sha256, perplexity, read_documents

    documents, skipped = read_documents(arguments.data)
    model = open_asked(arguments, arguments.model)
    against = None if arguments.against is None else open_asked(arguments, arguments.against)
    data_sha256 = documents_sha256(documents)
    try:
        figures = perplexity(
            model,
            documents,
            against=against,
            length=arguments.length,
            skipped=skipped,
            progress=ProgressLines("tokens"),
        )
    except NoAnswer as error:
        if arguments.json:
            about = {"model": str(model.path), "data_sha256": data_sha256}
            put_json("perplexity", no_answer_json("ppl", error, about))
        raise
    if arguments.json:
        models = perplexity_json(model, against)
        put_json("perplexity", {**models, **figures_json(figures), "data_sha256": data_sha256})
    else:
        put("\n".join(perplexity_lines(figures, against)))
    return EXIT_PASS


def _problems(arguments: argparse.Namespace) -> int:
    """Evaluate on HumanEval's and MBPP's problems. Invalid requests are refused before anything slow begins:

    problems, models, files of results    read, models as far as their headers
    sandbox                               opened
    model, prompts, file of results       opened, and compared with the request
    self-test                             of the sandbox and the problems: unfit problems are left out
    programs                              generated and judged, one line each
    """
    from engine.evaluate.results import read_if_exists
    from engine.evaluate.sandbox import open_sandbox

    _refuse_usage(arguments)
    problems = _read(arguments)
    arguments.model = model_argument(arguments.model)
    if arguments.against is not None:
        arguments.against = model_argument(arguments.against)
    _refuse_no_model(arguments.model)
    against_side = _read_other(arguments.against, problems)
    path = arguments.results or _results_file(arguments.model, problems)
    read_if_exists(path)
    try:
        return _evaluate(arguments, problems, against_side, path, open_sandbox())
    except NoAnswer as error:
        if arguments.json:
            about = {"model": str(arguments.model.resolve()), "data_sha256": problems.sha256}
            put_json("problems", no_answer_json(problems.benchmark, error, about))
        raise


def _evaluate(
    arguments: argparse.Namespace,
    problems: Problems,
    against_side: Side | None,
    path: Path,
    sandbox: Sandbox,
) -> int:
    from engine.evaluate.humaneval import self_test
    from engine.evaluate.report import compare, latest, report

    def run_self_test() -> dict[str, str]:
        say(f"sandbox: {sandbox.version}; self-test of {len(problems.problems)} problems")
        lines = ProgressLines("trials of the self-test")
        left_out = self_test(sandbox, problems.problems, progress=lines, unfit=arguments.unfit)
        for name, reason in left_out.items():
            say(f"excluded by the self-test: {name}: {reason}")
        return left_out

    against = arguments.against
    own = _judge(arguments, arguments.model, path, problems, sandbox, run_self_test)
    left_out = own.about["left_out"]
    judged = _without(problems, left_out)
    summary, lines = report(judged, arguments.samples, own.lines), latest(judged, own.lines)
    compared, differences = None, []
    if against is not None:
        if against_side is None:
            against_path = path.with_name(_results_file(against, problems).name)
            if against_path == path:
                against_path = path.with_name(f"against-{path.name}")
            against_side = _judge(
                arguments, against, against_path, problems, sandbox, lambda: left_out
            )
            say(f"{against}: {against_path}")
        compared = compare(lines, latest(judged, against_side.lines))
        differences = _differences(own.about, against_side.about)
    if arguments.json:
        put_json("problems", report_json(summary, own.about, lines, compared, differences))
    else:
        put("\n".join(report_lines(summary, own.about, lines, compared, differences)))
        put(path)
    return EXIT_PASS if summary.known else EXIT_UNKNOWN


def _refuse_usage(arguments: argparse.Namespace) -> None:
    if arguments.samples > 1 and arguments.temperature == 0:
        raise UsageError(
            f"--samples {arguments.samples} — expected a --temperature above 0, found 0: all would be "
            "one program"
        )
    if arguments.samples > 1 and arguments.against is not None:
        raise UsageError("--against — expected one program per problem, found --samples")


def _read(arguments: argparse.Namespace) -> Problems:
    from engine.evaluate.problems import read_problems

    problems = read_problems(arguments.data, arguments.benchmark)
    known = {problem.task_id for problem in problems.problems}
    if unknown := [name for name in arguments.without if name not in known]:
        raise UsageError(f"--without {unknown[0]} — expected a task_id of {arguments.data}")
    left = _without(problems, arguments.without)
    if not left.problems:
        raise UsageError("--without — expected a problem to be left, found none")
    return left


def _without(problems: Problems, names: Container[str]) -> Problems:
    left = tuple(problem for problem in problems.problems if problem.task_id not in names)
    return replace(problems, problems=left)


def _read_other(against: Path | None, problems: Problems) -> Side | None:
    """Read the results that --against names; None where it names a model, or nothing."""
    from engine.evaluate.results import is_results, read_results

    if against is None:
        return None
    if not is_results(against):
        _refuse_no_model(against)
        return None
    about, lines = read_results(against)
    samples = (about.get("settings") or {}).get("samples", 1)
    for key, wanted, found in (
        ("benchmark", problems.benchmark, about.get("benchmark")),
        ("data_sha256", problems.sha256, about.get("data_sha256")),
        ("samples", 1, samples),
    ):
        if found != wanted:
            raise UsageError(
                f"--against {against} — expected {key} {wanted}, found {found}: results of the same "
                "problems, one program each"
            )
    return Side(about, lines)


def _refuse_no_model(path: Path) -> None:
    """Raise an error now if `path` is no model: reading its headers is fast, and everything before its use is slow."""
    from engine.evaluate.model import model_path
    from engine.formats.open import open_weights

    open_weights(model_path(path)).close()


def _differences(about: dict[str, Any], against_about: dict[str, Any]) -> list[str]:
    """Describe how two sets of results differ besides the model."""
    differences = []
    for key in _COMPARED:
        here, there = about.get(key), against_about.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            names = [name for name in here if here[name] != there.get(name)]
            differences += [f"{name} {here[name]} here, {there.get(name)} there" for name in names]
        elif here != there:
            differences.append(f"{key} {here} here, {there} there")
    return differences


def _results_file(model: Path, problems: Problems) -> Path:
    from engine.spec.hub_cache import snapshot_of

    snapshot = snapshot_of(model)
    name = model.resolve().name if snapshot is None else Path(snapshot.name).name
    return Path(f"{name}-{problems.benchmark}.jsonl")


def _judge(
    arguments: argparse.Namespace,
    path: Path,
    results_path: Path,
    problems: Problems,
    sandbox: Sandbox,
    run_self_test: Callable[[], dict[str, str]],
) -> Side:
    """Judge every program of one model that `results_path` does not have yet. `run_self_test` is called when everything
    is open, and returns the problems that are left out, with reasons."""
    from engine.evaluate.humaneval import Settings, evaluate, token_limit
    from engine.evaluate.problems import STOPS
    from engine.evaluate.results import open_results, read_results, results_of
    from engine.evaluate.sandbox import RULES

    model = open_asked(arguments, path)
    tokens = token_limit(model, problems, arguments.max_tokens)
    settings = Settings(
        samples=arguments.samples, sampling=sampling_of(arguments), max_tokens=tokens
    )
    about: dict[str, Any] = {
        "benchmark": problems.benchmark,
        "model": str(path.resolve()),
        **model.about(),
        "data_sha256": problems.sha256,
        "settings": asdict(settings),
        "stops": list(STOPS[problems.benchmark]),
        "sandbox": {"rules": RULES, "cpu_s": sandbox.cpu_s, "clock_s": sandbox.clock_s},
    }
    results_of(results_path, about, unknown_keys=("problems", "without"))
    left_out = run_self_test()
    judged = _without(problems, left_out)
    about |= {
        "problems": len(judged.problems),
        "without": sorted({*arguments.without, *left_out}),
        "left_out": left_out,
    }
    results = open_results(results_path, about)
    try:
        if results.done:
            say(f"{results.path}: {len(results.done)} are finished")
        evaluate(
            model,
            judged,
            sandbox,
            results,
            settings,
            rows=arguments.rows,
            progress=ProgressLines("programs").of_programs,
        )
    finally:
        results.close()
    return Side(about, read_results(results_path)[1])
