"""`engine publish`: turn a finished run into a folder that others can load.

    evidence    what the run can prove (`engine.export.required_evidence`); refused here, before anything is written
    copy        the student's files, each compared with the receipt's hash as it is copied
    convert     the .apr and the GGUF file, from the copy
    verify      load it in three independent ways (`engine.export.published`), from the files that are shipped
    card        README.md with the metrics and the verification; MANIFEST.json last
    rename      the complete folder appears under its name

Everything is written into `.NAME.publish` next to the folder, which is locked for as long as its writer lives.
The kernel releases the lock however the writer ends, so the remains of a killed one are recognised and
replaced; two writers at once exclude each other. Repeating the command on a folder that was published from
the same run reports that and changes nothing.

The run's receipt and spec are copied unchanged, including the names of folders in them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import limits
from engine.errors import BadInput, DiskFull, EngineError, write_error
from engine.export.card import Card, card_text, replay_line
from engine.export.convert import Converted, Progress, convert
from engine.export.hf_folder import complete_folder
from engine.export.licence import bases_of, inherited, licence_files
from engine.export.manifest import check_manifest, read_manifest, write_manifest
from engine.export.published import Verification, verify
from engine.export.required_evidence import (
    Proof,
    examine,
    file_sha256,
    refuse_missing,
)
from engine.files import open_regular, read_json_object, read_text
from engine.formats.adapter import is_adapter
from engine.formats.writing import fsync_folder
from engine.log.folder import RunFolder
from engine.models.config import count_parameters
from engine.models.read_config import read_config
from engine.quant.blocks import QUANTS
from engine.signals import partial_output
from engine.units import format_bytes
from engine.verdict import Level
from engine.verify.kept_outcome import NAME as OUTCOME

CARD = "README.md"
VERIFICATION = "verification.json"
RECEIPT = "receipt.json"
DATA_RECEIPT = "data_receipt.json"
NONE = "none"
_SPACE_FACTOR = 4
"""Free disk space that publishing needs, as a multiple of the student's size: its copy, two conversions, and one in
F32 for verification."""

Say = Callable[[str], None]
Files = list[tuple[str, str]]
"""Each file of the folder with its description for the card."""


class VerificationFailed(EngineError):
    """A way to load the model gives other outputs; nothing is published."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    folder: Path
    name: str
    gguf: str | None = None
    """A quant of `engine convert`, or `none`; None is q4_k_m, where GGUF has the model's family."""
    apr: str | None = None
    """The same; None is the student's own float type, where .apr has the model's family."""
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
    was_there: bool
    """Whether it had been published before from the same run, and is complete."""


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
        refuse_missing(proof)
    if wanted.folder.exists() or wanted.folder.is_symlink():
        return _accept_published(proof, wanted, say)
    _refuse_full_disk(run, wanted.folder)
    with whole_folder(wanted.folder) as partial:
        verification = _write(proof, wanted, partial, say, on_tensor)
    return Published(
        folder=wanted.folder,
        proof=proof,
        verification=verification,
        bytes=_bytes(wanted.folder),
        was_there=False,
    )


# contract: publication-v1
@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty, locked folder to write to. It becomes `folder` when all of it is on disk, and is
    removed when anything fails. Raises `BadInput`, `DiskFull`."""
    partial = folder.with_name(f".{folder.name}.publish")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise write_error("publish", partial, "a folder to write to", error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput.expected(
                "publish", folder, "to be the only one", "another that is publishing to it"
            ) from None
        with partial_output(partial):
            try:
                for path in partial.iterdir():
                    path.unlink()  # left by a killed writer
                yield partial
                for path in partial.iterdir():
                    with open_regular(path, "file") as file:
                        os.fsync(file.fileno())
                fsync_folder(partial)
                partial.rename(folder)
                fsync_folder(folder.parent)
            except OSError as error:
                raise write_error("publish", partial, "to write it", error) from error
    finally:
        os.close(lock)


def _accept_published(proof: Proof, wanted: Wanted, say: Say) -> Published:
    """Accept an existing folder if it was published from this run and is complete; otherwise refuse."""

    def refusal(expected: str, found: str, hint: str) -> BadInput:
        return BadInput.expected("publish", wanted.folder, expected, found, hint=hint)

    receipt, anew = wanted.folder / RECEIPT, "remove the folder to publish again"
    is_comparable = receipt.is_file() and proof.run.receipt.is_file()
    if not is_comparable or file_sha256(receipt) != file_sha256(proof.run.receipt):
        expected = "a path where nothing is yet, or this run, published before"
        raise refusal(expected, "something else", "choose another name, or remove it")
    manifest_verdict = check_manifest(wanted.folder)
    if manifest_verdict.level != Level.PASS:
        raise refusal("this run as it was published before", manifest_verdict.reason, anew)
    published_hashes = {entry["sha256"] for entry in (read_manifest(wanted.folder) or {}).values()}
    if unpublished := [
        path for path in wanted.evaluations if file_sha256(path) not in published_hashes
    ]:
        raise refusal(
            f"{unpublished[0]} among what was published before", "a card without it", anew
        )
    card = read_text(wanted.folder / CARD, "card", limits.MODEL_TEXT)
    if replay_line(proof) not in card.splitlines():
        say(
            "its card states another outcome of `engine verify`; remove the folder to publish again"
        )
    return Published(
        folder=wanted.folder,
        proof=proof,
        verification=None,
        bytes=_bytes(wanted.folder),
        was_there=True,
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
        files.append((name, f"of {licensed.words}"))
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
                "student", path, f"sha256 {recorded['sha256'][:16]}, as the receipt says", "others"
            )
        files.append((path.name, descriptions.get(path.name, "weights")))
    return files


def _copy_evidence(proof: Proof, partial: Path, files: Files) -> list[str | None]:
    """Copy receipts, spec and evaluations; return the file of each evaluation."""
    for path, name, description in (
        (proof.run.receipt, RECEIPT, "what the run really did"),
        (proof.run.spec, "spec.toml", "what was asked for"),
        (proof.run.effective, "effective.json", "every setting after defaults"),
        (proof.outcome, OUTCOME, "outcome of training it again, by `engine verify`"),
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
    """Describe the types of its tensors, and say why a file may have none of the type that it is named after."""
    types = ", ".join(f"{count} {kind}" for kind, count in converted.tensors.items())
    text = f"{types}; {converted.bits_per_weight:.2f} bits a weight"
    matrix = QUANTS[converted.quant]
    return text if matrix in converted.tensors else f"{text}; no row fills a block of {matrix}"


def _verify_folder(partial: Path, files: Files, say: Say) -> Verification:
    # The first way compares the files with the manifest.
    write_manifest(partial)
    verification = verify(partial, say)
    if verification.verdict.level == Level.FAIL:
        failed = [outcome for outcome in verification.outcomes if outcome.level == "fail"]
        raise VerificationFailed(
            "verification: expected the same answers every way, found"
            + "".join(f"\n  {outcome.id}: {outcome.verdict}" for outcome in failed),
            hint="nothing was published; --gguf none or --apr none leave a file out",
        )
    text = json.dumps(verification.as_dict(), indent=2) + "\n"
    (partial / VERIFICATION).write_text(text, encoding="utf-8")
    files.append((VERIFICATION, "how it was loaded and what came of it"))
    return verification


def _refuse_full_disk(run: RunFolder, folder: Path) -> None:
    needed = _SPACE_FACTOR * _bytes(run.student)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DiskFull.expected(
            "publish",
            folder,
            f"{format_bytes(needed)} free to write and verify",
            format_bytes(free),
        )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
