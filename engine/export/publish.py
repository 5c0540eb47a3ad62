"""`engine publish`: turn a finished run into a folder that others can load.

    evidence    collect the run's evidence (`engine.export.required_evidence`); if some is missing, nothing is written
    copy        the student's files, each compared with the receipt's hash as it is copied
    convert     the .apr and the GGUF file, from the copy
    verify      load the copy in three implementations (`engine.export.published`)
    card        README.md with the metrics and the verification; MANIFEST.json last
    rename      the complete folder gets its final name; nothing is overwritten

The run's receipt and spec are copied unchanged, with the paths that they contain.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import limits
from engine.errors import BadInput, EngineError
from engine.export.card import Card, card_text
from engine.export.convert import Converted, Progress, convert
from engine.export.hf_folder import complete_folder
from engine.export.licence import bases_of, inherited, licence_files
from engine.export.manifest import write_manifest
from engine.export.published import Verification, verify
from engine.export.required_evidence import (
    Proof,
    examine,
    file_sha256,
    require_evidence,
)
from engine.files import read_json_object
from engine.formats.adapter import is_adapter
from engine.log.folder import RunFolder
from engine.models.config import count_parameters
from engine.models.load import new_folder
from engine.models.read_config import read_config
from engine.quant.blocks import QUANTS
from engine.verdict import Level
from engine.verify.kept_outcome import NAME as OUTCOME

CARD = "README.md"
VERIFICATION = "verification.json"
RECEIPT = "receipt.json"
DATA_RECEIPT = "data_receipt.json"
NONE = "none"

Say = Callable[[str], None]
Files = list[tuple[str, str]]
"""Each file of the folder with its description for the card."""


class VerificationFailed(EngineError):
    """Exception: an implementation gives other outputs; nothing is published."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    folder: Path
    name: str
    gguf: str | None = None
    """A quant of `engine convert`, or `none`; None means q4_k_m if GGUF supports the model's family."""
    apr: str | None = None
    """A quant of `engine convert`, or `none`; None means the student's float type if .apr supports the model's
    family."""
    licence: str | None = None
    base_models: tuple[str, ...] = ()
    evaluations: tuple[Path, ...] = ()
    unevaluated: bool = False
    unverified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    folder: Path
    proof: Proof
    verification: Verification | None
    bytes: int


def publish(
    run: RunFolder,
    wanted: Wanted,
    say: Say,
    on_tensor: Callable[[Progress], None] = lambda progress: None,
) -> Published:
    """Publish a run. Raises `BadInput` for contradictions and missing evidence, `VerificationFailed`,
    `DiskFull`."""
    if is_adapter(run.student):
        raise BadInput.expected(
            "publish",
            run.student,
            "a student with weights of its own",
            "an adapter",
            hint="peft loads the folder as it is; engine convert merges it into its base",
        )
    say("reading the evidence of the run")
    proof = examine(run, wanted.evaluations)
    verifying = f"; engine verify {shlex.quote(str(run.path))}"
    say(f"replay of the run: {proof.replay}{verifying if proof.outcome is None else ''}")
    if not wanted.unevaluated:
        require_evidence(proof)
    if wanted.folder.exists() or wanted.folder.is_symlink():
        raise BadInput.expected(
            "publish",
            wanted.folder,
            "a new path",
            "an existing one",
            hint="choose another name, or remove it",
        )
    with new_folder(wanted.folder) as partial:
        verification = _write(proof, wanted, partial, say, on_tensor)
    return Published(
        folder=wanted.folder,
        proof=proof,
        verification=verification,
        bytes=sum(path.stat().st_size for path in wanted.folder.iterdir()),
    )


def _write(
    proof: Proof,
    wanted: Wanted,
    partial: Path,
    say: Say,
    on_tensor: Callable[[Progress], None],
) -> Verification | None:
    receipt = proof.receipt or {}
    spec = receipt.get("spec") or proof.run.read_effective()["spec"]
    bases = bases_of(spec, receipt.get("model_sha256") or {})
    licence = inherited(bases, wanted.licence)
    say("copying the student")
    files = _copy_student(proof, partial)
    started_from = (spec.get("student") or {}).get("path") or ""
    base = Path(started_from) if started_from and Path(started_from).is_dir() else None
    complete_folder(partial, base)
    known = {name for name, _ in files}
    added = sorted({path.name for path in partial.iterdir()} - known)
    files += [(name, "for transformers") for name in added]
    for name, licensed in licence_files(bases, licence).items():
        assert licensed.licence_file is not None
        shutil.copyfile(licensed.licence_file, partial / name)
        files.append((name, f"licence of {licensed.words}"))
    origin = {"name": wanted.name, "license": licence.identifier}
    if wanted.licence is None and licence.identifier == "unknown":
        del origin["license"]
    saved_as = str((spec.get("student") or {}).get("save_as", "fp32")).replace("fp32", "f32")
    config = read_config(partial)
    for format_, requested, default in (
        ("apr", wanted.apr, saved_as),
        ("gguf", wanted.gguf, "q4_k_m"),
    ):
        lacks = not config.native or (format_ == "apr" and not config.kind.apr)
        if requested is None and lacks:
            say(f"no .{format_} file: the engine does not write {config.kind.title} in this format")
        if requested == NONE or (requested is None and lacks):
            continue
        quant = requested or default
        file = f"{wanted.name}{'' if quant == saved_as else '-' + quant.upper()}.{format_}"
        say(f"writing {file}")
        converted = convert(
            partial, partial / file, quant, format_=format_, origin=origin, on_tensor=on_tensor
        )
        files.append((file, f"{format_} in {quant}: {_describe_types(converted)}"))
    evaluations = _copy_evidence(proof, partial, files)
    verification = None if wanted.unverified else _verify_folder(partial, files, say)
    say("writing the card")
    card = Card(
        name=wanted.name,
        proof=proof,
        bases=bases,
        licence=licence,
        config=read_json_object(
            partial / "config.json", "model configuration", limits.MODEL_CONFIG
        ),
        parameters=count_parameters(config),
        files=files,
        evaluation_files=evaluations,
        verification=verification,
        base_models=wanted.base_models,
    )
    (partial / CARD).write_text(card_text(card), encoding="utf-8")
    write_manifest(partial)
    return verification


def _copy_student(proof: Proof, partial: Path) -> Files:
    """Copy every file of the student byte for byte, and refuse a copy that differs from the receipt."""
    descriptions = {
        "config.json": "shape of the model",
        "generation_config.json": "for transformers",
        "tokenizer.json": "tokenizer",
    }
    hashes = (proof.receipt or {}).get("student_files") or {}
    files = []
    for path in sorted(proof.run.student.iterdir()):
        shutil.copyfile(path, partial / path.name)
        recorded = hashes.get(path.name)
        if recorded is not None and file_sha256(partial / path.name) != recorded["sha256"]:
            raise BadInput.expected(
                "student", path, f"sha256 {recorded['sha256'][:16]}, as in the receipt", "another"
            )
        files.append((path.name, descriptions.get(path.name, "weights")))
    return files


def _copy_evidence(proof: Proof, partial: Path, files: Files) -> list[str | None]:
    """Copy receipts, spec and evaluations; return the file of each evaluation."""
    for path, name, description in (
        (proof.run.receipt, RECEIPT, "what the run really did"),
        (proof.run.spec, "spec.toml", "the settings as written by the user"),
        (proof.run.effective, "effective.json", "every setting after defaults"),
        (proof.outcome, OUTCOME, "result of training it again with `engine verify`"),
    ):
        if path is not None and path.is_file():
            shutil.copyfile(path, partial / name)
            files.append((name, description))
    data = (proof.receipt or {}).get("data")
    if data:
        (partial / DATA_RECEIPT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        files.append((DATA_RECEIPT, "which text was trained on, and in which order"))
    names: list[str | None] = []
    for evaluation in proof.evaluations:
        if evaluation.file is None:
            names.append(None)
            continue
        name, number = f"evaluation_{evaluation.benchmark}{evaluation.file.suffix}", 2
        while (partial / name).exists():
            name, number = (
                f"evaluation_{evaluation.benchmark}_{number}{evaluation.file.suffix}",
                number + 1,
            )
        shutil.copyfile(evaluation.file, partial / name)
        files.append((name, f"results of {evaluation.title}"))
        names.append(name)
    return names


def _describe_types(converted: Converted) -> str:
    """Describe the types of a file's tensors. If no tensor has the type that the file is named after, say why."""
    types = ", ".join(f"{count} {kind}" for kind, count in converted.tensors.items())
    text = f"{types}; {converted.bits_per_weight:.2f} bits per weight"
    matrix = QUANTS[converted.quant]
    return text if matrix in converted.tensors else f"{text}; no row fills a block of {matrix}"


def _verify_folder(partial: Path, files: Files, say: Say) -> Verification:
    # The first check compares the files with the manifest.
    write_manifest(partial)
    verification = verify(partial, say)
    if verification.verdict.level == Level.FAIL:
        failed = [outcome for outcome in verification.outcomes if outcome.level == "fail"]
        raise VerificationFailed(
            "verification: expected the same outputs from every implementation, found"
            + "".join(f"\n  {outcome.id}: {outcome.verdict}" for outcome in failed),
            hint="nothing was published; --gguf none or --apr none leave a file out",
        )
    text = json.dumps(verification.as_dict(), indent=2) + "\n"
    (partial / VERIFICATION).write_text(text, encoding="utf-8")
    files.append((VERIFICATION, "result of loading it in each implementation"))
    return verification
