"""Find the failures recorded in a run's logs: alerts, failed checks, contradictions, exits. Each is one line of a
log.

An experiment asks whether another run shows the same failure (`shown`): a failure with the same id and the same
`sign`. The sign of an exit is the exception, the line that raised it and its message; the sign of a check or identity
is its message; the sign of an alert is the subject that it names. Messages are compared without their numbers.

The answer is no only if the other run did enough work without the failure: 1.5 times the steps and rows of the
observed run, or all of its own steps. For an alert it must also have run for as long as the alert's window, and for a
check or an identity it must also have logged a pass. If anything else ended the run, the answer is unknown.
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
"""Alerts that a run does not show once it has done a step."""
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
    """Number of steps done before the line."""
    after_s: float
    """Seconds from the start of the run to the line."""
    window_s: float = 0.0
    """Length of an alert's window in seconds; 0 for a stall."""
    sign: str = ""
    """Text that distinguishes failures with the same id; empty in observations of earlier versions, in which all
    failures with the same id count as the same."""
    rows: int = 0
    """Number of rows trained on before the line; 0 if not known."""
    total: int = 0
    """Number of steps of the whole run; 0 if not known."""

    @property
    def name(self) -> str:
        """The kind and id, as a user types them: `alert gpu_idle`."""
        return f"{self.kind} {self.id}"


def observed_fields(observed: Observed) -> dict[str, Any]:
    """Return the fields of an observation for JSON, without empty fields that earlier versions do not have."""
    fields = dataclasses.asdict(observed)
    return {name: value for name, value in fields.items() if value or name not in _ADDED}


_ADDED = ("sign", "rows", "total")
"""Fields that are missing in observations of earlier versions."""

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
    """Yield the whole lines of a log with their times; none if the log is missing. Raises RunLogError."""
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
        reason = error.strerror or str(error)
        raise RunLogError.expected("run log", path, "to read it", reason) from error


def run_id(run: RunFolder) -> str:
    """Return an id that does not change when the run's folder is moved: a hash of the first line of its oldest log.
    Raises RunLogError."""
    for log in reversed(LOGS):
        for line in lines_of(log_of(run, log)):
            return hashlib.sha256(line.raw + b"\n").hexdigest()[:16]
    raise RunLogError.expected("run folder", run.path, "a log with a line in it", "none")


def observations(run: RunFolder) -> list[Observed]:
    """Return the failures that a run's logs record, the strongest evidence first. Raises RunLogError."""
    newest: dict[tuple[Kind, str], tuple[int, Observed]] = {}
    id_, first, work = run_id(run), None, _Work()
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            event = line.event
            first = line.unix_s if first is None else min(first, line.unix_s)
            work.add(event)
            failure = _failure_of(event, work)
            if failure is None:
                continue
            step = work.steps if failure.step is None else failure.step
            observed = Observed(
                kind=failure.kind,
                id=failure.id,
                text=failure.text,
                run=run.name,
                run_id=id_,
                log=log,
                seq=event.seq,
                sha256=hashlib.sha256(line.raw).hexdigest(),
                step=step,
                after_s=line.unix_s - first,
                window_s=_window_s(event),
                sign=failure.sign,
                rows=work.rows_until(step),
            )
            newest[failure.kind, failure.id] = failure.rank, observed
    ranked = sorted(newest.values(), key=lambda pair: pair[0])
    return [replace(observed, total=work.total) for _, observed in ranked]


def observation(run: RunFolder, name: str) -> Observed:
    """Return the newest failure with a name such as `alert gpu_idle`; without a name, the failure with the strongest
    evidence. Raises BadInput."""
    all_observed = observations(run)
    for observed in all_observed:
        if name in ("", observed.name, observed.id) or name == observed.kind == "exit":
            return observed
    known = (
        ", ".join(observed.name for observed in all_observed)
        or "nothing: no check failed, no alert, no bad end"
    )
    raise BadInput.expected("observation", run.path, name or "something that went wrong", known)


class _Failure(NamedTuple):
    """A failure that a line records."""

    kind: Kind
    id: str
    text: str
    rank: int
    step: int | None
    """None if the line has no sign."""
    sign: str

    def is_same(self, observed: Observed) -> bool:
        if (self.kind, self.id) != (observed.kind, observed.id):
            return False
        return observed.sign in ("", self.sign)


class _Work:
    """Steps and rows of a run in the lines that have been read."""

    def __init__(self) -> None:
        self.steps = 0
        self.total = 0
        """Number of steps of the whole run, from its settings, its framework or its end; 0 if not known."""
        self.ended: ScriptEnded | None = None
        self._rows: list[tuple[int, int]] = []
        """Number of each step, and the number of rows trained on up to it."""

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


def _failure_of(event: AnyEvent, work: _Work) -> _Failure | None:
    """Return the failure that a line records, if any; `work` covers the lines before it."""
    match event:
        case Judged() if (rank := RANKS.get((event.by, event.level))) is not None:
            kind = cast(Kind, event.by)
            # The text of an alert names threads, lines and rates that differ from run to run.
            words = (
                event.part if event.by == ALERT else _without_numbers(event.text.partition(":")[0])
            )
            sign = f"{event.id} {words}".strip()
            return _Failure(kind, event.id, event.text, rank, event.step, sign)
        case TrainerExited() if event.state.lower() != "completed":
            id_ = event.state.lower()
            how = " ".join([id_, event.signal or "", _exception_sign(work.ended)]).strip()
            code = f" with code {event.returncode}" if how == id_ and event.returncode else ""
            return _Failure("exit", id_, event.sentence, 5, None, how + code)
    return None


def _exception_sign(ended: ScriptEnded | None) -> str:
    """Return the exception that ended a script with the line that raised it, without folders and numbers."""
    if ended is None or ended.exception is None:
        return ""
    if "OutOfMemory" in ended.exception or ended.exception == "MemoryError":
        # Which allocation fails first depends on the machine.
        return ended.exception
    path, _, place = (ended.where or "").rpartition("/")
    return f"{ended.exception} at {place or path}: {_without_numbers(ended.message or '')}"


def raised_at(observed: Observed) -> tuple[str, int] | None:
    """Return the file's name and the line that raised the observed exception; None if not known."""
    match = re.search(r" at ([^/\s:]+):(\d+)", observed.sign) if observed.kind == "exit" else None
    return None if match is None else (match[1], int(match[2]))


_ENDED_BY_A_SIGNAL = ("KeyboardInterrupt", "SystemExit")


def _without_numbers(text: str) -> str:
    """Return a text without numbers, addresses and folders, which differ from run to run."""
    text = re.sub(r"(/[^\s/'\"]+)+/", "", text)
    return " ".join(re.sub(r"0x[0-9a-fA-F]+|[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", text).split())


def _window_s(event: AnyEvent) -> float:
    if not isinstance(event, Judged) or event.by != ALERT or event.id in STALLS:
        return 0.0
    return max(0.0, event.to_unix_s - event.from_unix_s)


def is_shown(observed: Observed, view: RunView, *, steps: int) -> bool | None:
    """Return whether a run that has not ended shows the failure so far; None until it has done enough work. An exit
    is known only at the end."""
    lasted_s = (view.last_unix_s or 0.0) - (view.first_unix_s or 0.0)
    no = False if view.last_step >= steps and lasted_s >= observed.window_s else None
    if no is False and observed.rows:
        rows = [count or 0 for count in view.steps.values("rows")]
        no = False if not any(rows) or sum(rows) >= rows_to_rule_out(observed) else None
    match observed.kind:
        case "alert":
            alert = view.alerts.get(observed.id)
            failure = None if alert is None else _failure_of(alert, _Work())
            return True if failure is not None and failure.is_same(observed) else no
        case "check":
            check = view.checks.get(observed.id)
            if check is not None and check.level == FAIL:
                return True
            return no if check is not None and check.step >= observed.step else None
        case "identity":
            return (
                True
                if any(_contradicts(observed, identity) for identity in view.identities)
                else no
            )
        case "exit":
            return no


def rows_to_rule_out(observed: Observed) -> int:
    """Return the number of rows after which a run without the failure counts as not showing it."""
    return math.ceil(1.5 * observed.rows)


def _contradicts(observed: Observed, identity: Judged) -> bool:
    return identity.id == observed.id and identity.level in WRONG


def shown(
    observed: Observed, run: RunFolder, *, steps: int, is_stopped: bool = False
) -> tuple[bool | None, str]:
    """Return whether the logs of a run that has ended show the failure, and the reason; None where the logs do not
    decide. `is_stopped`: the flip stopped the run, whose end by a signal is then no failure. Raises RunLogError.

    A run does not show the failure only if all of these hold: it did enough work; it did not fail otherwise; and the
    check or identity passed in it. Enough work is `steps` steps on as many rows as `rows_to_rule_out` for as long as
    the alert had taken, or all of the run's own steps if these are as many as the observed run's.
    """
    work, exits, first, last, other_failure = _Work(), "", math.inf, 0.0, ""
    is_completed: bool | None = None
    answered = observed.kind in ("alert", "exit")
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            event = line.event
            first, last = min(first, line.unix_s), max(last, line.unix_s)
            work.add(event)
            failure = _failure_of(event, work)
            is_stop = is_stopped and isinstance(event, TrainerExited) and event.signal is not None
            is_named = failure is not None and failure[:2] == (observed.kind, observed.id)
            if failure is not None and is_named and not is_stop:
                if failure.is_same(observed):
                    return True, failure.text
                other_failure = failure.text if failure.kind != "exit" else failure.sign
            match event:
                case RunFinished():
                    is_completed = event.state == "completed"
                case TrainerExited():
                    exits = event.state.lower()
                    if is_completed is None:
                        is_completed = event.returncode == 0
                case Judged(by="check", id=observed.id):
                    passed = event.level == PASS and event.step >= observed.step
                    answered = answered or passed
                case Judged(by="identity", id=observed.id):
                    if not observed.sign and _contradicts(observed, event):
                        return True, event.text
                    answered = answered or event.level == PASS
                case StepDone(loss=float() as loss) if observed.id == "finite_weights":
                    # The probe checks the weights only after a loss that is not finite. A loss of 0 trains nothing.
                    is_past = event.step > observed.step
                    answered = answered or (is_past and math.isfinite(loss) and loss != 0)
    if not exits:
        return None, "it was not watched to its end"
    raised = _exception_sign(work.ended)
    if raised and exits not in BROKEN and not raised.startswith(_ENDED_BY_A_SIGNAL):
        # It was ended from outside while it exited by this exception.
        is_same = observed.kind == "exit" and observed.sign.endswith(raised)
        return (True, raised) if is_same else (None, f"it failed differently: {raised}")
    if other_failure:
        return None, f"it failed differently: {other_failure}"
    done = work.steps
    made = f"it made {done} steps in {last - first:.0f} s and ended as {exits}"
    if exits in BROKEN:
        failed = _exception_sign(work.ended)
        return None, f"{made}{f': {failed}' if failed else ''}"
    rows, wanted = work.rows_until(done), rows_to_rule_out(observed) if observed.sign else 0
    did_enough = done >= steps and last - first >= observed.window_s
    did_all = is_completed and done >= observed.step
    if observed.sign:
        did_enough = did_enough and (not rows or rows >= wanted)
        did_all = did_all and done >= (observed.total or math.ceil(1.5 * observed.step))
    if not did_all and not did_enough:
        on = f" on {wanted} rows" if rows and wanted else ""
        return None, f"{made}; it takes {steps} steps{on} and {observed.window_s:.0f} s to tell"
    if not answered:
        return None, f"{made}; {observed.name} logged no pass"
    return False, made


def trace_of(run: RunFolder, step: int) -> str:
    """Return a hash of the losses and rows of a run's steps up to `step`, and of its end. It is equal for two runs
    with bit-identical computations. Raises RunLogError."""
    digest = hashlib.sha256()
    for log in LOGS:
        for line in lines_of(log_of(run, log)):
            match line.event:
                case StepDone() as done if done.step <= step:
                    digest.update(
                        repr((done.step, done.loss, done.rows, done.rows_digest)).encode()
                    )
                case ScriptEnded() as ended:
                    digest.update(_exception_sign(ended).encode())
    return digest.hexdigest()
