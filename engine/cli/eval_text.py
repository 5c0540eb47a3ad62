"""Format the output of `engine eval`: tables and sentences for people, one JSON value for programs, and progress on
stderr."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.terminal import say

if TYPE_CHECKING:
    from engine.errors import NoAnswer
    from engine.evaluate.humaneval import Progress
    from engine.evaluate.model import Model
    from engine.evaluate.perplexity import Figure, Perplexity
    from engine.evaluate.report import Compared, Report
    from engine.evaluate.results import Result

_PROGRESS_EVERY_S = 5.0
_FEW = 20
"""Number of documents below which a bootstrap interval over them is too narrow."""


def no_answer_json(
    benchmark: str, error: NoAnswer, about: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON of an evaluation without a result: the reason instead of the figures."""
    return {"benchmark": benchmark, **about, "mode": "unknown", "error": error.message}


def figures_json(result: Perplexity) -> dict[str, object]:
    """Return the JSON of a perplexity: the figures, and each document's sums, which they are computed from."""
    from dataclasses import asdict

    figures: dict[str, Figure | None] = {
        "loss": result.loss,
        "against_loss": result.against,
        "difference": result.difference,
        "kl": result.kl,
        "top1_agreement": result.agreement,
    }
    return {
        "length": result.length,
        "tokens": result.tokens,
        "interval": _interval_words(result),
        **{name: None if figure is None else asdict(figure) for name, figure in figures.items()},
        "perplexity": _exp(result.loss.value),
        "documents": [asdict(document) for document in result.documents],
        "skipped": [asdict(document) for document in result.skipped],
    }


def perplexity_json(model: Model, against: Model | None) -> dict[str, object]:
    """Return the models that were evaluated, as JSON. Hashes their weights."""
    from engine.evaluate.model import weights_sha256

    return {
        "benchmark": "ppl",
        "mode": "measured",
        "model": str(model.path),
        **model.about(),
        "against": None if against is None else str(against.path),
        "against_weights_sha256": None if against is None else weights_sha256(against.path),
    }


def perplexity_lines(result: Perplexity, against: Model | None) -> list[str]:
    header = f"{'nats/token':>10}  {'tokens':>9}  "
    header += (
        "document" if against is None else f"{'against':>10}  {'KL':>8}  {'top-1':>7}  document"
    )
    lines = [header]
    for document in result.documents:
        line = f"{document.nats / document.tokens:10.4f}  {document.tokens:9,}  "
        if (
            document.against_nats is not None
            and document.kl is not None
            and document.agreed is not None
        ):
            line += f"{document.against_nats / document.tokens:10.4f}  {document.kl / document.tokens:8.4f}  "
            line += f"{document.agreed / document.tokens:7.1%}  "
        lines.append(line + document.name)
    lines += [f"skipped  {document.name}: {document.reason}" for document in result.skipped]
    lines.append(f"loss {_figure(result.loss)}, {result.tokens:,} tokens")
    lines.append(f"perplexity {_figure(result.loss, exponential=True)}")
    for name, figure, share in (
        ("against: loss", result.against, False),
        ("difference", result.difference, False),
        ("KL(against || model)", result.kl, False),
        ("top-1 agreement", result.agreement, True),
    ):
        if figure is not None:
            lines.append(f"{name} {_figure(figure, share=share)}")
    lines.append(f"intervals: {_interval_words(result)}")
    return lines


def _interval_words(result: Perplexity) -> str:
    count = len(result.documents)
    words = f"95 %, percentile bootstrap over {count} documents"
    return f"{words}; with fewer than {_FEW} it is too narrow" if count < _FEW else words


def _figure(figure: Figure, *, exponential: bool = False, share: bool = False) -> str:
    def text(nats: float) -> str:
        return f"{nats:.2%}" if share else f"{_exp(nats) if exponential else nats:.4f}"

    if figure.interval is None:
        return f"{text(figure.value)} (no interval: one document)"
    return f"{text(figure.value)} [{text(figure.interval.low)}, {text(figure.interval.high)}]"


def _exp(nats: float) -> float:
    import math

    return math.exp(min(nats, 700.0))  # a larger one overflows a float


def report_json(
    summary: Report,
    about: Mapping[str, Any],
    results: Sequence[Result],
    compared: Compared | None,
    differences: Sequence[str],
) -> dict[str, object]:
    """Return the JSON of a report. `results` hold the last result of each program; `differences` describe in what the
    two compared evaluations differ besides the model.

    In the JSON, `without` lists all excluded problems (by --without or by the self-test), `left_out` maps those that
    the self-test excluded to the reason, and `harness` lists the programs whose trial itself failed, which have no
    verdict.
    """
    return {
        **{key: about[key] for key in ("benchmark", "model", "weights_sha256", "data_sha256")},
        "mode": "measured" if summary.known else "unknown",
        "problems": summary.problems,
        "samples": summary.samples,
        "without": about["without"],
        "left_out": about.get("left_out", {}),
        "settings": about["settings"],
        "attempts": summary.attempts,
        "cut": _cut(results),
        # A pass rate over some of the problems is not a pass rate of the model on the benchmark.
        "passed": summary.passed if summary.known else None,
        "pass_at_k": {str(k): value for k, value in summary.pass_at_k.items()}
        if summary.known
        else {},
        "interval": summary.interval if summary.known else None,
        "harness": list(summary.harness),
        "compared": None
        if compared is None
        else compared._asdict() | {"unlike": list(differences)},
        "per_problem_results": [
            {
                "task_id": result.task_id,
                "sample": result.sample,
                "outcome": result.outcome,
                "reason": result.reason,
                "ended": result.ended,
            }
            for result in results
        ],
    }


def report_lines(
    summary: Report,
    about: Mapping[str, Any],
    results: Sequence[Result],
    compared: Compared | None,
    differences: Sequence[str],
) -> list[str]:
    text = [f"{result.outcome:8} {result.task_id:16} {result.reason}" for result in results]
    if not summary.known:
        missing = summary.problems * summary.samples - summary.attempts
        total = summary.problems * summary.samples
        text.append(f"unknown: {missing} of {total} programs were not judged")
        return [*text, *summary.harness]
    for k, value in summary.pass_at_k.items():
        line = f"pass@{k} {value:.1%}"
        if k == 1 and summary.interval is not None:
            line += f" [{summary.interval.low:.1%}, {summary.interval.high:.1%}] (95 %, Wilson)"
        text.append(line)
    text.append(f"{summary.passed} of {summary.attempts} programs, {summary.problems} problems")
    left_out = about.get("left_out", {})
    if excluded := [name for name in about["without"] if name not in left_out]:
        text.append(f"excluded by --without: {', '.join(excluded)}")
    text += [f"excluded by the self-test: {name}: {reason}" for name, reason in left_out.items()]
    if cut_programs := _cut(results):
        most = about["settings"]["max_tokens"]
        text.append(f"{cut_programs} programs were cut off at the limit of {most:,} tokens")
    if compared is not None:
        text.append(
            f"against: {compared.only_first} solved by this model alone, {compared.only_second} by the "
            f"other alone, {compared.both} by both, {compared.neither} by neither; McNemar p = "
            f"{compared.p:.3g}"
        )
        text += [f"against: its evaluation differs: {difference}" for difference in differences]
    return text


def _cut(lines: Sequence[Result]) -> int:
    return sum(result.ended == "length" for result in lines)


class ProgressLines:
    """Print progress on stderr: a line every 5 s, and one at the end."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.next_s = time.monotonic() + _PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self.next_s or done == total:
            self.next_s = time.monotonic() + _PROGRESS_EVERY_S
            say(f"{done:,}/{total:,} {self.what}")

    def of_programs(self, progress: Progress) -> None:
        """Print the number of judged programs, and how many of them passed."""
        self.what = f"programs, {progress.passed} right"
        self(progress.done, progress.total)
