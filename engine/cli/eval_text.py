"""The output of `engine eval`: tables and sentences for people, one JSON value for programs, and progress on
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
"""Documents; with fewer, a bootstrap interval over them is too narrow."""


def no_answer_json(
    benchmark: str, error: NoAnswer, about: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON of an evaluation without a result: the reason takes the place of the figures."""
    return {"benchmark": benchmark, **about, "mode": "unknown", "error": error.message}


def figures_json(found: Perplexity) -> dict[str, object]:
    """Return what was evaluated, and the sums over each document that it comes from."""
    from dataclasses import asdict

    figures: dict[str, Figure | None] = {
        "loss": found.loss,
        "against_loss": found.against,
        "difference": found.difference,
        "kl": found.kl,
        "top1_agreement": found.agreement,
    }
    return {
        "length": found.length,
        "tokens": found.tokens,
        "interval": _interval_words(found),
        **{name: None if one is None else asdict(one) for name, one in figures.items()},
        "perplexity": _exp(found.loss.value),
        "documents": [asdict(one) for one in found.documents],
        "skipped": [asdict(one) for one in found.skipped],
    }


def perplexity_json(model: Model, against: Model | None) -> dict[str, object]:
    """Return which models the figures are of; hashes their weights."""
    from engine.evaluate.model import weights_sha256

    return {
        "benchmark": "ppl",
        "mode": "measured",
        "model": str(model.path),
        **model.about(),
        "against": None if against is None else str(against.path),
        "against_weights_sha256": None if against is None else weights_sha256(against.path),
    }


def perplexity_lines(found: Perplexity, against: Model | None) -> list[str]:
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
    for name, figure, share in (
        ("against: loss", found.against, False),
        ("difference", found.difference, False),
        ("KL(against || model)", found.kl, False),
        ("top-1 agreement", found.agreement, True),
    ):
        if figure is not None:
            lines.append(f"{name} {_figure(figure, share=share)}")
    lines.append(f"intervals: {_interval_words(found)}")
    return lines


def _interval_words(found: Perplexity) -> str:
    count = len(found.documents)
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
    found: Report,
    about: Mapping[str, Any],
    lines: Sequence[Result],
    compared: Compared | None,
    unlike: Sequence[str],
) -> dict[str, object]:
    """Return the JSON of a report. `lines` hold the newest result of each program; `unlike` says in what the
    compared results differ besides the model."""
    return {
        **{key: about[key] for key in ("benchmark", "model", "weights_sha256", "data_sha256")},
        "mode": "measured" if found.known else "unknown",
        "problems": found.problems,
        "samples": found.samples,
        "without": about["without"],
        "left_out": about.get("left_out", {}),
        "settings": about["settings"],
        "attempts": found.attempts,
        "cut": _cut(lines),
        # A pass rate over a part of the problems does not describe the model.
        "passed": found.passed if found.known else None,
        "pass_at_k": {str(k): value for k, value in found.pass_at_k.items()} if found.known else {},
        "interval": found.interval if found.known else None,
        "harness": list(found.harness),
        "compared": None if compared is None else compared._asdict() | {"unlike": list(unlike)},
        "per_problem_results": [
            {
                "task_id": one.task_id,
                "sample": one.sample,
                "outcome": one.outcome,
                "reason": one.reason,
                "ended": one.ended,
            }
            for one in lines
        ],
    }


def report_lines(
    found: Report,
    about: Mapping[str, Any],
    lines: Sequence[Result],
    compared: Compared | None,
    unlike: Sequence[str],
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
    left_out = about.get("left_out", {})
    if asked := [name for name in about["without"] if name not in left_out]:
        text.append(f"without {', '.join(asked)}")
    text += [f"left out of the count: {name}: {reason}" for name, reason in left_out.items()]
    if cut := _cut(lines):
        most = about["settings"]["max_tokens"]
        text.append(f"{cut} programs were cut: they had not ended after {most:,} tokens")
    if compared is not None:
        text.append(
            f"against: {compared.only_first} solved by this model alone, {compared.only_second} by the "
            f"other alone, {compared.both} by both, {compared.neither} by neither; McNemar p = "
            f"{compared.p:.3g}"
        )
        text += [f"against: not asked alike: {one}" for one in unlike]
    return text


def _cut(lines: Sequence[Result]) -> int:
    return sum(one.ended == "length" for one in lines)


class Said:
    """Prints the progress of perplexity on stderr, a line every few seconds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.next_s = time.monotonic() + _PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self.next_s or done == total:
            self.next_s = time.monotonic() + _PROGRESS_EVERY_S
            say(f"{done:,}/{total:,} {self.what}")


class Judged:
    """Prints the progress of judged programs in the same way."""

    def __init__(self) -> None:
        self.said = Said("programs")

    def __call__(self, progress: Progress) -> None:
        self.said.what = f"programs, {progress.passed} right"
        self.said(progress.done, progress.total)
