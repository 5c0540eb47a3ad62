"""Pane 1: training loss and its two parts over steps, with held-out losses and what guessing would
give."""

from __future__ import annotations

import math

from textual.reactive import reactive

from workbench.feed import Snapshot
from workbench.tui.legend import Level, Mark
from workbench.tui.widgets.trace_plot import Plot, TracePlot


class LossPlot(TracePlot, can_focus=True):
    """Draws the losses of a snapshot."""

    snapshot: reactive[Snapshot | None] = reactive(None)
    log_y: reactive[bool] = reactive(False)

    def watch_snapshot(self) -> None:
        self._plot_again()

    def watch_log_y(self, log_y: bool) -> None:
        self.border_title = f"1 loss, nats per token{', log axis' if log_y else ''}"
        self._plot_again()

    def _plot_again(self) -> None:
        if self.snapshot is None:
            return
        view, traces = self.snapshot.view, self.snapshot.traces
        student, teacher = view.models.get("student"), view.eval_of("teacher")
        levels = []
        if student is not None and student.vocab_size > 1:
            # The loss of a model that gives each of V tokens the same probability.
            levels.append(Level(y=math.log(student.vocab_size), name="ln V"))
        if teacher is not None and teacher.loss is not None and math.isfinite(teacher.loss):
            levels.append(Level(y=teacher.loss, name="teacher"))
        self.plot = Plot(
            traces=tuple(traces[name] for name in ("loss", "ce", "kd") if name in traces),
            marks=tuple(
                Mark(x=float(e.step), y=e.loss)
                for e in view.evals
                if e.subject in ("student", "untrained") and e.loss is not None
            ),
            mark_name="held-out",
            levels=tuple(levels),
            log_y=self.log_y,
        )
