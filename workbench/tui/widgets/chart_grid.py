"""A widget that draws one chart, or a grid of charts that share their legend."""

from __future__ import annotations

from textual.reactive import reactive

from workbench.plot.canvas import Row
from workbench.plot.chart import Chart
from workbench.plot.grid import Legend, grid_dots, legend_height, render_grid, shape_of
from workbench.tui.widgets.chart_view import ChartView


class ChartGrid(ChartView):
    """Draws its charts in `columns`, below one legend unless that is empty."""

    charts: reactive[tuple[Chart, ...]] = reactive((Chart(),))
    legend: reactive[Legend] = reactive(())
    columns: reactive[int] = reactive(1)

    @property
    def dots(self) -> int:
        """Return the number of buckets that each of its charts can show."""
        return grid_dots(self.columns, self.size.width, ascii_only=self._ascii_only)

    def shape(self, count: int, legend: Legend) -> tuple[int, int]:
        """Return the columns and rows in which it can show as many of `count` charts as fit below a legend."""
        width, height = self.size
        return shape_of(count, width, height - legend_height(legend, width, height))

    def redraw_key(self) -> tuple[object, ...]:
        return *self.charts, self.legend, self.columns

    def current_chart(self) -> Chart:
        return self.charts[0]

    def rows(self, chart: Chart) -> list[Row]:
        return render_grid(
            self.charts, self.columns, self.legend, *self.size, ascii_only=self._ascii_only
        )
