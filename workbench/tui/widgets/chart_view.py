"""Widgets that draw one chart of `workbench.plot`, or several in a grid."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from engine.log.view import RunView
from workbench.plot.canvas import Row
from workbench.plot.chart import Chart, dots_of, render_chart
from workbench.plot.grid import grid_dots, render_grid, shape_of
from workbench.plot.series import series_style


class ChartView(Widget):
    """Draws one chart. Lines with letters have the colours of their runs, others those of the theme."""

    class Resized(Message):
        """The width has changed, so the chart has to be computed again."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "plot--trace0",
        "plot--trace1",
        "plot--trace2",
        "plot--mark",
        "plot--level",
        "plot--cross",
        "plot--axis",
        "plot--legend",
        "plot--cursor",
        "plot--lane",
        "plot--note",
    }
    DEFAULT_CSS = """
    ChartView {
        .plot--trace0 { color: $text-primary; text-style: bold; }
        .plot--trace1 { color: $text-warning; }
        .plot--trace2 { color: $text-success; }
        .plot--mark { color: $text-accent; text-style: bold; }
        .plot--level { color: $text-muted; }
        .plot--cross { color: $text-error; text-style: bold; }
        .plot--axis { color: $text-muted; }
        .plot--legend { color: $foreground; }
        .plot--cursor { color: $text-accent; }
        .plot--lane { color: $text-success; }
        .plot--note { color: $foreground; text-style: bold; }
    }
    """

    virtual_size = reactive(Size(0, 0), repaint=False)
    """It never scrolls, so that another size needs no second layout."""

    def __init__(self, *, ascii_only: bool, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._ascii_only = ascii_only
        self._drawn: tuple[object, ...] = ()
        self._rows: list[Row] = []
        self._has_letters = False

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    @property
    def dots(self) -> int:
        """Return the number of buckets it can show."""
        return dots_of(self.size.width, ascii_only=self._ascii_only)

    def redraw_key(self) -> tuple[object, ...]:
        """Return everything the chart depends on; it is redrawn only when one of these changes."""
        return ()

    def current_chart(self) -> Chart:
        """Return the chart for the current size."""
        return Chart()

    def rows(self, chart: Chart) -> list[Row]:
        """Return the drawn rows of a chart."""
        return render_chart(chart, *self.size, ascii_only=self._ascii_only)

    def render_lines(self, crop: Region) -> list[Strip]:
        # Textual requests single lines: the chart is drawn once for all of them.
        wanted = (*self.redraw_key(), self.size)
        if len(wanted) != len(self._drawn) or any(map(_differ, wanted, self._drawn)):
            self._drawn = wanted
            chart = self.current_chart()
            self._has_letters = any(line.letter for line in chart.lines)
            self._rows = self.rows(chart)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        segments = [Segment(span.text, self._style_of(span.role)) for span in self._rows[y]]
        return Strip(segments, self.size.width)

    def _style_of(self, role: str) -> Style:
        if role.startswith("trace") and self._has_letters:
            colour = series_style(int(role.removeprefix("trace"))).colour
            return self.rich_style + Style(color=colour, bold=True)
        return self.get_component_rich_style(f"plot--{role}")


def _differ(a: object, b: object) -> bool:
    """Compare by identity, because views and charts are long."""
    return a is not b and (isinstance(a, RunView | Chart) or a != b)


class ChartGrid(ChartView):
    """Draws its charts in `columns`."""

    charts: reactive[tuple[Chart, ...]] = reactive((Chart(),))
    columns: reactive[int] = reactive(1)

    @property
    def dots(self) -> int:
        """Return the number of buckets that each of its charts can show."""
        return grid_dots(self.columns, self.size.width, ascii_only=self._ascii_only)

    def shape(self, count: int) -> tuple[int, int]:
        """Return the columns and rows in which it can show as many of `count` charts as fit."""
        return shape_of(count, *self.size)

    def redraw_key(self) -> tuple[object, ...]:
        return *self.charts, self.columns

    def current_chart(self) -> Chart:
        return self.charts[0]

    def rows(self, chart: Chart) -> list[Row]:
        return render_grid(self.charts, self.columns, *self.size, ascii_only=self._ascii_only)
