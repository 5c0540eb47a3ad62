"""Room on the disk for what a run will still write there: nothing is asked for what it will not. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.errors import DiskFull
from engine.log.folder import RunFolder
from engine.models.config import ModelConfig, count_parameters
from engine.spec import RunSpec
from engine.train.checkpoint.manifest import published, step_of
from engine.train.checkpoint.write import FREE_SPACE_FACTOR
from engine.units import format_bytes

ADAM_COPIES = 3
"""Weights and AdamW's two moments, each in fp32: what one checkpoint holds."""


def check_room(spec: RunSpec, student: ModelConfig, run: Path) -> None:
    """Raises DiskFull when there is less free than the session's checkpoints will take beside those that
    are there already. The student is smaller than what the last of them needs while it is written.
    """
    there = list(published(RunFolder(run).checkpoints))
    writes = checkpoints_of_session(spec, step_of(there[0]) if there else 0)
    if not writes:
        return
    # At once: the newest ones, the best, and the one that is being written.
    kept = min(spec.checkpoint.keep_last + 1, len(there) + writes - 1)
    more = max(0, kept - len(there))
    each = count_parameters(student) * 4 * ADAM_COPIES
    needed = round(each * (more + FREE_SPACE_FACTOR))
    folder = next(path for path in (run, *run.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        some = "a checkpoint" if more == 0 else f"{more + 1} checkpoints"
        raise DiskFull(
            f"run folder: {run} — expected {format_bytes(needed)} free for {some} of "
            f"{format_bytes(each)}, found {format_bytes(free)}",
            hint="free space there, choose another --out, or lower checkpoint.keep_last",
        )


def checkpoints_of_session(spec: RunSpec, begun_at: int) -> int:
    """How many a session writes that begins after step `begun_at` and is not asked to stop early."""
    every, at_end = spec.checkpoint.every, spec.checkpoint.at_end
    after = spec.train.stop_after
    last = min(begun_at + after, spec.train.steps) if after else spec.train.steps
    if last <= begun_at:
        return 0
    count = last // every - begun_at // every if every else 0
    return count + int(at_end and not (every and last % every == 0))
