"""The pairs of a flip against the margin; what it shows is decided in `forest.render_forest`."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from workbench.flips import FlipSnapshot
from workbench.plot.canvas import Row
from workbench.plot.forest import render_forest


class ForestPlot(Widget):
    """Draws the pairs of one snapshot, as high as they need."""

    HELP = """\
# Pairs against the margin

A row is a pair: `x` is its own ratio B/A, the bar is the interval of all pairs so far. The dotted lines
are the margin: an interval outside them decides, one inside says that the arms are the same.
"""
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "forest--axis",
        "forest--margin",
        "forest--interval",
        "forest--own",
        "forest--words",
    }
    DEFAULT_CSS = """
    ForestPlot {
        height: auto; max-height: 45%; margin-bottom: 1;
        .forest--axis { color: $text-muted; }
        .forest--margin { color: $text-warning; text-style: bold; }
        .forest--interval { color: $text-primary; text-style: bold; }
        .forest--own { color: $text-accent; }
        .forest--words { color: $foreground; }
    }
    """

    snapshot: reactive[FlipSnapshot | None] = reactive(None, layout=True)

    def __init__(self, *, ascii_only: bool) -> None:
        super().__init__()
        self._ascii_only = ascii_only
        self._drawn: tuple[FlipSnapshot | None, Size] | None = None
        self._rows: list[Row] = []

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        pairs = self.snapshot.pairs if self.snapshot is not None else ()
        return len(pairs) + 1 if pairs else 0

    def _draw(self) -> list[Row]:
        snapshot = self.snapshot
        if snapshot is None or snapshot.plan is None:
            return []
        return render_forest(snapshot.plan, snapshot.pairs, *self.size, ascii_only=self._ascii_only)

    def render_line(self, y: int) -> Strip:
        if (
            self._drawn is None
            or self._drawn[0] is not self.snapshot
            or self._drawn[1] != self.size
        ):
            self._drawn, self._rows = (self.snapshot, self.size), self._draw()
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        return Strip(
            [
                Segment(span.text, self.get_component_rich_style(f"forest--{span.role}"))
                for span in self._rows[y]
            ],
            self.size.width,
        )
