"""The names that a run's log gives to an incident: every failed check, alert, refusal and attributed end, with
its time; and whether one of them is accepted for the incident. Pure functions of a RunView; no torch.

A run that an incident ended without a name is a failure of the workbench, however loudly it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.log.events import Judged, RunFinished, TrainerExited
from engine.log.text import one_line
from engine.log.view import RunView

CHECK, ALERT, REFUSAL, EXIT = "check", "alert", "refusal", "exit"
QUIET_EXITS = frozenset({"COMPLETED", "TERMINATED", "INTERRUPTED", "FAILED", "BAD_INPUT"})
"""Exit states that were requested, or that the run's own log explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """One name that the workbench gave."""

    kind: str
    id: str
    """The id of the check or alert, the state of an exit, or what was refused."""
    text: str
    unix_s: float
    since_unix_s: float | None = None
    """For an alert: when the reported condition began."""
    flip: str = ""
    certainty: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """An accepted name."""

    kind: str
    id: str
    text: str = ""
    """Text that it must contain beside its name."""
    flip: str = ""
    """The flip that it must suggest."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.id}"

    def is_met_by(self, said: Naming) -> bool:
        return (
            (self.kind, self.id) == (said.kind, said.id)
            and self.text in said.text
            and self.flip in said.flip
        )


def names_of(view: RunView) -> list[Naming]:
    """Everything that was named in the newest session, in order of time."""
    begun = view.session_unix_s or view.trainer_started_unix_s or 0.0
    return [
        naming
        for line in view.lines
        if line.unix_s >= begun
        for naming in _names(line.event, line.unix_s)
    ]


def _names(event: object, unix_s: float) -> Iterator[Naming]:
    match event:
        case Judged(by="check", level="fail"):
            yield Naming(kind=CHECK, id=event.id, text=one_line(event.text), unix_s=unix_s)
        case Judged(raises_alert=True):
            text = one_line(f"{event.text}; {event.meaning}")
            yield Naming(
                kind=ALERT,
                id=event.id,
                text=text,
                unix_s=unix_s,
                since_unix_s=event.from_unix_s,
                flip=event.flip,
            )
        case RunFinished(state="failed") if not event.reason.startswith("check "):
            first, colon, _ = event.reason.partition(":")
            what = first.split()[0] if colon and first else "run"
            yield Naming(kind=REFUSAL, id=what, text=one_line(event.reason), unix_s=unix_s)
        case TrainerExited() if event.state not in QUIET_EXITS:
            yield Naming(
                kind=EXIT,
                id=event.state,
                text=one_line(event.sentence),
                unix_s=unix_s,
                certainty=event.certainty,
            )
        case _:
            return


def named_as(said: Sequence[Naming], expected: Sequence[Expected]) -> Naming | None:
    """Return the first name that is accepted."""
    return next((n for n in said if any(e.is_met_by(n) for e in expected)), None)
