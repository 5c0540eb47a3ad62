"""Capture evidence from a run, a flip, a file, a command or a person.

Each function returns a `Capture`: the locator, and the bytes that it describes. Nothing is written here;
`engine.findings.whys.link` puts a capture into a finding, and `Bundle.save` writes it to disk. Text passes
through `engine.findings.redact` before it is hashed. What is captured beside a run (settings, receipt,
surroundings, stacks) is in `engine.findings.context`.

A command runs without a shell; to use one, name it (`bash -c '...'`). A command with an expectation that was
given before it ran is a reproduction. It counts as one when it left a run: a log that was opened while the
command ran is searched for in the paths that it was given, in the paths that it printed, in ./runs and in
./flips. The command gets the unchanged environment; what is kept of its output and its arguments is redacted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import IO, Any

from msgspec import UNSET
from msgspec.structs import replace

from engine.attach.identities import PASS
from engine.errors import BadInput, EngineError, RunLogError
from engine.files import open_regular, parse_json
from engine.findings import logs
from engine.findings.finding import (
    Artifact,
    CommandRun,
    EventRange,
    ExitRecord,
    FileRange,
    FlipResult,
    Locator,
    LogName,
    MetricWindow,
    Quote,
    StartedRun,
    Statement,
    canonical,
    digest,
    now_utc,
)
from engine.findings.redact import Redactor
from engine.findings.rules import ARMS_KEPT
from engine.flips.record import read_plan_of, read_verdict
from engine.log.events import AlertRaised, Checked, Identity, TrainerExited
from engine.log.folder import RunFolder, is_run

LARGEST_KEPT_BYTES = 4 << 20
"""Bigger files are recorded by hash and size, and not copied."""
QUOTES_KEPT = 8
QUOTE_CHARACTERS = 300
EXCERPT_BYTES = 4096
COMMAND_LIMIT_S = 600.0
WHOLE = logs.Window()
_WORD = re.compile(r"[^\s'\"`;|&<>()=]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes that will become an artifact; None when only hash and size are kept."""

    artifact: Artifact
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    locator: Locator
    blob: Blob
    captured_by: str = "tool"
    source: Path | None = None
    """The path that it was taken from, if that is lasting."""
    attached: tuple[Blob, ...] = field(default=())
    needed: tuple[Blob, ...] = field(default=())
    """Artifacts that the locator itself refers to."""

    def with_attached(self, blobs: Sequence[Blob]) -> Capture:
        return dataclasses.replace(self, attached=(*self.attached, *blobs))

    @property
    def blobs(self) -> list[Blob]:
        """Everything that a bundle needs for this evidence."""
        return [self.blob, *self.needed, *self.attached]


def text_blob(data: bytes, name: str, what: str, redactor: Redactor) -> Blob:
    """Make a blob of redacted text."""
    kept, found = redactor.bytes(data)
    artifact = Artifact(
        sha256=digest(kept),
        name=name,
        size=len(kept),
        what=redactor.text(what).text,
        redacted=found,
    )
    return Blob(artifact=artifact, data=kept)


def _lines_blob(lines: Sequence[logs.Line], log: Path, what: str, redactor: Redactor) -> Blob:
    return text_blob(logs.slice_bytes(lines, log), log.name, what, redactor)


def json_blob(value: Any, name: str, what: str, redactor: Redactor) -> Blob:
    return text_blob(canonical(value), name, what, redactor)


def file_blob(path: Path, what: str, redactor: Redactor) -> Blob:
    """Make a blob of a file: its redacted text when it is a short text, otherwise hash and size. Raises
    BadInput."""
    try:
        if not path.is_file():
            raise BadInput.expected("evidence", path, "a plain file", "none")
        with open_regular(path, "evidence") as file:
            return _stream_blob(file, path.name, what, redactor)
    except OSError as error:
        found = error.strerror or str(error)
        raise BadInput.expected("evidence", path, "to read it", found) from error


def _stream_blob(
    stream: IO[bytes], name: str, what: str, redactor: Redactor, *, is_text: bool = False
) -> Blob:
    """Make a blob of a stream: all of a short text (`is_text` skips the check), otherwise hash and size."""
    head = stream.read(LARGEST_KEPT_BYTES + 1)
    if len(head) <= LARGEST_KEPT_BYTES and (is_text or _is_text(head)):
        return text_blob(head, name, what, redactor)
    stream.seek(0)
    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    name, what = redactor.text(name).text, redactor.text(what).text
    artifact = Artifact(sha256=sha256, name=name, size=stream.tell(), what=what, kept=False)
    return Blob(artifact=artifact, data=None)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def whole_or_run(
    path: Path, redactor: Redactor, lines: tuple[int, int] = (0, 0)
) -> Capture | RunFolder:
    """Capture a flip, or a file or lines of it; for a run, return its RunFolder, because a part must be
    named. Raises BadInput, RunLogError."""
    if is_flip(path):
        return capture_flip(path, redactor)
    if is_run(path):
        return RunFolder(path)
    if path.is_dir():
        raise BadInput.expected("evidence", path, "a run, a flip or a file", "another folder")
    return capture_file(path, redactor, *lines)


# Of a run


def capture_part(
    run: RunFolder,
    redactor: Redactor,
    *,
    exit_: bool = False,
    alert: str | None = None,
    check: str | None = None,
    metric: str | None = None,
    seqs: tuple[int, int] | None = None,
    log: LogName = "events",
    window: logs.Window = WHOLE,
) -> Capture:
    """Capture the named part of a run.

    In this order: the exit record (`exit_`), a metric over a time or over steps, the newest raising of an
    alert with the logs of its window, the newest result of a check or of an identity, lines of a log, otherwise
    the lines of a log in a time window with those of the other logs attached. Raises BadInput, RunLogError.
    """
    if exit_:
        return capture_exit(run, redactor)
    if metric is not None and seqs is None and alert is None and check is None:
        return capture_metric(run, metric, redactor, window)
    during = None
    if alert is not None:
        none = BadInput.expected("alert", run.watch, f"one of the id {alert}", "none")
        raised = _newest(run.watch, AlertRaised, none, alert).event
        log, seqs = "watch", (raised.seq, raised.seq)
        during = (raised.from_unix_s, raised.to_unix_s)
    elif check is not None:
        none = BadInput.expected("check", run.events, f"an answer of {check}", "none")
        # Of a script that is not ours, an identity, where something was seen of it.
        seq = _newest(run.events, Checked | Identity, none, check).event.seq
        log, seqs = "events", (seq, seq)
    elif seqs is None:
        path, during = logs.log_of(run, log), (window.from_unix_s, window.to_unix_s)
        inside = [x.event.seq for x in logs.read_log(path) if during[0] <= x.unix_s <= during[1]]
        if not inside:
            raise BadInput.expected("time window", path, "a line of that time", "none")
        seqs = (inside[0], inside[-1])
    found = capture_events(run, log, *seqs, redactor)
    return found.with_attached(window_blobs(run, *during, redactor)) if during else found


def _newest(
    log: Path, kind: type[Any] | UnionType, none: EngineError, id_: str | None = None
) -> Any:
    """Return the newest line of a log with an event of that kind (and id). Raises `none` when there is none."""
    found = None
    for line in logs.read_log(log):
        holds = isinstance(line.event, Identity) and line.event.degree == PASS
        if (
            isinstance(line.event, kind)
            and not holds
            and id_ in (None, getattr(line.event, "id", None))
        ):
            found = line
    if found is None:
        raise none
    return found


def _of_run(run: RunFolder, redactor: Redactor) -> dict[str, Any]:
    """The fields that identify a run in a locator."""
    return {"run": redactor.text(run.name).text, "run_id": logs.run_id(run)}


def capture_events(
    run: RunFolder, log: LogName, first_seq: int, last_seq: int, redactor: Redactor
) -> Capture:
    """Capture lines of a log. Raises RunLogError when the log lacks some of them."""
    path = logs.log_of(run, log)
    lines = logs.take_range(path, first_seq, last_seq)
    numbers = f"line {first_seq}" if first_seq == last_seq else f"lines {first_seq} to {last_seq}"
    what = f"{numbers} of {run.name}/{path.name}"
    blob = _lines_blob(lines, path, what, redactor)
    locator = EventRange(
        **_of_run(run, redactor),
        log=log,
        first_seq=first_seq,
        last_seq=last_seq,
        quotes=quotes_of(blob.data or b""),
    )
    return Capture(locator=locator, blob=blob, source=run.path)


def quotes_of(data: bytes) -> tuple[Quote, ...]:
    """Quote the beginnings of the first lines of a slice."""
    first = data.splitlines(keepends=True)[:QUOTES_KEPT]
    return tuple(
        Quote(seq=line.event.seq, text=line.raw.decode("utf-8")[:QUOTE_CHARACTERS])
        for line in logs.read_lines(first, "slice")
    )


def capture_exit(run: RunFolder, redactor: Redactor) -> Capture:
    """Capture the newest record of how the trainer ended. Raises RunLogError when there is none."""
    expected = "a record of how the trainer ended"
    none = RunLogError.expected("run log", run.watch, expected, "none")
    line = _newest(run.watch, TrainerExited, none)
    what = f"how the trainer of {run.name} ended"
    blob = text_blob(line.raw + b"\n", "watch.jsonl", what, redactor)
    (kept,) = logs.lines_of(blob.data or b"", run.watch)
    locator = ExitRecord(**_of_run(run, redactor), **exit_fields(kept))
    return Capture(locator=locator, blob=blob, source=run.path)


def exit_fields(line: logs.Line) -> dict[str, Any]:
    """The fields that a locator quotes from an exit record; empty for another event."""
    event = line.event
    if not isinstance(event, TrainerExited):
        return {}
    return {
        "seq": event.seq,
        "state": event.state.upper(),
        "certainty": event.certainty,
        "cause": event.cause,
        "sentence": event.sentence,
    }


def capture_metric(
    run: RunFolder, name: str, redactor: Redactor, window: logs.Window = WHOLE
) -> Capture:
    """Capture a metric over a time or over steps. Raises BadInput when the log has no value there."""
    wanted = logs.metric(name)
    path = logs.log_of(run, wanted.log)
    lines = logs.take_window(logs.read_log(path), wanted, window)
    what = f"{name} in {run.name}/{path.name}"
    blob = _lines_blob(lines, path, what, redactor)
    numbers = logs.numbers_of(wanted.points(lines))
    if not numbers:
        raise BadInput.expected("metric", path, f"{name} in that window", "no line that has it")
    steps: dict[str, Any] = {"first_step": window.first_step, "last_step": window.last_step}
    locator = MetricWindow(**_of_run(run, redactor), metric=name, **steps, **numbers)
    return Capture(locator=locator, blob=blob, source=run.path)


def window_blobs(
    run: RunFolder, from_unix_s: float, to_unix_s: float, redactor: Redactor
) -> list[Blob]:
    """Make a blob of each log's lines in a time window; a log without such lines has none."""
    blobs = []
    for path in (run.events, run.device, run.watch):
        if not path.exists():
            continue
        lines = [x for x in logs.read_log(path) if from_unix_s <= x.unix_s <= to_unix_s]
        if lines:
            what = f"{run.name}/{path.name} of {now_utc(from_unix_s)} to {now_utc(to_unix_s)}"
            blobs.append(_lines_blob(lines, path, what, redactor))
    return blobs


# Of a file, or a person


def capture_file(
    path: Path, redactor: Redactor, first_line: int = 0, last_line: int = 0
) -> Capture:
    """Capture a file or lines of it, as offered by a person. Raises BadInput."""
    blob = whole = file_blob(path, path.name, redactor)
    if first_line:
        if whole.data is None:
            expected, found = "text, to take lines of", "too much, or no text"
            raise BadInput.expected("evidence", path, expected, found)
        lines = whole.data.splitlines(keepends=True)
        wanted = f"lines {first_line} to {last_line}"
        if not first_line <= last_line <= len(lines):
            raise BadInput.expected("evidence", path, wanted, f"{len(lines)} lines")
        # Already redacted as a whole, because a secret may extend over several lines.
        data = b"".join(lines[first_line - 1 : last_line])
        artifact = replace(
            whole.artifact,
            sha256=digest(data),
            size=len(data),
            what=redactor.text(f"{wanted} of {path.name}").text,
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
    """Capture a person's statement."""
    data = f"{text}\n".encode("utf-8", "backslashreplace")
    blob = text_blob(data, "note.txt", "a statement", redactor)
    kept = (blob.data or b"").decode().rstrip("\n")
    return Capture(locator=Statement(text=kept), blob=blob, captured_by="human")


# Of a flip


def is_flip(path: Path) -> bool:
    return (path / "pairs.jsonl").is_file()


def capture_flip(path: Path, redactor: Redactor) -> Capture:
    """Capture the verdict of the flip in `path`, with its registered plan and every pair it is based on.
    Raises RunLogError when there is no verdict."""
    verdict = read_verdict(path)
    if verdict is None:
        raise RunLogError.expected("flip", path, "verdict.json", "none: it has not ended")
    plan = read_plan_of(path)
    name = path.resolve().name
    blob, plan_blob, pairs = (
        file_blob(path / part, f"{part} of the flip {name}", redactor)
        for part in ("verdict.json", "plan.json", "pairs.jsonl")
    )
    locator = FlipResult(
        flip=redactor.text(name).text,
        plan_sha256=plan.sha256,
        plan=plan_blob.artifact.sha256,
        pairs=pairs.artifact.sha256,
        # Read from the redacted bytes, so that the locator holds no secret.
        **flip_fields(parse_json(blob.data or b"{}", path, "verdict"), path),
    )
    return Capture(
        locator=locator,
        blob=blob,
        source=path,
        attached=tuple(_arm_blobs(path, verdict, redactor)),
        needed=(plan_blob, pairs),
    )


def flip_fields(verdict: dict[str, Any], where: object) -> dict[str, Any]:
    """The fields that a locator quotes from verdict.json. Raises RunLogError."""
    same = ("verdict", "hypothesis", "metric", "effect", "n_pairs")
    try:
        low, high = verdict["interval"]
        quoted = {"grade": verdict["class"], "changes": tuple(verdict["changes"])}
        return quoted | {name: verdict[name] for name in same} | {"low": low, "high": high}
    except (KeyError, TypeError, ValueError) as error:
        raise RunLogError.expected("verdict", where, "the verdict of a flip", str(error)) from None


def _arm_blobs(path: Path, verdict: dict[str, Any], redactor: Redactor) -> list[Blob]:
    files: list[tuple[Path, str]] = []
    for entry in verdict["raw_runs"][:ARMS_KEPT]:
        run = RunFolder(path / entry["run"])
        of_run = (run.effective, run.receipt, run.events, run.watch)
        files += [(file, f"{file.name} of {entry['run']}") for file in of_run]
    for control in sorted((path / "controls").glob("*")):
        files += [
            (control / part, f"{part} of the control {control.name}")
            for part in ("plan.json", "pairs.jsonl")
        ]
    return [file_blob(file, what, redactor) for file, what in files if file.is_file()]


# Of a command


def capture_command(
    command: str | Sequence[str],
    redactor: Redactor,
    *,
    expect_exit: int | None = None,
    expect_text: str = "",
    limit_s: float = COMMAND_LIMIT_S,
) -> Capture:
    """Run a command without a shell, and keep argv, exit status, hash and excerpt of both outputs.

    With `expect_exit` or `expect_text` it is a reproduction: the expectation was given before it ran. Raises
    BadInput for a command that cannot be started.
    """
    try:
        argv = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise BadInput.expected("command", command, "words of a shell", str(error)) from None
    if not argv:
        raise BadInput.expected("command", "of the evidence", "a program", "nothing")
    begun_unix_s = time.time()
    # A secret in an argument is a secret in the output too.
    redactor = redactor.knowing(argv)
    outputs: dict[str, Any] = {}
    blobs, texts = [], []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status, seconds = _run(argv, out, err, limit_s)
        for name, stream in (("stdout", out), ("stderr", err)):
            stream.seek(0)
            what = f"{name} of {argv[0]}"
            blob = _stream_blob(stream, f"{name}.txt", what, redactor, is_text=True)
            stream.seek(0)
            head = stream.read(LARGEST_KEPT_BYTES)
            outputs[name] = {
                "bytes": blob.artifact.size,
                "sha256": blob.artifact.sha256,
                "redacted": blob.artifact.redacted,
                "excerpt": _excerpt(head, stream, redactor),
            }
            blobs.append(blob)
            texts.append(redactor.text(head.decode("utf-8", "replace")).text)
    started = _started_run(argv, begun_unix_s, texts, redactor)
    expect_text = redactor.text(expect_text).text
    kept_argv, found = redactor.argv(argv)
    record: dict[str, Any] = {
        "argv": list(kept_argv),
        "cwd": redactor.text(str(Path.cwd())).text,
        "exit_status": status,
        "timed_out_after_s": limit_s if status is None else None,
        "expect_exit": expect_exit,
        "expect_text": expect_text,
        "started": now_utc(begun_unix_s),
        "seconds": round(seconds, 3),
        "redacted": found,
        **outputs,
    }
    locator = CommandRun(
        **command_fields(record),
        as_expected=as_expected(status, texts, expect_exit, expect_text),
        started=UNSET if started is None else started[0],
    )
    return Capture(
        locator=locator,
        blob=json_blob(record, "command.json", f"`{shlex.join(kept_argv)}`", redactor),
        attached=tuple(b for b in blobs if b.artifact.size),
        needed=() if started is None else (started[1],),
    )


def command_fields(record: dict[str, Any]) -> dict[str, Any]:
    """The fields that a locator quotes from command.json."""
    return {
        "argv": tuple(record["argv"]),
        "exit_status": record["exit_status"],
        "stdout_sha256": record["stdout"]["sha256"],
        "stderr_sha256": record["stderr"]["sha256"],
        "expect_exit": record["expect_exit"],
        "expect_text": record["expect_text"],
    }


def as_expected(
    status: int | None, texts: Sequence[str], expect_exit: int | None, expect_text: str
) -> bool | None:
    """Whether a command met the expectation; None when there was none."""
    if expect_exit is None and not expect_text:
        return None
    good_exit = expect_exit is None or status == expect_exit
    return good_exit and (not expect_text or any(expect_text in text for text in texts))


def _started_run(
    argv: Sequence[str], begun_unix_s: float, texts: Sequence[str], redactor: Redactor
) -> tuple[StartedRun, Blob] | None:
    """Find the newest run whose log was opened after the command began, with that log; None when there is
    none."""
    found = [(begun, run) for run in _runs_near(argv, texts) if (begun := _begun(run))]
    found = [one for one in found if begun_unix_s <= one[0] <= time.time()]
    if not found:
        return None
    begun, run = max(found, key=lambda one: (one[0], str(one[1].path)))
    log = run.watch if run.watch.is_file() else run.events
    blob = file_blob(log, f"log of {run.name}, which the command started", redactor)
    if blob.data is None:
        what = f"first line of the log of {run.name}"
        blob = text_blob(_first_line(log), log.name, what, redactor)
    named = _of_run(run, redactor)
    return StartedRun(**named, begun_unix_s=begun, log=blob.artifact.sha256), blob


def _runs_near(argv: Sequence[str], texts: Sequence[str]) -> list[RunFolder]:
    """Find runs where the command may have put one: in paths that it was given or printed, in ./runs and
    ./flips."""
    said = (*argv, *(text[-EXCERPT_BYTES:] for text in texts))
    words = {word for text in said for word in _WORD.findall(text)}
    found: set[Path] = set()
    for place in {Path.cwd() / word for word in (words | {"runs", "flips"})}:
        with contextlib.suppress(OSError, ValueError):
            if place.is_dir():
                inner = [place, *place.glob("*"), *place.glob("arms/*"), *place.glob("*/arms/*")]
                found |= {path.resolve() for path in inner if is_run(path)}
    return [RunFolder(path) for path in found]


def _begun(run: RunFolder) -> float | None:
    """When the run's log was opened; None when it has no such line."""
    for path in (run.watch, run.events):
        with contextlib.suppress(OSError, EngineError):
            if path.is_file():
                return logs.begun_of(_first_line(path))
    return None


def _first_line(path: Path) -> bytes:
    with open_regular(path, "log") as file:
        return file.readline(logs.FIRST_LINE_BYTES)


def _run(
    argv: Sequence[str], out: IO[bytes], err: IO[bytes], limit_s: float
) -> tuple[int | None, float]:
    """Return the exit status as a shell reports it (None after a timeout), and the seconds."""
    begun_s = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise BadInput.expected("command", argv[0], "to start it", found) from None
    try:
        code = process.wait(limit_s)
    except BaseException as error:
        # Kill the whole session, so that everything the command started ends with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, time.monotonic() - begun_s
    return (code if code >= 0 else 128 - code), time.monotonic() - begun_s


def _excerpt(head: bytes, stream: IO[bytes], redactor: Redactor) -> str:
    """The beginning and the end of an output, redacted."""
    stream.seek(max(len(head), stream.seek(0, os.SEEK_END) - EXCERPT_BYTES))
    tail = stream.read(EXCERPT_BYTES)
    # Redact before cutting: half a secret has no recognisable form.
    text = redactor.text((head + tail).decode("utf-8", "replace")).text
    if len(text) <= 2 * EXCERPT_BYTES:
        return text
    return f"{text[:EXCERPT_BYTES]}\n[...]\n{text[-EXCERPT_BYTES:]}"
