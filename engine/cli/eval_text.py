"""What `engine eval` prints: tables and sentences for people, one JSON value for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.evaluate.humaneval import Compared, Report, Settings
    from engine.evaluate.model import Model
    from engine.evaluate.perplexity import Figure, Perplexity
    from engine.evaluate.results import Result


def perplexity_json(found: Perplexity, model: Model, against: Model | None) -> dict[str, object]:
    from dataclasses import asdict

    from engine.evaluate.model import weights_sha256

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
        "weights_sha256": weights_sha256(model.path),
        "precision": model.precision,
        "against": None if against is None else str(against.path),
        "tokens": found.tokens,
        "interval": "95 %, percentile bootstrap over documents",
        **{name: None if one is None else asdict(one) for name, one in figures.items()},
        "perplexity": _exp(found.loss.value),
        "documents": [asdict(one) for one in found.documents],
        "skipped": [asdict(one) for one in found.skipped],
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


def report_json(
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


def report_lines(
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
