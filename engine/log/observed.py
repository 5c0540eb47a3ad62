"""Failures recorded in a run's logs: alerts, failed checks, contradictions, exits. Each is one line of a log.

An experiment asks whether another run shows the same (`shown`). No is an answer only where that run gives it: it went
on past the step, for as long as the alert looked at, and answered the check or identity with a pass. Otherwise it is
unknown.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from engine.errors import BadInput, RunLogError
from engine.files import open_plain
from engine.limits import LOG_LINE
from engine.log.events import (
    ALERT,
    CHECK,
    FAIL,
    IDENTITY,
    PASS,
    SUSPICION,
    AnyEvent,
    Judged,
    LogOpened,
    RunFinished,
    StepDone,
    TrainerExited,
)
from engine.log.folder import RunFolder
from engine.log.read import decode_line
from engine.log.view import RunView

Kind: TypeAlias = Literal["check", "identity", "alert", "exit"]
Log: TypeAlias = Literal["events", "watch"]
LOGS: tuple[Log, ...] = get_args(Log)
WRONG = (FAIL, SUSPICION)
STALLS = ("stalled", "stalled_at_start")
"""Alerts that are ruled out as soon as a run makes a step."""
BROKEN = frozenset(
    {
        *("failed", "crashed", "alloc_failed", "device_failed", "disk_full", "usage", "bad_input"),
        *("internal_error", "oom_memcg", "oom_global"),
    }
)
"""States of a run that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One line of a run's log that records a failure."""

    kind: Kind
    id: str
    """Id of the check, identity or alert, or state of the exit."""
    text: str
    """Message of the line."""
    run: str
    run_id: str
    log: Log
    seq: int
    sha256: str
    """SHA-256 of the line without its line end."""
    step: int
    """Number of steps before the line."""
    after_s: float
    """Seconds from the start of the run to the line."""
    window_s: float = 0.0
    """Length of an alert's window in seconds; 0 for a stall."""

    @property
    def name(self) -> str:
        """The kind and id as typed: `alert gpu_idle`."""
        return f"{self.kind} {self.id}"


RANKS = {
    (CHECK, FAIL): 0,
    (IDENTITY, FAIL): 1,
    (ALERT, FAIL): 2,
    (ALERT, SUSPICION): 3,
    (IDENTITY, SUSPICION): 4,
}
"""Rank of each kind of failure, from the strongest evidence to the weakest."""


class Line(NamedTuple):
    raw: bytes
    """The line without its line end."""
    unix_s: float
    event: AnyEvent


def log_of(run: RunFolder, log: Log) -> Path:
    return run.events if log == "events" else run.watch


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a log with their times; none where the log is missing. Raises RunLogError."""
    origin_s = 0.0
    try:
        with open_plain(path) as file:
            number = 0
            while (raw := file.readline(LOG_LINE.most + 1)).endswith(b"\n"):
                event = decode_line(raw[:-1], f"{path} line {number + 1}")
                if event.seq != number:
                    raise RunLogError.expected("run log", path, f"line {number}", str(event.seq))
                if isinstance(event, LogOpened):
                    origin_s = event.unix_s - event.t_s
                number += 1
                yield Line(raw[:-1], origin_s + event.t_s, event)
    except FileNotFoundError:
        return
    except OSError as error:
        found = error.strerror or str(error)
        raise RunLogError.expected("run log", path, "to read it", found) from error


def run_id(run: RunFolder) -> str:
    """An id that is the same wherever the run's folder lies: a hash of the first line of its oldest log. Raises
    RunLogError."""
    for log in reversed(LOGS):
        for line in lines_of(log_of(run, log)):
            return hashlib.sha256(line.raw + b"\n").hexdigest()[:16]
    raise RunLogError.expected("run folder", run.path, "a log with a line in it", "none")


def observations(run: RunFolder) -> list[Observed]:
    """Everything that went wrong by a run's logs, what proves most first. Raises RunLogError."""
    found: dict[tuple[Kind, str], tuple[int, Observed]] = {}
    id_, first, step = run_id(run), None, 0
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            event = line.event
            first = line.unix_s if first is None else min(first, line.unix_s)
            if isinstance(event, StepDone):
                step = event.step
            told = _told(event)
            if told is None:
                continue
            kind, name, text, rank, at = told
            one = Observed(
                kind=kind,
                id=name,
                text=text,
                run=run.name,
                run_id=id_,
                log=log,
                seq=event.seq,
                sha256=hashlib.sha256(line.raw).hexdigest(),
                step=step if at is None else at,
                after_s=line.unix_s - first,
                window_s=_window_s(event),
            )
            found[kind, name] = rank, one
    return [one for _, one in sorted(found.values(), key=lambda each: each[0])]


def observation(run: RunFolder, name: str) -> Observed:
    """The newest line of that name, such as `alert gpu_idle`; without a name the one that proves most. Raises
    BadInput."""
    found = observations(run)
    for one in found:
        if name in ("", one.name, one.id) or name == one.kind == "exit":
            return one
    known = ", ".join(one.name for one in found) or "nothing: no check failed, no alert, no bad end"
    raise BadInput.expected("observation", run.path, name or "something that went wrong", known)


def _told(event: AnyEvent) -> tuple[Kind, str, str, int, int | None] | None:
    """What a line says went wrong: kind, id, words, rank among others, and the step where the line has one."""
    match event:
        case Judged() if (rank := RANKS.get((event.by, event.level))) is not None:
            return cast(Kind, event.by), event.id, event.text, rank, event.step
        case TrainerExited() if event.state.lower() != "completed":
            return "exit", event.state.lower(), event.sentence, 5, None
    return None


def _window_s(event: AnyEvent) -> float:
    if not isinstance(event, Judged) or event.by != ALERT or event.id in STALLS:
        return 0.0
    return max(0.0, event.to_unix_s - event.from_unix_s)


def is_shown(observed: Observed, view: RunView, *, steps: int) -> bool | None:
    """Whether a run that is still going on shows it by now; None while it has not gone on for long enough. An exit is
    known at the end alone."""
    lasted_s = (view.last_unix_s or 0.0) - (view.first_unix_s or 0.0)
    no = False if view.last_step >= steps and lasted_s >= observed.window_s else None
    match observed.kind:
        case "alert":
            return True if observed.id in view.alerts else no
        case "check":
            check = view.checks.get(observed.id)
            if check is not None and check.level == FAIL:
                return True
            return no if check is not None and check.step >= observed.step else None
        case "identity":
            return True if any(_is_wrong(observed, one) for one in view.identities) else no
        case "exit":
            return no


def _is_wrong(observed: Observed, one: Judged) -> bool:
    return one.id == observed.id and one.level in WRONG


def shown(observed: Observed, run: RunFolder, *, steps: int) -> tuple[bool | None, str]:
    """Whether the logs of a run that has ended show it, with the reason; None where they do not tell. Raises
    RunLogError.

    A run does not show it if it made `steps` steps and went on for as long as the alert had looked at, or made all of
    its own steps and as many as the observed run; if it did not break; and if it answered the check or identity with a
    pass.
    """
    done, exits, first, last = 0, "", math.inf, 0.0
    is_whole: bool | None = None
    answered = observed.kind in ("alert", "exit")
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            event = line.event
            first, last = min(first, line.unix_s), max(last, line.unix_s)
            told = _told(event)
            if told is not None and told[:2] == (observed.kind, observed.id):
                return True, told[2]
            match event:
                case StepDone():
                    done = max(done, event.step)
                case RunFinished():
                    is_whole = event.state == "completed"
                case TrainerExited():
                    exits = event.state.lower()
                    if is_whole is None:
                        is_whole = event.returncode == 0
                case Judged(by="check", id=observed.id):
                    passed = event.level == PASS and event.step >= observed.step
                    answered = answered or passed
                case Judged(by="identity", id=observed.id):
                    if _is_wrong(observed, event):
                        return True, event.text
                    answered = answered or event.level == PASS
    if not exits:
        return None, "nothing watched it to its end"
    made = f"it made {done} steps in {last - first:.0f} s and ended as {exits}"
    if exits in BROKEN:
        return None, made
    if not (is_whole and done >= observed.step) and (
        done < steps or last - first < observed.window_s
    ):
        return None, f"{made}; it takes {steps} steps and {observed.window_s:.0f} s to tell"
    if not answered:
        return None, f"{made}; {observed.name} was not answered with a pass"
    return False, made
