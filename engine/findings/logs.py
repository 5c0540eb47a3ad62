"""Parts of a run's logs: lines by number, and the values of one metric.

A slice consists of the original lines, so any log reader can read it. Capturing and verifying use the same
functions: first on the run's own log, later on the slice in the bundle.

Metrics have the names that the views use:

    loss, ce, kd, step_s, tokens, ...      a field of `step`            events.jsonl
    eval.student, eval.teacher, ...        a held-out loss, nats        events.jsonl
    host_available_bytes, load1, ...       a field of `host`            device.jsonl
    gpu0.gpu_util_pct, gpu0.slowed, ...    a field of GPU 0's samples   device.jsonl
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import BadInput, RunLogError
from engine.files import open_plain
from engine.findings.finding import LogName, digest
from engine.log.events import (
    AnyEvent,
    Evaluated,
    GpuSample,
    HostSample,
    LogOpened,
    StepDone,
)
from engine.log.folder import RunFolder
from engine.log.read import LogReader, decode_line

LARGEST_SLICE_BYTES = 8 << 20
FIRST_LINE_BYTES = 1 << 16

Point = tuple[float, float | None]
"""Unix seconds, and the value at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    raw: bytes
    """The line without its newline."""
    unix_s: float
    event: AnyEvent


def log_of(run: RunFolder, name: LogName) -> Path:
    log: Path = getattr(run, name)
    return log


def run_id(run: RunFolder) -> str:
    """Return an id that is the same wherever the run's folder lies: a hash of the first line of its oldest
    log."""
    for path in (run.watch, run.events):
        try:
            with open_plain(path) as file:
                first = file.readline(FIRST_LINE_BYTES)
        except OSError:
            continue
        if first.endswith(b"\n"):
            return id_of(first)
    raise RunLogError.expected("run folder", run.path, "a log with a line in it", "none")


def id_of(first_line: bytes) -> str:
    return digest(first_line)[:16]


def begun_of(first_line: bytes) -> float | None:
    """When the log was opened, according to its first line; None when that is not an opening line."""
    event = decode_line(first_line.rstrip(b"\n"), "the first line")
    return event.unix_s if isinstance(event, LogOpened) else None


def read_lines(lines: Iterable[bytes], where: object) -> Iterator[Line]:
    """Yield the whole lines of a log; a torn last line is left out. Raises RunLogError for a line that is no
    record."""
    origin_s = 0.0
    for number, raw in enumerate(lines, start=1):
        if not raw.endswith(b"\n"):
            return
        event = decode_line(raw[:-1], f"{where} line {number}")
        if isinstance(event, LogOpened):
            origin_s = event.unix_s - event.t_s
        yield Line(raw=raw[:-1], unix_s=origin_s + event.t_s, event=event)


def lines_of(data: bytes, where: object) -> list[Line]:
    """Decode the lines of a slice."""
    return list(read_lines(data.splitlines(keepends=True), where))


def read_log(path: Path) -> Iterator[Line]:
    """Yield the lines of a log file and check their numbers. Raises RunLogError."""
    try:
        with open_plain(path) as file:
            for expected, line in enumerate(read_lines(file, path)):
                if line.event.seq != expected:
                    found = str(line.event.seq)
                    raise RunLogError.expected("run log", path, f"line number {expected}", found)
                yield line
    except OSError as error:
        found = error.strerror or str(error)
        raise RunLogError.expected("run log", path, "to read it", found) from error


def events_of(log: Path) -> Iterator[AnyEvent]:
    """Yield the events of a possibly long log without their bytes. Raises BrokenLog after the last sound
    part."""
    reader = LogReader(log)
    while events := reader.poll():
        yield from events


def take_range(path: Path, first_seq: int, last_seq: int) -> list[Line]:
    """Return lines `first_seq` to `last_seq`. Raises RunLogError when the log lacks some of them."""
    found: list[Line] = []
    for line in read_log(path):
        if line.event.seq > last_seq:
            break
        if line.event.seq >= first_seq:
            found.append(line)
    if not found or found[-1].event.seq != last_seq:
        held = f"its last line is {found[-1].event.seq}" if found else "none of them"
        raise RunLogError.expected("run log", path, f"lines {first_seq} to {last_seq}", held)
    return found


def slice_bytes(lines: Iterable[Line], where: object) -> bytes:
    """Return the lines as bytes, exactly as in the log. Raises BadInput when they are too many for a bundle."""
    data = b"".join(line.raw + b"\n" for line in lines)
    if len(data) > LARGEST_SLICE_BYTES:
        expected, hint = (
            f"at most {LARGEST_SLICE_BYTES} bytes",
            "take fewer lines, or a shorter time",
        )
        raise BadInput.expected("slice", where, expected, str(len(data)), hint=hint)
    return data


@dataclass(frozen=True, slots=True)
class Metric:
    """Where a metric is read: a field of one event type, restricted to events whose `key` equals `subject`."""

    log: LogName
    kind: type[Any]
    field: str
    key: str = ""
    subject: object = None

    def speaks(self, event: AnyEvent) -> bool:
        """Whether an event carries this metric."""
        return isinstance(event, self.kind) and (
            not self.key or getattr(event, self.key) == self.subject
        )

    def points(self, lines: Iterable[Line]) -> list[Point]:
        return [(x.unix_s, getattr(x.event, self.field)) for x in lines if self.speaks(x.event)]


def metric(name: str) -> Metric:
    """Return the metric with that name. Raises BadInput for one that no log has."""
    if match := re.fullmatch(r"eval\.([a-z_]+)", name):
        return Metric("events", Evaluated, "loss", "subject", match[1])
    match = re.fullmatch(r"gpu([0-9]+)\.([a-z0-9_]+)", name)
    if match and match[2] in _numeric(GpuSample) | {"slowed"}:
        return Metric("device", GpuSample, match[2], "index", int(match[1]))
    if name in _numeric(StepDone):
        return Metric("events", StepDone, name)
    if name in _numeric(HostSample):
        return Metric("device", HostSample, name)
    raise BadInput.expected(
        "metric",
        name,
        "a field of a step, of the host, gpuN.FIELD or eval.SUBJECT",
        "another name",
        hint=f"steps have {', '.join(sorted(_numeric(StepDone)))}",
    )


def _numeric(kind: type[Any]) -> frozenset[str]:
    text = ("v", "seq", "t_s", "nf", "absent", "clock_event_reasons", "index")
    return frozenset(kind.__struct_fields__) - set(text)


class Window(NamedTuple):
    """A part of a log, limited by time and by step."""

    from_unix_s: float = -math.inf
    to_unix_s: float = math.inf
    first_step: int = 0
    last_step: int | None = None

    def has(self, line: Line) -> bool:
        step = getattr(line.event, "step", None)
        last = math.inf if self.last_step is None else self.last_step
        in_steps = step is None or self.first_step <= step <= last
        return in_steps and self.from_unix_s <= line.unix_s <= self.to_unix_s


def take_window(lines: Iterable[Line], wanted: Metric, window: Window) -> list[Line]:
    """Return the lines of the metric inside the window, and the `LogOpened` lines that date them."""
    found: list[Line] = []
    opened: Line | None = None
    for line in lines:
        if isinstance(line.event, LogOpened):
            opened = line
        if wanted.speaks(line.event) and window.has(line):
            found += [line] if opened is None else [opened, line]
            opened = None
    return found


def numbers_of(points: list[Point]) -> dict[str, Any]:
    """Compute the statistics of a metric window, keyed by its field names; empty without points."""
    if not points:
        return {}
    values = [value for _, value in points if value is not None and math.isfinite(value)]
    absent = sum(value is None for _, value in points)
    return {
        "from_unix_s": points[0][0],
        "to_unix_s": points[-1][0],
        "count": len(values),
        "absent": absent,
        "non_finite": len(points) - len(values) - absent,
        "first": values[0] if values else None,
        "last": values[-1] if values else None,
        "least": min(values, default=None),
        "greatest": max(values, default=None),
        "mean": math.fsum(values) / len(values) if values else None,
    }
