"""Check the checkpoints that a run saves.

    checkpoint_reloads   every file of a checkpoint has the hash with which it was written, the kernel has written every
                         page of it, and the reader of a resume accepts it

It exists because a run of 25 hours left a checkpoint of 200 bytes that was not opened until the run had ended.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.checks.context import Context
from engine.errors import EngineError
from engine.verdict import Answer, Numbers


def checkpoint_reloads(
    context: Context, path: Path, step: int, check_resumable: Callable[[Path], None]
) -> Answer:
    """Read the checkpoint in `path` back with `check_resumable`, which reads all of it and raises CheckpointError where
    a resume would refuse it."""
    numbers = Numbers(step=step)
    try:
        check_resumable(path)
    except EngineError as error:
        return numbers.failed(f"{path.name} cannot be resumed from: {error}")
    return numbers.passed(
        f"{path.name}, read back, has every byte as it was written, and a resume accepts it"
    )
