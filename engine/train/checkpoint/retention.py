"""Which checkpoints stay, and what becomes of the others. No torch.

    published                 the newest `keep_last` stay, those that are named, and the newest that verifies
      -> .trash-<pid>         is being deleted: no longer published, whatever is left of it
      -> .refused-<pid>       did not verify: kept, so that its step can be saved again
    .partial-<pid>            was being written when its process died, or is by one that lives

A folder is renamed before any of its files is touched, so a death in the middle leaves no half of a
checkpoint. What processes that are dead left half written or half deleted is swept away with the next
change; what belongs to a living one is let be.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from engine.errors import NO_ROOM, CheckpointError, DiskFull
from engine.machine.host import Host
from engine.train.checkpoint.file_calls import OS_CALLS, FileCalls, sync_folder
from engine.train.checkpoint.manifest import published, refusal, step_of, verify

_LEFTOVER = re.compile(r"step-[0-9]{8}\.(?:partial|trash)-([0-9]+)")


# contract: checkpoint-protocol-v1
def prune(
    folder: Path, keep_last: int, keep: Collection[int] = (), *, calls: FileCalls = OS_CALLS
) -> tuple[int, ...]:
    """Delete old checkpoints and return their steps: all but the newest `keep_last` and the steps
    in `keep`.

    The newest checkpoint that verifies is never deleted, and when none verifies nothing is. Each is
    renamed to `.trash` first, so a death in the middle leaves no half of a checkpoint. Call it only
    after a save that returned; it stops at the first I/O error with CheckpointError or DiskFull.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last: expected 1 or more, found {keep_last}")
    paths = list(published(folder))
    doomed = [path for path in paths[keep_last:] if step_of(path) not in keep]
    if not doomed:
        return ()
    last_good = next((path for path in paths if _verifies(path)), None)
    if last_good is None:
        return ()
    try:
        sweep(folder, calls)
        removed = []
        for path in doomed:
            if path == last_good:
                continue
            trash = path.with_name(f"{path.name}.trash-{os.getpid()}")
            calls.rename(path, trash)
            sync_folder(folder, calls)
            _delete_tree(trash, calls)
            removed.append(step_of(path))
    except OSError as error:
        kind = DiskFull if error.errno in NO_ROOM else CheckpointError
        raise kind(
            f"checkpoint retention: {folder} — expected to delete old steps, found {error};"
            " the newest is as it was"
        ) from error
    return tuple(removed)


def set_aside(path: Path, *, calls: FileCalls = OS_CALLS) -> Path:
    """Rename a refused checkpoint so that its step can be saved again, keeping its files; returns
    the new path.
    """
    target = path.with_name(f"{path.name}.refused-{os.getpid()}")
    try:
        calls.rename(path, target)
        sync_folder(path.parent, calls)
    except OSError as error:
        raise refusal(path, "to be set aside", str(error)) from error
    return target


def sweep(folder: Path, calls: FileCalls) -> None:
    """Remove what dead processes left half written or half deleted, and what this process failed to
    remove.
    """
    for entry in sorted(folder.iterdir()):
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover is None or entry.is_symlink() or not entry.is_dir():
            continue
        pid = int(leftover[1])
        if pid == os.getpid() or not _is_owned(entry, pid):
            _delete_tree(entry, calls)


def remove_partial(partial: Path, calls: FileCalls) -> None:
    """Remove a failed partial folder. An I/O error here must not hide the one that is being
    reported.
    """
    with contextlib.suppress(OSError):
        _delete_tree(partial, calls)


def _is_owned(leftover: Path, pid: int) -> bool:
    """Whether the process that a folder is named for lives and is older than it: pids are used again,
    in a container soonest, where they begin at 1 with every start.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's, and alive
    ticks = Host().process(pid).start_ticks.number
    if ticks is None:
        return True
    booted_unix_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    started_unix_s = booted_unix_s + ticks / os.sysconf("SC_CLK_TCK")
    # A tick is 10 ms, and the two clocks are not read at once.
    return leftover.stat().st_mtime >= started_unix_s - 1.0


def _delete_tree(path: Path, calls: FileCalls) -> None:
    """Delete a folder of plain files; it holds no others, because only `save` makes it."""
    for entry in sorted(path.iterdir()):
        calls.remove_file(entry)
    calls.remove_folder(path)


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True
