"""A chart as text: lines, points and levels over one x axis, with a legend, bands and lanes.

    gap closed: 62 %  ⣤⣤ held-out 2.1132  ◆  ╌╌ teacher 1.9  ╌╌ start 6.9      the legend: what is drawn
      6 ┤⡇               ┊
      4 ┤ ⠱⣀     ×       ┊                                            lines, linear or logarithmic
      2 ┤   ⠉⠒⠤⣀   ⠈⠒⠢⠤┊⠤⠤
   marks│  s  !  × R     ┊  s                                         signs
     1 s┤⣀⡀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀┊⣀⣀  step time                              bands: other lines, each with its own y
  SM 97%│▇▇▇█▇▇▇▁▇▇▇▇▇▇▇▇▇                                            lanes: shares of what is full, one row each
        └┬────────┬──────┴┬───
    step 0       100    200
    step 183: loss 2.1132 ...                                         the values under the cursor

A column of dots shows the lowest and the highest of its values; distant columns are joined by a straight
line. A non-finite value is drawn as a cross at the top of its column, and the line breaks there. An absent
value leaves a gap. Lines are solid, and levels dashed; of several lines each has a letter, which it shows now
and then along its way, at its end, and under its crosses, so that they can be distinguished without colour.

The axis of a clipped band ends at CLIP times its median, so that one slow first step does not flatten all
others; values above it are an arrow at the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.log.axis import Axis
from engine.log.downsample import Bucket, Trace
from engine.units import format_value
from workbench.plot.canvas import (
    ASCII,
    UNICODE,
    Canvas,
    Glyphs,
    Row,
    Span,
    centred,
    fit,
    flow,
    name_places,
)

MIN_WIDTH, MIN_HEIGHT = 24, 4
"""Smallest size in cells on which curves are drawn; below it the newest values are written instead."""
LOW = 9
"""Number of rows below which the signs are drawn on the x axis and the values under the cursor replace the legend."""
TALL = 12
"""Number of rows from which the values under the cursor, and the legend of a chart with marks, may take two rows."""
LEAST_UPPER, LEAST_BAND = 5, 3
"""Minimum rows of the lines and of a band; bands and lanes are drawn only if there are more rows."""
CLIP = 3.0
"""Multiple of the median at which the axis of a clipped band ends."""
APART = 20
"""Distance between two letters on one line, in cells."""
GAP, MORE = "  ", ".."
"""The gap between two items of a legend, and the text in place of those that do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: its points, and its style."""

    trace: Trace
    slot: int
    """The index of its colour."""
    letter: str = ""
    """Drawn on the line, and before its name in the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A single value of a line, drawn as one character over it."""

    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal reference line, drawn however far it is from the points."""

    y: float
    name: str

    def height(self, log_y: bool) -> float:
        """Return its position on an axis; a logarithmic axis has no level at or below 0."""
        return math.log10(self.y) if log_y else self.y


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One character on the row of marks."""

    x: float
    text: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A line below the others, with its own y axis and its name on it."""

    trace: Trace
    name: str
    y_text: Callable[[float | None], str] = format_value
    clip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """One row of shares: how full something was in each cell of the plot."""

    name: str
    shares: Sequence[float | None]
    """Share in each column of cells, 0 to 1; None if nothing was read."""
    newest: float | None


def number_text(x: float) -> str:
    """Format an x with as many digits as needed."""
    return f"{x:.0f}" if x % 1 == 0 or x > 1000 else f"{x:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Everything that a chart draws, for one width."""

    title: str = ""
    """Drawn in the legend instead of note, lines and levels, for one chart among several with the same lines."""
    low: float = 0.0
    high: float = 1.0
    """The ends of the x axis."""
    lines: tuple[Line, ...] = ()
    bands: tuple[Band, ...] = ()
    """The most important first: those without room are left out."""
    lanes: tuple[LaneRow, ...] = ()
    note: str = ""
    """Summary of the lines, first in the legend."""
    points: tuple[Point, ...] = ()
    levels: tuple[Level, ...] = ()
    signs: tuple[Sign, ...] | None = None
    """Marks; the last of several in one column is drawn. None for a chart without marks."""
    cursor: float | None = None
    readout: tuple[str, ...] = ()
    """The text for the cursor; without it, the axis labels the cursor."""
    log_y: bool = False
    x_name: str = "step"
    x_text: Callable[[float], str] = number_text
    ticks: Callable[[float, float, int], Sequence[float]] | None = None
    """Chooses about `count` x in [low, high] to label; None for round numbers."""


def margin_of(width: int) -> int:
    """Return the number of cells left of the plot, enough for any axis label."""
    return 7 if width >= 50 else 6


def columns_of(width: int) -> int:
    """Return the number of cells of the plot itself."""
    return max(1, width - margin_of(width) - 2)


def dots_of(width: int, *, ascii_only: bool) -> int:
    """Return the dot columns of a chart of a width: the number of buckets it can show."""
    return columns_of(width) * (1 if ascii_only else 2)


def render_chart(chart: Chart, width: int, height: int, *, ascii_only: bool) -> list[Row]:
    """Draw `height` rows of `width` cells; a line without a value is left out."""
    if width <= 0 or height <= 0:
        return []
    return _Drawing(chart, width, height, ASCII if ascii_only else UNICODE).rows()


class _Drawing:
    """One chart at one size."""

    def __init__(self, chart: Chart, width: int, height: int, glyphs: Glyphs) -> None:
        self.chart, self.width, self.height, self.glyphs = chart, width, height, glyphs
        self.margin, self.columns = margin_of(width), columns_of(width)
        self.lines = [line for line in chart.lines if not line.trace.is_empty]
        # Infinite levels, and on a logarithmic axis those at or below 0, cannot be drawn.
        self.levels = [
            x for x in chart.levels if math.isfinite(x.y) and (x.y > 0 or not chart.log_y)
        ]
        traces = [line.trace for line in self.lines]
        self.span = span_of(traces, chart.points, self.levels, chart.log_y)
        dots = dots_of(width, ascii_only=glyphs is ASCII)
        self.x_axis = Axis(chart.low, chart.high, dots)

    def rows(self) -> list[Row]:
        chart, width, height = self.chart, self.width, self.height
        if not (self.lines or chart.points or chart.signs or chart.lanes):
            return centred("nothing logged yet", width, height)
        legend_limit = 2 if height >= (LOW if chart.signs is None else TALL) else 1
        legend = self.legend()
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            return legend_rows(legend, width, height, pad=True)
        is_low = height < LOW
        head = legend_rows(legend, width, legend_limit)
        readout = [fit([Span(text, "legend")], width) for text in chart.readout]
        if is_low:
            head, readout = readout[:1] or head, []
        readout = readout[: 2 if height >= TALL else 1]
        has_labels = height >= MIN_HEIGHT + 2
        has_signs = chart.signs is not None and not is_low
        rows = height - len(head) - len(readout) - 1 - has_labels - has_signs
        lanes, bands, of_band = self.parts(rows)
        hidden = [band for band in chart.bands if band not in bands]
        drawn = [*head, *self.upper(rows - len(lanes) - of_band * len(bands), hidden)]
        if has_signs:
            drawn.append(
                self.framed(self.signs(" " * self.columns), {0: "marks"}, is_tick=False)[0]
            )
        for band in bands:
            drawn += self.band(band, of_band)
        drawn += [self.lane(lane) for lane in lanes]
        edge, labels = self.x_rows()
        if is_low:
            edge = (edge[0], *self.signs(edge[1].text).text(0))
        drawn += [edge, *([labels] if has_labels else []), *readout]
        return [fit(row, width) for row in drawn]

    def parts(self, rows: int) -> tuple[Sequence[LaneRow], Sequence[Band], int]:
        """Return the lanes and bands that there is room for in `rows`, and the rows of a band."""
        chart = self.chart
        bands = [band for band in chart.bands if not band.trace.is_empty]
        if not self.lines and not chart.points:
            # Before the first step, only what was read of the machine has something to show.
            return chart.lanes[: max(0, rows - 1)], (), 0
        lanes = chart.lanes[: max(0, (rows - LEAST_UPPER) // 3)]
        left = rows - len(lanes)
        bands = bands[: max(0, (left - LEAST_UPPER) // LEAST_BAND)]
        return lanes, bands, max(LEAST_BAND, left // 5)

    # The legend.

    def legend(self) -> list[tuple[Span, Span]]:
        """Return the legend's items, each as form and text. Non-finite values come first, or after a title, which
        replaces all other items."""
        chart, glyphs = self.chart, self.glyphs
        items = [(Span(glyphs.cross, "cross"), Span(x, "cross")) for x in self.faults()]
        if chart.title:
            return [(Span(chart.title, "legend"), Span("", "legend")), *items]
        items += [(Span("", "note"), Span(chart.note, "note"))] if chart.note else []
        for line in self.lines:
            form = f"{line.letter} {glyphs.traces[line.slot]}".lstrip()
            words = f" {line.trace.name} {format_value(line.trace.last)}"
            items.append((Span(form, f"trace{line.slot}"), Span(words, "legend")))
        for level in self.levels:
            words = f" {level.name} {format_value(level.y)}"
            items.append((Span(glyphs.level * 2, "level"), Span(words, "legend")))
        return items

    def faults(self) -> list[str]:
        """Return where lines and bands are not finite."""
        by_letter: dict[str, tuple[float, int]] = {}
        bands = (Line(trace=band.trace, slot=0) for band in self.chart.bands)
        for line in (*self.lines, *bands):
            faulty = [bucket for bucket in line.trace.buckets if bucket.non_finite]
            if faulty:
                # Values are counted, not columns, whose number depends on the width; a line with a band counts once.
                first, count = by_letter.get(line.letter, (math.inf, 0))
                values = sum(bucket.non_finite for bucket in faulty)
                by_letter[line.letter] = min(first, faulty[0].x_first), max(count, values)
        return [
            f"{letter and ' '}{letter} not finite: {self.chart.x_text(first)}"
            + (f" and {count - 1} more" if count > 1 else "")
            for letter, (first, count) in by_letter.items()
        ]

    # Areas.

    def upper(self, rows: int, hidden: Sequence[Band]) -> list[Row]:
        """Draw the lines, points and levels, and crosses for what is not finite in bands without room."""
        chart, glyphs, span = self.chart, self.glyphs, self.span
        if span is None:
            words = "no finite value above 0" if chart.log_y else "no finite value"
            if not self.lines:
                words = "no step yet"
            return centred(words, self.width, rows)
        canvas = Canvas(self.columns, rows, ascii_only=glyphs is ASCII)
        y_axis = Axis(*span, canvas.dots_up, chart.log_y)
        levels = [
            (canvas.cell(0, y_axis.dot(level.y) or 0)[1], level.name) for level in self.levels
        ]
        for row, _ in levels:
            for column in range(canvas.columns):
                canvas.char(column, row, glyphs.level, "level")
        for line in reversed(self.lines):
            draw_line(canvas, line.trace, self.x_axis, y_axis, line.slot, glyphs)
        for line in self.lines:
            if line.letter:
                self.letters(canvas, line, y_axis)
        for point in chart.points:
            column, y = self.column(point.x), y_axis.dot(point.y) if math.isfinite(point.y) else 0
            if not math.isfinite(point.y):
                canvas.char(column, 0, glyphs.cross, "cross")
            elif y is not None:
                canvas.char(column, canvas.cell(0, y)[1], glyphs.mark, "mark")
        self.crosses(canvas, [*self.lines, *(Line(trace=x.trace, slot=0) for x in hidden)])
        # Drawn before the names of levels, so that it covers none of their letters.
        self.draw_cursor(canvas)
        for row, name in levels:
            places = [(canvas.columns - len(name) - 3, row), (2, row)]
            # As text of the axis, so that no other name covers it.
            write_where_free(canvas, f" {name} ", places, "level", "axis")
        ticks = Axis(*span, rows, chart.log_y)
        placed = [(ticks.dot(tick.value), tick) for tick in ticks.ticks(max(2, rows // 3))]
        labels = {rows - 1 - dot: tick.text for dot, tick in placed if dot is not None}
        return self.framed(canvas, labels)

    def band(self, band: Band, rows: int) -> list[Row]:
        """Draw a band; the ends of its y axis are labelled."""
        span = span_of([band.trace], (), (), False, clip=band.clip)
        if span is None:
            return centred(f"{band.name}: no finite value", self.width, rows)
        canvas = Canvas(self.columns, rows, ascii_only=self.glyphs is ASCII)
        draw_line(canvas, band.trace, self.x_axis, Axis(*span, canvas.dots_up), 0, self.glyphs)
        self.crosses(canvas, [Line(trace=band.trace, slot=0)])
        labels = {0: band.y_text(span[1]), rows - 1: band.y_text(span[0])}
        if labels[0] == labels[rows - 1]:
            labels = {rows // 2: labels[0]}
        name = f" {band.name} {band.y_text(band.trace.last)} "[: canvas.columns]
        places = [(x, y) for y in (0, rows - 1) for x in (canvas.columns - len(name), 0)]
        write_where_free(canvas, name, places, None, "legend")
        return self.framed(canvas, labels)

    def lane(self, lane: LaneRow) -> Row:
        """Draw one row of shares; its name and newest value are the label."""
        canvas, bars = Canvas(self.columns, 1, ascii_only=self.glyphs is ASCII), self.glyphs.bars
        for column, share in enumerate(lane.shares[: self.columns]):
            if share is not None:
                bar = min(max(0, int(share * len(bars))), len(bars) - 1)
                canvas.char(column, 0, bars[bar], "lane")
        label = lane.name
        if lane.newest is not None:
            label = f"{lane.name} {lane.newest:.0%}"
            label = label if len(label) <= self.margin else label.removesuffix("%")
        return self.framed(canvas, {0: label}, is_tick=False)[0]

    def framed(self, canvas: Canvas, labels: dict[int, str], *, is_tick: bool = True) -> list[Row]:
        """Return a canvas with the y axis at its left, and the cursor in the empty cells."""
        self.draw_cursor(canvas)
        rows = []
        for row in range(canvas.rows):
            edge = self.glyphs.tick if row in labels and is_tick else self.glyphs.vertical
            label = f"{labels.get(row, ''):>{self.margin}.{self.margin}} {edge}"
            rows.append((Span(label, "axis"), *canvas.text(row)))
        return rows

    def draw_cursor(self, canvas: Canvas) -> None:
        """Draw the cursor in every cell of its column that is empty or has only a level or text of the axis."""
        cursor = self.chart.cursor
        if cursor is not None and self.chart.low <= cursor <= self.chart.high:
            column = self.column(cursor)
            for row in range(canvas.rows):
                if canvas.role(column, row) in (None, "axis", "level"):
                    canvas.char(column, row, ":" if self.glyphs is ASCII else "┊", "cursor")

    def column(self, x: float) -> int:
        """Return the column of cells of an x; the x axis is linear, so there always is one."""
        return (self.x_axis.dot(x) or 0) // (1 if self.glyphs is ASCII else 2)

    def letters(self, canvas: Canvas, line: Line, y_axis: Axis) -> None:
        """Put the letter of a line on it at intervals, and at its end unless another line is there."""
        role, last = f"trace{line.slot}", -APART
        known = [b for b in line.trace.buckets if b.low is not None and b.high is not None]
        for index, bucket in enumerate(known):
            column = self.column((bucket.x_first + bucket.x_last) / 2)
            # Each line starts at another offset, so that the letters of coinciding lines are all visible.
            is_due = column - last >= APART and column % APART >= 3 * line.slot
            assert bucket.low is not None and bucket.high is not None
            dot = y_axis.dot(bucket.low / 2 + bucket.high / 2)
            if dot is None or not (is_due or index == len(known) - 1):
                continue
            row = canvas.cell(0, dot)[1]
            if canvas.role(column, row) in (role, None) or is_due:
                canvas.char(column, row, line.letter, role)
                last = column

    def crosses(self, canvas: Canvas, lines: Sequence[Line]) -> None:
        """Draw a cross at the top of each column with a non-finite value, and below it the letters of its lines."""
        taken: dict[int, int] = {}
        for line in lines:
            for bucket in line.trace.buckets:
                if not bucket.non_finite:
                    continue
                column = self.column((bucket.x_first + bucket.x_last) / 2)
                canvas.char(column, 0, self.glyphs.cross, "cross")
                row = taken[column] = taken.get(column, 0) + 1
                if line.letter and row < canvas.rows:
                    canvas.char(column, row, line.letter, f"trace{line.slot}")

    def signs(self, under: str) -> Canvas:
        """Draw the signs on one row, over `under`."""
        canvas = Canvas(len(under), 1, ascii_only=self.glyphs is ASCII)
        for column, char in enumerate(under):
            if char != " ":
                canvas.char(column, 0, char, "axis")
        for sign in self.chart.signs or ():
            if self.chart.low <= sign.x <= self.chart.high:
                canvas.char(self.column(sign.x), 0, sign.text, sign.role)
        return canvas

    def x_rows(self) -> tuple[Row, Row]:
        """Draw the x axis and its labels: the cursor first, then both ends, then the ticks, each where there is
        space."""
        chart, axis, glyphs = self.chart, self.x_axis, self.glyphs
        count = max(2, self.columns // 14)
        if chart.ticks is not None:
            ticks = list(chart.ticks(axis.low, axis.high, count))
        else:
            ticks = [tick.value for tick in axis.ticks(count)]
            if chart.x_name == "step":
                ticks = [value for value in ticks if value % 1 == 0]
        cursor = [chart.cursor] if chart.cursor is not None and not chart.readout else []
        placed = [(self.column(x), chart.x_text(x)) for x in (*cursor, axis.high, axis.low, *ticks)]
        words, named = name_places(placed, self.columns)
        edge = [
            glyphs.down_tick if column in named else glyphs.horizontal
            for column in range(self.columns)
        ]
        if chart.cursor is not None and axis.low <= chart.cursor <= axis.high:
            edge[self.column(chart.cursor)] = "^" if glyphs is ASCII else "┴"
        begin = " " * (self.margin + 1) + glyphs.corner
        name = f"{chart.x_name:<{self.margin + 2}.{self.margin}}"
        return (
            (Span(begin, "axis"), Span("".join(edge), "axis")),
            (Span(name + words, "axis"),),
        )


def legend_rows(
    items: Sequence[tuple[Span, Span]], width: int, height: int, *, pad: bool = False
) -> list[Row]:
    """Draw a legend on at most `height` rows; items that do not fit are dropped whole, and MORE replaces them."""
    lengths = [sum(len(span.text) for span in item) for item in items]
    lines = flow(lengths, width, len(GAP))
    is_cut = len(lines) > height
    if is_cut:
        # The last row keeps space for MORE.
        first = lines[height - 1].start
        last = flow(lengths[first:], width - len(GAP + MORE), len(GAP))[0]
        lines = [*lines[: height - 1], range(first, first + len(last))]
    rows = [
        [span for at in line for span in (Span(GAP, "legend"), *items[at])][1:] for line in lines
    ]
    if is_cut and sum(len(span.text) for span in rows[-1]) + len(GAP + MORE) <= width:
        rows[-1].append(Span(GAP + MORE, "legend"))
    if pad:
        rows += [[] for _ in range(height - len(rows))]
    return [fit(row, width) for row in rows]


def span_of(
    traces: Sequence[Trace],
    points: Sequence[Point],
    levels: Sequence[Level],
    log_y: bool,
    *,
    clip: bool = False,
) -> tuple[float, float] | None:
    """Return the lowest and highest y to show, as log10 if `log_y`, of every finite value and each level; clipped
    values and, if `log_y`, values at or below 0 are left out. None without a value."""
    values = [y for t in traces for b in t.buckets for y in (b.low, b.high) if y is not None]
    values += [point.y for point in points if math.isfinite(point.y)]
    if clip and values:
        ceiling = CLIP * median(values)
        values = [y for y in values if y <= ceiling] or values
    if log_y:
        values = [math.log10(y) for y in values if y > 0]
    if not values:
        return None
    values += [level.height(log_y) for level in levels]
    return min(values), max(values)


def draw_line(
    canvas: Canvas, trace: Trace, x_axis: Axis, y_axis: Axis, slot: int, glyphs: Glyphs
) -> None:
    """Draw one line; points further apart than the gap of the trace are not joined."""
    role, char = f"trace{slot}", glyphs.traces[slot][0]
    before: tuple[int, int, int] | None = None
    last: Bucket | None = None
    xs = x_axis.dots_of([(bucket.x_first + bucket.x_last) / 2 for bucket in trace.buckets])
    tops = y_axis.heights([bucket.high for bucket in trace.buckets])
    bottoms = y_axis.heights([bucket.low for bucket in trace.buckets])
    for bucket, x, high, bottom in zip(trace.buckets, xs, tops, bottoms, strict=True):
        if last is not None and bucket.x_first - last.x_last > trace.gap:
            before = None
        last = bucket
        if bucket.low is None or bucket.high is None:
            before = None
        elif high is None:
            canvas.char(canvas.cell(x, 0)[0], canvas.rows - 1, glyphs.below, role)
            before = None
        elif y_axis.is_over(bucket.high):
            canvas.char(canvas.cell(x, 0)[0], 0, glyphs.above, role)
            before = None
        else:
            low = bottom or 0
            runs = [(x, low, high)]
            if before is not None and not bucket.non_finite:
                x0, low0, high0 = before
                # Join the nearest dots of both bands; overlapping bands need no line between them.
                y0 = min(max((low + high) // 2, low0), high0)
                y1 = min(max(y0, low), high)
                if x > x0 + 1 or abs(y1 - y0) > 1:
                    runs += _joined(x0, y0, x, y1)
            for column, lowest, highest in runs:
                canvas.run(column, lowest, highest, char, role)
            before = None if bucket.non_finite else (x, low, high)


def _joined(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int, int]]:
    """Return a straight line as runs of dots: the column of dots, and its lowest and highest dot."""
    count = max(x1 - x0, abs(y1 - y0), 1)
    runs: dict[int, tuple[int, int]] = {}
    for i in range(count + 1):
        x, y = round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
        low, high = runs.get(x, (y, y))
        runs[x] = min(low, y), max(high, y)
    return [(x, low, high) for x, (low, high) in runs.items()]


def write_where_free(
    canvas: Canvas, words: str, places: Sequence[tuple[int, int]], free: str | None, role: str
) -> None:
    """Write words from the first of some places (column, row) on whose cells all have the role `free`; nowhere if
    there is none."""
    for start, row in places:
        cells = range(start, start + len(words))
        fits = start >= 0 and cells.stop <= canvas.columns
        if fits and all(canvas.role(column, row) == free for column in cells):
            for column, char in zip(cells, words, strict=True):
                canvas.char(column, row, char, role)
            return
