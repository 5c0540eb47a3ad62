"""Judge a model: how well it foretells a text, how many programming problems it solves.

engine eval ppl MODEL --data texts/                      held-out loss and perplexity, file by file
engine eval ppl STUDENT --data texts/ --against TEACHER  both, their difference, KL, top-1 agreement
engine eval humaneval MODEL --data HumanEval.jsonl.gz    pass@1 of the likeliest programs
engine eval mbpp MODEL --data mbpp.jsonl --samples 20 --temperature 0.8
engine eval humaneval STUDENT --data HumanEval.jsonl.gz --against TEACHER      both, McNemar's exact test
engine eval humaneval STUDENT --data HumanEval.jsonl.gz --against t.jsonl      the teacher's results are there

Programs are run in a sandbox (bubblewrap), which is tried first with programs that mean harm; without one
nothing is run. Each result is a line of --results as it is judged: the same command again goes on where it
was stopped. Exit 2 where nothing is known about the model: no sandbox, a harness that fails its self-test,
logits that are not finite.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.eval_text import perplexity_json, perplexity_lines, report_json, report_lines
from engine.cli.generate import (
    add_model_arguments,
    add_sampling_arguments,
    graph_decision,
    most_tokens,
    positive,
    prepare_threads,
)
from engine.errors import EXIT_PASS, EXIT_UNKNOWN, UsageError

if TYPE_CHECKING:
    from engine.evaluate.humaneval import Progress, Settings
    from engine.evaluate.model import Model
    from engine.evaluate.problems import Problems
    from engine.evaluate.sandbox import Sandbox

HELP = "judge a model: perplexity, programming problems"

_PROGRESS_EVERY_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    text = kinds.add_parser("ppl", help="held-out loss and perplexity")
    add_model_arguments(text)
    text.add_argument("--data", required=True, metavar="FILE|FOLDER", help="text to foretell")
    text.add_argument("--against", type=Path, metavar="MODEL", help="a second model, the teacher")
    text.add_argument(
        "--length", type=positive, default=1024, metavar="N", help="tokens of a row (1024)"
    )
    text.add_argument("--json", action="store_true", help="print one JSON value")
    for name, what in (("humaneval", "HumanEval's format"), ("mbpp", "MBPP's format")):
        code = kinds.add_parser(name, help=f"programming problems in {what}")
        add_model_arguments(code)
        code.add_argument(
            "--data", type=Path, required=True, metavar="FILE", help=".jsonl or .jsonl.gz"
        )
        code.add_argument("--samples", type=positive, default=1, metavar="N", help="(1)")
        add_sampling_arguments(code)
        code.add_argument(
            "--results", type=Path, metavar="FILE", help="where results go (MODEL-WHAT.jsonl here)"
        )
        code.add_argument(
            "--against",
            type=Path,
            metavar="MODEL|RESULTS",
            help="a second model, or its file of results: McNemar's test",
        )
        code.add_argument(
            "--without", action="append", default=[], metavar="TASK_ID", help="leave one out"
        )
        code.add_argument(
            "--rows", type=int, choices=range(1, 9), metavar="1..8", help="sequences at once (8)"
        )
        code.add_argument("--json", action="store_true", help="print one JSON value")


def run(arguments: argparse.Namespace) -> int:
    prepare_threads()
    if arguments.benchmark == "ppl":
        return _perplexity(arguments)
    return _problems(arguments)


def _open(arguments: argparse.Namespace, path: Path) -> Model:
    from engine.evaluate.model import open_model

    return open_model(
        path,
        device=arguments.device,
        precision=arguments.precision,
        weights=arguments.weights,
        tokenizer=arguments.tokenizer,
    )


def _perplexity(arguments: argparse.Namespace) -> int:
    from engine.evaluate.perplexity import documents_sha256, perplexity, read_documents

    documents, skipped = read_documents(arguments.data)
    model = _open(arguments, arguments.model)
    against = None if arguments.against is None else _open(arguments, arguments.against)
    found = perplexity(
        model,
        documents,
        against=against,
        length=arguments.length,
        skipped=skipped,
        progress=_Said("documents"),
    )
    if arguments.json:
        record = perplexity_json(found, model, against) | {
            "data_sha256": documents_sha256(documents)
        }
        print(json.dumps(record, allow_nan=False))
    else:
        print("\n".join(perplexity_lines(found, against)))
    return EXIT_PASS


def _problems(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from engine.evaluate.humaneval import Settings, compare, report, self_test
    from engine.evaluate.problems import read_problems
    from engine.evaluate.results import is_results, read_results
    from engine.evaluate.sandbox import open_sandbox
    from engine.models.generate import Sampling

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    if arguments.samples > 1 and sampling.temperature == 0:
        raise UsageError(
            f"--samples {arguments.samples} — expected a --temperature above 0, found 0: all would be "
            "one program"
        )
    if arguments.samples > 1 and arguments.against is not None:
        raise UsageError("--against — expected one program a problem, found --samples")
    problems = read_problems(arguments.data, arguments.benchmark)
    known = {problem.task_id for problem in problems.problems}
    if unknown := [name for name in arguments.without if name not in known]:
        raise UsageError(f"--without {unknown[0]} — expected a task_id of {arguments.data}")
    problems = replace(
        problems,
        problems=tuple(one for one in problems.problems if one.task_id not in arguments.without),
    )
    against, others = arguments.against, None
    if against is not None and is_results(against):
        other, others = read_results(against)
        _refuse_other_data(against, other, problems)
    sandbox = open_sandbox()
    print(
        f"sandbox: {sandbox.version}; self-test of {len(problems.problems)} problems",
        file=sys.stderr,
    )
    self_test(sandbox, problems.problems)
    settings = Settings(samples=arguments.samples, sampling=sampling)
    path = arguments.results or _results_file(arguments.model, problems)
    about = _judge(arguments, arguments.model, path, problems, sandbox, settings)
    lines = read_results(path)[1]
    found = report(problems, settings, lines)
    compared = None
    if against is not None:
        if others is None:
            place = path.with_name(_results_file(against, problems).name)
            if place == path:
                place = path.with_name(f"against-{path.name}")
            _judge(arguments, against, place, problems, sandbox, settings)
            others = read_results(place)[1]
            print(f"{against}: {place}", file=sys.stderr)
        compared = compare(lines, others)
    if arguments.json:
        print(json.dumps(report_json(found, about, lines, compared), allow_nan=False))
    else:
        print("\n".join(report_lines(found, settings, lines, compared)))
        print(path)
    return EXIT_PASS if found.known else EXIT_UNKNOWN


def _results_file(model: Path, problems: Problems) -> Path:
    return Path(f"{model.resolve().name}-{problems.benchmark}.jsonl")


def _refuse_other_data(path: Path, about: dict[str, Any], problems: Problems) -> None:
    for key, wanted in (("benchmark", problems.benchmark), ("data_sha256", problems.sha256)):
        if about.get(key) != wanted:
            raise UsageError(
                f"--against {path} — expected {key} {wanted}, found {about.get(key)}: results of the "
                "same problems"
            )


def _judge(
    arguments: argparse.Namespace,
    path: Path,
    where: Path,
    problems: Problems,
    sandbox: Sandbox,
    settings: Settings,
) -> dict[str, Any]:
    """Every program of one model that `where` does not have yet; what its results are about."""
    from dataclasses import asdict, replace

    from engine.evaluate.humaneval import evaluate
    from engine.evaluate.model import weights_sha256
    from engine.evaluate.problems import STOPS
    from engine.evaluate.results import open_results
    from engine.models.generate import TILE

    model = _open(arguments, path)
    for line in graph_decision(model, TILE, arguments.cuda_graph):
        print(line, file=sys.stderr)
    prompts = [problem.prompt for problem in problems.problems]
    settings = replace(settings, max_tokens=most_tokens(model, prompts, arguments.max_tokens))
    about = {
        "benchmark": problems.benchmark,
        "problems": len(problems.problems),
        "model": str(path.resolve()),
        "weights_sha256": weights_sha256(path),
        "tokenizer_sha256": model.tokenizer.sha256,
        "weights": model.weights,
        "precision": model.precision,
        "device": model.device.type,
        "data_sha256": problems.sha256,
        "without": sorted(arguments.without),
        "settings": asdict(settings),
        "stops": list(STOPS[problems.benchmark]),
        "sandbox": {"cpu_s": sandbox.cpu_s, "clock_s": sandbox.clock_s},
    }
    results = open_results(where, about)
    try:
        if results.done:
            print(f"{results.path}: {len(results.done)} are finished", file=sys.stderr)
        evaluate(
            model,
            problems,
            sandbox,
            results,
            settings,
            rows=arguments.rows,
            cuda_graph=arguments.cuda_graph,
            progress=_Judged(),
        )
    finally:
        results.close()
    return about


class _Said:
    """Progress on stderr, a line every few seconds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.next_s = time.monotonic() + _PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self.next_s or done == total:
            self.next_s = time.monotonic() + _PROGRESS_EVERY_S
            print(f"{done}/{total} {self.what}", file=sys.stderr, flush=True)


class _Judged:
    """The same for programs."""

    def __init__(self) -> None:
        self.said = _Said("programs")

    def __call__(self, progress: Progress) -> None:
        self.said.what = f"programs, {progress.passed} right"
        self.said(progress.done, progress.total)
