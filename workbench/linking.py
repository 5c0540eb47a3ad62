"""Evidence from two lines that a person types: where it is, and which part of it is meant.

    where                          which part
    runs/kd-1                      metric loss | metric loss 3-9 | events 3-9 | device 3-9 | watch 3-9
                                   time 10-20 | exit | alert gpu_idle
    flips/20260101-120000-x        (nothing)
    notes.txt                      (nothing) | lines 3-9
    ! COMMAND                      (nothing) | exit 0 | text SOMETHING: what a reproduction must show
    : WHAT A PERSON SAYS           (nothing)

It is the same as `engine why link` with its options.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import BadInput
from engine.findings import capture
from engine.findings.capture import Capture, capture_file, capture_statement
from engine.findings.command import capture_command
from engine.findings.context import run_blobs, view_of
from engine.findings.flips import capture_flip, is_flip
from engine.findings.redact import Redactor
from engine.log.folder import RunFolder, is_run

PARTS = "metric loss 3-9, events 3-9, device 3-9, watch 3-9, time 10-20, exit, or alert ID"


def captured(where: str, part: str = "") -> Capture:
    """The evidence that is meant. Runs a command, where one is. Raises BadInput or RunLogError."""
    where, words, redactor = where.strip(), part.split(), Redactor()
    if where.startswith("!"):
        return _command(where[1:].strip(), part.strip(), redactor)
    if where.startswith(":"):
        return capture_statement(where[1:].strip(), redactor)
    path = Path(where).expanduser()
    if not where or not path.exists():
        raise BadInput.expected(
            "evidence",
            where or "(empty)",
            "a run, a flip, a file, `! COMMAND` or `: WORDS`",
            "none",
        )
    if is_flip(path):
        return capture_flip(path, redactor)
    if is_run(path):
        run = RunFolder(path)
        return _of_run(run, words, redactor).with_attached(run_blobs(run, redactor))
    if path.is_dir():
        raise BadInput.expected("evidence", path, "a run, a flip or a file", "another folder")
    first, last = _range(words[1]) if words[:1] == ["lines"] and len(words) == 2 else (0, 0)
    if words and not first:
        raise BadInput.expected("part", path, "lines 3-9, or nothing", repr(part))
    return capture_file(path, redactor, first, last)


def _command(command: str, expected: str, redactor: Redactor) -> Capture:
    kind, _, rest = expected.partition(" ")
    rest = rest.strip()
    if kind == "exit" and rest.isdecimal():
        return capture_command(command, redactor, expect_exit=int(rest))
    if kind == "text" and rest:
        return capture_command(command, redactor, expect_text=rest)
    if expected:
        raise BadInput.expected("part", "of a command", "exit N, text WORDS, or nothing", expected)
    return capture_command(command, redactor)


def _of_run(run: RunFolder, words: list[str], redactor: Redactor) -> Capture:
    match words:
        case ["exit"]:
            return capture.capture_exit(run, redactor)
        case ["alert", id_]:
            return capture.capture_alert(run, id_, redactor)
        case ["metric", name]:
            return capture.capture_metric(run, name, redactor)
        case ["metric", name, steps]:
            first, last = _range(steps)
            return capture.capture_metric(run, name, redactor, first_step=first, last_step=last)
        case ["events" | "device" | "watch" as log, lines]:
            first, last = _range(lines)
            return capture.capture_events(run, log, first, last, redactor)
        case ["time", seconds]:
            first, last = _range(seconds)
            begin = view_of(run).first_unix_s or 0.0
            return capture.capture_window(run, "events", begin + first, begin + last, redactor)
    found = " ".join(words) or "nothing"
    raise BadInput.expected("part", f"of the run {run.name}", PARTS, found)


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise BadInput.expected("part", "of the evidence", "FIRST or FIRST-LAST", repr(text))
    return int(first), int(last) if dash else int(first)
