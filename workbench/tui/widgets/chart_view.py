"""A widget that draws one chart of `workbench.plot`."""

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
from workbench.plot.series import series_style


class ChartView(Widget):
    """Draws one chart. If a line has a letter, lines have the colours of `SERIES`, otherwise those of the theme."""

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

    def render_lines(self, crop: Region) -> list[Strip]:
        # Textual requests single lines: the chart is drawn once for all of them.
        wanted = (*self.redraw_key(), self.size)
        if len(wanted) != len(self._drawn) or any(map(_differ, wanted, self._drawn)):
            self._drawn = wanted
            chart = self.current_chart()
            self._has_letters = any(line.letter for line in chart.lines)
            self._rows = render_chart(chart, *self.size, ascii_only=self._ascii_only)
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
    """Return whether two values differ. Views and charts are compared by identity, because they are long."""
    return a is not b and (isinstance(a, RunView | Chart) or a != b)
