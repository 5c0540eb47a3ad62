"""The time line of a run as text: loss, marks and step time over one x axis, a cursor through all of them.

    ⣤⣤ loss 2.1132  ⠤ ⠤ ce 2.3011  ◆ held-out 2.4  ╌╌ ln V 6.9     what is drawn
      6 ┤⡇               ┊
      4 ┤ ⠱⣀     ×       ┊                                            loss, linear or logarithmic
      2 ┤   ⠉⠒⠤⣀   ⠈⠒⠢⠤┊⠤⠤
        │  s  !  × R     ┊  s                                         marks
     1 s┤⣀⡀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀┊⣀⣀                                         step time
        └┬────────┬──────┬┴───
    step 0       100    200
    step 183: loss 2.1132 ...                                         what is under the cursor

Every dot column holds the extremes of all rows that fall on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.units import format_seconds, format_value
from workbench.marks import PRESSING, Happening, Kind
from workbench.traces import Trace
from workbench.tui.axis import Axis
from workbench.tui.canvas import ASCII, UNICODE, Canvas, Glyphs, Row, Span, centred, fit
from workbench.tui.legend import Level, Mark, legend_items, legend_rows
from workbench.tui.plot import (
    draw_crosses,
    draw_levels,
    draw_marks,
    draw_trace,
    name_levels,
    span_of,
    y_labels,
)

MIN_WIDTH, MIN_HEIGHT = 24, 4
"""Below this there is no room for a curve: the newest values are written instead."""
LOW = 9
"""On fewer rows the marks stand on the line of the x axis, and what is under the cursor in the place of the
legend, so that the curve keeps its rows."""
WITH_PACE = 13
"""From so many rows on there is room for step time below the loss."""
SIGNS: dict[Kind, tuple[str, str]] = {
    "nan": ("×", "X"),
    "alert": ("!", "!"),
    "restart": ("R", "R"),
    "flip": ("F", "F"),
    "late compile": ("C", "C"),
    "checkpoint": ("s", "s"),
    "compile": ("c", "c"),
}
"""How each kind of mark is drawn, with and without Unicode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """Everything that is drawn, for one width."""

    low: float
    high: float
    losses: tuple[Trace, ...]
    pace: Trace | None = None
    heldout: tuple[Mark, ...] = ()
    levels: tuple[Level, ...] = ()
    marks: tuple[tuple[float, Happening], ...] = ()
    """Each with its x."""
    fault: str = ""
    """Which steps are not finite, in words; empty where the traces alone tell."""
    cursor: float | None = None
    readout: tuple[str, ...] = ()
    log_y: bool = False
    x_name: str = "step"
    x_text: Callable[[float], str] = field(default=lambda x: f"{x:.0f}")
    ticks: Callable[[float, float, int], Sequence[float]] | None = None
    """Which x to name of [low, high], about so many; None for round numbers."""


def margin_of(width: int) -> int:
    """Cells left of the plot: enough for any label of an axis."""
    return 7 if width >= 50 else 5


def dots_of(width: int, *, ascii_only: bool) -> int:
    """Dot columns of a time line of a width: so many buckets it can show."""
    return max(1, width - margin_of(width) - 2) * (1 if ascii_only else 2)


def render_timeline(line: TimeLine, width: int, height: int, *, ascii_only: bool) -> list[Row]:
    """`height` rows of `width` cells."""
    if width <= 0 or height <= 0:
        return []
    glyphs = ASCII if ascii_only else UNICODE
    losses = [trace for trace in line.losses if not trace.is_empty]
    if not losses and not line.heldout and not line.marks:
        return centred("nothing logged yet", width, height)
    span = span_of(losses, line.heldout, line.levels, line.log_y, False)
    legend = legend_items(
        losses, line.heldout, "held-out", line.levels, span, line.log_y, glyphs, format_value
    )
    if line.fault:
        faults = (Span(glyphs.cross, "cross"), Span(f" {line.fault}", "cross"))
        legend = [faults, *(item for item in legend if item[0].role != "cross")]
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return legend_rows(legend, width, height, pad=True)
    if height < LOW:
        return _low(line, losses, legend, span, width, height, glyphs)
    head = legend_rows(legend, width, 2 if height >= 12 else 1)
    readout = line.readout[: 2 if height >= 12 else 1]
    rows = height - len(head) - len(readout) - 2 - 1
    has_pace = line.pace is not None and not line.pace.is_empty and height >= WITH_PACE
    below = max(3, rows // 4) if has_pace else 0
    margin = margin_of(width)
    columns = width - margin - 2
    x_axis = Axis(line.low, line.high, dots_of(width, ascii_only=ascii_only))
    lines: list[Row] = [*head, *_loss_area(line, losses, span, x_axis, width, rows - below, glyphs)]
    lines.append(_mark_row(line, x_axis, columns, margin, glyphs))
    if has_pace and line.pace is not None:
        lines += _pace_area(line, line.pace, x_axis, columns, below, margin, glyphs)
    lines += _x_rows(line, x_axis, columns, margin, glyphs)
    lines += [fit([Span(text, "legend")], width) for text in readout]
    return [fit(row, width) for row in lines]


def _low(
    line: TimeLine,
    losses: Sequence[Trace],
    legend: Sequence[tuple[Span, Span]],
    span: tuple[float, float] | None,
    width: int,
    height: int,
    glyphs: Glyphs,
) -> list[Row]:
    """On a few rows: the newest values, or what is under the cursor; the curve; marks on the x axis."""
    head = legend_rows(legend, width, 1)
    if line.readout:
        head = [fit([Span(line.readout[0], "legend")], width)]
    has_labels = height >= MIN_HEIGHT + 2
    rows = height - len(head) - 1 - has_labels
    margin = margin_of(width)
    columns = width - margin - 2
    x_axis = Axis(line.low, line.high, dots_of(width, ascii_only=glyphs is ASCII))
    (edge,), labels = _x_rows(line, x_axis, columns, margin, glyphs)
    begin, ruler = edge.text[: margin + 2], edge.text[margin + 2 :]
    marks = _mark_canvas(line, x_axis, ruler, glyphs).text(0)
    lines = [*head, *_loss_area(line, losses, span, x_axis, width, rows, glyphs)]
    lines += [(Span(begin, "axis"), *marks), *([labels] if has_labels else [])]
    return [fit(row, width) for row in lines]


def _loss_area(
    line: TimeLine,
    losses: Sequence[Trace],
    span: tuple[float, float] | None,
    x_axis: Axis,
    width: int,
    rows: int,
    glyphs: Glyphs,
) -> list[Row]:
    """The losses, held-out losses and levels on some rows."""
    if span is None:
        words = "no finite value above 0" if line.log_y else "no finite value"
        return centred(words, width, rows)
    margin = margin_of(width)
    canvas = Canvas(width - margin - 2, rows, ascii_only=glyphs is ASCII)
    y_axis = Axis(*span, canvas.dots_up, line.log_y)
    draw_levels(canvas, line.levels, span, y_axis, glyphs)
    for form in reversed(range(len(losses))):
        draw_trace(canvas, losses[form].buckets, x_axis, y_axis, form, glyphs, losses[form].gap)
    draw_marks(canvas, line.heldout, x_axis, y_axis, glyphs)
    draw_crosses(canvas, losses, x_axis, glyphs)
    name_levels(canvas, line.levels, span, y_axis)
    labels = y_labels(Axis(*span, canvas.rows, line.log_y), canvas.rows)
    return _area(canvas, labels, x_axis, line.cursor, margin, glyphs)


def _pace_area(
    line: TimeLine,
    pace: Trace,
    x_axis: Axis,
    columns: int,
    rows: int,
    margin: int,
    glyphs: Glyphs,
) -> list[Row]:
    span = span_of([pace], (), (), False, True)
    if span is None:
        return centred("no step time was measured", columns + margin + 2, rows)
    canvas = Canvas(columns, rows, ascii_only=glyphs is ASCII)
    y_axis = Axis(*span, canvas.dots_up)
    draw_trace(canvas, pace.buckets, x_axis, y_axis, 0, glyphs, pace.gap)
    draw_crosses(canvas, [pace], x_axis, glyphs)
    labels = {0: format_seconds(span[1]), rows - 1: format_seconds(span[0])}
    if labels[0] == labels[rows - 1]:
        labels = {rows // 2: labels[0]}
    return _area(canvas, labels, x_axis, line.cursor, margin, glyphs)


def _area(
    canvas: Canvas,
    labels: dict[int, str],
    x_axis: Axis,
    cursor: float | None,
    margin: int,
    glyphs: Glyphs,
) -> list[Row]:
    column = _column(canvas, x_axis, cursor)
    rows = []
    for row in range(canvas.rows):
        if column is not None and canvas.role(column, row) in (None, "axis", "level"):
            canvas.char(column, row, _cursor_sign(glyphs), "cursor")
        edge = glyphs.tick if row in labels else glyphs.vertical
        label = Span(f"{labels.get(row, '')[:margin]:>{margin}} {edge}", "axis")
        rows.append((label, *canvas.text(row)))
    return rows


def _cursor_sign(glyphs: Glyphs) -> str:
    return "|" if glyphs is ASCII else "┊"


def _column(canvas: Canvas, x_axis: Axis, x: float | None) -> int | None:
    if x is None or not x_axis.low <= x <= x_axis.high:
        return None
    return canvas.cell(x_axis.dot(x) or 0, 0)[0]


def _mark_canvas(line: TimeLine, x_axis: Axis, under: str, glyphs: Glyphs) -> Canvas:
    """One sign for each column with marks: that of its most pressing one; elsewhere what is under them."""
    canvas = Canvas(len(under), 1, ascii_only=glyphs is ASCII)
    for place, char in enumerate(under):
        if char != " ":
            canvas.char(place, 0, char, "axis")
    for kind in reversed(PRESSING):
        for x, mark in line.marks:
            column = _column(canvas, x_axis, x)
            if mark.kind == kind and column is not None:
                role = "cross" if kind in ("nan", "alert") else "mark"
                canvas.char(column, 0, SIGNS[kind][glyphs is ASCII], role)
    return canvas


def _mark_row(line: TimeLine, x_axis: Axis, columns: int, margin: int, glyphs: Glyphs) -> Row:
    """The marks on a row of their own, with the cursor."""
    canvas = _mark_canvas(line, x_axis, " " * columns, glyphs)
    cursor = _column(canvas, x_axis, line.cursor)
    if cursor is not None and canvas.role(cursor, 0) is None:
        canvas.char(cursor, 0, _cursor_sign(glyphs), "cursor")
    return (Span(f"{'marks'[:margin]:>{margin}} {glyphs.vertical}", "axis"), *canvas.text(0))


def _x_rows(line: TimeLine, axis: Axis, columns: int, margin: int, glyphs: Glyphs) -> list[Row]:
    """The line under the plot and the values under the line; both ends are always named."""
    per_column = 1 if glyphs is ASCII else 2
    edge = [glyphs.horizontal] * columns
    words = [" "] * columns
    count = max(2, columns // 14)
    ticks = [tick.value for tick in axis.ticks(count) if tick.value % 1 == 0]
    if line.ticks is not None:
        ticks = list(line.ticks(axis.low, axis.high, count))
    for value in [axis.high, axis.low, *ticks]:
        column, text = (axis.dot(value) or 0) // per_column, line.x_text(value)
        start = min(max(0, column - len(text) // 2), columns - len(text))
        # One free cell on each side keeps neighbouring numbers apart.
        around = words[max(0, start - 1) : start + len(text) + 1]
        if start >= 0 and all(char == " " for char in around):
            words[start : start + len(text)] = text
            edge[column] = glyphs.down_tick
    if line.cursor is not None and axis.low <= line.cursor <= axis.high:
        edge[(axis.dot(line.cursor) or 0) // per_column] = "^" if glyphs is ASCII else "┴"
    return [
        (Span(" " * (margin + 1) + glyphs.corner + "".join(edge), "axis"),),
        (Span(f"{line.x_name[:margin]:<{margin + 2}}" + "".join(words), "axis"),),
    ]


def marks_near(
    marks: Sequence[tuple[float, Happening]], x: float, within: float
) -> list[Happening]:
    """The marks at most `within` from x, the nearest first, of equals the most pressing."""
    near = [(abs(place - x), PRESSING.index(mark.kind), mark) for place, mark in marks]
    return [m for d, _, m in sorted(near, key=lambda item: item[:2]) if d <= within]


ROUND_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def clock_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` unix times in [low, high] that are round on a local clock."""
    wanted = (high - low) / max(1, count)
    every = next((s for s in ROUND_SECONDS if s >= wanted), None)
    if every is None:
        every = 86400 * math.ceil(wanted / 86400)
    offset = time.localtime(low).tm_gmtoff
    first = math.ceil((low + offset) / every) * every - offset
    return [first + every * index for index in range(int((high - first) // every) + 1)]
