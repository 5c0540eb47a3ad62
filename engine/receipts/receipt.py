"""Collect the facts that a run's folder proves about the run, and compare a receipt with them. No torch.

`facts_of` reads a run's logs and settings; the trainer adds its own facts and writes receipt.json
(`engine.train.finish`). A run that was killed has no receipt, but `facts_of` returns the same facts up to the end of
its log. `check_receipt` compares a receipt with the files of its run folder.

Identity fields come first: tool, config, seeds, data, weights, device, environment, times, outcome. Then come
decisions and rows. Values come from the log, never from the request, if the log records them. The rest of the log, such
as the checkpoints, is covered by the hash of the log.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.errors import RunLogError
from engine.files import open_plain
from engine.limits import LOG_FILE, MANIFEST, RUN_FILE, SPEC_FILE, STUDENT_FILE, Limit
from engine.log.events import (
    Event,
)
from engine.log.folder import RunFolder
from engine.log.view import RunView, host_of
from engine.receipts.context import plain, sessions_of, spec_hash
from engine.sealing import now_utc
from engine.terminal import clipped
from engine.verdict import Level, Verdict

_READ_BYTES = 1 << 20
_UNSEALED = frozenset(
    {
        *("notes.json", "verified.json", "memory.held", "reserve", "stop-asked"),
        *("stacks", "ranks", "flight", "columns"),
    }
)
"""Names of files and folders in a run folder that a receipt does not cover, because other processes write them during
training or after it."""


class _File(msgspec.Struct):
    sha256: str


class _Log(_File):
    bytes: Annotated[int, msgspec.Meta(ge=0, le=STUDENT_FILE.most)]


class _Decided(msgspec.Struct):
    overridden: bool
    reason: str
    knob: str
    choice: str


class _Form(msgspec.Struct):
    """Schema of the fields of a receipt that this module iterates over. It is checked, because a receipt may come from
    an untrusted source."""

    logs: dict[str, _Log | None] | None = None
    student_files: dict[str, _File] | None = None
    files: dict[str, _File] | None = None
    decisions: list[_Decided] | None = None


def facts_of(run: RunFolder, view: RunView) -> dict[str, Any]:
    """Collect the facts that a run's logs, settings and files prove."""
    effective = effective_of(run)
    spec = effective.get("spec") or {}
    return {
        "config": {
            **spec_hash(run),
            "effective_sha256": _sha256(run.effective, RUN_FILE),
            "spec_file_sha256": _sha256(run.spec, SPEC_FILE),
            "sets": effective.get("sets"),
        },
        "seeds": {"train.seed": (spec.get("train") or {}).get("seed")},
        "data": _fields(view.data),
        "weights": {role: _fields(model) for role, model in view.models.items()},
        "device": plain(view.facts),
        "times": {
            "first": None if view.first_unix_s is None else now_utc(view.first_unix_s),
            "last": None if view.last_unix_s is None else now_utc(view.last_unix_s),
            "sessions": sessions_of(run),
        },
        "decisions": [_fields(decision) for decision in view.decisions],
        "rows": rows_of(view),
        "logs": {path.name: digest_of_log(path) for path in logs_of(run) if path.exists()},
    }


def logs_of(run: RunFolder) -> tuple[Path, ...]:
    """Return the append-only files of a run."""
    hosts = [RunFolder(run.path, host_of(source)) for source in run.logs() if host_of(source)]
    further = {path: None for host in hosts for path in (host.device, host.watch, host.stderr)}
    return run.events, run.device, run.watch, run.stderr, *further


def _fields(event: Event | None) -> dict[str, Any] | None:
    """Return the fields of an event except its sequence number and time."""
    if event is None:
        return None
    return {k: v for k, v in plain(event).items() if k not in ("seq", "t_s")}


def digest_of_log(path: Path) -> dict[str, Any] | None:
    """Return the current size and hash of a log. A log only grows, so the hash stays that of its first bytes."""
    if not path.is_file() or (size := path.stat().st_size) > LOG_FILE.most:
        return None
    return {"bytes": size, "sha256": _sha256(path, LOG_FILE, size)}


def digest_files(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return size and hash of every file in a folder whose name does not end with one of `without`."""
    files = (file for file in sorted(folder.iterdir()) if file.is_file())
    return {file.name: _digest_of_file(file) for file in files if not file.name.endswith(without)}


def _digest_of_file(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file, STUDENT_FILE)}


def digest_rest(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return size and hash of every file of a run folder, except logs, the student, checkpoints and files that a
    receipt does not cover."""
    return {
        name: _digest_of_file(run.path / name)
        for name in _names(run)
        if not name.startswith((f"{run.student.name}/", f"{run.checkpoints.name}/"))
        and run.path / name not in logs_of(run)
    }


def _names(run: RunFolder) -> list[str]:
    """Return the files of a run folder that a receipt covers, as paths relative to the folder."""
    files = (path for path in run.path.rglob("*") if path.is_symlink() or not path.is_dir())
    parts = (path.relative_to(run.path).parts for path in files)
    covered_parts = (
        part for part in parts if part[0] not in _UNSEALED and part != (run.receipt.name,)
    )
    return sorted("/".join(part) for part in covered_parts)


def _sha256(path: Path, limit: Limit, first_bytes: int | None = None) -> str | None:
    digest, left = hashlib.sha256(), first_bytes
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > limit.most:
                return None
            while piece := file.read(_READ_BYTES if left is None else min(left, _READ_BYTES)):
                digest.update(piece)
                left = None if left is None else left - len(piece)
    except OSError:
        return None
    return digest.hexdigest() if not left else None


def effective_of(run: RunFolder) -> dict[str, Any]:
    """Return the content of effective.json, with the run's settings by section; empty if it cannot be read."""
    try:
        effective = run.read_effective()
    except RunLogError:
        return {}
    sets = effective.get("sets")
    return effective | {
        "sets": [assignment for assignment in sets if isinstance(assignment, str)]
        if isinstance(sets, list)
        else None
    }


def rows_of(view: RunView) -> dict[str, Any]:
    """Count the rows that went through the model, and the rows of steps whose update was applied. An update with a
    non-finite value is skipped."""
    steps = view.steps.values("step")
    rows = view.steps.values("rows")
    bad = _skipped_steps(view)
    seen = sum(n or 0 for n in rows)
    trained = sum(n or 0 for step, n in zip(steps, rows, strict=True) if step not in bad)
    return {
        "rows_seen": int(seen),
        "rows_trained": int(trained),
        "steps_not_applied": len(bad),
        "labelled_tokens": int(sum(n or 0 for n in view.steps.values("labelled"))),
        "position": int(view.steps.last("position") or 0),
    }


def _skipped_steps(view: RunView) -> set[int]:
    """Return the steps whose update was skipped because a number was not finite."""
    # Numbers that are measured between updates cause no skipped update.
    between_updates = ("heldout_loss", "weight_norm")
    return {event.step for event in view.non_finite if event.id not in between_updates}


# Comparing a receipt with the files of its run folder


def check_receipt(run: RunFolder, receipt: dict[str, Any], view: RunView) -> dict[str, Verdict]:
    """Compare everything in a receipt that can be compared with the run folder without torch.

    `not_compared` lists the rest. The log records the receipt's hash, so the facts in the receipt are not compared with
    the log one by one. A receipt is not signed: a folder in which both log and receipt were rewritten passes.
    """
    recorded = view.receipt.sha256 if view.receipt is not None else None
    out = {
        "receipt": Verdict(Level.UNKNOWN, "the log does not record the hash of a receipt")
        if recorded is None
        else _equal("sha256 of receipt.json, as logged", recorded, _sha256(run.receipt, RUN_FILE)),
        "spec": _equal(
            "hash of effective.json's settings", receipt.get("spec_sha256"), spec_hash(run)["found"]
        ),
    }
    logs = {path.name: path for path in logs_of(run)}
    for name, log in (receipt.get("logs") or {}).items():
        if name not in logs:
            out[name] = Verdict(Level.FAIL, f"{name}: expected the name of a run's log")
        elif log is not None:
            found = _sha256(logs[name], LOG_FILE, log["bytes"])
            out[name] = _equal(f"first {log['bytes']} bytes of {name}", log["sha256"], found)
    out |= check_student_files(run, receipt)
    names = _names(run)
    for name, file in (receipt.get("files") or {}).items():
        found = _sha256(run.path / name, STUDENT_FILE) if name in names else None
        out[name] = _equal(f"sha256 of {name}", file["sha256"], found)
    return out | {"files": _every_file(run, receipt, names)} | _checkpoints(run, view)


def _every_file(run: RunFolder, receipt: dict[str, Any], names: Sequence[str]) -> Verdict:
    """Return a failed check if the run folder has files that the receipt does not list."""
    if receipt.get("files") is None:
        return Verdict(Level.UNKNOWN, "files of the folder: the receipt does not list them")
    named = {*receipt["files"], *(receipt.get("logs") or {})}
    named |= {f"{run.student.name}/{name}" for name in receipt.get("student_files") or {}}
    present = [name for name in names if not name.startswith(f"{run.checkpoints.name}/")]
    if extra := [name for name in present if name not in named]:
        rest = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        return Verdict(
            Level.FAIL,
            f"{extra[0]}{rest}: the receipt does not list this file; move your own files out of the run folder",
        )
    return Verdict(Level.PASS, f"the receipt lists all {len(present)} files")


def not_compared(run: RunFolder, receipt: dict[str, Any]) -> list[str]:
    """List the parts of a run that `check_receipt` does not compare."""
    out = [
        f"{name}: lines after its first {log['bytes']} bytes"
        for name, log in (receipt.get("logs") or {}).items()
        if log is not None
        and (run.path / name).is_file()
        and log["bytes"] < (run.path / name).stat().st_size
    ]
    if run.checkpoints.is_dir():
        out.append("checkpoints: their contents, except the manifests")
    out += [
        f"{name}: written by other processes, during training or after it"
        for name in sorted(_UNSEALED)
        if (run.path / name).exists()
    ]
    return [*out, "the machine, the engine and the environment at the time of the run"]


def check_student_files(run: RunFolder, receipt: dict[str, Any]) -> dict[str, Verdict]:
    """Compare the files of the student with the hashes in a receipt."""
    out = {}
    for name, recorded in (receipt.get("student_files") or {}).items():
        # A name with a `/` could point outside the student's folder.
        inside = name not in ("", ".", "..") and "/" not in name
        found = _sha256(run.student / name, STUDENT_FILE) if inside else None
        out[f"student/{name}"] = _equal(f"sha256 of {name}", recorded["sha256"], found)
    return out


def _checkpoints(run: RunFolder, view: RunView) -> dict[str, Verdict]:
    """Compare the manifests of the checkpoints that still exist with the log."""
    out = {}
    for step, sha256 in {saved.step: saved.manifest_sha256 for saved in view.checkpoints}.items():
        manifest = run.checkpoints / f"step-{step:08d}" / "MANIFEST.json"
        if manifest.is_file():
            found = _sha256(manifest, MANIFEST)
            out[f"checkpoint {step}"] = _equal(f"manifest of step {step}", sha256, found)
    return out


def _equal(what: str, recorded: str | None, found: str | None) -> Verdict:
    """Compare a recorded hash with the one found."""
    if recorded is None:
        return Verdict(Level.UNKNOWN, f"{what}: the receipt does not record it")
    if recorded != found:
        text = "nothing to compare" if found is None else found[:16]
        return Verdict(Level.FAIL, f"{what}: expected {recorded[:16]}, found {text}")
    return Verdict(Level.PASS, f"{what}: {found[:16]}")


def read_receipt_or_facts(run: RunFolder, view: RunView) -> tuple[dict[str, Any], bool]:
    """Return a run's receipt, or its facts so far if it has none, and whether a receipt was read. Raises RunLogError
    if the receipt is malformed."""
    receipt = run.read_receipt()
    if receipt is not None:
        try:
            msgspec.convert(receipt, _Form)
        except msgspec.ValidationError as error:
            raise RunLogError.expected(
                "receipt", run.receipt, "the fields of a receipt", clipped(str(error), 200)
            ) from None
        return receipt, True
    return {"run": run.name, "outcome": None, **facts_of(run, view)}, False
