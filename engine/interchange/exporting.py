"""Write the values of a run (of the engine or of a watched script) as a TensorBoard folder, a CSV file or a Parquet
file.

    step         every number of its event; nested numbers are named `phases/data`, `host/launch`, `losses/0`
    evaluation   held_out (the student), held_out/teacher, held_out/untrained
    logged       values that a script logged, by the script's names

An absent value is an empty cell in CSV, a null in Parquet, and no value in TensorBoard; NaN and infinities are kept.
CSV and Parquet keep the full precision; TensorBoard stores 32 bits for a value. Steps that a resume repeats are
written once.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.errors import BadInput, write_error
from engine.interchange.names import COUNTS, HELD_OUT
from engine.interchange.series import Series, by_step
from engine.interchange.sources import missing
from engine.log.events import AnyEvent, Evaluated, Logged, LogOpened, RunStarted, StepDone
from engine.log.folder import RunFolder
from engine.log.read import LogReader

ENVELOPE = frozenset({"v", "seq", "t_s", "nf", "step"})
_SUBJECTS = {subject: name for name, subject in HELD_OUT.items()}


def export_run(run: RunFolder, to: str, path: Path) -> int:
    """Write the values of a run to a new file or folder, and return the number of values. Raises BadInput,
    RunLogError, DiskFull."""
    if path.exists():
        hint = "--out names another"
        raise BadInput.expected("export", path, "nothing of that name", "something", hint=hint)
    series = read_series(run)
    count = sum(len(values.steps) for values in series.values())
    if not count:
        raise BadInput.expected("run", run.path, "a step with a number", "none")
    try:
        WRITERS[to](series, path)
    except OSError as error:
        raise write_error("export", path, "to write it", error) from error
    return count


def read_series(run: RunFolder) -> dict[str, Series]:
    """Read every value of a run's own log. Raises RunLogError for a log that is broken."""
    series: dict[str, Series] = {}
    reader, opened_s = LogReader(run.events), 0.0
    while events := reader.poll():
        for event in events:
            if isinstance(event, LogOpened):
                opened_s = event.unix_s
            elif isinstance(event, RunStarted) and event.resumed_from is not None:
                for values in series.values():
                    values.rewind(event.resumed_from + 1)
            for name, step, value in _values(event):
                series.setdefault(name, Series()).add(step, opened_s + event.t_s, value)
    return series


def _values(event: AnyEvent) -> Iterator[tuple[str, int, float]]:
    pairs: Iterable[tuple[str, Any]] = ()
    if isinstance(event, StepDone):
        pairs = _nested(event)
    elif isinstance(event, Evaluated):
        pairs = [(_SUBJECTS.get(event.subject, f"held_out/{event.subject}"), event.loss)]
    elif isinstance(event, Logged):
        pairs = event.values.items()
    for name, value in pairs:
        if isinstance(value, int | float):
            yield name, event.step, float(value)  # type: ignore[union-attr]


def _nested(step: StepDone) -> Iterator[tuple[str, Any]]:
    for name in step.__struct_fields__:
        value = getattr(step, name)
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", item) for key, item in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/{index}", item) for index, item in enumerate(value))
        elif value is not None and name not in ENVELOPE:
            yield name, value


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file, and rename it to its final path when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(series: dict[str, Series]) -> list[str]:
    # A script may itself log values named "step" or "unix_s".
    return ["step", "unix_s", *(name for name in series if name not in ("step", "unix_s"))]


def _rows(series: dict[str, Series], header: list[str]) -> Iterator[list[int | float | None]]:
    """Yield a row for each step; the row's time is that of its last value."""
    column_of = {name: place for place, name in enumerate(header)}
    for step, points in by_step(series):
        row: list[int | float | None] = [step, 0.0, *[None] * (len(header) - 2)]
        for _, unix_s, name, value in points:
            if name not in ("step", "unix_s"):
                row[column_of[name]] = (
                    int(value) if name in COUNTS and math.isfinite(value) else value
                )
            row[1] = max(row[1] or 0.0, unix_s)
        yield row


def write_csv(series: dict[str, Series], path: Path) -> None:
    header = _header(series)
    with _new_file(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in _rows(series, header):
            writer.writerow(["" if cell is None else repr(cell) for cell in row])


def write_parquet(series: dict[str, Series], path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing("pyarrow", "to write Parquet", "data") from None
    header = _header(series)
    kinds = [pyarrow.int64() if n in COUNTS or n == "step" else pyarrow.float64() for n in header]
    columns = zip(*_rows(series, header), strict=True)
    arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    with _new_file(path) as partial:
        pyarrow.parquet.write_table(pyarrow.table(arrays, names=header), partial)


def write_tensorboard(series: dict[str, Series], path: Path) -> None:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise missing("tensorboard", "to write event files") from None
    writer = EventFileWriter(str(path))
    for step, points in by_step(series):
        for unix_s, at_once in groupby(
            sorted(points, key=lambda point: point.unix_s), lambda point: point.unix_s
        ):
            values = [Summary.Value(tag=point.name, simple_value=point.value) for point in at_once]
            writer.add_event(Event(step=step, wall_time=unix_s, summary=Summary(value=values)))
    writer.close()


WRITERS: dict[str, Callable[[dict[str, Series], Path], None]] = {
    "tensorboard": write_tensorboard,
    "csv": write_csv,
    "parquet": write_parquet,
}
