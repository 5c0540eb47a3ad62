"""Taking evidence: from a run, a file or a person. Flips are in `flips`, commands in `command`.

Each function returns a `Capture`: the locator with what it says, and the bytes it says it of. Nothing
is written; `engine.findings.whys.link` puts a capture into a finding and `Bundle.save` onto the disk.
Text passes `engine.findings.redact` before it is hashed. What is captured beside a run (settings,
receipt, surroundings, stacks) is in `engine.findings.context`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import BadInput, RunLogError
from engine.files import open_regular
from engine.findings import logs
from engine.findings.finding import (
    Artifact,
    EventRange,
    ExitRecord,
    FileRange,
    Locator,
    LogName,
    MetricWindow,
    Quote,
    Statement,
)
from engine.findings.form import canonical, now_utc
from engine.findings.redact import Redactor
from engine.log.events import AlertRaised, Checked, TrainerExited
from engine.log.folder import RunFolder

LARGEST_KEPT_BYTES = 4 << 20
"""Bigger files are named by hash and size and not copied."""
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes that are to become an artifact; none where only hash and size are kept."""

    artifact: Artifact
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    locator: Locator
    blob: Blob
    captured_by: str = "tool"
    source: Path | None = None
    """What it was taken from, if that stays."""
    attached: tuple[Blob, ...] = field(default=())
    needed: tuple[Blob, ...] = field(default=())
    """Artifacts that the locator itself names."""

    def with_attached(self, blobs: Sequence[Blob]) -> Capture:
        return dataclasses.replace(self, attached=(*self.attached, *blobs))


def text_blob(data: bytes, name: str, what: str, redactor: Redactor) -> Blob:
    """Text without its secrets."""
    kept, found = redactor.bytes(data)
    artifact = Artifact(
        sha256=hashlib.sha256(kept).hexdigest(),
        name=name,
        size=len(kept),
        what=redactor.text(what).text,
        redacted=found,
    )
    return Blob(artifact=artifact, data=kept)


def json_blob(value: Any, name: str, what: str, redactor: Redactor) -> Blob:
    return text_blob(canonical(value), name, what, redactor)


def file_blob(path: Path, what: str, redactor: Redactor) -> Blob:
    """A file: its text when it is short text, else hash and size. Raises BadInput."""
    size, digest = 0, hashlib.sha256()
    try:
        if not path.is_file():
            raise BadInput.expected("evidence", path, "a plain file", "none")
        with open_regular(path, "evidence") as file:
            head = file.read(LARGEST_KEPT_BYTES + 1)
            if len(head) <= LARGEST_KEPT_BYTES and _is_text(head):
                return text_blob(head, path.name, what, redactor)
            digest.update(head)
            size = len(head)
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise BadInput.expected(
            "evidence", path, "to read it", error.strerror or str(error)
        ) from error
    what = redactor.text(what).text
    artifact = Artifact(
        sha256=digest.hexdigest(),
        name=redactor.text(path.name).text,
        size=size,
        what=what,
        kept=False,
    )
    return Blob(artifact=artifact, data=None)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def capture_events(
    run: RunFolder, log: LogName, first_seq: int, last_seq: int, redactor: Redactor
) -> Capture:
    """Lines of a log. Raises RunLogError when the log has not all of them."""
    path = logs.log_of(run, log)
    lines = logs.take_range(path, first_seq, last_seq)
    numbers = f"line {first_seq}" if first_seq == last_seq else f"lines {first_seq} to {last_seq}"
    what = f"{numbers} of {run.name}/{path.name}"
    blob = text_blob(logs.slice_bytes(lines, path), path.name, what, redactor)
    locator = EventRange(
        run=redactor.text(run.name).text,
        run_id=logs.run_id(run),
        log=log,
        first_seq=first_seq,
        last_seq=last_seq,
        quotes=quotes_of(blob.data or b""),
    )
    return Capture(locator=locator, blob=blob, source=run.path)


def quotes_of(data: bytes) -> tuple[Quote, ...]:
    """The beginnings of the first lines of a slice."""
    lines = list(logs.read_lines(data.splitlines(keepends=True)[: logs.QUOTES_KEPT], "slice"))
    return tuple(
        Quote(seq=line.event.seq, text=line.raw.decode("utf-8")[: logs.QUOTE_CHARACTERS])
        for line in lines
    )


def capture_exit(run: RunFolder, redactor: Redactor) -> Capture:
    """The newest record of how the trainer ended. Raises RunLogError when there is none."""
    found = [line for line in logs.read_log(run.watch) if isinstance(line.event, TrainerExited)]
    if not found:
        raise RunLogError.expected(
            "run log", run.watch, "a record of how the trainer ended", "none"
        )
    what = f"how the trainer of {run.name} ended"
    blob = text_blob(found[-1].raw + b"\n", "watch.jsonl", what, redactor)
    (kept,) = logs.read_lines([blob.data or b""], run.watch)
    event = kept.event
    assert isinstance(event, TrainerExited), "redaction leaves the kind of a record"
    locator = ExitRecord(
        run=redactor.text(run.name).text,
        run_id=logs.run_id(run),
        seq=event.seq,
        state=event.state.upper(),
        certainty=event.certainty,
        cause=event.cause,
        sentence=event.sentence,
    )
    return Capture(locator=locator, blob=blob, source=run.path)


def capture_metric(
    run: RunFolder,
    name: str,
    redactor: Redactor,
    *,
    from_unix_s: float = float("-inf"),
    to_unix_s: float = float("inf"),
    first_step: int = 0,
    last_step: int | None = None,
) -> Capture:
    """A metric over a time or over steps. Raises BadInput when the log has no value there."""
    wanted = logs.metric(name)
    path = logs.log_of(run, wanted.log)
    lines = logs.take_window(
        logs.read_log(path),
        wanted,
        from_unix_s=from_unix_s,
        to_unix_s=to_unix_s,
        first_step=first_step,
        last_step=last_step,
    )
    blob = text_blob(
        logs.slice_bytes(lines, path), path.name, f"{name} in {run.name}/{path.name}", redactor
    )
    numbers = logs.numbers_of(logs.points_of(lines, wanted))
    if numbers is None:
        raise BadInput.expected("metric", path, f"{name} in that window", "no line that has it")
    locator = MetricWindow(
        run=redactor.text(run.name).text,
        run_id=logs.run_id(run),
        metric=name,
        first_step=first_step,
        last_step=last_step,
        **dataclasses.asdict(numbers),
    )
    return Capture(locator=locator, blob=blob, source=run.path)


def capture_alert(run: RunFolder, id_: str, redactor: Redactor) -> Capture:
    """The newest raising of an alert, with the readings of its window. Raises BadInput."""
    raised = [
        line
        for line in logs.read_log(run.watch)
        if isinstance(line.event, AlertRaised) and line.event.id == id_
    ]
    if not raised:
        raise BadInput.expected("alert", run.watch, f"one of the id {id_}", "none")
    alert = raised[-1].event
    assert isinstance(alert, AlertRaised)
    capture = capture_events(run, "watch", alert.seq, alert.seq, redactor)
    return capture.with_attached(window_blobs(run, alert.from_unix_s, alert.to_unix_s, redactor))


def capture_check(run: RunFolder, id_: str, redactor: Redactor) -> Capture:
    """The newest answer of a first-minute check, with its numbers. Raises BadInput."""
    seqs = [
        line.event.seq
        for line in logs.read_log(run.events)
        if isinstance(line.event, Checked) and line.event.id == id_
    ]
    if not seqs:
        raise BadInput.expected("check", run.events, f"an answer of {id_}", "none")
    return capture_events(run, "events", seqs[-1], seqs[-1], redactor)


def capture_window(
    run: RunFolder, log: LogName, from_unix_s: float, to_unix_s: float, redactor: Redactor
) -> Capture:
    """What a log says of a time, with what the others say of it beside. Raises BadInput for nothing."""
    path = logs.log_of(run, log)
    inside = [
        line.event.seq for line in logs.read_log(path) if from_unix_s <= line.unix_s <= to_unix_s
    ]
    if not inside:
        raise BadInput.expected("time window", path, "a line of that time", "none")
    capture = capture_events(run, log, inside[0], inside[-1], redactor)
    return capture.with_attached(window_blobs(run, from_unix_s, to_unix_s, redactor))


def window_blobs(
    run: RunFolder, from_unix_s: float, to_unix_s: float, redactor: Redactor
) -> list[Blob]:
    """Everything that the logs say of a time, one slice a log; a log that says nothing has none."""
    blobs = []
    for path in (run.events, run.device, run.watch):
        if not path.exists():
            continue
        lines = [x for x in logs.read_log(path) if from_unix_s <= x.unix_s <= to_unix_s]
        if lines:
            what = f"{run.name}/{path.name} of {now_utc(from_unix_s)} to {now_utc(to_unix_s)}"
            blobs.append(text_blob(logs.slice_bytes(lines, path), path.name, what, redactor))
    return blobs


def capture_file(
    path: Path, redactor: Redactor, first_line: int = 0, last_line: int = 0
) -> Capture:
    """A file or lines of it, as a person offers it. Raises BadInput."""
    whole = file_blob(path, f"{path.name}", redactor)
    blob = whole
    if first_line:
        if whole.data is None:
            raise BadInput.expected(
                "evidence", path, "text, to take lines of", "too much, or no text"
            )
        lines = whole.data.splitlines(keepends=True)
        if not first_line <= last_line <= len(lines):
            found = f"{len(lines)} lines"
            raise BadInput.expected("evidence", path, f"lines {first_line} to {last_line}", found)
        what = f"lines {first_line} to {last_line} of {path.name}"
        # Cleaned as a whole already: a secret may go over several lines.
        data = b"".join(lines[first_line - 1 : last_line])
        artifact = msgspec.structs.replace(
            whole.artifact,
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            what=redactor.text(what).text,
        )
        blob = Blob(artifact=artifact, data=data)
    locator = FileRange(
        path=redactor.text(str(path)).text,
        first_line=first_line,
        last_line=last_line,
        file_sha256=whole.artifact.sha256,
        file_bytes=whole.artifact.size,
    )
    return Capture(locator=locator, blob=blob, captured_by="human", source=path)


def capture_statement(text: str, redactor: Redactor) -> Capture:
    """What a person says."""
    blob = text_blob(
        f"{text}\n".encode("utf-8", "backslashreplace"), "note.txt", "a statement", redactor
    )
    kept = (blob.data or b"").decode().rstrip("\n")
    return Capture(locator=Statement(text=kept), blob=blob, captured_by="human")
