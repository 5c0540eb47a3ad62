"""Failures recorded in a run's logs: alerts, failed checks, contradictions, exits. Each is one line of a log.

An experiment asks whether another run shows the same (`shown`): the same id, and the same `sign`, which of an exit is
the exception, the line that raised it and its words, of an identity or check its words, both without numbers, and of an
alert the part that it is about. No is
an answer only where that run has done the work: half as many steps and rows again as the observed run had done, or all
of its steps, for as long as the window of the alert, with a pass of the check or identity. If anything else ends the
run, the answer is unknown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

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
    RunStarted,
    ScriptEnded,
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
    sign: str = ""
    """Words that tell it from another failure with the same id; empty in observations of earlier versions, of which any
    failure with the id is the same."""
    rows: int = 0
    """Rows trained on until then; 0 where that is not known."""
    total: int = 0
    """Steps of the whole run; 0 where that is not known."""

    @property
    def name(self) -> str:
        """The kind and id as typed: `alert gpu_idle`."""
        return f"{self.kind} {self.id}"


def observed_fields(observed: Observed) -> dict[str, Any]:
    """Return an observation for JSON, without the fields that those of earlier versions do not have."""
    fields = dataclasses.asdict(observed)
    return {name: value for name, value in fields.items() if value or name not in _NEW}


_NEW = ("sign", "rows", "total")

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
    id_, first, work = run_id(run), None, _Work()
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            event = line.event
            first = line.unix_s if first is None else min(first, line.unix_s)
            work.add(event)
            told = _told(event, work)
            if told is None:
                continue
            step = work.steps if told.step is None else told.step
            one = Observed(
                kind=told.kind,
                id=told.id,
                text=told.text,
                run=run.name,
                run_id=id_,
                log=log,
                seq=event.seq,
                sha256=hashlib.sha256(line.raw).hexdigest(),
                step=step,
                after_s=line.unix_s - first,
                window_s=_window_s(event),
                sign=told.sign,
                rows=work.rows_until(step),
            )
            found[told.kind, told.id] = told.rank, one
    ranked = sorted(found.values(), key=lambda each: each[0])
    return [replace(one, total=work.total) for _, one in ranked]


def observation(run: RunFolder, name: str) -> Observed:
    """The newest line of that name, such as `alert gpu_idle`; without a name the one that proves most. Raises
    BadInput."""
    found = observations(run)
    for one in found:
        if name in ("", one.name, one.id) or name == one.kind == "exit":
            return one
    known = ", ".join(one.name for one in found) or "nothing: no check failed, no alert, no bad end"
    raise BadInput.expected("observation", run.path, name or "something that went wrong", known)


class _Told(NamedTuple):
    """A failure that a line records."""

    kind: Kind
    id: str
    text: str
    rank: int
    step: int | None
    """None where the line has none."""
    sign: str
    earlier_sign: str = ""
    """Sign in earlier versions, where that said less."""

    def is_same(self, observed: Observed) -> bool:
        if (self.kind, self.id) != (observed.kind, observed.id):
            return False
        return observed.sign in ("", self.sign, self.earlier_sign)


class _Work:
    """Steps and rows of a run, as far as its log has been read."""

    def __init__(self) -> None:
        self.steps = 0
        self.total = 0
        """Steps of the whole run, where something says so: its settings, its framework, or its end."""
        self.ended: ScriptEnded | None = None
        self._rows: list[tuple[int, int]] = []
        """Number of each step, and the rows until then."""

    def add(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self.total = event.steps
            case StepDone():
                self.steps = max(self.steps, event.step)
                self.total = event.total_steps or self.total
                before = self._rows[-1][1] if self._rows else 0
                self._rows.append((event.step, before + (event.rows or 0)))
            case ScriptEnded():
                self.ended = event
            case RunFinished(state="completed") | TrainerExited(returncode=0):
                self.total = self.total or self.steps

    def rows_until(self, step: int) -> int:
        return max((rows for at, rows in self._rows if at <= step), default=0)


def _told(event: AnyEvent, work: _Work) -> _Told | None:
    """Return what a line says went wrong; `work` is what was read before it."""
    match event:
        case Judged() if (rank := RANKS.get((event.by, event.level))) is not None:
            kind = cast(Kind, event.by)
            # The text of an alert names threads, places and rates that differ from run to run.
            words = event.part if event.by == ALERT else _unnumbered(event.text.partition(":")[0])
            sign, earlier = f"{event.id} {words}".strip(), event.id if event.by == ALERT else ""
            return _Told(kind, event.id, event.text, rank, event.step, sign, earlier)
        case TrainerExited() if event.state.lower() != "completed":
            id_ = event.state.lower()
            how = " ".join([id_, event.signal or "", _of_exception(work.ended)]).strip()
            code = f" with code {event.returncode}" if how == id_ and event.returncode else ""
            return _Told("exit", id_, event.sentence, 5, None, how + code, how)
    return None


def _of_exception(ended: ScriptEnded | None) -> str:
    """Return the exception that ended a script with the line that raised it, without folders and numbers."""
    if ended is None or ended.exception is None:
        return ""
    if "OutOfMemory" in ended.exception or ended.exception == "MemoryError":
        # Which allocation fails first depends on the machine.
        return ended.exception
    path, _, place = (ended.where or "").rpartition("/")
    return f"{ended.exception} at {place or path}: {_unnumbered(ended.message or '')}"


def raised_at(observed: Observed) -> tuple[str, int] | None:
    """Return the file's name and the line that raised what was observed; None where that is not known."""
    found = re.search(r" at ([^/\s:]+):(\d+)", observed.sign) if observed.kind == "exit" else None
    return None if found is None else (found[1], int(found[2]))


def _unnumbered(text: str) -> str:
    """Return words without numbers, addresses and folders, which differ from run to run."""
    text = re.sub(r"(/[^\s/'\"]+)+/", "", text)
    return " ".join(re.sub(r"0x[0-9a-fA-F]+|[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", text).split())


def _window_s(event: AnyEvent) -> float:
    if not isinstance(event, Judged) or event.by != ALERT or event.id in STALLS:
        return 0.0
    return max(0.0, event.to_unix_s - event.from_unix_s)


def is_shown(observed: Observed, view: RunView, *, steps: int) -> bool | None:
    """Whether a run that is still going on shows it by now; None while it has not gone on for long enough. An exit is
    known at the end alone."""
    lasted_s = (view.last_unix_s or 0.0) - (view.first_unix_s or 0.0)
    no = False if view.last_step >= steps and lasted_s >= observed.window_s else None
    if no is False and observed.rows:
        rows = [one or 0 for one in view.steps.values("rows")]
        no = False if not any(rows) or sum(rows) >= rows_past(observed) else None
    match observed.kind:
        case "alert":
            alert = view.alerts.get(observed.id)
            found = None if alert is None else _told(alert, _Work())
            return True if found is not None and found.is_same(observed) else no
        case "check":
            check = view.checks.get(observed.id)
            if check is not None and check.level == FAIL:
                return True
            return no if check is not None and check.step >= observed.step else None
        case "identity":
            return True if any(_is_wrong(observed, one) for one in view.identities) else no
        case "exit":
            return no


def rows_past(observed: Observed) -> int:
    """Return the rows after which a run counts as one that does not show it: half as many again."""
    return math.ceil(1.5 * observed.rows)


def _is_wrong(observed: Observed, one: Judged) -> bool:
    return one.id == observed.id and one.level in WRONG


def shown(observed: Observed, run: RunFolder, *, steps: int) -> tuple[bool | None, str]:
    """Whether the logs of a run that has ended show it, with the reason; None where they do not tell. Raises
    RunLogError.

    A run does not show it if it made `steps` steps on as many rows as `rows_past`, and went on for as long as the alert
    had taken, or made all of its own steps and as many as the whole observed run; if it did not break; and if it
    answered the check or identity with a pass.
    """
    work, exits, first, last, other = _Work(), "", math.inf, 0.0, ""
    is_whole: bool | None = None
    answered = observed.kind in ("alert", "exit")
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            event = line.event
            first, last = min(first, line.unix_s), max(last, line.unix_s)
            work.add(event)
            found = _told(event, work)
            if found is not None and (found.kind, found.id) == (observed.kind, observed.id):
                if found.is_same(observed):
                    return True, found.text
                other = found.text if found.kind != "exit" else found.sign
            match event:
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
                    if not observed.sign and _is_wrong(observed, event):
                        return True, event.text
                    answered = answered or event.level == PASS
                case StepDone(loss=float() as loss) if observed.id == "finite_weights":
                    # The probe asks for it where a loss is not finite. A loss of 0 trains nothing.
                    is_past = event.step > observed.step
                    answered = answered or (is_past and math.isfinite(loss) and loss != 0)
    if not exits:
        return None, "nothing watched it to its end"
    if other:
        return None, f"it failed otherwise: {other}"
    done = work.steps
    made = f"it made {done} steps in {last - first:.0f} s and ended as {exits}"
    if exits in BROKEN:
        failed = _of_exception(work.ended)
        return None, f"{made}{f': {failed}' if failed else ''}"
    rows, wanted = work.rows_until(done), rows_past(observed) if observed.sign else 0
    went_on = done >= steps and last - first >= observed.window_s
    whole = is_whole and done >= observed.step
    if observed.sign:
        went_on = went_on and (not rows or rows >= wanted)
        whole = whole and done >= (observed.total or math.ceil(1.5 * observed.step))
    if not whole and not went_on:
        on = f" on {wanted} rows" if rows and wanted else ""
        return None, f"{made}; it takes {steps} steps{on} and {observed.window_s:.0f} s to tell"
    if not answered:
        return None, f"{made}; {observed.name} was not answered with a pass"
    return False, made


def trace_of(run: RunFolder, step: int) -> str:
    """Return a hash of the losses and rows of a run's steps until `step`, and of how it ended: equal for two runs that
    computed the same to the bit. Raises RunLogError."""
    found = hashlib.sha256()
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            match line.event:
                case StepDone() as one if one.step <= step:
                    found.update(repr((one.step, one.loss, one.rows, one.rows_digest)).encode())
                case ScriptEnded() as ended:
                    found.update(_of_exception(ended).encode())
    return found.hexdigest()
