"""Evidence of a flip: its verdict, with the plan it was registered by and every pair it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import RunLogError
from engine.files import parse_json
from engine.findings.capture import Blob, Capture, file_blob
from engine.findings.finding import FlipResult
from engine.findings.redact import Redactor
from engine.findings.support import ARMS_KEPT
from engine.flips.record import read_plan_of, read_verdict
from engine.log.folder import RunFolder


def is_flip(path: Path) -> bool:
    return (path / "pairs.jsonl").is_file()


def capture_flip(path: Path, redactor: Redactor) -> Capture:
    """The verdict of the flip in `path`. Raises RunLogError for one without a verdict."""
    verdict = read_verdict(path)
    if verdict is None:
        raise RunLogError.expected("flip", path, "verdict.json", "none: it has not ended")
    plan = read_plan_of(path)
    name = path.resolve().name
    blobs = {
        part: file_blob(path / part, f"{part} of the flip {name}", redactor)
        for part in ("verdict.json", "plan.json", "pairs.jsonl")
    }
    blob = blobs["verdict.json"]
    # As it is kept, so that the locator holds nothing that was cut out.
    fields = fields_of(parse_json(blob.data or b"{}", path, "verdict"), path)
    locator = FlipResult(
        flip=redactor.text(name).text,
        plan_sha256=plan.sha256,
        plan=blobs["plan.json"].artifact.sha256,
        pairs=blobs["pairs.jsonl"].artifact.sha256,
        **fields,
    )
    return Capture(
        locator=locator,
        blob=blob,
        source=path,
        attached=tuple(_arm_blobs(path, verdict, redactor)),
        needed=(blobs["plan.json"], blobs["pairs.jsonl"]),
    )


def fields_of(verdict: dict[str, Any], where: object) -> dict[str, Any]:
    """What a locator quotes of verdict.json. Raises RunLogError."""
    try:
        low, high = verdict["interval"]
        return {
            "grade": verdict["class"],
            "verdict": verdict["verdict"],
            "hypothesis": verdict["hypothesis"],
            "changes": tuple(verdict["changes"]),
            "metric": verdict["metric"],
            "effect": verdict["effect"],
            "low": low,
            "high": high,
            "n_pairs": verdict["n_pairs"],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RunLogError.expected("verdict", where, "the verdict of a flip", str(error)) from None


def _arm_blobs(path: Path, verdict: dict[str, Any], redactor: Redactor) -> list[Blob]:
    blobs = []
    for entry in verdict["raw_runs"][:ARMS_KEPT]:
        run = RunFolder(path / entry["run"])
        blobs += [
            file_blob(file, f"{file.name} of {entry['run']}", redactor)
            for file in (run.effective, run.receipt, run.events, run.watch)
            if file.is_file()
        ]
    for control in sorted((path / "controls").glob("*")):
        for part in ("plan.json", "pairs.jsonl"):
            if (control / part).is_file():
                what = f"{part} of the control {control.name}"
                blobs.append(file_blob(control / part, what, redactor))
    return blobs
