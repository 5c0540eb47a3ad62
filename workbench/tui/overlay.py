"""Several runs over each other as text: a line for each, told apart without colour.

    × B not finite: 21 and 2 more  A ⣤⣤ 2.1132  B ⠤ ⠤ 2.3011    values: newest, or at the cursor
      6 ┤⡇      ┊
        │⠸⡀A    ┊   ×
      4 ┤ ⠱⣀⠤B  ┊   B       a letter on each line, and under each cross whose it is
        │   ⠉⠒⠤⣀A  ⠈⠒⠢⠤B
        └┬──────┬─┬───────
    step 0     183       400

Every run keeps its form, whatever else is drawn. A value that is not finite is a cross, no line goes
over it, and a stretch that was lost stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.units import format_value
from workbench.traces import Trace
from workbench.tui.axis import Axis
from workbench.tui.canvas import ASCII, UNICODE, Canvas, Glyphs, Row, Span, centred, fit
from workbench.tui.legend import legend_rows, needs_rows
from workbench.tui.plot import draw_trace, span_of, y_labels
from workbench.tui.series import series_style

MIN_WIDTH, MIN_HEIGHT = 24, 5
APART = 20
"""Cells between two letters on one line."""
CURSOR = {True: ":", False: "┊"}
"""The line through the cursor, in ASCII and not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One run: its form, its points, and the value that the legend tells."""

    slot: int
    trace: Trace
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """Everything that is drawn, for one width."""

    low: float
    high: float
    lines: tuple[Line, ...]
    cursor: float | None = None
    log_y: bool = False
    x_name: str = "step"
    x_text: Callable[[float], str] = "{:.0f}".format
    y_text: Callable[[float | None], str] = format_value


def margin_of(width: int) -> int:
    """Cells left of the plot: enough for any label of an axis."""
    return 8 if width >= 50 else 6


def dots_of(width: int, *, ascii_only: bool) -> int:
    """Dot columns of an overlay of a width: so many buckets it can show."""
    return max(1, width - margin_of(width) - 2) * (1 if ascii_only else 2)


def render_overlay(overlay: Overlay, width: int, height: int, *, ascii_only: bool) -> list[Row]:
    """`height` rows of `width` cells."""
    if width <= 0 or height <= 0:
        return []
    glyphs = ASCII if ascii_only else UNICODE
    drawn = [line for line in overlay.lines if not line.trace.is_empty]
    most = 2 if height >= 9 else 1
    legend = _legend(overlay, glyphs)
    if needs_rows(legend, width) > most:
        # Each line's form comes before its value, which stands above the plot, too.
        legend = _legend(overlay, glyphs, values=False)
    if not drawn:
        return centred("nothing logged yet", width, height)
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return legend_rows(legend, width, height, pad=True)
    head = legend_rows(legend, width, most)
    span = span_of([line.trace for line in drawn], (), (), overlay.log_y, False)
    rows = height - len(head) - 2
    if span is None:
        words = "no finite value above 0" if overlay.log_y else "no finite value"
        return [*head, *centred(words, width, rows + 2)]
    margin = margin_of(width)
    canvas = Canvas(width - margin - 2, rows, ascii_only=ascii_only)
    x_axis = Axis(overlay.low, overlay.high, canvas.dots_across)
    y_axis = Axis(*span, canvas.dots_up, overlay.log_y)
    for line in reversed(drawn):
        draw_trace(
            canvas, line.trace.buckets, x_axis, y_axis, line.slot, glyphs, gap=line.trace.gap
        )
    for line in drawn:
        _letters(canvas, line, x_axis, y_axis)
    if overlay.cursor is not None:
        column = _column(canvas, x_axis, overlay.cursor)
        for row in range(rows):
            if canvas.role(column, row) is None:
                canvas.char(column, row, CURSOR[ascii_only], "cursor")
    _crosses(canvas, drawn, x_axis, glyphs)
    labels = y_labels(Axis(*span, rows, overlay.log_y), rows)
    body = []
    for row in range(rows):
        edge = glyphs.tick if row in labels else glyphs.vertical
        label = Span(f"{labels.get(row, ''):>{margin}.{margin}} {edge}", "axis")
        body.append(fit([label, *canvas.text(row)], width))
    return [*head, *body, *_x_rows(overlay, x_axis, canvas, margin, glyphs, width)]


def _legend(overlay: Overlay, glyphs: Glyphs, *, values: bool = True) -> list[tuple[Span, Span]]:
    """Each run's form and value; what is not finite comes first."""
    items = []
    for line in overlay.lines:
        places = [b.x_first for b in line.trace.buckets if b.non_finite]
        if places:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            letter = series_style(line.slot).letter
            words = f" {letter} not finite: {overlay.x_text(places[0])}{more}"
            items.append((Span(glyphs.cross, "cross"), Span(words, "cross")))
    for line in overlay.lines:
        letter, role = series_style(line.slot).letter, f"trace{line.slot}"
        form = Span(f"{letter} {glyphs.traces[line.slot]}", role)
        words = "no value" if line.value is None else overlay.y_text(line.value)
        items.append((form, Span(f" {words}" if values else "", "legend")))
    return items


def _column(canvas: Canvas, x_axis: Axis, x: float) -> int:
    dot = x_axis.dot(x)
    assert dot is not None, "the x axis is linear"
    return canvas.cell(dot, 0)[0]


def _letters(canvas: Canvas, line: Line, x_axis: Axis, y_axis: Axis) -> None:
    """Put the run's letter on its line: now and then, and at its end."""
    role = f"trace{line.slot}"
    last = -APART
    points = [b for b in line.trace.buckets if b.low is not None and b.high is not None]
    for index, bucket in enumerate(points):
        x = (bucket.x_first + bucket.x_last) / 2
        column = _column(canvas, x_axis, x)
        # Each run begins elsewhere, so that letters of lines that lie on each other are all seen.
        due = column - last >= APART and column % APART >= 3 * line.slot
        assert bucket.low is not None and bucket.high is not None
        dot = y_axis.dot(bucket.low / 2 + bucket.high / 2)
        if dot is None or not (due or index == len(points) - 1):
            continue
        row = canvas.cell(0, dot)[1]
        if canvas.role(column, row) in (role, None) or due:
            canvas.char(column, row, series_style(line.slot).letter, role)
            last = column


def _crosses(canvas: Canvas, lines: Sequence[Line], x_axis: Axis, glyphs: Glyphs) -> None:
    """A cross at the top for each value that is not finite, and whose it is below."""
    taken: dict[int, int] = {}
    for line in lines:
        for bucket in line.trace.buckets:
            if not bucket.non_finite:
                continue
            column = _column(canvas, x_axis, (bucket.x_first + bucket.x_last) / 2)
            canvas.char(column, 0, glyphs.cross, "cross")
            row = taken[column] = taken.get(column, 0) + 1
            if row < canvas.rows:
                letter = series_style(line.slot).letter
                canvas.char(column, row, letter, f"trace{line.slot}")


def _x_rows(
    overlay: Overlay, axis: Axis, canvas: Canvas, margin: int, glyphs: Glyphs, width: int
) -> list[Row]:
    """The line under the plot and the values under the line; the cursor's and the last come first."""
    line = [glyphs.horizontal] * canvas.columns
    words = [" "] * canvas.columns
    ticks = [tick.value for tick in axis.ticks(max(2, canvas.columns // 14))]
    cursor = [] if overlay.cursor is None else [overlay.cursor]
    for value in [*cursor, axis.high, *ticks]:
        column, text = _column(canvas, axis, value), overlay.x_text(value)
        start = min(max(0, column - len(text) // 2), canvas.columns - len(text))
        # One free cell on each side keeps neighbouring numbers apart.
        around = words[max(0, start - 1) : start + len(text) + 1]
        if start >= 0 and all(char == " " for char in around):
            words[start : start + len(text)] = text
            line[column] = glyphs.down_tick
    return [
        fit([Span(" " * (margin + 1) + glyphs.corner + "".join(line), "axis")], width),
        fit([Span(f"{overlay.x_name:<{margin + 2}.{margin + 1}}" + "".join(words), "axis")], width),
    ]
