"""The table of kinds of logs: how each is recognised and read. `engine import` makes a run folder from such a log, and
`engine diagnose` evaluates the rules on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial as bind
from pathlib import Path
from typing import NamedTuple, TypeAlias

from engine.errors import BadInput
from engine.interchange.sources import (
    SAME_RUN_FOLDERS,
    Recorded,
    mlflow_runs,
    read_mlflow,
    read_mlflow_database,
    read_table,
    read_tensorboard,
    read_trainer_state,
    read_wandb,
)
from engine.interchange.text_log import read_text_log
from engine.log.folder import is_run

Reader: TypeAlias = Callable[[Recorded, Mapping[str, str]], None]
"""Function that reads the files at the path of a `Recorded` into it; raises BadInput. The mapping is that of `--map`:
the engine's name of a value to its name in the files."""


class Kind(NamedTuple):
    source: str
    """Name of the kind, as in `engine import KIND`."""
    endings: tuple[str, ...]
    """Suffixes of the names of its files, in lower case."""
    read: Reader


class Log(NamedTuple):
    """The log of one run."""

    path: Path
    source: str
    """Name of the log's kind, or `run` for a run folder."""
    read: Reader | None
    """None for a run folder."""
    part: str = ""
    """Name of the log, if the file has several."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.part}" if self.part else str(self.path)


def _read_mlflow(recorded: Recorded, given: Mapping[str, str]) -> None:
    if recorded.path.is_dir():
        return read_mlflow(recorded, given)
    runs = mlflow_runs(recorded.path)
    if len(runs) != 1:
        names = ", ".join(name for _, name in runs[:4])
        raise BadInput.expected("MLflow run", recorded.path, "one run", f"{len(runs)}: {names}")
    return read_mlflow_database(recorded, runs[0][0])


KINDS = (
    Kind("wandb", (".wandb",), read_wandb),
    Kind("trainer_state", ("trainer_state.json",), read_trainer_state),
    Kind("csv", (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"), read_table),
    Kind("mlflow", (".db", ".sqlite", ".sqlite3"), _read_mlflow),
    Kind(
        "text",
        (".log", ".txt", ".out", ".err", ".stdout", ".stderr"),
        read_text_log,
    ),
    Kind("tensorboard", (), read_tensorboard),
)
BY_SOURCE = {one.source: one for one in KINDS}
_EVENTS = "tfevents"
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "venv"})
_FILES_MOST = 100_000


def find_logs(path: Path) -> list[Log]:
    """Return the logs at a path: the logs in a file, or all logs below a folder. Raises BadInput for too many
    files."""
    if is_run(path):
        return [Log(path, "run", None)]
    return list(_below(path)) if path.is_dir() else _of_file(path, is_named=True)


def _of_file(path: Path, *, is_named: bool = False) -> list[Log]:
    name = path.name.lower()
    if _EVENTS in name:
        return [Log(path, "tensorboard", read_tensorboard)]
    kind = next((known for known in KINDS if name.endswith(known.endings)), None)
    if kind is None:
        return [Log(path, "text", BY_SOURCE["text"].read)] if is_named else []
    if kind.source != "mlflow":
        return [Log(path, kind.source, kind.read)]
    try:
        return [Log(path, "mlflow", bind(_of_run, run), name) for run, name in mlflow_runs(path)]
    except BadInput:  # the error is raised again when the log is read
        return [Log(path, "mlflow", _read_mlflow)]


def _of_run(run: str, recorded: Recorded, given: Mapping[str, str]) -> None:
    read_mlflow_database(recorded, run)


def _below(folder: Path) -> Iterator[Log]:
    file_count = 0
    for root, folders, files in os.walk(folder):
        place = Path(root)
        if is_run(place):
            folders.clear()
            yield Log(place, "run", None)
            continue
        if {"metrics", "meta.yaml"} <= {*folders, *files}:
            folders.clear()
            yield Log(place, "mlflow", read_mlflow)
            continue
        if any(file.endswith(".wandb") for file in files):
            folders.clear()  # the sub-folders hold W&B's debug log and its list of installed libraries
        # The newest checkpoint of a trainer has the log of all steps; the older ones are prefixes of it.
        checkpoints = sorted(
            (name for name in folders if name.startswith("checkpoint-")), key=_number
        )
        dropped = {*checkpoints[:-1], *(checkpoints if "trainer_state.json" in files else ())}
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in {*_SKIPPED, *dropped}
        )
        event_folders = [
            name
            for name in folders
            if name in SAME_RUN_FOLDERS and any((place / name).glob(f"*{_EVENTS}*"))
        ]
        if event_folders or any(_EVENTS in file for file in files):
            yield Log(place, "tensorboard", read_tensorboard)
            folders[:] = [name for name in folders if not any((place / name).glob(f"*{_EVENTS}*"))]
        file_count += len(files)
        if file_count > _FILES_MOST:
            raise BadInput.expected("logs", folder, f"at most {_FILES_MOST:,} files", "more")
        for file in sorted(files):
            if _EVENTS not in file and not (place / file).is_symlink():
                yield from _of_file(place / file)


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
