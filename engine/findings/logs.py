"""Parts of a run's logs as they stand there: lines by number, and the numbers of one metric.

A slice is the lines themselves, so that it can be read again by whatever reads logs. Capturing and
verifying use the same functions: first on the run's own log, later on the slice in the bundle.

Metrics are named as the views name them:

    loss, ce, kd, step_s, tokens, ...      a field of `step`            events.jsonl
    eval.student, eval.teacher, ...        a held-out loss, nats        events.jsonl
    host_available_bytes, load1, ...       a field of `host`            device.jsonl
    gpu0.gpu_util_pct, gpu0.slowed, ...    a field of GPU 0's samples   device.jsonl
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput, RunLogError
from engine.files import open_plain
from engine.findings.finding import LogName
from engine.log.events import (
    AnyEvent,
    Evaluated,
    GpuSample,
    HostSample,
    LogOpened,
    StepDone,
)
from engine.log.folder import RunFolder
from engine.log.read import decode_line

LARGEST_SLICE_BYTES = 8 << 20
QUOTES_KEPT = 8
QUOTE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    raw: bytes
    """Without its newline."""
    unix_s: float
    event: AnyEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    unix_s: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a metric window says."""

    from_unix_s: float
    to_unix_s: float
    count: int
    absent: int
    non_finite: int
    first: float | None
    last: float | None
    least: float | None
    greatest: float | None
    mean: float | None


def log_of(run: RunFolder, name: LogName) -> Path:
    return {"events": run.events, "device": run.device, "watch": run.watch}[name]


def run_id(run: RunFolder) -> str:
    """The same for the same run wherever it lies: a hash of the first line of its oldest log."""
    for path in (run.watch, run.events):
        try:
            with open_plain(path) as file:
                first = file.readline(1 << 16)
        except OSError:
            continue
        if first.endswith(b"\n"):
            return hashlib.sha256(first).hexdigest()[:16]
    raise RunLogError.expected("run folder", run.path, "a log with a line in it", "none")


def read_lines(lines: Iterable[bytes], where: object) -> Iterator[Line]:
    """Whole lines of a log; a torn last one is left out. Raises RunLogError for one that is no
    record."""
    origin_s = 0.0
    for number, raw in enumerate(lines, start=1):
        if not raw.endswith(b"\n"):
            return
        event = decode_line(raw[:-1], f"{where} line {number}")
        if isinstance(event, LogOpened):
            origin_s = event.unix_s - event.t_s
        yield Line(raw=raw[:-1], unix_s=origin_s + event.t_s, event=event)


def read_log(path: Path) -> Iterator[Line]:
    """The lines of a log file, numbers checked. Raises RunLogError."""
    try:
        with path.open("rb") as file:
            for expected, line in enumerate(read_lines(file, path)):
                if line.event.seq != expected:
                    raise RunLogError.expected(
                        "run log", path, f"line number {expected}", str(line.event.seq)
                    )
                yield line
    except OSError as error:
        raise RunLogError.expected(
            "run log", path, "to read it", error.strerror or str(error)
        ) from error


def take_range(path: Path, first_seq: int, last_seq: int) -> list[Line]:
    """Lines `first_seq` to `last_seq`. Raises RunLogError when the log has not all of them."""
    found: list[Line] = []
    for line in read_log(path):
        if line.event.seq > last_seq:
            break
        if line.event.seq >= first_seq:
            found.append(line)
    if not found or found[-1].event.seq != last_seq:
        held = f"its last line is {line.event.seq}" if found else "none of them"
        raise RunLogError.expected("run log", path, f"lines {first_seq} to {last_seq}", held)
    return found


def slice_bytes(lines: Iterable[Line], where: object) -> bytes:
    """The lines as they stand in the log. Raises BadInput for more than a bundle should hold."""
    data = b"".join(line.raw + b"\n" for line in lines)
    if len(data) > LARGEST_SLICE_BYTES:
        raise BadInput.expected(
            "slice",
            where,
            f"at most {LARGEST_SLICE_BYTES} bytes",
            str(len(data)),
            hint="take fewer lines, or a shorter time",
        )
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Where a metric stands and how it is read."""

    name: str
    log: LogName
    value: Callable[[AnyEvent], tuple[bool, float | None]]
    """Whether an event speaks of it, and the number."""


def metric(name: str) -> Metric:
    """The metric of that name. Raises BadInput for one that no log has."""
    if match := re.fullmatch(r"eval\.([a-z_]+)", name):
        subject = match[1]
        return Metric(
            name=name,
            log="events",
            value=lambda e: (
                isinstance(e, Evaluated) and e.subject == subject,
                getattr(e, "loss", None),
            ),
        )
    if match := re.fullmatch(r"gpu([0-9]+)\.([a-z0-9_]+)", name):
        index, field = int(match[1]), match[2]
        if field == "slowed" or field in _numeric(GpuSample):
            return Metric(
                name=name,
                log="device",
                value=lambda e: (
                    isinstance(e, GpuSample) and e.index == index,
                    getattr(e, field, None),
                ),
            )
    for kind, log in ((StepDone, "events"), (HostSample, "device")):
        if name in _numeric(kind):
            return _field(name, kind, log)  # type: ignore[arg-type]
    raise BadInput.expected(
        "metric",
        name,
        "a field of a step, of the host, gpuN.FIELD or eval.SUBJECT",
        "another name",
        hint=f"steps have {', '.join(sorted(_numeric(StepDone)))}",
    )


def _field(name: str, kind: type[Any], log: LogName) -> Metric:
    return Metric(name=name, log=log, value=lambda e: (isinstance(e, kind), getattr(e, name, None)))


def _numeric(kind: type[Any]) -> frozenset[str]:
    text = ("v", "seq", "t_s", "nf", "absent", "clock_event_reasons", "index")
    return frozenset(kind.__struct_fields__) - set(text)


def take_window(
    lines: Iterable[Line],
    wanted: Metric,
    *,
    from_unix_s: float = -math.inf,
    to_unix_s: float = math.inf,
    first_step: int = 0,
    last_step: int | None = None,
) -> list[Line]:
    """The lines that a window of the metric is made of, and the openings that date them."""
    found: list[Line] = []
    opened: Line | None = None
    for line in lines:
        if isinstance(line.event, LogOpened):
            opened = line
        speaks, _ = wanted.value(line.event)
        if not speaks or not from_unix_s <= line.unix_s <= to_unix_s:
            continue
        step = getattr(line.event, "step", None)
        if step is not None and (step < first_step or (last_step is not None and step > last_step)):
            continue
        if opened is not None:
            found.append(opened)
            opened = None
        found.append(line)
    return found


def points_of(lines: Iterable[Line], wanted: Metric) -> list[Point]:
    out = []
    for line in lines:
        speaks, value = wanted.value(line.event)
        if speaks:
            out.append(Point(unix_s=line.unix_s, value=value))
    return out


def numbers_of(points: list[Point]) -> Numbers | None:
    """What the points say; None when there is none."""
    if not points:
        return None
    values = [p.value for p in points if p.value is not None and math.isfinite(p.value)]
    absent = sum(p.value is None for p in points)
    return Numbers(
        from_unix_s=points[0].unix_s,
        to_unix_s=points[-1].unix_s,
        count=len(values),
        absent=absent,
        non_finite=len(points) - len(values) - absent,
        first=values[0] if values else None,
        last=values[-1] if values else None,
        least=min(values, default=None),
        greatest=max(values, default=None),
        mean=math.fsum(values) / len(values) if values else None,
    )
