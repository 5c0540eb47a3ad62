"""Run the alert rules over a finished run by replaying its logs in time order.

A view of the end of a run cannot show that the GPU was idle for an hour in the middle. So the log is folded
again from its start, the rules are evaluated as the supervisor would have, and the result is what was raised
and cleared. This also works for a run that was never watched, or was watched with an older set of rules.

Evaluations are one second apart, more for runs of hours (at most MOST_LOOKS in total), and never more than
STEPS_PER_LOOK steps apart, so that no rule's window of steps is skipped. A symptom that exists only between
two evaluations is missed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from engine.log.events import AlertCleared, AlertRaised, AnyEvent, LogOpened, StepDone
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.read import BrokenLog, LogReader
from engine.log.view import SOURCES, RunView, Source
from engine.spec import RunSpec
from engine.watch.active_alerts import ActiveAlerts
from engine.watch.rules.rule import Alert, Case, Unknown

LOOK_S = 1.0
MOST_LOOKS = 5000
STEPS_PER_LOOK = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """One alert of a run, with the times at which it was raised and cleared."""

    alert: Alert
    unix_s: float
    cleared_unix_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    view: RunView
    raised: tuple[Raised, ...]
    """Ordered by time."""
    unjudged: dict[str, str]
    """Rules that could not judge at any moment, each with its last reason."""
    judged: tuple[str, ...]
    """Rules that judged at least once."""
    fault: str | None
    """Why a log could not be read to its end; None when all were."""


def diagnose(run: RunFolder, settings: RunSpec | None) -> Diagnosis:
    """Replay a run under every rule."""
    logs, fault = _read(run)
    replay = _Replay(settings, _interval_s(logs))
    for source, event, unix_s in _in_order(logs):
        replay.take(source, event, unix_s)
    return replay.end(fault)


def _read(run: RunFolder) -> tuple[dict[Source, list[AnyEvent]], str | None]:
    """Read every event of each log, as far as it can be read."""
    logs: dict[Source, list[AnyEvent]] = {}
    fault = None
    for source in SOURCES:
        reader = LogReader(getattr(run, source))
        events = logs[source] = []
        try:
            while found := reader.poll():
                events += found
        except BrokenLog as broken:
            events += broken.before
            fault = fault or str(broken)
    return logs, fault


def _timed(source: Source, events: list[AnyEvent]) -> Iterator[tuple[float, Source, AnyEvent]]:
    opened_s = 0.0
    for event in events:
        if isinstance(event, LogOpened):
            opened_s = event.unix_s
        yield opened_s + event.t_s, source, event


def _in_order(
    logs: dict[Source, list[AnyEvent]],
) -> Iterator[tuple[Source, AnyEvent, float]]:
    """Merge the lines of all logs by time, keeping the order within each log."""
    streams = (_timed(source, events) for source, events in logs.items())
    for unix_s, source, event in heapq.merge(*streams, key=itemgetter(0)):
        yield source, event, unix_s


def _interval_s(logs: dict[Source, list[AnyEvent]]) -> float:
    """Return the seconds between two evaluations: the time worked over MOST_LOOKS, at least LOOK_S."""
    worked_s = 0.0
    for events in logs.values():
        ends = [a.t_s for a, b in pairwise(events) if isinstance(b, LogOpened)]
        worked_s = max(worked_s, sum(ends) + (events[-1].t_s if events else 0.0))
    return max(LOOK_S, worked_s / MOST_LOOKS)


class _Replay:
    def __init__(self, settings: RunSpec | None, interval_s: float) -> None:
        self.settings, self.interval_s = settings, interval_s
        self.view, self.alerts = RunView(), ActiveAlerts()
        self.waiting: list[tuple[Source, AnyEvent]] = []
        self.steps = 0
        self.next_look_s: float | None = None
        self.now_s = 0.0
        self.raised: list[Raised] = []
        self.judged: set[str] = set()

    def take(self, source: Source, event: AnyEvent, unix_s: float) -> None:
        # Alerts that were logged at the time are not evidence: the rules are evaluated again.
        if isinstance(event, AlertRaised | AlertCleared):
            return
        if self.next_look_s is not None and unix_s >= self.next_look_s:
            # Evaluated before this line is folded, because the line that breaks a silence also ends it.
            # Before the opening of a log the trainer may not have existed, so that gap is no silence.
            opened = isinstance(event, LogOpened)
            self.look(self.next_look_s if opened else unix_s)
            self.next_look_s = None
        if self.next_look_s is None:
            self.next_look_s = unix_s + self.interval_s
        self.now_s = unix_s
        self.waiting.append((source, event))
        self.steps += isinstance(event, StepDone)
        if self.steps >= STEPS_PER_LOOK:
            self.look(unix_s)

    def look(self, now_s: float) -> None:
        self.fold_waiting()
        case = Case(view=self.view, settings=self.settings, now_unix_s=now_s)
        for event in self.alerts.look(case):
            if isinstance(event, AlertRaised):
                self.raised.append(Raised(alert=event, unix_s=now_s, cleared_unix_s=None))
            elif isinstance(event, AlertCleared):
                self.clear(event.id, now_s)
        answers = self.alerts.answers.items()
        self.judged |= {id for id, answer in answers if not isinstance(answer, Unknown)}

    def clear(self, id: str, now_s: float) -> None:
        for index in reversed(range(len(self.raised))):
            entry = self.raised[index]
            if entry.alert.id == id:
                self.raised[index] = Raised(
                    alert=entry.alert, unix_s=entry.unix_s, cleared_unix_s=now_s
                )
                return

    def fold_waiting(self) -> None:
        batch: list[AnyEvent] = []
        for index, (source, event) in enumerate(self.waiting):
            batch.append(event)
            if index + 1 == len(self.waiting) or self.waiting[index + 1][0] != source:
                self.view = fold(self.view, source, batch)
                batch = []
        self.waiting, self.steps = [], 0

    def end(self, fault: str | None) -> Diagnosis:
        self.look(self.now_s)
        answers = self.alerts.answers
        unjudged = {
            id: answer.reason
            for id, answer in answers.items()
            if isinstance(answer, Unknown) and id not in self.judged
        }
        return Diagnosis(
            view=self.view,
            raised=tuple(self.raised),
            unjudged=unjudged,
            judged=tuple(rule.id for rule in self.alerts.rules if rule.id in self.judged),
            fault=fault,
        )
