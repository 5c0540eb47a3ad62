"""What a run can show for its student before it is published.

    completed     the log's own end, and the receipt that is written with it
    verified      every line of the receipt that the folder can be held against (`engine.findings.receipt`)
    the student   its files have the receipt's hashes, and its tensors the hash that the run logged
    evaluated     a held-out loss of the student, of the run or of an evaluation beside it

What is not there is `missing`, with the command that makes it: a card may still be written, and says so.
What contradicts is refused, and no option lets it pass: a receipt that does not fit its run, a student that
is not the receipt's, an evaluation of other weights or one that is not finished.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.evaluate.model import weights_sha256
from engine.export.evaluations import Evaluation, heldout_of_the_run, read_evaluation
from engine.files import open_regular
from engine.findings.context import view_of
from engine.findings.receipt import check_receipt
from engine.formats.safetensors import tensors_sha256
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.models.load import load_decoder
from engine.verdict import Level, Verdict

_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    what: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    run: RunFolder
    view: RunView
    receipt: dict[str, Any] | None
    verdicts: dict[str, Verdict]
    """Of each line of the receipt; the unknown ones are said in the card."""
    evaluations: tuple[Evaluation, ...]
    missing: tuple[Missing, ...]
    weights_sha256: str
    tensors_sha256: str | None
    """Of the student as the log has it; None where the log has none."""


# contract: publication-v1
def examine(run: RunFolder, evaluation_files: Sequence[Path] = ()) -> Proof:
    """Reads everything there is; hashes the student's files and reads its tensors.

    Raises `BadInput` for a run without a student, and for what contradicts.
    """
    view = view_of(run)
    again = f"engine distill --resume {shlex.quote(str(run.path))}"
    if not run.student.is_dir():
        raise BadInput.expected(
            "student",
            run.path,
            "a finished run, with a folder student",
            f"none: the run is {view.state(run.liveness())}",
            hint=f"finish it with {again}",
        )
    receipt = run.read_receipt()
    missing, verdicts = [], {}
    state = view.state(run.liveness())
    if state != "completed":
        missing.append(Missing(what=f"a completed run (it is {state})", command=again))
    if receipt is None:
        missing.append(Missing(what="a receipt of the run", command=again))
    else:
        verdicts = check_receipt(run, receipt, view) | {"student": _is_the_runs(run, receipt, view)}
        _refuse_contradictions(run, verdicts)
    weights = weights_sha256(run.student)
    evaluations = [read_evaluation(path, weights) for path in evaluation_files]
    own = heldout_of_the_run(receipt, view)
    if own is not None:
        evaluations.insert(0, own)
    judged = [m for one in evaluations for m in one.metrics if m.subject == "student"]
    if not judged:
        place = shlex.quote(str(run.path))
        missing.append(
            Missing(
                what="an evaluation of the student",
                command=f"engine eval ppl {place} --data TEXT --json > ppl.json, then --eval ppl.json",
            )
        )
    return Proof(
        run=run,
        view=view,
        receipt=receipt,
        verdicts=verdicts,
        evaluations=tuple(evaluations),
        missing=tuple(missing),
        weights_sha256=weights,
        tensors_sha256=None if view.student is None else view.student.sha256,
    )


# contract: publication-v1
def refuse_missing(proof: Proof) -> None:
    """Raises `BadInput` with everything that is missing, and the command that makes it."""
    if not proof.missing:
        return
    listed = "".join(f"\n  {one.what}\n    make it: {one.command}" for one in proof.missing)
    raise BadInput(
        f"evidence: {proof.run.path} — expected what a model card has to show, missing:{listed}",
        hint="--unevaluated publishes without it, and the card says so at its head",
    )


def _refuse_contradictions(run: RunFolder, verdicts: dict[str, Verdict]) -> None:
    wrong = [verdict.reason for verdict in verdicts.values() if verdict.level == Level.FAIL]
    if wrong:
        more = [f"... and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        listed = "".join(f"\n  {line}" for line in wrong[:_LISTED] + more)
        raise BadInput.expected(
            "receipt",
            run.receipt,
            "to fit the run's folder",
            f"what does not{listed}",
            hint="something was changed after the run: restore it, or run again",
        )


def _is_the_runs(run: RunFolder, receipt: dict[str, Any], view: RunView) -> Verdict:
    """Whether the student's tensors have the hash that the run took before it saved them.

    Those of a student that is saved in fp32, as it was trained, can be compared; rounded ones cannot.
    """
    files = receipt.get("student_files")
    if not files:
        return Verdict(Level.UNKNOWN, "files of the student: the receipt has no hashes")
    unknown = sorted({file.name for file in run.student.iterdir()} - files.keys())
    if unknown:
        return Verdict(Level.FAIL, f"student: {unknown[0]} is not in the receipt")
    expected = (receipt.get("model_sha256") or {}).get("student")
    save_as = ((receipt.get("spec") or {}).get("student") or {}).get("save_as")
    if expected is None or save_as != "fp32":
        text = f"tensors of the student: saved as {save_as}, so their fp32 hash cannot be taken"
        return Verdict(Level.UNKNOWN, text)
    found = tensors_sha256(dict(load_decoder(run.student).named_parameters()))
    if found != expected:
        text = f"tensors of the student: expected sha256 {expected[:16]}, found {found[:16]}"
        return Verdict(Level.FAIL, text)
    return Verdict(Level.PASS, f"tensors of the student: sha256 {found[:16]}")


def file_sha256(path: Path) -> str:
    with open_regular(path, "file") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
