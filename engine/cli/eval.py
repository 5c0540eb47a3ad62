"""Judge a model: how well it foretells a text, how many programming problems it solves.

engine eval ppl MODEL --data texts/                      held-out loss and perplexity, file by file
engine eval ppl STUDENT --data texts/ --against TEACHER  both, their difference, KL, top-1 agreement
engine eval humaneval MODEL --data HumanEval.jsonl.gz    pass@1 of the likeliest programs
engine eval mbpp MODEL --data mbpp.jsonl --samples 20 --temperature 0.8
engine eval humaneval MODEL --data HumanEval.jsonl.gz --against other.jsonl    two models, McNemar's test

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

from engine.cli.generate import (
    add_model_arguments,
    add_sampling_arguments,
    most_tokens,
    positive,
    prepare_threads,
)
from engine.errors import EXIT_PASS, EXIT_UNKNOWN, UsageError

if TYPE_CHECKING:
    from engine.evaluate.humaneval import Compared, Progress, Report, Settings
    from engine.evaluate.model import Model
    from engine.evaluate.perplexity import Figure, Perplexity
    from engine.evaluate.results import Result

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
            "--against", type=Path, metavar="RESULTS", help="another model's file of results"
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
    from engine.evaluate.perplexity import perplexity, read_documents

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
        print(json.dumps(_perplexity_json(found, model, against), allow_nan=False))
    else:
        print("\n".join(_perplexity_lines(found, against)))
    return EXIT_PASS


def _perplexity_json(found: Perplexity, model: Model, against: Model | None) -> dict[str, object]:
    from dataclasses import asdict

    figures: dict[str, Figure | None] = {
        "loss": found.loss,
        "against_loss": found.against,
        "difference": found.difference,
        "kl": found.kl,
        "top1_agreement": found.agreement,
    }
    return {
        "benchmark": "ppl",
        "model": str(model.path),
        "against": None if against is None else str(against.path),
        "tokens": found.tokens,
        "interval": "95 %, percentile bootstrap over documents",
        **{name: None if one is None else asdict(one) for name, one in figures.items()},
        "perplexity": _exp(found.loss.value),
        "documents": [asdict(one) for one in found.documents],
        "skipped": [asdict(one) for one in found.skipped],
    }


def _perplexity_lines(found: Perplexity, against: Model | None) -> list[str]:
    header = f"{'nats/token':>10}  {'tokens':>9}  "
    header += (
        "document" if against is None else f"{'against':>10}  {'KL':>8}  {'top-1':>7}  document"
    )
    lines = [header]
    for one in found.documents:
        line = f"{one.nats / one.tokens:10.4f}  {one.tokens:9,}  "
        if one.against_nats is not None and one.kl is not None and one.agreed is not None:
            line += f"{one.against_nats / one.tokens:10.4f}  {one.kl / one.tokens:8.4f}  "
            line += f"{one.agreed / one.tokens:7.1%}  "
        lines.append(line + one.name)
    lines += [f"skipped  {one.name}: {one.reason}" for one in found.skipped]
    lines.append(f"loss {_figure(found.loss)}, {found.tokens:,} tokens")
    lines.append(f"perplexity {_figure(found.loss, exponential=True)}")
    for name, figure in (
        ("against: loss", found.against),
        ("difference", found.difference),
        ("KL(against || model)", found.kl),
        ("top-1 agreement", found.agreement),
    ):
        if figure is not None:
            lines.append(f"{name} {_figure(figure)}")
    lines.append("intervals: 95 %, percentile bootstrap over documents")
    return lines


def _figure(figure: Figure, *, exponential: bool = False) -> str:
    value = _exp if exponential else float
    text = f"{value(figure.value):.4f}"
    if figure.interval is None:
        return f"{text} (no interval: one document)"
    return f"{text} [{value(figure.interval.low):.4f}, {value(figure.interval.high):.4f}]"


def _exp(nats: float) -> float:
    import math

    return math.exp(min(nats, 700.0))  # beyond it, larger than a float


def _problems(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict, replace

    from engine.evaluate.humaneval import Settings, compare, evaluate, report, self_test
    from engine.evaluate.model import weights_sha256
    from engine.evaluate.problems import STOPS, read_problems
    from engine.evaluate.results import open_results, read_results
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
    sandbox = open_sandbox()
    print(
        f"sandbox: {sandbox.version}; self-test of {len(problems.problems)} problems",
        file=sys.stderr,
    )
    self_test(sandbox, problems.problems)
    model = _open(arguments, arguments.model)
    prompts = [problem.prompt for problem in problems.problems]
    settings = Settings(
        samples=arguments.samples,
        sampling=sampling,
        max_tokens=most_tokens(model, prompts, arguments.max_tokens),
    )
    about = {
        "benchmark": problems.benchmark,
        "model": str(arguments.model.resolve()),
        "weights_sha256": weights_sha256(arguments.model),
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
    name = f"{arguments.model.resolve().name}-{problems.benchmark}.jsonl"
    results = open_results(arguments.results or Path(name), about)
    try:
        if results.done:
            print(f"{results.path}: {len(results.done)} are finished", file=sys.stderr)
        evaluate(
            model, problems, sandbox, results, settings, rows=arguments.rows, progress=_Judged()
        )
    finally:
        results.close()
    about, lines = read_results(results.path)
    found = report(problems, settings, lines)
    compared = None
    if arguments.against is not None:
        other, others = read_results(arguments.against)
        for key in ("benchmark", "data_sha256"):
            if other.get(key) != about[key]:
                raise UsageError(f"--against {arguments.against} — expected the same {key}")
        compared = compare(lines, others)
    if arguments.json:
        print(json.dumps(_report_json(found, about, lines, compared), allow_nan=False))
    else:
        print("\n".join(_report_lines(found, settings, lines, compared)))
        print(results.path)
    return EXIT_PASS if found.known else EXIT_UNKNOWN


def _report_json(
    found: Report, about: dict[str, Any], lines: list[Result], compared: Compared | None
) -> dict[str, object]:
    return {
        **{key: about[key] for key in ("benchmark", "model", "weights_sha256", "data_sha256")},
        "mode": "measured" if found.known else "unknown",
        "problems": found.problems,
        "samples": found.samples,
        "without": about["without"],
        "attempts": found.attempts,
        # A figure of half of the problems is no figure of the model.
        "passed": found.passed if found.known else None,
        "pass_at_k": {str(k): value for k, value in found.pass_at_k.items()} if found.known else {},
        "interval": found.interval if found.known else None,
        "harness": list(found.harness),
        "compared": None if compared is None else compared._asdict(),
        "per_problem_results": [
            {
                "task_id": one.task_id,
                "sample": one.sample,
                "outcome": one.outcome,
                "reason": one.reason,
            }
            for one in lines
        ],
    }


def _report_lines(
    found: Report, settings: Settings, lines: list[Result], compared: Compared | None
) -> list[str]:
    text = [f"{one.outcome:8} {one.task_id:16} {one.reason}" for one in lines]
    if not found.known:
        missing = found.problems * found.samples - found.attempts
        text.append(f"unknown: {missing} of {found.problems * found.samples} were not judged")
        return [*text, *found.harness]
    for k, value in found.pass_at_k.items():
        line = f"pass@{k} {value:.1%}"
        if k == 1 and found.interval is not None:
            line += f" [{found.interval.low:.1%}, {found.interval.high:.1%}] (95 %, Wilson)"
        text.append(line)
    text.append(f"{found.passed} of {found.attempts} programs, {found.problems} problems")
    if compared is not None:
        text.append(
            f"against: {compared.only_first} solved by this model alone, {compared.only_second} by the "
            f"other alone, {compared.both} by both, {compared.neither} by neither; McNemar p = "
            f"{compared.p:.3g}"
        )
    return text


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
