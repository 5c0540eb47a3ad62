"""Read the sessions of a run from its log, and join them into stretches of steps that can be replayed.

A resume continues from its checkpoint without changing a bit, so consecutive sessions with the same settings form one
stretch. If two sessions ran the same step, the later session's record counts, because the following steps continue
from its weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.log.events import (
    DataReady,
    Evaluated,
    Judged,
    LogOpened,
    ModelReady,
    Recorded,
    RunFinished,
    RunStarted,
    StepDone,
)
from engine.log.folder import RunFolder
from engine.log.observed import lines_of
from engine.spec.sections import settings_sha256

NO_STEP_SECTIONS = ("run", "eval", "checkpoint", "checks", "gate", "notify", "watch")
"""Sections of the settings that do not change what a step computes."""


@dataclass
class Session:
    """The events that the trainer logged in one session."""

    started: RunStarted | None = None
    data: DataReady | None = None
    models: dict[str, ModelReady] = field(default_factory=dict)
    """Event of each loaded model, by role (`teacher`, `student`)."""
    steps: dict[int, StepDone] = field(default_factory=dict)
    recorded: dict[int, Recorded] = field(default_factory=dict)
    audited: dict[tuple[int, str], Judged] = field(default_factory=dict)
    """Results of checks, by step and id; those of an audit are its stages."""
    evaluated: list[Evaluated] = field(default_factory=list)
    finished: RunFinished | None = None

    @property
    def begin(self) -> int:
        """Step that the session resumed from; 0 for a new run."""
        return (self.started.resumed_from or 0) if self.started is not None else 0

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)


def read_sessions(run: RunFolder) -> list[Session]:
    """Read a run's log, and return the sessions that logged at least one step. Raises RunLogError."""
    sessions: list[Session] = []
    for line in lines_of(run.events):
        event = line.event
        if isinstance(event, LogOpened):
            sessions.append(Session())
        if not sessions:
            continue  # events before the first log_opened belong to no session
        session = sessions[-1]
        match event:
            case RunStarted():
                session.started = event
            case DataReady():
                session.data = event
            case ModelReady():
                session.models.setdefault(event.role, event)
            case StepDone():
                # If a session logged a step twice, the first record counts.
                session.steps.setdefault(event.step, event)
            case Recorded():
                session.recorded.setdefault(event.step, event)
            case Judged(by="check"):
                session.audited[event.step, event.id] = event
            case Evaluated():
                session.evaluated.append(event)
            case RunFinished():
                session.finished = event
    return [session for session in sessions if session.steps]


def settings_at(effective: dict[str, Any], sha256: str) -> dict[str, Any] | None:
    """Return the settings whose hash a session logged. They are those of effective.json, with as many of its newest
    changes undone as it takes to reach the hash. None if the hash is not reached."""
    settings: dict[str, Any] = copy.deepcopy(effective["spec"])
    changes = effective.get("changes")
    newest_changes = list(changes) if isinstance(changes, list) else []
    while settings_sha256(settings) != sha256:
        if not newest_changes:
            return None
        change = newest_changes.pop()
        try:
            section, name = change["key"].split(".")
            settings[section][name] = change["was"]
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
    return settings


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps that were trained with the same settings."""

    begin: int
    """Number of the step before the stretch's first; 0 at the beginning of the run."""
    end: int
    settings: dict[str, Any]
    sessions: tuple[Session, ...]
    steps: dict[int, StepDone]
    recorded: dict[int, Recorded]

    def between(self, begin: int, end: int) -> Stretch:
        """Return the part of the stretch after step `begin`, up to step `end`."""
        return dataclasses.replace(self, begin=max(begin, self.begin), end=min(end, self.end))

    def __str__(self) -> str:
        return f"steps {self.begin + 1} to {self.end}"


class ChangedSettings(Exception):
    """A session logged the hash of settings that effective.json does not have. The message names the step."""


def stretches(sessions: Sequence[Session], effective: dict[str, Any]) -> list[Stretch]:
    """Return the stretches of a run in order. Raises ChangedSettings."""
    joined: list[Stretch] = []
    for begin, end, session in _kept_steps(sessions):
        assert session.started is not None
        sha256 = session.started.spec_sha256
        if (settings := settings_at(effective, sha256)) is None:
            current_sha256 = settings_sha256(effective["spec"])
            raise ChangedSettings(
                f"the settings of step {begin + 1} have hash {sha256[:16]}, "
                f"those of effective.json {current_sha256[:16]}"
            )
        steps = {n: record for n, record in session.steps.items() if begin < n <= end}
        recorded = {n: record for n, record in session.recorded.items() if begin < n <= end}
        last = joined[-1] if joined else None
        if last is not None and _step_settings(last.settings) == _step_settings(settings):
            joined[-1] = dataclasses.replace(
                last,
                end=end,
                sessions=(*last.sessions, session),
                steps=last.steps | steps,
                recorded=last.recorded | recorded,
            )
            continue
        joined.append(
            Stretch(
                begin=begin,
                end=end,
                settings=settings,
                sessions=(session,),
                steps=steps,
                recorded=recorded,
            )
        )
    return joined


def _kept_steps(sessions: Sequence[Session]) -> Iterator[tuple[int, int, Session]]:
    """Yield for each session its steps that no later session ran again: the step before the first, and the last."""
    for number, session in enumerate(sessions):
        later_begins = [
            later_session.begin
            for later_session in sessions[number + 1 :]
            if later_session.started is not None
        ]
        end = min((session.last_step, *later_begins))
        if session.started is not None and session.begin < end:
            yield session.begin, end, session


def _step_settings(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: dict(section) for name, section in settings.items() if name not in NO_STEP_SECTIONS
    }
    kept.get("train", {}).pop("stop_after", None)
    return kept
