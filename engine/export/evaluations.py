"""Where the figures of a model card come from: the held-out losses of the run, and files of `engine eval`.

    the run              heldout_loss_nats of its receipt
    engine eval ppl      the JSON value of --json, kept in a file
    engine eval humaneval, mbpp    the file of results, counted again here

An evaluation counts if it is of the student's own weights, by their hash, and is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput
from engine.evaluate.report import report_of_file
from engine.files import parse_json, read_bytes
from engine.log.view import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    """`pass@1`, `loss`, `perplexity`, ..."""
    value: float
    low: float | None
    high: float | None
    """95 %; None where there is no interval."""
    subject: str
    """`student`, `teacher`, `untrained`, or `student against X`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One source of metrics."""

    title: str
    benchmark: str
    """`heldout`, `ppl`, `humaneval` or `mbpp`."""
    metrics: tuple[Metric, ...]
    detail: str
    """On how much, and with which settings."""
    data_sha256: str | None
    file: Path | None
    """To copy beside the model; None for what is in the receipt."""


def heldout_of_the_run(receipt: dict[str, Any] | None, view: RunView) -> Evaluation | None:
    """The held-out losses: of the receipt, or of a log whose run has none."""
    losses = {e.subject: e.loss for e in view.evals if e.loss is not None}
    labelled = max((e.labelled for e in view.evals), default=0)
    if receipt is not None:
        losses = receipt.get("heldout_loss_nats") or {}
    metrics = tuple(
        Metric(name="loss", value=float(value), low=None, high=None, subject=subject)
        for subject, value in losses.items()
    )
    if not metrics:
        return None
    return Evaluation(
        title="Held-out documents of the training corpus",
        benchmark="heldout",
        metrics=metrics,
        detail=f"{labelled:,} tokens, nats a token; documents chosen by name and never trained on",
        data_sha256=None if view.data is None else view.data.heldout_sha256,
        file=None,
    )


# contract: publication-v1
def read_evaluation(path: Path, weights: str) -> Evaluation:
    """What `engine eval` wrote: a file of results, or the JSON value of --json."""
    raw = read_bytes(path, "evaluation", limits.EVALUATION)
    try:
        record = parse_json(raw.splitlines()[0], path, "evaluation") if raw.strip() else {}
    except BadInput:
        record = None  # said below
    if not isinstance(record, dict) or "benchmark" not in record:
        raise BadInput.expected(
            "evaluation",
            path,
            "results of `engine eval humaneval`, or `engine eval ppl --json`",
            "something else",
        )
    if record.get("weights_sha256") != weights:
        raise BadInput.expected(
            "evaluation",
            path,
            f"one of these weights (sha256 {weights[:16]})",
            f"one of {record.get('model', 'others')} ({str(record.get('weights_sha256'))[:16]})",
            hint="evaluate the run itself: engine eval ... RUN",
        )
    return _perplexity(path, record) if record["benchmark"] == "ppl" else _problems(path)


def _perplexity(path: Path, record: dict[str, Any]) -> Evaluation:
    try:
        metrics = []
        for key, name, subject in (
            ("loss", "loss", "student"),
            ("against_loss", "loss", "the other model"),
            ("kl", "KL(other || student)", "both"),
            ("top1_agreement", "top-1 agreement", "both"),
        ):
            figure = record[key]
            if figure is not None:
                low, high = figure["interval"] or (None, None)
                metrics.append(
                    Metric(name=name, value=figure["value"], low=low, high=high, subject=subject)
                )
        against = "" if record["against"] is None else f"; against {Path(record['against']).name}"
        if sha256 := record.get("against_weights_sha256"):
            against += f" (weights sha256 `{sha256}`)"
        rows = f" in rows of {record['length']:,}" if "length" in record else ""
        return Evaluation(
            title="Perplexity of a text",
            benchmark="ppl",
            metrics=tuple(metrics),
            detail=f"{record['tokens']:,} tokens{rows} of {len(record['documents'])} documents{against}",
            data_sha256=record["data_sha256"],
            file=path,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput.expected(
            "evaluation", path, "the JSON value of `engine eval ppl --json`", f"no {error}"
        ) from None


def _problems(path: Path) -> Evaluation:
    """Counted again from the lines of a file of results."""
    found, about = report_of_file(path)
    if not found.known or found.interval is None:
        wanted = found.problems * found.samples
        raise BadInput.expected(
            "evaluation",
            path,
            "every program to be judged",
            f"{wanted - found.attempts} of {wanted} that are not",
            hint="give the same `engine eval` command again: it goes on where it was stopped",
        )
    first = {"low": found.interval.low, "high": found.interval.high}
    none = {"low": None, "high": None}
    left_out = about.get("without") or []
    return Evaluation(
        title={"humaneval": "HumanEval", "mbpp": "MBPP"}[found.benchmark],
        benchmark=found.benchmark,
        metrics=tuple(
            Metric(name=f"pass@{k}", value=value, subject="student", **(first if k == 1 else none))
            for k, value in found.pass_at_k.items()
        ),
        detail=f"{found.passed} of {found.attempts} programs right, {found.problems} problems, {_drawn(about)}"
        + (f", without {', '.join(left_out)}" if left_out else ""),
        data_sha256=about.get("data_sha256"),
        file=path,
    )


def _drawn(about: dict[str, Any]) -> str:
    """How the programs were chosen."""
    sampling = about["settings"].get("sampling") or {}
    if "temperature" not in sampling:
        return "with settings that its file does not say"
    if sampling["temperature"] == 0:
        return "of the likeliest tokens"
    cuts = [f"{name} {sampling[name]:g}" for name in ("top_k", "top_p") if sampling.get(name)]
    return ", ".join([f"drawn at temperature {sampling['temperature']:g}", *cuts])
