"""Running a command so that it is evidence: argv, exit status, hash and excerpt of what it printed.

No shell is between; one that is wanted is named (`bash -c '...'`). With an expectation that was said
before it ran, the command is a reproduction. It gets the environment as it is; what is kept of its
output and its arguments has no secrets in it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from engine.errors import BadInput
from engine.evidence.capture import (
    LARGEST_KEPT_BYTES,
    READ_BYTES,
    Blob,
    Capture,
    json_blob,
    text_blob,
)
from engine.evidence.finding import Artifact, CommandRun
from engine.evidence.form import now_utc
from engine.evidence.redact import Redactor

EXCERPT_BYTES = 4096
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
    begun = now_utc()
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
    expect_text = redactor.text(expect_text).text
    kept_argv, found = redactor.argv(argv)
    record: dict[str, Any] = {
        "argv": list(kept_argv),
        "cwd": redactor.text(str(cwd or Path.cwd())).text,
        "exit_status": status,
        "timed_out_after_s": limit_s if status is None else None,
        "expect_exit": expect_exit,
        "expect_text": expect_text,
        "started": begun,
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
    )
    blob = json_blob(record, "command.json", f"`{shlex.join(kept_argv)}`", redactor)
    return Capture(locator=locator, blob=blob, attached=tuple(b for b in blobs if b.artifact.size))


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
