"""Find the run folder of a training and this process's rank.

The first training under `engine watch` uses the command's folder RUN. Later trainings, in the same process or in others
(a sweep that starts child processes), use folders next to it: RUN-2, RUN-3, ... The ranks of a training share its
folder: rank 0 writes the log, and each rank writes a file with its progress.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from typing import Any

PART_OF = "part_of"
SETTINGS = "effective.json"
_PARENT = "APR_WATCH_PARENT"
"""Process id of `engine watch`."""
_MAX_TRAININGS = 10_000
_MAX_CHARACTERS = 1 << 24
_TRIES, _PAUSE_S = 50, 0.002
"""Number and interval in seconds of attempts to read a file that another rank is writing."""
_BEAT = struct.Struct("<QQQ")


def rank_and_world(torch: Any) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, without communication."""
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() else 0, int(world) if world.isdecimal() else 1


class Position:
    """Rank of this process and number of ranks. Reading them from torch takes some microseconds, so that they are read
    only when a script may have joined a process group: at a new optimizer, at the begin of an epoch, and before the
    first step."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.read()

    def read(self) -> None:
        self.rank, self.world = rank_and_world(self._torch)


def claim(run: str, training: int, world: int) -> str:
    """Return the folder of a training of this process; create the folder if the training is a later one. Raises
    OSError."""
    # All ranks have the same parent process, the launcher. A restart by torchrun begins another training.
    owner = f"{os.getpid()}"
    if world > 1:
        owner = f"ranks of {os.getppid()}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    owner = f"{owner}, training {training}\n"
    for number in range(1, _MAX_TRAININGS):
        folder = run if number == 1 else f"{run}-{number}"
        belongs = number == 1 or _create_or_check(folder, run)
        if belongs and _owner(folder, owner) == owner and not _is_over(folder):
            return folder
    raise OSError(f"{_MAX_TRAININGS} trainings")


def claim_failed(run: str) -> bool:
    """Return whether this process is the watched command itself and no training has begun. Then an exception that ends
    this process is the end of the command. Raises OSError."""
    if os.environ.get(_PARENT) != str(os.getppid()):
        return False
    own_line = f"{os.getpid()}, without a training\n"
    return _owner(run, own_line) == own_line


def _create_or_check(folder: str, run: str) -> bool:
    """Create the folder of a later training, unless it exists; return whether it exists now and belongs to `run`."""
    settings = os.path.join(folder, SETTINGS)
    try:
        os.mkdir(folder)
    except FileExistsError:
        for _ in range(_TRIES):
            try:
                with open(settings) as file:
                    about = json.loads(file.read(_MAX_CHARACTERS)).get("command")
                return isinstance(about, dict) and about.get(PART_OF) == os.path.basename(run)
            except (OSError, ValueError, AttributeError):
                time.sleep(_PAUSE_S)
        return False
    with open(os.path.join(run, SETTINGS)) as file:
        settings_of_run = json.loads(file.read(_MAX_CHARACTERS))
    settings_of_run["command"] = {
        **settings_of_run["command"],
        PART_OF: os.path.basename(run),
        "pid": os.getpid(),
    }
    fill(folder, settings_of_run)
    return True


def fill(folder: str, settings: dict[str, Any]) -> None:
    """Write the files of a new run folder into an empty folder."""
    with open(os.path.join(folder, "spec.toml"), "x"):
        pass
    path = os.path.join(folder, SETTINGS)
    with open(path + ".partial", "x") as file:
        json.dump(settings, file, indent=2, sort_keys=True)
    # Rename last: a folder without a complete file is not a run.
    os.rename(path + ".partial", path)


def _owner(folder: str, own_line: str) -> str:
    """Return the owner of a folder; if it has none, write `own_line` as its owner."""
    path = os.path.join(folder, "owner")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        for _ in range(_TRIES):
            with open(path) as file:
                owner = file.read(200)
            if owner.endswith("\n"):
                return owner
            time.sleep(_PAUSE_S)
        return ""
    try:
        os.write(fd, own_line.encode())
    finally:
        os.close(fd)
    return own_line


def _is_over(folder: str) -> bool:
    """Return whether the folder has a log without a writer."""
    try:
        fd = os.open(os.path.join(folder, "events.jsonl"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not os.fstat(fd).st_size:
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def record_lost(folder: str, rank: int, ended: dict[str, Any]) -> None:
    """Record the exception that ended this rank, unless another rank ended before: the first is the cause (`LostRank`
    of `engine/log/beats.py`)."""
    pid = os.getpid()
    message = f": {ended['message']}" if ended["message"] else ""
    text = (
        f"rank {rank} (process {pid}) ended with {ended['exception']} at {ended['where']}{message}"
    )
    with open(os.path.join(folder, "ranks", "lost.json"), "x") as file:
        # Python exits with 1 after an uncaught exception.
        json.dump({"rank": rank, "pid": pid, "returncode": 1, "sentence": text}, file)


class Beat:
    """Writer of a rank's progress, in the format of `engine/log/beats.py`: process, completed steps, and the number of
    backward passes and updates begun. If a rank hangs, its number is smaller than that of the ranks that wait for
    it."""

    def __init__(self, folder: str, rank: int) -> None:
        os.makedirs(os.path.join(folder, "ranks"), exist_ok=True)
        path = os.path.join(folder, "ranks", f"{rank}.beat")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        status = os.fstat(self._fd)
        self._file = status.st_dev, status.st_ino
        self._begun = 0

    def begun(self, step: int) -> None:
        """Record that a backward pass or an update begins after `step` steps."""
        self._begun += 1
        self.done(step)

    def done(self, step: int) -> None:
        status = os.fstat(self._fd)
        # The script may have closed all descriptors, and the number may now belong to another file.
        if (status.st_dev, status.st_ino) == self._file:
            os.pwrite(self._fd, _BEAT.pack(os.getpid(), step, self._begun), 0)

    def close(self) -> None:
        status = os.fstat(self._fd)
        if (status.st_dev, status.st_ino) == self._file:
            os.close(self._fd)
