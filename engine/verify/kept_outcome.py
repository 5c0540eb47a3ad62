"""The outcome of a verification, kept in the run folder: verified.json.

    {"level": "pass", "reason": "...", "steps": 30, "rounding": "", "engine": "0.1.0", "at": "2026-01-31T12:00:00Z",
     "log": {"bytes": 18234, "sha256": "..."}}

`log` identifies events.jsonl at the start of the verification. If the log has another size or content now, the outcome
is stale, which counts as not verified. The file is not signed: anyone who can write to the folder can write it too.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Literal

import msgspec

from engine.errors import RunLogError
from engine.files import read_json_object
from engine.limits import LOG_COUNT, LOG_FILE, RUN_FILE
from engine.log.folder import RunFolder, write_whole
from engine.log.text import one_line
from engine.receipts.receipt import digest_of_log
from engine.sealing import now_utc
from engine.terminal import clipped
from engine.verdict import Level, Verdict
from engine.version import VERSION

NAME = "verified.json"
MAX_REASON_CHARACTERS = 300
"""Maximum length of a reason in a line about an outcome, in characters."""


class Log(msgspec.Struct, frozen=True):
    """Size and hash of the log at the start of a verification."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=LOG_FILE.most)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The kept result of a run's verifications."""

    level: Literal["pass", "unknown", "fail"]
    reason: str
    steps: Annotated[int, msgspec.Meta(ge=0, le=LOG_COUNT.most)]
    """Number of compared steps."""
    rounding: str
    """Size of the allowed rounding and the reason for it; empty if every bit had to be equal."""
    engine: str
    at: Annotated[str, msgspec.Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z$")]
    log: Log


def digest_log(run: RunFolder) -> Log | None:
    """Return the current size and hash of the log; None for a log that cannot be read."""
    digest = digest_of_log(run.events)
    if digest is None or digest["sha256"] is None:
        return None
    return Log(bytes=digest["bytes"], sha256=digest["sha256"])


def keep_outcome(run: RunFolder, log: Log, verdict: Verdict, steps: int, rounding: str) -> Outcome:
    """Write the outcome of verifying `log` to the run folder, and return the outcome that the file then has.

    An earlier outcome of the same log with more steps stays, unless the new one is a failure. Raises RunLogError,
    DiskFull.
    """
    new = Outcome(
        level=_NAMES[verdict.level],
        reason=verdict.reason,
        steps=steps,
        rounding=rounding,
        engine=VERSION,
        at=now_utc(),
        log=log,
    )
    try:
        previous = read_outcome(run)
    except RunLogError:
        previous = None  # a malformed outcome is replaced
    if (
        previous is not None
        and previous.log == log
        and previous.steps > steps
        and new.level != "fail"
    ):
        return previous
    text = json.dumps(msgspec.to_builtins(new), indent=2) + "\n"
    write_whole(run.path / NAME, text, "outcome")
    return new


def read_outcome(run: RunFolder) -> Outcome | None:
    """Read the kept outcome of a run; None if there is none. Raises RunLogError if the file is malformed."""
    path = run.path / NAME
    if not os.path.lexists(path):
        return None
    record = read_json_object(path, "outcome", RUN_FILE, error=RunLogError)
    try:
        return msgspec.convert(record, Outcome)
    except msgspec.ValidationError as error:
        words = clipped(str(error), 200)
        raise RunLogError.expected("outcome", path, "the fields of an outcome", words) from None


def is_stale(run: RunFolder, outcome: Outcome) -> bool:
    """Return whether the log changed after the outcome was made."""
    try:
        # Compare the size first, so that a long log that has grown is not hashed.
        if run.events.stat().st_size != outcome.log.bytes:
            return True
        return digest_log(run) != outcome.log
    except OSError:
        return True


def outcome_text(outcome: Outcome | None, *, stale: bool, last_step: int) -> str:
    """Format the outcome for a run of `last_step` steps in one line: `pass, 30 steps to the bit, 2026-01-31`."""
    if outcome is None:
        return "not verified"
    day = outcome.at[:10]
    if stale:
        return f"stale, the log has changed since {day}"
    if outcome.level != "pass":
        return f"{outcome.level}: {clipped(one_line(outcome.reason), MAX_REASON_CHARACTERS)}, {day}"
    steps = f"{outcome.steps:,}" + (f" of {last_step:,}" if outcome.steps < last_step else "")
    precision = "within rounding" if outcome.rounding else "to the bit"
    return f"pass, {steps} steps {precision}, {day}"


_NAMES: dict[Level, Literal["pass", "unknown", "fail"]] = {
    Level.PASS: "pass",
    Level.UNKNOWN: "unknown",
    Level.FAIL: "fail",
}
