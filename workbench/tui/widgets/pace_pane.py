"""Pane 2: how fast the run goes, tokens per second beside seconds per step."""

from __future__ import annotations

from dataclasses import replace

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.reactive import reactive

from engine.units import format_count, format_seconds
from workbench.feed import Snapshot
from workbench.traces import Trace
from workbench.tui.widgets.trace_plot import Plot, TracePlot


def _named(trace: Trace, name: str) -> Trace:
    return replace(trace, name=name)


class PacePane(Horizontal, can_focus=True):
    """Draws the pace of a snapshot as two plots, because their units differ."""

    DEFAULT_CSS = """
    PacePane {
        TracePlot { width: 1fr; }
        #tokens { margin-right: 2; }
    }
    """

    snapshot: reactive[Snapshot | None] = reactive(None)
    log_y: reactive[bool] = reactive(False)

    def __init__(self, *, ascii_only: bool, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii_only = ascii_only

    def compose(self) -> ComposeResult:
        yield TracePlot(ascii_only=self._ascii_only, id="tokens")
        yield TracePlot(ascii_only=self._ascii_only, id="seconds")

    def watch_snapshot(self) -> None:
        self._plot_again()

    def watch_log_y(self, log_y: bool) -> None:
        self.border_title = f"2 pace{', log axis' if log_y else ''}"
        self._plot_again()

    def _plot_again(self) -> None:
        if self.snapshot is None or not self.is_mounted:
            return
        traces = self.snapshot.traces
        if not traces:
            return
        self.query_one("#tokens", TracePlot).plot = Plot(
            traces=(_named(traces["tokens_per_s"], "tokens/s"),),
            log_y=self.log_y,
            clip=True,
            format_y=format_count,
        )
        self.query_one("#seconds", TracePlot).plot = Plot(
            traces=(_named(traces["step_s"], "step time"),),
            log_y=self.log_y,
            clip=True,
            format_y=format_seconds,
        )
