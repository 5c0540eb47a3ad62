"""Run the alert rules over a finished run by replaying its logs in time order.

The view of a run's end does not show that the GPU was idle for an hour in the middle. So the log is folded again from
its start, and the rules are evaluated as the supervisor would have done. The result has the alerts that this raised
and cleared, the alerts that only the run's own watcher raised, and the failed checks and error notes of every rank.
This also works for a run that was never watched, or was watched with an older set of rules.

Evaluations are one second apart at first. The interval doubles after each EVALUATIONS evaluations, but is never more
than MAX_STEPS_BETWEEN steps, so that no rule's window of steps is skipped. A symptom that exists only between two
evaluations is missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import msgspec

from engine.log.events import (
    ALERT,
    PASS,
    AnyEvent,
    Imported,
    Judged,
    LogOpened,
    Note,
    StepDone,
)
from engine.log.fold import OF_RANKS, failure_of_rank, fold
from engine.log.folder import RunFolder
from engine.log.in_order import InOrder, Line
from engine.log.read import BrokenLog
from engine.log.view import ErrorNote, Failed, RunView, host_of, rank_of, without_repeats
from engine.spec import RunSpec
from engine.watch.active_alerts import ActiveAlerts
from engine.watch.rules.rule import Case, Unknown

SHORTEST_INTERVAL_S = 1.0
EVALUATIONS = 1000
"""Number of evaluations before the interval doubles: 3,000 in two hours of a run, 6,400 in a day."""
MAX_STEPS_BETWEEN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """One alert of a run, with the times at which it was raised and cleared."""

    alert: Judged
    unix_s: float
    cleared_unix_s: float | None
    replayed: bool = True
    """Whether the replay raised it; False if only the run's own watcher did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    view: RunView
    raised: tuple[Raised, ...]
    """Ordered by time."""
    failed: tuple[Failed, ...]
    """The first failure of each check on each rank, ordered by time."""
    errors: tuple[ErrorNote, ...]
    """The notes at level error, ordered by time."""
    unjudged: dict[str, str]
    """Rules that could not judge at any moment, each with its last reason."""
    judged: tuple[str, ...]
    """Rules that judged at least once."""
    fault: str | None
    """Reason why a log could not be read to its end; None if all were."""

    @property
    def judged_view(self) -> RunView:
        """The view with the alerts that are active at the end of the log."""
        active = {r.alert.id: r.alert for r in self.raised if r.cleared_unix_s is None}
        return replace(self.view, alerts=active)


def diagnose(run: RunFolder, settings: RunSpec | None) -> Diagnosis:
    """Replay a run under every rule."""
    replay, lines = _Replay(settings), InOrder(run)
    for line in lines:
        replay.take(line)
    replay.fold_waiting()
    return replay.end(lines.fault)


def diagnose_events(events: Iterable[tuple[AnyEvent, float]]) -> Diagnosis:
    """Judge events that are in memory and in no log, each with its time, as `diagnose` judges the log of a run."""
    replay = _Replay(None)
    for event, unix_s in events:
        replay.take(Line("events", event, unix_s, unix_s))
    replay.fold_waiting()
    return replay.end(None)


class _Replay:
    def __init__(self, settings: RunSpec | None) -> None:
        self.settings, self.interval_s = settings, SHORTEST_INTERVAL_S
        self.evaluations = 0
        self.view, self.alerts = RunView(), ActiveAlerts()
        self.waiting: list[Line] = []
        self.steps = 0
        self.next_s: float | None = None
        self.now_s = 0.0
        self.raised: list[Raised] = []
        self.reported: list[Raised] = []
        """Alerts raised by the watcher of the run."""
        self.session_s = 0.0
        """Start time of the session that is being replayed, in seconds."""
        self.failed: dict[tuple[str, int], Failed] = {}
        self.errors: list[ErrorNote] = []
        self.judged: set[str] = set()

    def take(self, line: Line) -> None:
        event, unix_s = line.event, line.unix_s
        if host_of(line.source):
            self.waiting.append(line)
            return
        if rank_of(line.source):
            # Its steps repeat the first rank's.
            if isinstance(event, OF_RANKS):
                self.keep_failure(
                    rank_of(line.source), failure_of_rank(rank_of(line.source), event), unix_s
                )
                self.waiting.append(line)
            return
        # Alerts that were logged at the time are not evidence: the rules are evaluated again.
        if isinstance(event, Judged) and event.by == ALERT:
            add_or_clear(self.reported, event, unix_s, replayed=False)
            return
        if self.next_s is not None and unix_s >= self.next_s:
            # Evaluated before this line is folded, because the line that breaks a silence also ends it.
            # The gap before a log is opened is no silence: the trainer may not have existed.
            opened = isinstance(event, LogOpened)
            self.evaluate(self.next_s if opened else unix_s)
            self.next_s = None
            self.evaluations += 1
            if self.evaluations % EVALUATIONS == 0:
                self.interval_s *= 2
        if self.next_s is None:
            self.next_s = unix_s + self.interval_s
        if isinstance(event, LogOpened) and line.source == "events":
            self.end_session(unix_s)
        if isinstance(event, Imported):
            self.interval_s = math.inf  # nothing is known between two steps of an imported log
        self.keep_failure(0, event, unix_s)
        self.now_s = unix_s
        self.waiting.append(line)
        self.steps += isinstance(event, StepDone)
        if self.steps >= MAX_STEPS_BETWEEN:
            self.evaluate(unix_s)

    def keep_failure(self, rank: int, event: AnyEvent | None, unix_s: float) -> None:
        """Keep a check that failed on a rank, or a rank's error note."""
        match event:
            case Judged(by="check", level="fail"):
                # The first rank may also log a failure of another rank.
                texts = (f.check.text for f in self.failed.values() if f.check.id == event.id)
                if event.text not in texts:
                    self.failed.setdefault((event.id, rank), Failed(rank, event))
            case Note(level="error"):
                self.errors.append(ErrorNote(rank, unix_s, event))

    def evaluate(self, now_s: float) -> None:
        self.fold_waiting()
        case = Case(view=self.view, settings=self.settings, now_unix_s=now_s)
        for event in self.alerts.evaluate(case):
            if isinstance(event, Judged):
                add_or_clear(self.raised, event, now_s)
        answers = self.alerts.answers.items()
        self.judged |= {id for id, answer in answers if not isinstance(answer, Unknown)}

    def end_session(self, unix_s: float) -> None:
        """Add the alerts that only the watcher of the ended session has raised."""
        new = [r.alert.id for r in self.raised if r.replayed and r.unix_s >= self.session_s]
        self.raised += [r for r in self.reported if r.alert.id not in new]
        self.raised.sort(key=attrgetter("unix_s"))
        self.reported, self.session_s = [], unix_s

    def fold_waiting(self) -> None:
        for source, lines in groupby(self.waiting, attrgetter("source")):
            self.view = fold(self.view, source, [line.event for line in lines])
        self.waiting, self.steps = [], 0

    def end(self, fault: BrokenLog | None) -> Diagnosis:
        self.evaluate(self.now_s)
        self.end_session(self.now_s)
        answers = self.alerts.answers
        if self.view.imported is not None:
            self.raised = [
                _updated_at_end(raised, answers.get(raised.alert.id), self.now_s)
                for raised in self.raised
            ]
        unjudged = {
            id: answer.reason
            for id, answer in answers.items()
            if isinstance(answer, Unknown) and id not in self.judged
        }
        return Diagnosis(
            view=self.view,
            raised=tuple(self.raised),
            failed=tuple(self.failed.values()),
            errors=tuple(without_repeats(self.errors)),
            unjudged=unjudged,
            judged=tuple(rule.id for rule in self.alerts.rules if rule.id in self.judged),
            fault=None if fault is None else str(fault),
        )


def _updated_at_end(raised: Raised, now: Judged | Unknown | None, now_s: float) -> Raised:
    """Return an alert of an imported log as of its end: an active alert gets the numbers of the end, or is cleared if
    its rule finds nothing there."""
    if raised.cleared_unix_s is not None or isinstance(now, Unknown):
        return raised
    if now is None:
        return replace(raised, cleared_unix_s=now_s)
    since = [step for step in (raised.alert.first_step, now.first_step) if step is not None]
    return replace(raised, alert=msgspec.structs.replace(now, first_step=min(since, default=None)))


def add_or_clear(
    raised: list[Raised], alert: Judged, now_s: float, *, replayed: bool = True
) -> None:
    """Add a raised alert; for a cleared one, set the time at which the newest alert of its id was cleared."""
    if alert.level != PASS:
        raised.append(Raised(alert=alert, unix_s=now_s, cleared_unix_s=None, replayed=replayed))
        return
    for index in reversed(range(len(raised))):
        if raised[index].alert.id == alert.id:
            raised[index] = replace(raised[index], cleared_unix_s=now_s)
            return
