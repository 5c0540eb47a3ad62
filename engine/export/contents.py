"""The parts of a published folder that are copies: the student, its receipts, its evaluations.

Each is a pair of a name and what it is, for the card. No torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from engine.errors import BadInput
from engine.export.proof import Proof, file_sha256

RECEIPT = "receipt.json"
DATA_RECEIPT = "data_receipt.json"


def copy_student(proof: Proof, partial: Path) -> list[tuple[str, str]]:
    """Every file of the student, byte for byte; a copy that differs is refused."""
    said = {"config.json": "shape of the model", "tokenizer.json": "tokenizer"}
    hashes = (proof.receipt or {}).get("student_files") or {}
    files = []
    for path in sorted(proof.run.student.iterdir()):
        shutil.copyfile(path, partial / path.name)
        recorded = hashes.get(path.name)
        if recorded is not None and file_sha256(partial / path.name) != recorded["sha256"]:
            raise BadInput.expected(
                "student", path, f"sha256 {recorded['sha256'][:16]}, as the receipt says", "others"
            )
        files.append((path.name, said.get(path.name, "weights")))
    return files


def describe_added(partial: Path, files: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    known = {name for name, _ in files}
    return [
        (path.name, "for transformers")
        for path in sorted(partial.iterdir())
        if path.name not in known
    ]


def copy_evidence(proof: Proof, partial: Path, files: list[tuple[str, str]]) -> list[str | None]:
    """Receipts, spec and evaluations; returns the file of each evaluation."""
    for path, name, what in (
        (proof.run.receipt, RECEIPT, "what the run really did"),
        (proof.run.spec, "spec.toml", "what was asked for"),
        (proof.run.effective, "effective.json", "every setting after defaults"),
    ):
        if path.is_file():
            shutil.copyfile(path, partial / name)
            files.append((name, what))
    data = (proof.receipt or {}).get("data")
    if data:
        (partial / DATA_RECEIPT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        files.append((DATA_RECEIPT, "which text was trained on, and in which order"))
    found: list[str | None] = []
    for one in proof.evaluations:
        if one.file is None:
            found.append(None)
            continue
        name, number = f"evaluation_{one.benchmark}{one.file.suffix}", 2
        while (partial / name).exists():
            name, number = f"evaluation_{one.benchmark}_{number}{one.file.suffix}", number + 1
        shutil.copyfile(one.file, partial / name)
        files.append((name, f"results of {one.title}"))
        found.append(name)
    return found
