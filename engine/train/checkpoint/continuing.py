"""How a run goes on, and the checkpoints that its log says are safe against those that are there. No torch.

A checkpoint is written into the log only once it is on disk, and the newest is never deleted by the
engine: one that is missing was taken by somebody else, or by a disk. Then nothing is begun again unasked.
"""

from __future__ import annotations

import shlex

from engine.errors import CheckpointError
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.train.checkpoint.manifest import published, step_of


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
