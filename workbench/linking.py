"""Parse evidence from two typed lines: where it is, and which part of it is meant.

    where                          which part
    runs/kd-1                      metric loss | metric loss 3-9 | events 3-9 | device 3-9 | watch 3-9
                                   time 10-20 | exit | alert gpu_idle | check step_rows
    flips/20260101-120000-x        (nothing)
    notes.txt                      (nothing) | lines 3-9
    ! COMMAND                      (nothing) | exit 0 | text SOMETHING: what a reproduction must show
    : WHAT A PERSON SAYS           (nothing)

The result is that of `engine why link` with its options.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import BadInput
from engine.findings.capture import (
    Capture,
    capture_command,
    capture_part,
    capture_statement,
    whole_or_run,
)
from engine.findings.context import run_blobs, view_of
from engine.findings.logs import Window
from engine.findings.redact import Redactor
from engine.log.folder import RunFolder

PARTS = (
    "metric loss 3-9, events 3-9, device 3-9, watch 3-9, time 10-20, exit, alert ID, or check ID"
)


def captured(where: str, part: str = "") -> Capture:
    """Capture the evidence that is meant; runs the command if it is one. Raises BadInput or RunLogError."""
    where, words, redactor = where.strip(), part.split(), Redactor()
    if where.startswith("!"):
        return _command(where[1:].strip(), part.strip(), redactor)
    if where.startswith(":"):
        return capture_statement(where[1:].strip(), redactor)
    path = Path(where).expanduser()
    if not where or not path.exists():
        expected = "a run, a flip, a file, `! COMMAND` or `: WORDS`"
        raise BadInput.expected("evidence", where or "(empty)", expected, "none")
    lines = _range(words[1]) if words[:1] == ["lines"] and len(words) == 2 else (0, 0)
    if path.is_file() and words and not lines[0]:
        raise BadInput.expected("part", path, "lines 3-9, or nothing", repr(part))
    found = whole_or_run(path, redactor, lines)
    if isinstance(found, Capture):
        return found
    return _of_run(found, words, redactor).with_attached(run_blobs(found, redactor))


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
            return capture_part(run, redactor, exit_=True)
        case ["alert", id_]:
            return capture_part(run, redactor, alert=id_)
        case ["check", id_]:
            return capture_part(run, redactor, check=id_)
        case ["metric", name]:
            return capture_part(run, redactor, metric=name)
        case ["metric", name, steps]:
            first, last = _range(steps)
            window = Window(first_step=first, last_step=last)
            return capture_part(run, redactor, metric=name, window=window)
        case ["events" | "device" | "watch" as log, lines]:
            return capture_part(run, redactor, log=log, seqs=_range(lines))
        case ["time", seconds]:
            begin = view_of(run).first_unix_s or 0.0
            first, last = _range(seconds)
            return capture_part(run, redactor, window=Window(begin + first, begin + last))
    found = " ".join(words) or "nothing"
    raise BadInput.expected("part", f"of the run {run.name}", PARTS, found)


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise BadInput.expected("part", "of the evidence", "FIRST or FIRST-LAST", repr(text))
    return int(first), int(last) if dash else int(first)
