"""Traces as text: a pure function from points to rows of characters, for a terminal of any size.

    ⣤⣤ loss 2.1132  ⠤ ⠤ ce 2.3011  ◆ held-out 2.4       legend
      6 ┤⡇
        │⠸⡀      ×                                       a cross where a value is NaN or infinite
      4 ┤ ⠱⣀     ◆
        │   ⠉⠒⠤⣀   ⠈⠒⠢⠤                                  never a line over it
        └┬────────┬───────────┬───
    step 0       100         200                         named values of x

A column of dots shows the lowest and the highest value that fall on it; columns in between are
joined by a straight line. A value that is not finite is not a point: it is a cross at the top of
its column, and no line goes to or from it. An absent value leaves a gap. Traces differ in form, so
that they can be told apart without colour: solid, dashed, dotted, or three characters.

With `clip`, an axis ends at CLIP times the median, so that one slow first step does not flatten all
others; what is over it is an arrow at the top, and the legend tells how high it went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from engine.units import format_value
from workbench.traces import Bucket, Trace
from workbench.tui.axis import Axis
from workbench.tui.canvas import ASCII, UNICODE, Canvas, Glyphs, Row, Span, centred, fit
from workbench.tui.legend import Level, Mark, legend_items, legend_rows

MIN_WIDTH, MIN_HEIGHT = 24, 5
"""Below this there is no room for axes: the newest values are written instead."""
CLIP = 3.0
FEW = 8
"""So few values have no shape yet that a level could flatten."""

DRAWN = (
    "################",
    "#####   #####   ",
    "# # # # # # # # ",
    "#### #  #### #  ",
    "############    ",
    "#   #   #   #   ",
)
"""Which dot columns a trace uses, over and over: the first is solid, the second dashed, the third dotted, and
then dashes with dots, long dashes, and few dots."""


def render_plot(
    traces: Sequence[Trace],
    width: int,
    height: int,
    *,
    log_y: bool = False,
    ascii_only: bool = False,
    marks: Sequence[Mark] = (),
    mark_name: str = "mark",
    levels: Sequence[Level] = (),
    format_y: Callable[[float | None], str] = format_value,
    clip: bool = False,
) -> list[Row]:
    """`height` rows of `width` cells, of at most three traces; one never logged is left out."""
    if width <= 0 or height <= 0:
        return []
    traces = [trace for trace in traces if not trace.is_empty]
    levels = [x for x in levels if math.isfinite(x.y) and (x.y > 0 or not log_y)]
    glyphs = ASCII if ascii_only else UNICODE
    assert len(traces) <= len(DRAWN), f"{len(traces)} traces, and forms for {len(DRAWN)}"
    if not traces and not marks:
        return centred("nothing logged yet", width, height)
    span = span_of(traces, marks, levels, log_y, clip)
    legend = legend_items(traces, marks, mark_name, levels, span, log_y, glyphs, format_y)
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return legend_rows(legend, width, height, pad=True)
    head = legend_rows(legend, width, 2 if height >= 9 else 1)
    if span is None:
        words = "no finite value above 0" if log_y else "no finite value"
        return [*head, *centred(words, width, height - len(head))]

    rows = height - len(head) - 2
    labels = y_labels(Axis(*span, rows, log_y), rows)
    margin = max(4, *(len(text) for text in labels.values()))
    canvas = Canvas(width - margin - 2, rows, ascii_only=ascii_only)
    xs = [x for t in traces for b in t.buckets for x in (b.x_first, b.x_last)]
    xs += [mark.x for mark in marks]
    x_axis = Axis(min(xs), max(xs), canvas.dots_across)
    y_axis = Axis(*span, canvas.dots_up, log_y)
    draw_levels(canvas, levels, span, y_axis, glyphs)
    for form in reversed(range(len(traces))):
        draw_trace(canvas, traces[form].buckets, x_axis, y_axis, form, glyphs, traces[form].gap)
    draw_marks(canvas, marks, x_axis, y_axis, glyphs)
    draw_crosses(canvas, traces, x_axis, glyphs)
    name_levels(canvas, levels, span, y_axis)

    lines = []
    for row in range(rows):
        edge = glyphs.tick if row in labels else glyphs.vertical
        label = Span(f"{labels.get(row, ''):>{margin}} {edge}", "axis")
        lines.append(fit([label, *canvas.text(row)], width))
    x_name = traces[0].x_name if traces else "step"
    return [*head, *lines, *_x_labels(x_axis, x_name, margin, canvas, glyphs, width)]


def span_of(
    traces: Sequence[Trace],
    marks: Sequence[Mark],
    levels: Sequence[Level],
    log_y: bool,
    clip: bool,
) -> tuple[float, float] | None:
    """Lowest and highest y to show: every finite value but clipped ones, and each level that is
    near enough to them."""
    values = [y for t in traces for b in t.buckets for y in (b.low, b.high) if y is not None]
    values += [mark.y for mark in marks if math.isfinite(mark.y)]
    if clip and values:
        ceiling = CLIP * median(values)
        values = [y for y in values if y <= ceiling] or values
    if log_y:
        values = [math.log10(y) for y in values if y > 0]
    if not values:
        return None
    low, high = min(values), max(values)
    room = (high / 2 - low / 2) * 0.8 if len(values) > FEW else math.inf
    heights = [level.height(log_y) for level in levels]
    near = [y for y in heights if low - room <= y <= high + room]
    return min([low, *near]), max([high, *near])


def draw_levels(
    canvas: Canvas,
    levels: Sequence[Level],
    span: tuple[float, float],
    y_axis: Axis,
    glyphs: Glyphs,
) -> None:
    for level in levels:
        dot = y_axis.dot(level.y)
        if span[0] <= level.height(y_axis.is_log) <= span[1] and dot is not None:
            for column in range(canvas.columns):
                canvas.char(column, canvas.cell(0, dot)[1], glyphs.level, "level")


def name_levels(
    canvas: Canvas, levels: Sequence[Level], span: tuple[float, float], y_axis: Axis
) -> None:
    """Write the name of each level on its line, where no trace and no other name has covered it."""
    taken: set[tuple[int, int]] = set()
    for level in levels:
        dot = y_axis.dot(level.y)
        if dot is None or not span[0] <= level.height(y_axis.is_log) <= span[1]:
            continue
        row, name = canvas.cell(0, dot)[1], f" {level.name} "
        for start in (canvas.columns - len(name) - 1, 2):
            place = range(start, start + len(name))
            if start > 0 and all(
                canvas.role(column, row) == "level" and (column, row) not in taken
                for column in place
            ):
                for column, char in zip(place, name, strict=True):
                    canvas.char(column, row, char, "level")
                    taken.add((column, row))
                break


def _x_dot(x_axis: Axis, x: float) -> int:
    dot = x_axis.dot(x)
    assert dot is not None, "the x axis is linear"
    return dot


def _joined(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int, int]]:
    """A straight line as runs of dots: the column of dots, and its lowest and highest dot."""
    count = max(x1 - x0, abs(y1 - y0), 1)
    runs: dict[int, tuple[int, int]] = {}
    for i in range(count + 1):
        x, y = round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
        low, high = runs.get(x, (y, y))
        runs[x] = min(low, y), max(high, y)
    return [(x, low, high) for x, (low, high) in runs.items()]


def draw_trace(
    canvas: Canvas,
    buckets: Sequence[Bucket],
    x_axis: Axis,
    y_axis: Axis,
    form: int,
    glyphs: Glyphs,
    gap: float = math.inf,
) -> None:
    """Draw one trace; points that are further apart than `gap` on x are not joined."""
    role, char = f"trace{form}", glyphs.traces[form][0]
    drawn = DRAWN[form if canvas.dots_per_column > 1 else 0]
    before: tuple[int, int, int] | None = None
    last_x = math.inf
    xs = x_axis.dots_of([(bucket.x_first + bucket.x_last) / 2 for bucket in buckets])
    tops = y_axis.heights([bucket.high for bucket in buckets])
    bottoms = y_axis.heights([bucket.low for bucket in buckets])
    for bucket, x, high, bottom in zip(buckets, xs, tops, bottoms, strict=True):
        if before is not None and bucket.x_first - last_x > gap:
            before = None
        last_x = bucket.x_last
        if bucket.low is None or bucket.high is None:
            before = None
            continue
        if high is None:
            canvas.char(canvas.cell(x, 0)[0], canvas.rows - 1, glyphs.below, role)
            before = None
            continue
        if y_axis.is_over(bucket.high):
            canvas.char(canvas.cell(x, 0)[0], 0, glyphs.above, role)
            before = None
            continue
        low = bottom or 0
        runs = [(x, low, high)]
        if before is not None and not bucket.non_finite:
            x0, low0, high0 = before
            # Between the nearest dots of both bands: bands that overlap need no line through them.
            y0 = min(max((low + high) // 2, low0), high0)
            y1 = min(max(y0, low), high)
            if x > x0 + 1 or abs(y1 - y0) > 1:
                runs += _joined(x0, y0, x, y1)
        for column, lowest, highest in runs:
            if drawn[column % len(drawn)] == "#":
                canvas.run(column, lowest, highest, char, role)
        before = None if bucket.non_finite else (x, low, high)


def draw_marks(
    canvas: Canvas, marks: Sequence[Mark], x_axis: Axis, y_axis: Axis, glyphs: Glyphs
) -> None:
    for mark in marks:
        column = canvas.cell(_x_dot(x_axis, mark.x), 0)[0]
        if not math.isfinite(mark.y):
            canvas.char(column, 0, glyphs.cross, "cross")
        elif (y := y_axis.dot(mark.y)) is not None:
            canvas.char(column, canvas.cell(0, y)[1], glyphs.mark, "mark")


def draw_crosses(canvas: Canvas, traces: Sequence[Trace], x_axis: Axis, glyphs: Glyphs) -> None:
    for trace in traces:
        for bucket in trace.buckets:
            if bucket.non_finite:
                x = _x_dot(x_axis, (bucket.x_first + bucket.x_last) / 2)
                canvas.char(canvas.cell(x, 0)[0], 0, glyphs.cross, "cross")


def y_labels(axis: Axis, rows: int) -> dict[int, str]:
    """The text beside each row that has one; rows count from the top."""
    placed = [(axis.dot(tick.value), tick) for tick in axis.ticks(max(2, rows // 3))]
    return {rows - 1 - dot: tick.text for dot, tick in placed if dot is not None}


def _x_labels(
    axis: Axis, x_name: str, margin: int, canvas: Canvas, glyphs: Glyphs, width: int
) -> list[Row]:
    """The line under the plot and the values under the line; the last value is always named."""
    line = [glyphs.horizontal] * canvas.columns
    words = [" "] * canvas.columns
    ticks = axis.ticks(max(2, canvas.columns // 14))
    if x_name == "step":
        ticks = [tick for tick in ticks if tick.value % 1 == 0]
    for value in [axis.high, *(tick.value for tick in ticks)]:
        column = canvas.cell(_x_dot(axis, value), 0)[0]
        text = f"{value:.0f}" if value % 1 == 0 or value > 1000 else f"{value:.3g}"
        start = min(max(0, column - len(text) // 2), canvas.columns - len(text))
        # One free cell on each side keeps neighbouring numbers apart.
        around = words[max(0, start - 1) : start + len(text) + 1]
        if start >= 0 and all(char == " " for char in around):
            words[start : start + len(text)] = text
            line[column] = glyphs.down_tick
    return [
        fit([Span(" " * (margin + 1) + glyphs.corner + "".join(line), "axis")], width),
        fit([Span(f"{x_name:<{margin + 2}.{margin + 2}}" + "".join(words), "axis")], width),
    ]
