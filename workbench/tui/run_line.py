"""What a time line says of a run besides its columns: held-out losses, losses to compare with, and words."""

from __future__ import annotations

import math

from engine.log.table import Table
from engine.log.text import clock_text
from engine.log.view import RunView
from engine.units import format_count, format_seconds, format_value
from workbench.tui.legend import Level, Mark

LOSSES = ("loss", "ce", "kd")


def heldout_marks(view: RunView, low: float, high: float, *, by_time: bool) -> tuple[Mark, ...]:
    """Held-out losses of the student in a window, each at its step or at the time of it."""
    marks = []
    for done in view.evals:
        if done.subject in ("student", "untrained") and done.loss is not None:
            x = float(done.step)
            if by_time and len(view.steps):
                row = min(view.steps.find("step", x), len(view.steps) - 1)
                x = view.steps.value("clock_s", row) or 0.0
            elif len(view.steps):
                x = max(x, view.steps.value("step", 0) or 0.0)
            if low <= x <= high:
                marks.append(Mark(x=x, y=done.loss))
    return tuple(marks)


def levels_of(view: RunView) -> tuple[Level, ...]:
    """Losses to compare with: of a model that gives each of V tokens the same probability, the share of it
    that CE has in the objective, and the teacher's own."""
    levels = []
    student, teacher = view.models.get("student"), view.eval_of("teacher")
    if student is not None and student.vocab_size > 1:
        guessing = math.log(student.vocab_size)
        levels.append(Level(y=guessing, name="ln V"))
        alpha = view.started.alpha if view.started is not None else 0.0
        if 0.0 < alpha < 1.0:
            levels.append(Level(y=alpha * guessing, name="alpha ln V"))
    if teacher is not None and teacher.loss is not None and math.isfinite(teacher.loss):
        levels.append(Level(y=teacher.loss, name="teacher"))
    return tuple(levels)


def fault_words(view: RunView) -> str:
    """Which steps are not finite."""
    if not view.non_finite:
        return ""
    first, others = view.non_finite[0].step, len({fault.step for fault in view.non_finite}) - 1
    return f"not finite: {first}" + (f" and {others} more" if others else "")


def step_words(steps: Table, row: int) -> str:
    """All numbers of one step."""

    def text(name: str, digits: int = 4) -> str:
        return format_value(steps.value(name, row), digits)

    pace = steps.value("tokens_per_s", row)
    parts = [
        f"step {steps.value('step', row):.0f} at {clock_text(steps.value('unix_s', row) or 0.0)}:",
        *(f"{n} {text(n)}" for n in LOSSES if steps.value(n, row) is not None),
        format_seconds(steps.value("step_s", row)),
        *([] if pace is None else [f"{format_count(pace)} tok/s"]),
        f"|g| {text('grad_norm', 3)}",
        f"lr {steps.value('lr', row) or 0.0:.2e}",
    ]
    return "  ".join(parts)
