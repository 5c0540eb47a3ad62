"""Collect the evidence that a run must have before its student is published.

    completed     the end of the run in its log, and the receipt that is written with it
    verified      every line of the receipt that can be compared with the folder (`engine.receipts.receipt`)
    the student   its files have the hashes in the receipt, and the receipt has the hash in the log
    replayed      the outcome of `engine verify`, if the run was verified: a failure counts as missing
    evaluated     a held-out loss of the student, from the run or from a separate evaluation:

        the run                        heldout_loss_nats of its receipt, of the student read back from its files
        engine eval ppl                the JSON value of --json, kept in a file
        engine eval humaneval, mbpp    the file of results, whose passed programs are counted again

An evaluation is accepted if it is finished and its weights have the student's hash. Evidence that does
not exist is `missing`, with the command that produces it; with --unevaluated a card is still written, and says so.
Contradictions are refused, and no option overrides that: a receipt that does not fit its run, a student that
differs from the receipt, an evaluation of other weights, or an unfinished evaluation.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput
from engine.evaluate.model import weights_sha256
from engine.evaluate.report import report_of_file
from engine.files import open_regular, parse_json, read_bytes
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.receipts.context import view_of
from engine.receipts.receipt import check_receipt
from engine.verdict import Level, Verdict
from engine.verify.kept_outcome import NAME as OUTCOME
from engine.verify.kept_outcome import is_stale, outcome_text, read_outcome

_LISTED = 5
ARTEFACT = "artefact"
"""The check of the saved student."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    """`pass@1`, `loss`, `perplexity`, ..."""
    value: float
    subject: str
    """`student`, `teacher`, `untrained`, `the other model` or `both`."""
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval; None when there is no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One source of metrics."""

    title: str
    benchmark: str
    """`heldout`, `ppl`, `humaneval` or `mbpp`."""
    metrics: tuple[Metric, ...]
    detail: str
    """The amount of data, and the settings."""
    data_sha256: str | None
    file: Path | None
    """File to copy to the model's folder; None if the metrics are in the receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    what: str
    command: str


HELDOUT = "Held-out documents of the training corpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The evidence of one run, and what is missing."""

    run: RunFolder
    receipt: dict[str, Any] | None
    verdicts: dict[str, Verdict]
    """A verdict for each line of the receipt; the card lists the unknown ones."""
    evaluations: tuple[Evaluation, ...]
    missing: tuple[Missing, ...]
    weights_sha256: str
    replay: str
    """Outcome of `engine verify` in one line: `pass, 30 steps to the bit, 2026-01-31`, or `not verified`."""
    outcome: Path | None
    """File with the outcome of `engine verify`; None if the run was not verified, or the log has changed since."""


# contract: publication-v1
def examine(run: RunFolder, evaluation_files: Sequence[Path] = ()) -> Proof:
    """Collect all evidence. This hashes the student's files.

    Raises `BadInput` for a run without a student, and for contradictions.
    """
    view = view_of(run)
    place = shlex.quote(str(run.path))
    resume_command = f"engine distill --resume {place}"
    if not run.student.is_dir():
        raise BadInput.expected(
            "student",
            run.path,
            "a finished run, with a folder student",
            f"none: the run is {view.state(run.liveness())}",
            hint=f"finish it with {resume_command}",
        )
    receipt = run.read_receipt()
    missing, verdicts = [], {}
    state = view.state(run.liveness())
    if state != "completed":
        missing.append(Missing(what=f"a completed run (it is {state})", command=resume_command))
    if receipt is None:
        missing.append(Missing(what="a receipt of the run", command=resume_command))
    else:
        verdicts = check_receipt(run, receipt, view)
        verdicts |= {"student": _check_student(run, receipt), ARTEFACT: _was_read_back(view)}
        _refuse_contradictions(run, verdicts)
    weights = weights_sha256(run.student)
    evaluations = [read_evaluation(path, weights) for path in evaluation_files]
    heldout_evaluation = heldout_of_the_run(receipt, view)
    if heldout_evaluation is not None:
        evaluations.insert(0, heldout_evaluation)
    student_metrics = [
        m for evaluation in evaluations for m in evaluation.metrics if m.subject == "student"
    ]
    if not student_metrics:
        missing.append(
            Missing(
                what="an evaluation of the student",
                command=f"engine eval ppl {place} --data TEXT --json > ppl.json, then --eval ppl.json",
            )
        )
    outcome = read_outcome(run)
    stale = outcome is not None and is_stale(run, outcome)
    replay = outcome_text(outcome, stale=stale, last_step=view.last_step)
    if outcome is not None and not stale and outcome.level == "fail":
        what = f"a run whose replay agrees with its log ({replay})"
        missing.append(Missing(what=what, command=f"engine verify {place}"))
    return Proof(
        run=run,
        receipt=receipt,
        verdicts=verdicts,
        evaluations=tuple(evaluations),
        missing=tuple(missing),
        weights_sha256=weights,
        replay=replay,
        outcome=None if outcome is None or stale else run.path / OUTCOME,
    )


# contract: publication-v1
def require_evidence(proof: Proof) -> None:
    """Raise `BadInput` with everything that is missing, and the commands that produce it."""
    if not proof.missing:
        return
    listed = "".join(f"\n  {item.what}\n    make it: {item.command}" for item in proof.missing)
    raise BadInput(
        f"evidence: {proof.run.path} — expected the evidence that a model card shows, missing:{listed}",
        hint="--unevaluated publishes without it, and the card says so at its head",
    )


def _refuse_contradictions(run: RunFolder, verdicts: dict[str, Verdict]) -> None:
    wrong = [verdict.reason for verdict in verdicts.values() if verdict.level == Level.FAIL]
    if wrong:
        rest = [f"... and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        listed = "".join(f"\n  {line}" for line in wrong[:_LISTED] + rest)
        raise BadInput.expected(
            "receipt",
            run.receipt,
            "to agree with the files in the run folder",
            f"differences:{listed}",
            hint="something was changed after the run: restore it, or run again",
        )


def _check_student(run: RunFolder, receipt: dict[str, Any]) -> Verdict:
    """Check that the student has no file that the receipt does not name; `check_receipt` compares the others."""
    files = receipt.get("student_files")
    if not files:
        return Verdict(Level.UNKNOWN, "files of the student: the receipt has no hashes")
    unknown = sorted({file.name for file in run.student.iterdir()} - files.keys())
    if unknown:
        return Verdict(Level.FAIL, f"student: {unknown[0]} is not in the receipt")
    return Verdict(Level.PASS, f"student: the {len(files)} files of the receipt")


def _was_read_back(view: RunView) -> Verdict:
    """Return the outcome of the run's check of its saved student."""
    check = view.checks.get(ARTEFACT)
    if check is None:
        return Verdict(Level.UNKNOWN, "the run did not read its saved student back")
    level = next((name for name in Level if name.name.lower() == check.level), Level.UNKNOWN)
    return Verdict(level, f"saved student, as the run read it back: {check.text}")


def file_sha256(path: Path) -> str:
    with open_regular(path, "file") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def heldout_of_the_run(receipt: dict[str, Any] | None, view: RunView) -> Evaluation | None:
    """Return the held-out losses in the receipt, or in the log of a run without a receipt."""
    losses = {
        e.subject: e.loss
        for e in view.evals
        if e.loss is not None and (e.subject != "student" or e.saved)
    }
    labelled = max((e.labelled or 0 for e in view.evals), default=0)
    if receipt is not None:
        losses = receipt.get("heldout_loss_nats") or {}
    metrics = tuple(
        Metric(name="loss", value=float(value), subject=subject)
        for subject, value in losses.items()
    )
    if not metrics:
        return None
    return Evaluation(
        title=HELDOUT,
        benchmark="heldout",
        metrics=metrics,
        detail=f"{labelled:,} tokens, nats per token; documents chosen by name and never trained on",
        data_sha256=None if view.data is None else view.data.heldout_sha256,
        file=None,
    )


# contract: publication-v1
def read_evaluation(path: Path, weights: str) -> Evaluation:
    """Read the output of `engine eval`: a file of results, or the JSON value of --json."""
    raw = read_bytes(path, "evaluation", limits.EVALUATION)
    try:
        record = parse_json(raw.splitlines()[0], path, "evaluation") if raw.strip() else {}
    except BadInput:
        record = None  # reported below
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
            f"an evaluation of these weights (sha256 {weights[:16]})",
            f"an evaluation of {record.get('model', 'other weights')} ({str(record.get('weights_sha256'))[:16]})",
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
    """Count the lines of a file of results again."""
    report, about = report_of_file(path)
    if not report.known or report.interval is None:
        expected = report.problems * report.samples
        raise BadInput.expected(
            "evaluation",
            path,
            "a result for every program",
            f"{expected - report.attempts} of {expected} programs without one",
            hint="give the same `engine eval` command again: it continues where it was stopped",
        )
    interval = {"low": report.interval.low, "high": report.interval.high}
    left_out = about.get("without") or []
    return Evaluation(
        title={"humaneval": "HumanEval", "mbpp": "MBPP"}[report.benchmark],
        benchmark=report.benchmark,
        metrics=tuple(
            Metric(name=f"pass@{k}", value=value, subject="student", **(interval if k == 1 else {}))
            for k, value in report.pass_at_k.items()
        ),
        detail=f"{report.passed} of {report.attempts} programs right, {report.problems} problems, {_drawn(about)}"
        + (f", without {', '.join(left_out)}" if left_out else ""),
        data_sha256=about.get("data_sha256"),
        file=path,
    )


def _drawn(about: dict[str, Any]) -> str:
    """Describe how the programs were sampled."""
    sampling = about["settings"].get("sampling") or {}
    if "temperature" not in sampling:
        return "sampling settings not recorded"
    if sampling["temperature"] == 0:
        return "greedy"
    cuts = [f"{name} {sampling[name]:g}" for name in ("top_k", "top_p") if sampling.get(name)]
    return ", ".join([f"sampled at temperature {sampling['temperature']:g}", *cuts])
