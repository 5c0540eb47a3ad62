"""A plot of several runs that fills its widget; what it shows is decided in `render_overlay`."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from workbench.compared import Comparison, Metric, axis_text
from workbench.tui.canvas import Row
from workbench.tui.overlay import Line, Overlay, dots_of, render_overlay
from workbench.tui.series import series_style

EMPTY = Overlay(low=0.0, high=1.0, lines=())


class OverlayPlot(Widget, can_focus=True):
    """Draws one metric of the runs of a comparison."""

    class Moved(Message):
        """The plot has another width: what it shows has to be computed again."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "plot--axis",
        "plot--legend",
        "plot--cross",
        "plot--cursor",
    }
    DEFAULT_CSS = """
    OverlayPlot {
        .plot--axis { color: $text-muted; }
        .plot--legend { color: $foreground; }
        .plot--cross { color: $text-error; text-style: bold; }
        .plot--cursor { color: $text-muted; }
    }
    """

    overlay: reactive[Overlay] = reactive(EMPTY)

    def __init__(self, *, ascii_only: bool, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii_only = ascii_only
        self._drawn: tuple[Overlay, Size] | None = None
        self._rows: list[Row] = []

    def on_resize(self) -> None:
        self.post_message(self.Moved())

    @property
    def dots(self) -> int:
        """So many buckets can be shown."""
        return dots_of(self.size.width, ascii_only=self._ascii_only)

    def show(
        self,
        comparison: Comparison,
        metric: Metric,
        axis: str,
        *,
        cursor: float | None,
        log_y: bool,
    ) -> None:
        """Draw a metric over an axis; with a cursor, the legend tells the values there."""
        low, high = comparison.extent(metric, axis) or (0.0, 1.0)
        lines = []
        for run in comparison.runs:
            trace = run.trace(metric, axis, low, high, self.dots)
            value = trace.last if cursor is None else run.value_at(metric, axis, cursor)
            lines.append(Line(slot=run.slot, trace=trace, value=value))
        self.overlay = Overlay(
            low=low,
            high=high,
            lines=tuple(lines),
            cursor=cursor,
            log_y=log_y,
            x_name=axis,
            x_text=lambda x: axis_text(axis, x),
            y_text=metric.text,
        )

    def render_line(self, y: int) -> Strip:
        # Lines are asked for one by one: the plot is drawn once for all of them.
        wanted = (self.overlay, self.size)
        if self._drawn is None or self._drawn[0] is not wanted[0] or self._drawn[1] != wanted[1]:
            self._drawn = wanted
            self._rows = render_overlay(
                self.overlay, self.size.width, self.size.height, ascii_only=self._ascii_only
            )
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        segments = [Segment(span.text, self._style(span.role)) for span in self._rows[y]]
        return Strip(segments, self.size.width)

    def _style(self, role: str) -> Style:
        if role.startswith("trace"):
            colour = series_style(int(role.removeprefix("trace"))).colour
            return self.rich_style + Style(color=colour, bold=True)
        return self.get_component_rich_style(f"plot--{role}")
