"""The pairs of a flip against the margin, drawn by `workbench.plot.forest`."""

from __future__ import annotations

from textual.geometry import Size
from textual.reactive import reactive

from workbench.flip_snapshots import FlipSnapshot
from workbench.plot.canvas import Row
from workbench.plot.chart import Chart
from workbench.plot.forest import render_forest
from workbench.tui.widgets.chart_view import ChartView


class ForestPlot(ChartView):
    """Draws the pairs of one snapshot, as high as they need."""

    HELP = """\
# Pairs against the margin

A row is a pair: `x` is its own ratio B/A, the bar is the interval of all pairs so far. The dotted lines
are the margin: an interval outside them decides, one inside shows that the arms are equal.
"""
    DEFAULT_CSS = "ForestPlot { height: auto; max-height: 45%; margin-bottom: 1; }"

    snapshot: reactive[FlipSnapshot | None] = reactive(None, layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        pairs = self.snapshot.pairs if self.snapshot is not None else ()
        return len(pairs) + 1 if pairs else 0

    def redraw_key(self) -> tuple[object, ...]:
        return (self.snapshot,)

    def rows(self, chart: Chart) -> list[Row]:
        snapshot = self.snapshot
        if snapshot is None or snapshot.plan is None:
            return []
        return render_forest(snapshot.plan, snapshot.pairs, *self.size, ascii_only=self._ascii_only)
