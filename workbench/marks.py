"""The marks on the time line of a run: non-finite values, alerts, restarts, compiles and checkpoints. Each has a step,
a time and a text.

A mark with a time but no step is placed at the step that was running then. Marks of steps that a resume has
replaced are dropped; marks with a time stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from engine.log.events import PASS, AnyEvent, Compiled, Judged, RunStarted
from engine.log.figures import first_seen
from engine.log.text import alert_lines, clock_text, event_text
from engine.log.view import RunView
from engine.units import format_bytes, format_seconds

Kind = Literal["nan", "alert", "restart", "late compile", "compile", "checkpoint"]
SIGNS: dict[Kind, tuple[str, str]] = {
    "nan": ("×", "X"),
    "alert": ("!", "!"),
    "restart": ("R", "R"),
    "late compile": ("C", "C"),
    "checkpoint": ("s", "s"),
    "compile": ("c", "c"),
}
"""Character of each kind of mark, with and without Unicode; of several marks in one column, the first kind is drawn."""
PRIORITY = tuple(SIGNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark on the time line."""

    kind: Kind
    step: float
    """Step at which the mark is drawn: its own, or the one that was running at its time."""
    unix_s: float
    words: tuple[str, ...] = ()
    """The title and all details. Empty for an alert, whose text is formatted only when it is shown: a run may have
    thousands."""
    alert: Judged | None = None

    @property
    def title(self) -> str:
        return self.words[0] if self.alert is None else event_text(self.alert)

    @property
    def lines(self) -> tuple[str, ...]:
        return self.words if self.alert is None else tuple(alert_lines(self.alert))


def all_marks(view: RunView) -> tuple[Mark, ...]:
    """Return every mark, ordered by step."""
    steps = view.steps

    @cache
    def step_of(row: int) -> float:
        last = steps.value("step", min(row, len(steps) - 1)) if len(steps) else None
        return last or 0.0

    def time_of(step: int) -> float:
        row = min(steps.find("step", step), len(steps) - 1)
        return (steps.value("unix_s", row) if row >= 0 else None) or 0.0

    marks = [_stretch(part, time_of) for part in _stretches(view.non_finite)]
    timed = [line for line in view.marks if not _is_over(line.event)]
    rows = steps.find_each("clock_s", [line.unix_s for line in timed])
    for line, row in zip(timed, rows, strict=True):
        event, unix_s, step = line.event, line.unix_s, step_of(row)
        if isinstance(event, Judged):
            began, began_s = first_seen(view, line)
            marks.append(Mark(kind="alert", step=float(began or step), unix_s=began_s, alert=event))
        elif isinstance(event, Compiled):
            kind: Kind = "late compile" if event.after_warm_up else "compile"
            words = (
                event_text(event),
                f"key: {event.key}",
                f"differs in: {', '.join(event.differs) or '-'}",
                f"at {clock_text(unix_s)}",
            )
            marks.append(Mark(kind=kind, step=step, unix_s=unix_s, words=words))
        elif isinstance(event, RunStarted) and event.resumed_from is not None:
            marks.append(
                Mark(
                    kind="restart",
                    step=float(event.resumed_from),
                    unix_s=unix_s,
                    words=(
                        f"resumed from step {event.resumed_from}",
                        f"at {clock_text(unix_s)}",
                        event_text(event),
                    ),
                )
            )
    for saved in view.checkpoints:
        title = f"checkpoint {Path(saved.path).name}{', best so far' if saved.best else ''}"
        words_of_checkpoint = (
            title,
            f"step {saved.step}, {format_bytes(saved.size_bytes)} in {format_seconds(saved.save_s)}",
            f"manifest sha256 {saved.manifest_sha256}",
        )
        marks.append(
            Mark(
                kind="checkpoint",
                step=float(saved.step),
                unix_s=time_of(saved.step),
                words=words_of_checkpoint,
            )
        )
    marks.sort(key=lambda mark: (mark.step, PRIORITY.index(mark.kind)))
    return tuple(marks)


def _is_over(event: AnyEvent) -> bool:
    return isinstance(event, Judged) and event.level == PASS


def _stretches(faults: Sequence[Judged]) -> list[list[Judged]]:
    """Group faults of equal or consecutive steps: a run that diverged has one at every step."""
    parts: list[list[Judged]] = []
    for fault in faults:
        if parts and fault.step - parts[-1][-1].step <= 1:
            parts[-1].append(fault)
        else:
            parts.append([fault])
    return parts


def _stretch(part: Sequence[Judged], time_of: Callable[[int], float]) -> Mark:
    first, last = part[0], part[-1]
    fields = sorted({fault.id for fault in part})
    lines = [f"{first.id} is {first.text} at step {first.step}"]
    if last.step > first.step:
        lines[0] += f", and to step {last.step}"
        lines.append(f"not finite at every step to {last.step}: {', '.join(fields)}")
    return Mark(
        kind="nan",
        step=float(first.step),
        unix_s=time_of(first.step),
        words=tuple(lines),
    )
