"""Open, create and find run folders. A run folder holds everything about a run.

spec.toml       as requested            events.jsonl device.jsonl watch.jsonl   the logs
                                        device-HOST.jsonl watch-HOST.jsonl      those of each further host
effective.json  after defaults          stderr.txt               what the processes printed
resolved.json   the values of `auto`
receipt.json    written at the end      checkpoints/ student/    what was produced
notes.json      tags and a note         rows/                    hashes of the rows of every step
verified.json   the outcome of `engine verify`
reserve         disk space that is released when the disk is full, so that the end can be logged
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput, RunLogError, write_error
from engine.files import read_json_object
from engine.log.read import Liveness, writer_is_alive
from engine.log.write import read_boot_id, read_host, sync_folder

RESERVE_BYTES = 64 << 10
"""Size of the reserve in bytes: enough for the last log lines."""
_RANK_LOG = re.compile(r"([1-9][0-9]{0,5})\.jsonl")
_HOST_LOG = re.compile(r"(device|watch)-([\w.-]{1,64})\.jsonl", re.ASCII)
COMMAND = "command"
"""Key of effective.json with the command, folder and commit of a watched script, which has no settings."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    host: str = ""
    """The host whose supervisor and sampler write `watch`, `device` and `stderr`; empty for the run's first host."""

    def _of_host(self, name: str) -> Path:
        stem, dot, suffix = name.partition(".")
        return self.path / (f"{stem}-{self.host}{dot}{suffix}" if self.host else name)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def spec(self) -> Path:
        return self.path / "spec.toml"

    @property
    def effective(self) -> Path:
        return self.path / "effective.json"

    @property
    def resolved(self) -> Path:
        """Settings as the last session resolved `auto`; absent in watched and imported runs, and in runs of earlier
        versions."""
        return self.path / "resolved.json"

    @property
    def receipt(self) -> Path:
        return self.path / "receipt.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def device(self) -> Path:
        return self._of_host("device.jsonl")

    @property
    def watch(self) -> Path:
        return self._of_host("watch.jsonl")

    def rank_log(self, rank: int) -> Path:
        """Return the path of a rank's log; the first rank's is events.jsonl."""
        return self.path / "ranks" / f"{rank}.jsonl" if rank else self.events

    def logs(self) -> dict[str, Path]:
        """Return the logs of the run by source: the three logs of every run and, if they exist, `device HOST` and
        `watch HOST` of the other hosts, and `rank 1`, `rank 2`, ..."""
        logs = {"events": self.events, "device": self.device, "watch": self.watch}
        names = [] if self.host else sorted(_names(self.path))
        for match in filter(None, map(_HOST_LOG.fullmatch, names)):
            logs[f"{match[1]} {match[2]}"] = self.path / match[0]
        matches = filter(None, map(_RANK_LOG.fullmatch, _names(self.path / "ranks")))
        ranks = sorted(int(match[1]) for match in matches)
        return logs | {f"rank {rank}": self.rank_log(rank) for rank in ranks}

    @property
    def stderr(self) -> Path:
        return self._of_host("stderr.txt")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def student(self) -> Path:
        return self.path / "student"

    @property
    def stop_asked(self) -> Path:
        """Path of a file that exists once `engine stop` has sent a signal to a watched command."""
        return self.path / "stop-asked"

    @property
    def reserve(self) -> Path:
        return self.path / "reserve"

    def keep_reserve(self) -> None:
        """Reserve disk space, so that a run can write its last log lines when the disk is full. Raises DiskFull,
        RunLogError."""
        try:
            with self.reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            raise write_error(
                "reserve", self.reserve, f"to hold {RESERVE_BYTES} bytes", error
            ) from error

    def free_reserve(self) -> None:
        # An error here must not mask the original error; writing the last log lines will report it.
        with contextlib.suppress(OSError):
            self.reserve.unlink(missing_ok=True)

    def liveness(self) -> Liveness:
        """Return which processes of the run exist now. Raises RunLogError if a log's lock cannot be tested."""
        return Liveness(
            # The first rank is on the first host.
            trainer=not self.host and writer_is_alive(self.events),
            supervisor=writer_is_alive(self.watch),
            boot_id=read_boot_id(),
            host=read_host(),
            silent_s=self._silent_s(),
        )

    def _silent_s(self) -> float:
        changed_s = [0.0]
        for log in (self.events, self.watch, self.device):
            with contextlib.suppress(OSError):
                changed_s.append(log.stat().st_mtime)
        return abs(time.time() - max(changed_s))

    def read_receipt(self) -> dict[str, Any] | None:
        """Read the receipt; None if the run has not written one. Raises RunLogError if it is invalid."""
        if not os.path.lexists(self.receipt):
            return None
        return read_json_object(self.receipt, "receipt", limits.RUN_FILE, error=RunLogError)

    def write_resolved(self, spec: Mapping[str, Any]) -> None:
        """Write resolved.json. Raises DiskFull, RunLogError."""
        write_whole(self.resolved, json.dumps({"spec": spec}, indent=2, sort_keys=True) + "\n")

    def read_effective(self) -> dict[str, Any]:
        """Read effective.json, whose `spec` has a table of settings per section. Raises RunLogError."""
        effective = read_json_object(
            self.effective, "settings", limits.RUN_FILE, having=("spec",), error=RunLogError
        )
        spec = effective["spec"]
        if not isinstance(spec, dict) or not all(
            isinstance(section, dict) for section in spec.values()
        ):
            raise RunLogError.expected(
                "settings", self.effective, "a table for each section under 'spec'", "other values"
            )
        return effective


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedCommand:
    """The command of a watched script."""

    arguments: tuple[str, ...]
    folder: str
    """Folder in which the command was started."""
    commit: str | None
    """Commit of that folder, with `+` if files differ from it."""
    part_of: str | None = None
    """Name of the command's first run, in the same folder of runs; None in the first run. A command that trains
    several times has one run for each training."""
    pid: int | None = None
    """The script's process id, if the process is older than the run folder: the script watches itself, trains again,
    or was running when `engine watch --pid` began. Else None."""

    @property
    def line(self) -> str:
        """The command as typed; `unknown` if an imported run does not record it."""
        return shlex.join(self.arguments) or "unknown"

    @property
    def short(self) -> str:
        """The command line without the folder of its program."""
        return (
            shlex.join((Path(self.arguments[0]).name, *self.arguments[1:]))
            if self.arguments
            else ""
        )


def read_command(run: RunFolder) -> WatchedCommand | None:
    """Return the command of a watched or imported run; None for a run of the engine. Raises RunLogError."""
    command = run.read_effective().get(COMMAND)
    if not isinstance(command, dict):
        return None
    words, commit = command.get("arguments"), command.get("commit")
    part_of, pid = command.get("part_of"), command.get("pid")
    return WatchedCommand(
        arguments=tuple(map(str, words)) if isinstance(words, list) else (),
        folder=str(command.get("folder") or "unknown"),
        commit=commit if isinstance(commit, str) else None,
        part_of=part_of if isinstance(part_of, str) else None,
        pid=pid if isinstance(pid, int) and pid > 0 else None,
    )


def must_have_settings(run: RunFolder) -> None:
    """Raise BadInput for a watched or imported run, which has no settings, and RunLogError if that cannot be read."""
    if (command := read_command(run)) is not None:
        raise BadInput.expected(
            "run folder",
            run.path,
            "a run of `engine distill`",
            "a watched or imported run, which has no spec",
            hint=f"change the command and watch it again: engine watch -- {command.line}"
            if command.arguments
            else None,
        )


def settings_of(run: RunFolder) -> dict[str, object]:
    """Return each setting of a run by section.key, with defaults applied; empty if the settings cannot be read."""
    try:
        spec = run.read_effective()["spec"]
    except RunLogError:
        return {}
    return {
        f"{section}.{key}": value for section, keys in spec.items() for key, value in keys.items()
    }


def is_run(path: Path) -> bool:
    """Return whether `path` is a run folder; False for a folder that may not be read."""
    return os.path.isfile(path / "effective.json")


def open_run(path: Path) -> RunFolder:
    """Open the run at `path`. Raises RunLogError if there is none."""
    if is_run(path):
        return RunFolder(path)
    if not os.path.lexists(path):
        raise RunLogError(
            f"run folder: {path} — expected a run, found nothing there",
            hint="`engine runs` lists the runs there are",
        )
    if not path.is_dir():
        raise RunLogError(f"run folder: {path} — expected a folder, found something else")
    raise RunLogError(
        f"run folder: {path} — expected effective.json in it, found none",
        hint="name the folder of one run, not the folder that holds the runs",
    )


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run in a folder; `made_ns` is the time at which its settings were written."""

    folder: RunFolder
    name: str
    """The name of the run's folder, with its parent folder if that is not the searched folder."""
    made_ns: int
    key: str
    """The run's path with symbolic links resolved, which is the same if a run is found twice."""


def find_runs(folder: Path) -> list[RunFolder]:
    """Return every run directly in `folder` (or `folder` itself), newest first; empty if the folder does not
    exist. Raises OSError."""
    return [run.folder for run in find_all(folder, nested=False)]


def find_all(folder: Path, *, nested: bool = True) -> list[FoundRun]:
    """Return the runs of `folder`: `folder` itself if it is a run, else the runs in it and, if `nested`, one level
    below. All are ordered together, newest first, and runs of the same time by name in reverse. Empty if the folder
    does not exist. Raises OSError if the folder cannot be listed."""
    if is_run(folder):
        run = RunFolder(folder)
        key = os.path.realpath(folder)
        return [FoundRun(run, run.name, _made_ns(key) or 0, key)]
    return _runs_in(str(folder), nested=nested) if folder.is_dir() else []


def _runs_in(folder: str, prefix: str = "", *, nested: bool) -> list[FoundRun]:
    """Return the runs in a folder and, if `nested`, in its sub-folders that are neither runs nor hidden. Raises OSError
    if the folder cannot be listed; a sub-folder that cannot be listed is skipped."""
    runs: list[FoundRun] = []
    inner: list[os.DirEntry[str]] = []
    real = os.path.realpath(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            if (made_ns := _made_ns(entry.path)) is not None:
                is_link = entry.is_symlink()
                key = os.path.realpath(entry.path) if is_link else f"{real}/{entry.name}"
                name = prefix + entry.name
                runs.append(FoundRun(RunFolder(Path(entry.path)), name, made_ns, key))
            elif nested and not entry.name.startswith(".") and entry.is_dir():
                inner.append(entry)
    for entry in inner:
        with contextlib.suppress(OSError):
            runs += _runs_in(entry.path, f"{entry.name}/", nested=False)
    return sorted(runs, key=lambda run: (run.made_ns, run.name), reverse=True)


def _made_ns(folder: str) -> int | None:
    """Return the creation time of the run in a folder, in nanoseconds; None if there is no run."""
    try:
        status = os.stat(f"{folder}/effective.json")
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None


def last_change(run: RunFolder) -> float:
    """Return the Unix time of the newest change of a run's settings, logs, tags or note; 0 if the run no longer
    exists."""
    changed = [0.0]
    for path in (run.effective, run.path / "notes.json", *run.logs().values()):
        with contextlib.suppress(OSError):
            changed.append(path.stat().st_mtime)
    return max(changed)


def write_whole(path: Path, text: str | bytes, what: str = "write") -> None:
    """Write a small file atomically, so that it is either complete or absent: write a temporary file, fsync it,
    rename it and fsync the folder.

    Raises DiskFull if there is no space, RunLogError if it cannot be written for another reason.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    data = text.encode() if isinstance(text, str) else text
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(what, path, f"to write {len(data)} bytes", error) from error
        raise


@contextlib.contextmanager
def new_folder(path: Path, what: str, hint: str) -> Iterator[None]:
    """Create a folder and sync its name; the body of the `with` statement writes and syncs the content. If anything
    fails, the folder is removed, because a partial folder would block the next attempt. Raises BadInput if it already
    exists, DiskFull or RunLogError if it cannot be created or synced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(what, path.parent, "to create it", error) from error
    try:
        path.mkdir()
    except FileExistsError:
        raise BadInput.expected(what, path, "a new folder", "one that exists", hint=hint) from None
    except OSError as error:
        raise write_error(what, path, "to create it", error) from error
    try:
        yield
        # The folder's name is an entry of its parent.
        sync_folder(path.parent)
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(what, path, "to reach the disk", error) from error
        raise


def create_run(path: Path, spec_text: str, effective: dict[str, Any]) -> RunFolder:
    """Create a run folder. Raises BadInput if it exists, DiskFull or RunLogError if it cannot be written; a folder
    that cannot be completed is removed."""
    # Serialise first: invalid JSON is an internal error and must leave nothing to clean up.
    effective_text = json.dumps(effective, indent=2, sort_keys=True, allow_nan=False) + "\n"
    # Also sync the names of the run folder and of new parent folders, without which the content cannot be found.
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    hint = "choose another with --out or `run.name`, or continue it with --resume"
    with new_folder(path, "run folder", hint):
        run = RunFolder(path)
        write_whole(run.spec, spec_text)
        # Written last: a folder without it is not a run.
        write_whole(run.effective, effective_text)
        for folder in made:
            sync_folder(folder.parent)
    return run
