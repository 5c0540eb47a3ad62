"""Read another tool's log of one run: TensorBoard's event files, an offline run of W&B, a run of MLflow, the state of
a Transformers trainer, or a table.

A broken file is refused with the position of the fault; with `--partial` it is read up to the fault. Everything is
read before a run folder is made.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import math
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from engine import limits
from engine.errors import BadInput
from engine.files import open_regular, parse_json, read_json_object, read_text
from engine.interchange.names import STEP, TIME, find
from engine.interchange.series import Series
from engine.version import install_extra

_SHOWN = 40


class NotALog(BadInput):
    """A file that holds no logged value."""


@dataclass(slots=True, kw_only=True)
class Recorded:
    """Contents of another tool's files about one run."""

    path: Path
    name: str = ""
    partial: bool = False
    """Whether to read a broken file up to its fault."""
    files: list[tuple[str, int, str]] = field(default_factory=list)
    """Path, size in bytes and SHA-256 of each file."""
    series: dict[str, Series] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    folder: str | None = None
    commit: str | None = None
    exit_code: int | None = None
    """Exit code of the run; None if it is not known how the run ended."""
    is_timed: bool = True
    left_out: dict[str, str] = field(default_factory=dict)
    """Kind of the values, by name, for names whose values are not numbers."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on how the files were read."""
    crash: str | None = None
    """Line of a text log with the exception or signal that ended the run; None if there is none."""
    most: int | None = None
    """Maximum number of values kept of each name; None for all."""
    count: int = 0
    begin_unix_s: float = 0.0
    """Modification time of the files in unix seconds, for values without a time."""

    def __post_init__(self) -> None:
        self.name = self.name or self.path.stem
        with contextlib.suppress(OSError, ValueError):
            self.begin_unix_s = max(0.0, self.path.stat().st_mtime)

    def take_file(self, path: Path, what: str) -> None:
        """Record a file with its hash. Raises BadInput if it is empty or too large."""
        with open_regular(path, what) as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size > limits.IMPORT_FILE.most:
                found = f"{size:,}" if size else "an empty file"
                raise BadInput.expected(what, path, str(limits.IMPORT_FILE), found)
            self.files.append((str(path), size, hashlib.file_digest(file, "sha256").hexdigest()))

    def add(self, name: str, step: int, unix_s: float, value: float, where: object) -> None:
        """Add a value. Raises BadInput if a step or a time is out of range, or if there are too many values."""
        if not 0 <= step <= limits.LOG_COUNT.most:
            raise BadInput.expected(
                "step", where, f"0 to {limits.LOG_COUNT.most:,}", f"{step:.6g} of {name}"
            )
        if not 0 <= unix_s <= limits.LOG_UNIX.most:
            raise BadInput.expected("time", where, "seconds since 1970", f"{unix_s} of {name}")
        self.count += 1
        count = self.count if self.most is None else 0
        for size, limit in ((len(name), limits.IMPORT_NAME), (count, limits.IMPORT_VALUES)):
            if size > limit.most:
                raise BadInput.expected("values", where, str(limit), "more")
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = Series()
        series.add(step, unix_s, value, self.most)

    def broken(self, what: str, where: object, expected: str, found: str) -> None:
        """Raise BadInput for a fault in a file. With `partial`, add a warning instead: the values before the fault are
        imported."""
        if not self.partial:
            hint = "--partial imports the values before the fault"
            raise BadInput.expected(what, where, expected, found, hint=hint)
        self.warnings.append(f"{where}: read up to the fault: expected {expected}, found {found}")


# TensorBoard.

_EVENTS = "event file"
_NO_NUMBER = (TypeError, ValueError, IndexError)
SAME_RUN_FOLDERS = frozenset(
    {"train", "training", "validation", "val", "valid", "eval", "test", "dev"}
)
"""Names of sibling folders of event files that belong to one run, as Keras and others write them."""


def read_tensorboard(recorded: Recorded, columns: Mapping[str, str]) -> None:
    """Read the event files of one run: one file, or all files in a folder and its sub-folders. Values in a sub-folder
    get its name as a prefix. Raises BadInput."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto import event_pb2
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    except ImportError:
        raise missing("tensorboard", "to read event files") from None
    root, files = _event_files(recorded.path)
    recorded.name = root.resolve().name
    scalars: set[str] = set()
    for file in files:
        recorded.take_file(file, _EVENTS)
        inside = file.parent.relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        reader, number = PyRecordReader_New(str(file)), 0
        while True:
            try:
                reader.GetNext()
                event = event_pb2.Event.FromString(reader.record())
                if not number and not event.file_version.startswith("brain.Event"):
                    raise DecodeError("no file version in the first record")
                _take_event(recorded, event, prefix, scalars, f"{file} record {number + 1}")
            except errors.OutOfRangeError:
                break
            # An impossible length raises OverflowError or MemoryError; a tensor without a number raises one of
            # _NO_NUMBER.
            except (errors.OpError, DecodeError, OverflowError, MemoryError, *_NO_NUMBER) as error:
                found = "a record of another format"
                if isinstance(error, errors.OpError):
                    found = f"a record that {str(error.message).removeprefix(str(file)).strip()}"
                expected = "a complete TensorBoard record"
                recorded.broken(_EVENTS, f"{file} record {number + 1}", expected, found)
                break
            number += 1


def _event_files(path: Path) -> tuple[Path, list[Path]]:
    """Return the folder of a run, and its event files."""
    if path.is_file():
        return path.parent, [path]
    files = sorted(path.rglob("*tfevents*")) if path.is_dir() else []
    files = [file for file in files if file.is_file()]
    if not files:
        found = "none" if path.is_dir() else "nothing there"
        raise BadInput.expected(_EVENTS, path, "files named *tfevents* in the folder", found)
    if len(files) > limits.IMPORT_FILES.most:
        raise BadInput.expected(_EVENTS, path, str(limits.IMPORT_FILES), f"{len(files):,}")
    # Sibling folders are separate runs, unless all have names of SAME_RUN_FOLDERS.
    root = Path(os.path.commonpath([file.parent for file in files]))
    folders = sorted({file.parent.relative_to(root) for file in files})
    tops = {folder.parts[0] if folder.parts else "" for folder in folders}
    if "" not in tops and len(tops) > 1 and not tops <= SAME_RUN_FOLDERS:
        shown = ", ".join(str(folder) for folder in folders[:4])
        raise BadInput.expected(
            _EVENTS,
            path,
            "one run",
            f"{len(folders)}: {shown}",
            hint="give the path of one of them",
        )
    return root, files


def _take_event(recorded: Recorded, event: Any, prefix: str, scalars: set[str], where: str) -> None:
    if event.HasField("session_log") and event.session_log.status == event.session_log.START:
        # The writer restarted here, and repeats steps that were already logged.
        for name, series in recorded.series.items():
            if name.startswith(prefix):
                series.rewind(event.step)
    for value in event.summary.value:
        name, plugin = prefix + value.tag, value.metadata.plugin_data.plugin_name
        if plugin == "scalars":
            scalars.add(name)
        if value.HasField("simple_value"):
            recorded.add(name, event.step, event.wall_time, value.simple_value, where)
        elif value.HasField("tensor") and name in scalars:
            from tensorboard.util.tensor_util import make_ndarray

            number = float(make_ndarray(value.tensor).reshape(-1)[0])
            recorded.add(name, event.step, event.wall_time, number, where)
        elif plugin == "hparams":
            recorded.settings.update(_hyperparameters(value.metadata.plugin_data.content))
        else:
            recorded.left_out.setdefault(name, plugin or value.WhichOneof("value") or "nothing")


def _hyperparameters(content: bytes) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    parameters = HParamsPluginData.FromString(content).session_start_info.hparams
    return {
        name: getattr(value, value.WhichOneof("kind") or "null_value")
        for name, value in parameters.items()
    }


# Weights & Biases.

_RUN = "W&B run"
_MAGIC = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK, _HEAD = 1 << 15, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_wandb(recorded: Recorded, columns: Mapping[str, str]) -> None:
    """Read the log of an offline W&B run: its file, its folder, or a folder `wandb` that holds one run. Raises
    BadInput."""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise missing("wandb", "to read W&B runs") from None
    file = _run_file(recorded.path)
    recorded.name = file.stem
    recorded.take_file(file, _RUN)
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        for data in _records(file):
            number += 1
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append(_history_row(record.history))
            elif kind in ("config", "run"):
                _take_config(recorded, record.config if kind == "config" else record.run.config)
                recorded.name = (kind == "run" and record.run.display_name) or recorded.name
            elif kind == "environment":
                _take_environment(recorded, record.environment)
            elif kind == "exit":
                recorded.exit_code = record.exit.exit_code
            elif kind == "stats":
                recorded.left_out.setdefault("readings of the machine", "stats")
    except (_Broken, DecodeError, BadInput) as error:
        recorded.broken(
            _RUN, f"{file} record {number + 1}", "a complete W&B record", str(error)[:80]
        )
    # The step is a column that the script logs in every row, otherwise `_step`, W&B's count of `log` calls.
    shared = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    _take_rows(recorded, enumerate(rows, 1), columns, shared)
    recorded.series.pop("_step", None)


class _Broken(ValueError):
    """A frame of a file is incomplete or damaged."""


def _run_file(path: Path) -> Path:
    if path.is_file() or not path.is_dir():
        return path
    files = sorted({file.resolve() for file in (*path.glob("*.wandb"), *path.glob("*/*.wandb"))})
    if len(files) != 1:
        names = ", ".join(str(file.parent.name) for file in files[:4])
        text = f"{len(files)}: {names}" if files else "none"
        raise BadInput.expected(_RUN, path, "one run-ID.wandb", text, hint="name one run's folder")
    return files[0]


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, in blocks of 32 KiB. wandb 0.31 can read the format only in its
    Go code, so the frames are parsed here. Raises _Broken."""
    with open_regular(path, _RUN) as file:
        if (magic := file.read(len(_MAGIC))) != _MAGIC:
            raise _Broken(f"{magic!r} at its beginning")
        parts: list[bytes] = []
        while True:
            block_left = _BLOCK - file.tell() % _BLOCK
            if block_left < _HEAD.size:
                file.read(block_left)
            head = file.read(_HEAD.size)
            if not head and not parts:
                return
            if len(head) < _HEAD.size:
                raise _Broken("the end of the file in the middle of a record")
            checksum, size, kind = _HEAD.unpack(head)
            body = file.read(size)
            if len(body) < size:
                raise _Broken("the end of the file in the middle of a record")
            is_next = kind in ((_MIDDLE, _LAST) if parts else (_FULL, _FIRST))
            if zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum or not is_next:
                raise _Broken(
                    f"a wrong checksum or order of frames at byte {file.tell() - size - _HEAD.size:,}"
                )
            parts.append(body)
            if kind in (_FULL, _LAST):
                yield b"".join(parts)
                parts = []


def _history_row(history: Any) -> dict[str, Any]:
    row = {
        ".".join(item.nested_key) or item.key: parse_json(item.value_json, item.key, _RUN)
        for item in history.item
    }
    row.setdefault("_step", history.step.num)
    row.pop("_runtime", None)
    return row


def _take_config(recorded: Recorded, config: Any) -> None:
    for item in config.update:
        name = ".".join(item.nested_key) or item.key
        if name != "_wandb" and not name.startswith("_wandb."):
            recorded.settings[name] = parse_json(item.value_json, item.key, _RUN)
    for item in config.remove:
        recorded.settings.pop(".".join(item.nested_key) or item.key, None)


def _take_environment(recorded: Recorded, about: Any) -> None:
    # A second record adds the hardware.
    if about.program:
        recorded.arguments = [about.executable or "python", about.program, *about.args]
    recorded.folder = about.root or recorded.folder
    recorded.commit = about.git.commit or recorded.commit


# MLflow.

_MLFLOW = "MLflow run"
_STATUS = {"3": 0, "4": 1, "5": 1, "FINISHED": 0, "FAILED": 1, "KILLED": 1}
"""Exit codes by the status of a run, which is a number in `meta.yaml` and a word in a database."""
_LARGEST = 1.7976931348623157e308
"""Value by which MLflow's database represents infinity."""


def read_mlflow(recorded: Recorded, columns: Mapping[str, str]) -> None:
    """Read a run of MLflow's file store: its folder in `mlruns/EXPERIMENT/`. Raises BadInput."""
    path, recorded.name = recorded.path, recorded.path.resolve().name
    files = sorted(path for path in (path / "metrics").rglob("*") if path.is_file())
    if not files:
        raise BadInput.expected(_MLFLOW, path, "files in its folder metrics", "none")
    for file in files:
        recorded.take_file(file, _MLFLOW)
        name = file.relative_to(path / "metrics").as_posix()
        with open_regular(file, _MLFLOW) as lines:
            number = 0
            while line := lines.readline(limits.LOG_LINE.most):
                number += 1
                where = f"{file} line {number}"
                try:
                    time_ms, reading, step = line.split()[:3]
                    point = int(step), int(time_ms) / 1000, float(reading)
                except ValueError:
                    recorded.broken(_MLFLOW, where, "TIME VALUE STEP", f"{line[:_SHOWN]!r}")
                    break
                recorded.add(name, *point, where)
    for file in sorted((path / "params").glob("*")):
        recorded.settings[file.name] = read_text(file, _MLFLOW, limits.RUN_FILE).strip()
    about = read_text(path / "meta.yaml", _MLFLOW, limits.RUN_FILE)
    for key, _, value in (line.partition(": ") for line in about.splitlines()):
        if key == "run_name":
            recorded.name = value.strip("'\"") or recorded.name
        elif key == "status":
            recorded.exit_code = _STATUS.get(value)


def mlflow_runs(path: Path) -> list[tuple[str, str]]:
    """Return the id and the name of each run in a database of MLflow. Raises BadInput."""
    with _database(path) as database:
        runs = database.execute("SELECT run_uuid, name FROM runs ORDER BY start_time").fetchall()
    return [(str(run), str(name or run)) for run, name in runs]


def read_mlflow_database(recorded: Recorded, run: str) -> None:
    """Read one run of MLflow's database. Raises BadInput."""
    path, recorded.name = recorded.path, run
    recorded.take_file(path, _MLFLOW)
    with _database(path) as database:
        for name, status in database.execute(
            "SELECT name, status FROM runs WHERE run_uuid = ?", (run,)
        ):
            recorded.name, recorded.exit_code = str(name or run), _STATUS.get(status)
        rows = database.execute(
            "SELECT key, step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY timestamp, step",
            (run,),
        )
        for name, step, time_ms, value, is_nan in rows:
            number = math.nan if is_nan else float(value)
            if abs(number) >= _LARGEST:
                number = math.copysign(math.inf, number)
            recorded.add(str(name), int(step), time_ms / 1000, number, path)
        recorded.settings.update(
            database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)).fetchall()
        )


@contextlib.contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    with open_regular(path, _MLFLOW):
        pass
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as database:
            yield database
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise NotALog.expected(_MLFLOW, path, "a database of MLflow", str(error)[:80]) from None


# Transformers.

_STATE = "state of a trainer"


def read_trainer_state(recorded: Recorded, columns: Mapping[str, str]) -> None:
    """Read the log in a `trainer_state.json` of Transformers. Raises BadInput."""
    path, recorded.name = recorded.path, recorded.path.resolve().parent.name
    recorded.take_file(path, _STATE)
    state = read_json_object(path, _STATE, limits.TRAINER_STATE, having=("log_history",))
    rows = state["log_history"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadInput.expected(_STATE, path, "a list of objects in log_history", "something else")
    _take_rows(recorded, enumerate(rows, 1), columns, ("step",))


# Tables.

_TABLE = "table"
_EMPTY = ("", "null", "none", "na", "n/a")
Row: TypeAlias = tuple[int, dict[str, Any]]
"""A row of a table: its line number, and its cells by column name."""
_TORN = "the last line is incomplete and was left out: its writer was killed, or is still writing"


def read_table(recorded: Recorded, columns: Mapping[str, str]) -> None:
    """Read a table: .csv or .tsv with a header, .jsonl (one object per line) or .parquet. Raises BadInput."""
    path = recorded.path
    readers: dict[str, Callable[[Recorded], Iterator[Row]]] = {
        ".csv": _csv_rows, ".tsv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows, ".parquet": _parquet_rows,
    }  # fmt: skip
    if path.suffix.lower() not in readers:
        expected = f"a file that ends in {', '.join(readers)}"
        raise BadInput.expected(_TABLE, path, expected, path.suffix or "no ending")
    recorded.take_file(path, _TABLE)
    rows = readers[path.suffix.lower()](recorded)
    _take_rows(recorded, rows, columns)


def _csv_rows(recorded: Recorded) -> Iterator[Row]:
    path = recorded.path
    with open_regular(path, _TABLE) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        line = 1
        try:
            first_line = file.readline(limits.LOG_LINE.most)
            separator = max(
                "\t,;" if path.suffix.lower() == ".tsv" else ",;\t", key=first_line.count
            )
            header = next(csv.reader([first_line], delimiter=separator, strict=True), [])
            if header and not header[0]:
                header[0] = "index"  # the index column of pandas
            if len(header) != len(set(header)) or not all(header):
                recorded.broken(
                    _TABLE,
                    f"{path} line 1",
                    "a different name for each column",
                    f"{first_line[:_SHOWN]!r}",
                )
                return
            reader = csv.reader(file, delimiter=separator, strict=True)
            for cells in reader:
                line = reader.line_num + 1
                is_short = cells and len(cells) < len(header) and line > 2
                if is_short and next(reader, None) is None and _is_torn(raw):
                    recorded.warnings.append(_TORN)
                    return
                if cells and len(cells) != len(header):
                    expected = f"{len(header)} cells"
                    recorded.broken(_TABLE, f"{path} line {line}", expected, str(len(cells)))
                    return
                if cells:
                    yield line, dict(zip(header, cells, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            recorded.broken(_TABLE, f"{path} line {line + 1}", "a row of text", str(error)[:80])


def _is_torn(raw: BinaryIO) -> bool:
    """Return whether the last line of a file, which has been read, is incomplete: it has no line break."""
    if raw.read(1):
        return False
    raw.seek(-1, os.SEEK_END)
    return raw.read(1) not in b"\r\n"


def _json_rows(recorded: Recorded) -> Iterator[Row]:
    with open_regular(recorded.path, _TABLE) as file:
        number = 0
        while line := file.readline(limits.LOG_LINE.most):
            number += 1
            try:
                row = parse_json(line, number, _TABLE)
            except BadInput:
                row = None
            if not isinstance(row, dict) and number > 1 and not line.endswith(b"\n"):
                recorded.warnings.append(_TORN)
                return
            if not isinstance(row, dict):
                where = f"{recorded.path} line {number}"
                recorded.broken(_TABLE, where, "a JSON object", f"{line[:_SHOWN]!r}")
                return
            yield number, row


def _parquet_rows(recorded: Recorded) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing("pyarrow", "to read Parquet", "data") from None
    number = 0
    with open_regular(recorded.path, _TABLE) as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (OSError, pyarrow.ArrowException) as error:
            reason = " ".join(str(error).split())[:80]
            recorded.broken(_TABLE, f"{recorded.path} row {number + 1}", "Parquet", reason)


def _take_rows(
    recorded: Recorded, rows: Iterable[Row], columns: Mapping[str, str], names: Collection[str] = ()
) -> None:
    """Add the numbers of the rows to the series.

    step    first of: the column in `columns`; a column in STEP; the epoch, if the first two rows have consecutive
            epochs; the number of the row
    time    first of: the column in `columns`; a column in TIME; the modification time of the file

    `names` are the columns that may hold step and time; by default, all columns of the first row.
    """
    path, file_unix_s = recorded.path, recorded.path.stat().st_mtime
    step_name = time_name = None
    rows = iter(rows)
    begin = [*itertools.islice(rows, 2)]
    for number, (line, row) in enumerate(itertools.chain(begin, rows), 1):
        where = f"{path} line {line}"
        if number == 1:
            names = names or row.keys()
            for role in {"step", "time"} & columns.keys():
                if columns[role] not in names:
                    shown = ", ".join(list(names)[:8])
                    raise BadInput.expected("--map", f"{role}={columns[role]}", "a column", shown)
            step_name = (
                columns.get("step") or find(STEP, names) or _epochs([row for _, row in begin])
            )
            time_name = columns.get("time") or find(TIME, names)
            recorded.is_timed = time_name is not None
        step = number if step_name is None else _whole(row.get(step_name))
        unix_s = file_unix_s if time_name is None else _unix_s(row.get(time_name))
        if step is None or unix_s is None:
            name, cell = (step_name, "an integer") if step is None else (time_name, "a time")
            recorded.broken(_TABLE, where, f"{cell} in {name}", f"{row.get(str(name))!r:.{_SHOWN}}")
            return
        for name, value in _flat(row):
            if name not in (step_name, time_name):
                try:
                    reading = _number(value)
                except (*_NO_NUMBER, OverflowError):
                    recorded.left_out.setdefault(name, f"{value!r:.{_SHOWN}}")
                    continue
                if reading is not None:
                    recorded.add(name, step, unix_s, reading, where)


def _epochs(begin: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the epoch column if the first two rows have consecutive epochs, else None."""
    name = find(("epoch",), begin[0]) or ""
    epochs = [_whole(row.get(name)) for row in begin]
    is_consecutive = len(epochs) == 2 and None not in epochs and epochs[1] == (epochs[0] or 0) + 1
    return name if is_consecutive else None


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        # W&B keeps images, tables and histograms as objects with a type.
        if isinstance(value, dict) and "_type" not in value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _number(value: object) -> float | None:
    """Return a number; None for an empty cell. Raises TypeError, ValueError or OverflowError for anything else."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _EMPTY):
        return None
    return float(value)  # type: ignore[arg-type]


def _whole(value: object) -> int | None:
    try:
        number = _number(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number is not None and number.is_integer() else None


def _unix_s(value: object) -> float | None:
    try:
        return value.timestamp() if isinstance(value, datetime) else _number(value)
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError):
        return None


def missing(package: str, purpose: str, extra: str = "import") -> BadInput:
    """Return the error to raise if a package is not installed."""
    hint = install_extra(extra)
    return BadInput.expected("library", package, purpose, "that it is not installed", hint=hint)
