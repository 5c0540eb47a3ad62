"""How a run goes on, and the checkpoints that its log says are safe against those that are there. No torch.

A checkpoint is written into the log only once it is on disk, and the newest is never deleted by the
engine: one that is missing was taken by somebody else, or by a disk. Then nothing is begun again unasked.

What may change between two sessions of one run: settings are those of effective.json, and the command that
resumes changes them only for keys named with `--allow-change`; effective.json lists each change. Versions
may change: the run goes on, and says that its curve is not bit for bit the one it would have had. A teacher
with other weights is refused: from there on the student would learn something else.
"""

from __future__ import annotations

import shlex
from typing import Any

from engine.errors import CheckpointError
from engine.log.events import RunStarted
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.spec import settings_sha256
from engine.train.checkpoint.manifest import published, step_of

_VERSIONS = ("engine", "python", "torch", "device")


def written_sha256(folder: RunFolder) -> str:
    """The hash of the settings as they were written down: an engine that has gained settings since gives
    them their defaults, and the run is the same one."""
    return settings_sha256(folder.read_effective()["spec"])


def changes_since(folder: RunFolder, spec_sha256: str) -> list[str] | None:
    """The allowed changes of settings since `spec_sha256` was the hash of them all, in words; None when
    that hash never was.
    """
    changes: list[dict[str, Any]] = folder.read_effective().get("changes", [])
    try:
        for index, change in enumerate(changes):
            if change["spec_sha256"] == spec_sha256:
                return [f"{c['key']} {c['was']!r} -> {c['is']!r}" for c in changes[index:]]
    except (KeyError, TypeError):
        raise CheckpointError.expected(
            "settings", folder.effective, "changes with key, was, is and spec_sha256", "others"
        ) from None
    return None


def versions_changed(before: RunView | None, now: RunStarted) -> str:
    """What the earlier session ran with and this one does not, in words; empty when nothing."""
    if before is None or before.started is None:
        return ""
    changed = [
        f"{name} {getattr(before.started, name)} -> {getattr(now, name)}"
        for name in _VERSIONS
        if getattr(before.started, name) != getattr(now, name)
    ]
    if not changed:
        return ""
    return (
        f"{', '.join(changed)} since the last session: not bit for bit the run it would have been"
    )


def check_same_teacher(
    before: RunView | None, sha256: str, source: str, backend: str, precision: str
) -> None:
    """Raises CheckpointError when an earlier session had other weights out of the same file.

    Weights that are held in another form have another hash, and are not compared.
    """
    known = before.models.get("teacher") if before else None
    if before is None or known is None:
        return
    held = next((d.choice for d in before.decisions if d.knob == "teacher.backend"), backend)
    if (known.source, known.precision, held) != (source, precision, backend):
        return
    if known.sha256 != sha256:
        raise CheckpointError.expected(
            "teacher",
            source,
            f"the weights this run began with (sha256 {known.sha256[:12]})",
            f"others ({sha256[:12]})",
            hint="put the old file back, or start a new run",
        )


def resume_command(folder: RunFolder) -> str:
    """The command that continues a run, as it is typed in a shell."""
    return f"engine distill --resume {shlex.quote(str(folder.path))}"


def past_checks(folder: RunFolder) -> str:
    """The command that continues a run past checks that fail, which are then reported and stop nothing."""
    key = "checks.on_fail"
    return f"{resume_command(folder)} --set {key}=report --allow-change {key}"


def was_stopped_by_checks(view: RunView) -> bool:
    """Whether the last session ended because a check failed: to resume the run as it is would end so again."""
    if view.finished is None or view.finished.state != "failed":
        return False
    failed = [check for check in view.checks.values() if check.level == "fail"]
    return any(view.finished.reason.startswith(f"check {check.id}: ") for check in failed)


def promised_step(view: RunView) -> int | None:
    """The step of the newest checkpoint that the log says is safe; None when it names none."""
    return max((saved.step for saved in view.checkpoints), default=None)


def check_promised(folder: RunFolder, view: RunView, allow_restart: bool) -> None:
    """Raises CheckpointError when the log promises a checkpoint and there is none at all."""
    promised = promised_step(view)
    if promised is None or allow_restart or any(published(folder.checkpoints)):
        return
    command = f"{resume_command(folder)} --allow-restart"
    raise CheckpointError.expected(
        "run folder",
        folder.path,
        f"the checkpoint of step {promised}, which its log says was safe",
        "no checkpoint at all",
        hint=f"put the folder {folder.checkpoints} back, or `{command}` begins again from step 0, "
        "and every step so far is made again",
    )


def missing_newest(folder: RunFolder, view: RunView) -> str:
    """That the newest checkpoint is gone, and from which the run goes on; empty when it is there."""
    promised = promised_step(view)
    newest = next(map(step_of, published(folder.checkpoints)), None)
    if promised is None or newest is None or newest >= promised:
        return ""
    return (
        f"the log says that a checkpoint of step {promised} was safe, and it is not in "
        f"{folder.checkpoints}: going on from step {newest} or before it, and the steps since are made again"
    )
