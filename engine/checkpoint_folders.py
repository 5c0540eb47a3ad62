"""Name and list the folders of a run's checkpoints, and define the disk space that a checkpoint needs.

`engine.train.checkpoint` defines their content and writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import CheckpointError

PUBLISHED = re.compile(r"step-([0-9]{8})")
"""Pattern of the name of a complete checkpoint. A checkpoint that is being written, deleted or set aside has another
name."""
FREE_SPACE_FACTOR = 1.5
"""Free disk space that is required before a checkpoint is begun, as a multiple of its size."""


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    if not 0 <= step <= 99_999_999:
        raise ValueError(f"checkpoint step: expected 0 to 99999999, found {step}")
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a published checkpoint."""
    return int(path.name.removeprefix("step-"))


def published(folder: Path) -> Iterator[Path]:
    """Yield the paths named like a published checkpoint, newest first; all other names are ignored."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if PUBLISHED.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise refusal(folder, "a folder that can be read", str(error)) from error
    yield from (folder / name for name in reversed(names))


def refusal(where: Path, expected: str, found: str) -> CheckpointError:
    """Return the error for a checkpoint that cannot be used."""
    return CheckpointError(f"checkpoint: {where} — expected {expected}, found {found}")
