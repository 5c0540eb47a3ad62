"""A plot that fills its widget; what it shows is decided in `plot.render_plot`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from engine.units import format_value
from workbench.traces import Trace
from workbench.tui.canvas import Row
from workbench.tui.legend import Level, Mark
from workbench.tui.plot import render_plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Everything a plot shows."""

    traces: tuple[Trace, ...] = ()
    marks: tuple[Mark, ...] = ()
    mark_name: str = "mark"
    levels: tuple[Level, ...] = ()
    log_y: bool = False
    format_y: Callable[[float | None], str] = format_value
    clip: bool = False


class TracePlot(Widget):
    """Draws one `Plot`."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "plot--trace0",
        "plot--trace1",
        "plot--trace2",
        "plot--mark",
        "plot--level",
        "plot--cross",
        "plot--axis",
        "plot--legend",
    }
    DEFAULT_CSS = """
    TracePlot {
        .plot--trace0 { color: $text-primary; text-style: bold; }
        .plot--trace1 { color: $text-warning; }
        .plot--trace2 { color: $text-success; }
        .plot--mark { color: $text-accent; text-style: bold; }
        .plot--level { color: $text-muted; }
        .plot--cross { color: $text-error; text-style: bold; }
        .plot--axis { color: $text-muted; }
        .plot--legend { color: $foreground; }
    }
    """

    plot: reactive[Plot] = reactive(Plot())

    def __init__(self, *, ascii_only: bool, id: str | None = None, classes: str | None = None):
        super().__init__(id=id, classes=classes)
        self._ascii_only = ascii_only
        self._drawn: tuple[Plot, Size] | None = None
        self._rows: list[Row] = []

    def render_line(self, y: int) -> Strip:
        # Lines are asked for one by one: the plot is drawn once for all of them.
        wanted = (self.plot, self.size)
        if self._drawn is None or self._drawn[0] is not wanted[0] or self._drawn[1] != wanted[1]:
            self._drawn = wanted
            self._rows = render_plot(
                self.plot.traces,
                self.size.width,
                self.size.height,
                log_y=self.plot.log_y,
                ascii_only=self._ascii_only,
                marks=self.plot.marks,
                mark_name=self.plot.mark_name,
                levels=self.plot.levels,
                format_y=self.plot.format_y,
                clip=self.plot.clip,
            )
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        return Strip(
            [
                Segment(span.text, self.get_component_rich_style(f"plot--{span.role}"))
                for span in self._rows[y]
            ],
            self.size.width,
        )
