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


@dataclass(frozen=True)
class Name:
    kind: str
    id: str
    """The id of the check or alert, the state of an exit, or what was refused."""
    text: str = ""
    flip: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, kw_only=True)
class Naming(Name):
    """One name that the workbench gave."""

    unix_s: float
    since_unix_s: float | None = None
    """For an alert: when the reported condition began."""
    certainty: str = ""


class Expected(Name):
    """An accepted name: the text that it must contain, and the flip that it must suggest."""

    def is_met_by(self, naming: Naming) -> bool:
        return (
            (self.kind, self.id) == (naming.kind, naming.id)
            and self.text in naming.text
            and self.flip in naming.flip
        )


def names_of(view: RunView) -> list[Naming]:
    """Return all names given in the newest session, in order of time."""
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
            yield Naming(CHECK, event.id, one_line(event.text), unix_s=unix_s)
        case Judged(raises_alert=True):
            text, since_unix_s = one_line(f"{event.text}; {event.meaning}"), event.from_unix_s
            yield Naming(
                ALERT, event.id, text, event.flip, unix_s=unix_s, since_unix_s=since_unix_s
            )
        case RunFinished(state="failed") if not event.reason.startswith("check "):
            first, colon, _ = event.reason.partition(":")
            what = first.split()[0] if colon and first else "run"
            yield Naming(REFUSAL, what, one_line(event.reason), unix_s=unix_s)
        case TrainerExited() if event.state not in QUIET_EXITS:
            sentence, certainty = one_line(event.sentence), event.certainty
            yield Naming(EXIT, event.state, sentence, unix_s=unix_s, certainty=certainty)
        case _:
            return


def named_as(namings: Sequence[Naming], expected: Sequence[Expected]) -> Naming | None:
    """Return the first name that the drill accepts."""
    return next((n for n in namings if any(e.is_met_by(n) for e in expected)), None)
