"""Running a command so that it is evidence: argv, exit status, hash and excerpt of what it printed.

No shell is between; one that is wanted is named (`bash -c '...'`). With an expectation that was said
before it ran, the command is a reproduction, which counts as one when it left a run: a log that began
while the command ran is looked for where it was told to put one, in what it printed, in ./runs and in
./flips. It gets the environment as it is; what is kept of its output and its arguments has no secrets in
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from msgspec import UNSET

from engine.errors import BadInput, EngineError
from engine.files import open_regular
from engine.findings.capture import (
    LARGEST_KEPT_BYTES,
    READ_BYTES,
    Blob,
    Capture,
    file_blob,
    json_blob,
    text_blob,
)
from engine.findings.finding import Artifact, CommandRun, StartedRun
from engine.findings.form import now_utc
from engine.findings.logs import run_id
from engine.findings.redact import Redactor
from engine.log.events import LogOpened
from engine.log.folder import RunFolder, is_run
from engine.log.read import decode_line

EXCERPT_BYTES = 4096
FIRST_LINE_BYTES = 1 << 16
_WORD = re.compile(r"[^\s'\"`;|&<>()=]+")
COMMAND_LIMIT_S = 600.0


def capture_command(
    command: str | Sequence[str],
    redactor: Redactor,
    *,
    cwd: Path | None = None,
    expect_exit: int | None = None,
    expect_text: str = "",
    limit_s: float = COMMAND_LIMIT_S,
    environ: Mapping[str, str] | None = None,
) -> Capture:
    """Run a command, without a shell, and keep argv, exit status, hash and excerpt of both outputs.

    With `expect_exit` or `expect_text` it is a reproduction: they were said before it ran. Raises
    BadInput for a command that cannot be started.
    """
    try:
        argv = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise BadInput.expected("command", command, "words of a shell", str(error)) from None
    if not argv:
        raise BadInput.expected("command", "of the evidence", "a program", "nothing")
    begun_unix_s = time.time()
    # A secret that an argument holds is one in what is printed, too.
    redactor = redactor.knowing(argv)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status, seconds = _run(argv, cwd, out, err, limit_s, environ)
        blobs = [
            _output_blob(stream, name, argv, redactor)
            for stream, name in ((out, "stdout"), (err, "stderr"))
        ]
        excerpts = [_excerpt(stream, redactor) for stream in (out, err)]
        texts = [_beginning(stream, redactor) for stream in (out, err)]
    started = _started_run(argv, cwd or Path.cwd(), begun_unix_s, texts, redactor)
    expect_text = redactor.text(expect_text).text
    kept_argv, found = redactor.argv(argv)
    record: dict[str, Any] = {
        "argv": list(kept_argv),
        "cwd": redactor.text(str(cwd or Path.cwd())).text,
        "exit_status": status,
        "timed_out_after_s": limit_s if status is None else None,
        "expect_exit": expect_exit,
        "expect_text": expect_text,
        "started": now_utc(begun_unix_s),
        "seconds": round(seconds, 3),
        "redacted": found,
    }
    for name, blob, excerpt in zip(("stdout", "stderr"), blobs, excerpts, strict=True):
        record[name] = {
            "bytes": blob.artifact.size,
            "sha256": blob.artifact.sha256,
            "redacted": blob.artifact.redacted,
            "excerpt": excerpt,
        }
    locator = CommandRun(
        argv=kept_argv,
        exit_status=status,
        stdout_sha256=blobs[0].artifact.sha256,
        stderr_sha256=blobs[1].artifact.sha256,
        expect_exit=expect_exit,
        expect_text=expect_text,
        as_expected=as_expected(status, texts, expect_exit, expect_text),
        started=UNSET if started is None else started[0],
    )
    blob = json_blob(record, "command.json", f"`{shlex.join(kept_argv)}`", redactor)
    return Capture(
        locator=locator,
        blob=blob,
        attached=tuple(b for b in blobs if b.artifact.size),
        needed=() if started is None else (started[1],),
    )


def _started_run(
    argv: Sequence[str], cwd: Path, begun_unix_s: float, texts: Sequence[str], redactor: Redactor
) -> tuple[StartedRun, Blob] | None:
    """The newest run whose log began after the command did, with that log; None where there is none."""
    found: list[tuple[float, RunFolder]] = []
    for path in _run_folders(argv, cwd, texts):
        run = RunFolder(path)
        begun = _begun(run)
        if begun is not None and begun_unix_s <= begun <= time.time():
            found.append((begun, run))
    if not found:
        return None
    begun, run = max(found, key=lambda one: (one[0], str(one[1].path)))
    log = run.watch if run.watch.is_file() else run.events
    blob = file_blob(log, f"log of {run.name}, which the command started", redactor)
    if blob.data is None:
        with open_regular(log, "log") as file:
            first = file.readline(FIRST_LINE_BYTES)
        blob = text_blob(first, log.name, f"first line of the log of {run.name}", redactor)
    name = redactor.text(run.name).text
    started = StartedRun(run=name, run_id=run_id(run), begun_unix_s=begun, log=blob.artifact.sha256)
    return started, blob


def _run_folders(argv: Sequence[str], cwd: Path, texts: Sequence[str]) -> set[Path]:
    """Runs where the command may have put one: paths that it was given or printed, ./runs and ./flips."""
    words = {
        word
        for text in (*argv, *(t[-EXCERPT_BYTES:] for t in texts))
        for word in _WORD.findall(text)
    }
    places = {cwd / "runs", cwd / "flips", *(cwd / word for word in words)}
    found: set[Path] = set()
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            if not place.is_dir():
                continue
            inner = [place, *place.glob("*"), *place.glob("arms/*"), *place.glob("*/arms/*")]
            found |= {path.resolve() for path in inner if is_run(path)}
    return found


def _begun(run: RunFolder) -> float | None:
    """When the log that names a run was opened; None where it has no such line."""
    for path in (run.watch, run.events):
        with contextlib.suppress(OSError, EngineError):
            if not path.is_file():
                continue
            with open_regular(path, "log") as file:
                first = file.readline(FIRST_LINE_BYTES)
            return begun_of(first)
    return None


def begun_of(first_line: bytes) -> float | None:
    """The time that the first line of a log says it was opened; None where it says none."""
    event = decode_line(first_line.rstrip(b"\n"), "the first line")
    return event.unix_s if isinstance(event, LogOpened) else None


def as_expected(
    status: int | None, texts: Sequence[str], expect_exit: int | None, expect_text: str
) -> bool | None:
    """Whether a command showed what it was to show; None where nothing was expected."""
    if expect_exit is None and not expect_text:
        return None
    good_exit = expect_exit is None or status == expect_exit
    return good_exit and (not expect_text or any(expect_text in text for text in texts))


def _run(
    argv: Sequence[str],
    cwd: Path | None,
    out: IO[bytes],
    err: IO[bytes],
    limit_s: float,
    environ: Mapping[str, str] | None,
) -> tuple[int | None, float]:
    begun_s = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=None if environ is None else dict(environ),
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
    except subprocess.TimeoutExpired:
        # The whole session: what the command started ends with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None, time.monotonic() - begun_s
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return (code if code >= 0 else 128 - code), time.monotonic() - begun_s


def _output_blob(stream: IO[bytes], name: str, argv: Sequence[str], redactor: Redactor) -> Blob:
    """All of a short output; hash and size of a long one."""
    what = f"{name} of {argv[0]}"
    stream.seek(0)
    head = stream.read(LARGEST_KEPT_BYTES + 1)
    if len(head) <= LARGEST_KEPT_BYTES:
        return text_blob(head, f"{name}.txt", what, redactor)
    digest, size = hashlib.sha256(head), len(head)
    while piece := stream.read(READ_BYTES):
        digest.update(piece)
        size += len(piece)
    artifact = Artifact(
        sha256=digest.hexdigest(), name=f"{name}.txt", size=size, what=what, kept=False
    )
    return Blob(artifact=artifact, data=None)


def _beginning(stream: IO[bytes], redactor: Redactor) -> str:
    stream.seek(0)
    return redactor.text(stream.read(LARGEST_KEPT_BYTES).decode("utf-8", "replace")).text


def _excerpt(stream: IO[bytes], redactor: Redactor) -> str:
    """The beginning and the end of an output, without its secrets."""
    stream.seek(0)
    head = stream.read(LARGEST_KEPT_BYTES)
    stream.seek(max(len(head), stream.seek(0, os.SEEK_END) - EXCERPT_BYTES))
    tail = stream.read(EXCERPT_BYTES)
    # Cleaned before it is cut: half a secret has no form that could be found.
    text = redactor.text((head + tail).decode("utf-8", "replace")).text
    if len(text) <= 2 * EXCERPT_BYTES:
        return text
    return f"{text[:EXCERPT_BYTES]}\n[...]\n{text[-EXCERPT_BYTES:]}"
