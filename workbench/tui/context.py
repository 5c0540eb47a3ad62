"""The context of every screen: the folders to watch, the refresh interval, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workbench.jobs import Jobs


@dataclass(frozen=True, slots=True)
class Context:
    """The options of one start of the workbench."""

    folders: tuple[Path, ...]
    """Folders named on the command line: folders of runs, or the folder of one run."""
    refresh_s: float = 1.0
    """Time between two polls, in seconds."""
    read_only: bool = False
    """Whether the keys that start, stop or change a run, a flip or evidence are disabled."""
    ascii_only: bool = False
    """Whether only ASCII characters may be drawn."""
    jobs: Jobs = field(default_factory=Jobs, compare=False)
    """Commands that keys have started."""
