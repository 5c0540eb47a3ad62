"""Resuming a run: compare the checkpoints that its log reports with those on disk. No torch.

A checkpoint is logged only once it is on disk, and the engine never deletes the newest one. So when a
logged checkpoint is missing, the user or another program deleted it, or the disk lost it. The run is then not
restarted from step 0 unless the user allows it.

What may change between two sessions of a run:

    settings    They come from effective.json. The resuming command can change only keys named with
                `--allow-change`, and effective.json records each change.
    versions    They may change. The log then says that the run's numbers may differ in their last bits from those
                of a run with unchanged versions.
    teacher     Different weights are refused: the student would learn from another model after the resume.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from engine.checkpoint_folders import published, step_of
from engine.errors import CheckpointError
from engine.log.events import RunStarted
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.spec import GONE, RunSpec, settings_sha256

_VERSIONS = ("engine", "python", "torch", "device")


def written_sha256(folder: RunFolder) -> str:
    """Return the hash of the settings in effective.json.

    A newer engine adds its new settings with their defaults, which changes the hash of the spec but not the run, so the
    hash is computed from the file.
    """
    return settings_sha256(folder.read_effective()["spec"])


def changes_since(folder: RunFolder, spec_sha256: str) -> list[str] | None:
    """Describe the allowed changes of settings since the settings had the hash `spec_sha256`.

    Returns None if the settings never had that hash.
    """
    changes: list[dict[str, Any]] = folder.read_effective().get("changes", [])
    try:
        for index, change in enumerate(changes):
            if change["spec_sha256"] == spec_sha256:
                return [f"{c['key']} {c['was']!r} -> {c['is']!r}" for c in changes[index:]]
    except (KeyError, TypeError):
        raise CheckpointError.expected(
            "settings",
            folder.effective,
            "changes with key, was, is and spec_sha256",
            "other fields",
        ) from None
    return None


def check_changes(folder: RunFolder, spec: RunSpec) -> None:
    """Raise CheckpointError if a setting that a resume changed has another value in `spec` than it was changed to."""
    changed = {c["key"]: c["is"] for c in folder.read_effective().get("changes", [])}
    for key, value in changed.items():
        if key not in GONE and (found := spec.value(key)) != value:
            raise CheckpointError.expected(
                "settings",
                folder.effective,
                f"{key} = {value!r}, to which a resume changed it",
                f"{found!r}",
            )


def versions_changed(before: RunView | None, now: RunStarted) -> str:
    """Describe the versions that differ from the last session; empty if none does."""
    if before is None or before.started is None:
        return ""
    changed = [
        f"{name} {getattr(before.started, name)} -> {getattr(now, name)}"
        for name in _VERSIONS
        if getattr(before.started, name) != getattr(now, name)
    ]
    if not changed:
        return ""
    return f"{', '.join(changed)} since the last session: the results may differ in their last bits"


def check_same_teacher(
    before: RunView | None, sha256: str, source: str, backend: str, precision: str
) -> None:
    """Raise CheckpointError when an earlier session read different weights from the same file.

    Weights with another backend or precision have another hash, so they are not compared.
    """
    logged = before.models.get("teacher") if before else None
    if before is None or logged is None:
        return
    logged_backend = next(
        (d.choice for d in before.decisions if d.knob == "teacher.backend"), backend
    )
    if (logged.source, logged.precision, logged_backend) != (source, precision, backend):
        return
    if logged.sha256 != sha256:
        raise CheckpointError.expected(
            "teacher",
            source,
            f"the weights this run began with (sha256 {logged.sha256[:12]})",
            f"different weights (sha256 {sha256[:12]})",
            hint="restore the original file, or start a new run",
        )


def resume_command(folder: RunFolder) -> str:
    """Return the shell command that resumes a run."""
    return f"engine distill --resume {shlex.quote(str(folder.path))}"


def past_checks(folder: RunFolder) -> str:
    """Return the command that resumes a run in which failed checks are only reported."""
    key = "checks.on_fail"
    return f"{resume_command(folder)} --set {key}=report --allow-change {key}"


def was_stopped_by_checks(view: RunView) -> bool:
    """Return whether the last session ended because a check failed; a plain resume would then fail again."""
    if view.finished is None or view.finished.state != "failed":
        return False
    failed = [check for check in view.checks.values() if check.level == "fail"]
    reason = re.sub(r"^rank \d+: ", "", view.finished.reason)
    return any(reason.startswith(f"check {check.id}: ") for check in failed)


def newest_logged_step(view: RunView) -> int | None:
    """Return the step of the newest checkpoint that the log reports as saved; None if it reports none."""
    return max((saved.step for saved in view.checkpoints), default=None)


def require_logged_checkpoint(folder: RunFolder, view: RunView, allow_restart: bool) -> None:
    """Raise CheckpointError if the log reports a saved checkpoint, none is on disk, and `allow_restart` is false."""
    logged_step = newest_logged_step(view)
    if logged_step is None or allow_restart or any(published(folder.checkpoints)):
        return
    command = f"{resume_command(folder)} --allow-restart"
    raise CheckpointError.expected(
        "run folder",
        folder.path,
        f"the checkpoint of step {logged_step}, which its log reports as saved",
        "no checkpoint at all",
        hint=f"restore the folder {folder.checkpoints}, or start again from step 0 with `{command}`",
    )


def missing_newest(folder: RunFolder, view: RunView) -> str:
    """Describe that the newest logged checkpoint is missing and where the run continues; empty if it is present."""
    logged_step = newest_logged_step(view)
    newest = next(map(step_of, published(folder.checkpoints)), None)
    if logged_step is None or newest is None or newest >= logged_step:
        return ""
    return (
        f"the log reports that a checkpoint of step {logged_step} was saved, but it is not in "
        f"{folder.checkpoints}: the run resumes from step {newest} or earlier and trains the later steps again"
    )
