"""What a plot holds besides traces, and the legend that names it all, form by form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.traces import Trace
from workbench.tui.axis import Axis
from workbench.tui.canvas import Glyphs, Row, Span, fit

GAP, MORE = "  ", ".."
"""Between two items, and in the place of those without room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of its own, drawn as one character over the traces."""

    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line to compare with. One far from all points is named in the legend only, so
    that it flattens nothing."""

    y: float
    name: str

    def height(self, log_y: bool) -> float:
        """Where it is on an axis; a logarithmic axis has no level at or under 0."""
        return math.log10(self.y) if log_y else self.y


def legend_items(
    traces: Sequence[Trace],
    marks: Sequence[Mark],
    mark_name: str,
    levels: Sequence[Level],
    span: tuple[float, float] | None,
    log_y: bool,
    glyphs: Glyphs,
    format_y: Callable[[float | None], str],
) -> list[tuple[Span, Span]]:
    """What is drawn, each as its form and its words; what is not finite comes first."""
    items = []
    places = sorted({b.x_first for t in traces for b in t.buckets if b.non_finite})
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        items.append(
            (Span(glyphs.cross, "cross"), Span(f" not finite: {places[0]:g}{more}", "cross"))
        )
    for form, trace in enumerate(traces):
        words = Span(f" {trace.name} {format_y(trace.last)}", "legend")
        items.append((Span(glyphs.traces[form], f"trace{form}"), words))
    top = max((b.high for t in traces for b in t.buckets if b.high is not None), default=0.0)
    if span is not None and Axis(*span, 1, log_y).is_over(top):
        items.append((Span(glyphs.above, "mark"), Span(f" up to {format_y(top)}", "legend")))
    if marks:
        words = Span(f" {mark_name} {format_y(marks[-1].y)}", "legend")
        items.append((Span(glyphs.mark, "mark"), words))
    for level in levels:
        y = level.height(log_y)
        where = ""
        if span is not None and not span[0] <= y <= span[1]:
            where = f" {glyphs.above if y > span[1] else glyphs.below}"
        words = Span(f" {level.name} {format_y(level.y)}{where}", "legend")
        items.append((Span(glyphs.level * 2, "level"), words))
    return items


def legend_rows(
    items: Sequence[tuple[Span, Span]], width: int, height: int, *, pad: bool = False
) -> list[Row]:
    """A legend on at most `height` rows; what has no room is left out whole, and a sign stands for it."""
    lines: list[list[Span]] = [[]]
    used = 0
    for index, item in enumerate(items):
        needed = sum(len(span.text) for span in item)
        if lines[-1] and used + len(GAP) + needed > width and len(lines) < height:
            lines.append([])
            used = 0
        # Where something comes after it on the last row, room for the sign is kept.
        rest = len(GAP) + len(MORE) if len(lines) == height and index < len(items) - 1 else 0
        if lines[-1] and used + len(GAP) + needed + rest > width:
            if len(lines) == height and used + len(GAP) + len(MORE) <= width:
                lines[-1].append(Span(GAP + MORE, "legend"))
            break
        gap = [Span(GAP, "legend")] if lines[-1] else []
        lines[-1] += [*gap, *item]
        used += needed + (len(GAP) if gap else 0)
    if pad:
        lines += [[] for _ in range(height - len(lines))]
    return [fit(line, width) for line in lines]


def needs_rows(items: Sequence[tuple[Span, Span]], width: int) -> int:
    """How many rows a legend takes that leaves nothing out."""
    return len(legend_rows(items, width, len(items) or 1))
