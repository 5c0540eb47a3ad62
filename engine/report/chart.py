"""Draw line charts as SVG, for reports and notebooks without a kernel: the charts of `engine.log.figures` for a run,
the same charts of compared runs over each other, and the pairs of a flip with the margin.

A chart holds rectangles, lines and text, and no script, font or separate file. So a page with charts opens offline,
as does Markdown, and a figure takes some KiB. Solid lines are series, with their names at their ends; dashed lines
are levels. A non-finite value breaks the line and is marked with a cross at the top, because a line drawn across a
NaN would hide it. An absent value has no row, or breaks the line if its row holds None. A column that was never
logged has no line, and a figure without any line has the text "nothing was measured". A chart is dark on a dark page:
an inline chart takes the color-scheme of the page (or JupyterLab's theme), an image that of the img element; a viewer
without light-dark() draws the light chart. The same rows give the same bytes. Very many rows are downsampled
(`engine.log.downsample`). Not covered: logarithmic axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.flips.pair import Pair
from engine.flips.plan import Plan
from engine.log.axis import Axis
from engine.log.downsample import Row, points
from engine.log.figures import Curve, Figure, figures_of, held_out
from engine.log.sparkline import value_range
from engine.log.table import Column, numbers
from engine.log.view import RunView
from engine.report.compared import METRICS
from engine.terminal import as_html, printable
from engine.units import format_bytes

WIDTH, HEIGHT = 620, 190
LIMIT = 300
"""Number of intervals into which a drawn series is divided; each gives two or three rows."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 106, 24, 22
_LETTER, _ROW = 7, 12
"""Assumed width and height of a letter, with some margin because the font depends on the viewer."""
_NAMED = 12
"""Maximum length of a name at the end of its line, in letters."""
_SWATCH = 8
"""Width of the colour sample before a name; the name is in the text colour, because the colours of lines are too weak
for text."""
PAGE_ROWS = 20_000
"""Maximum number of intervals of all series of a page together, which keeps a page with many GPUs below 5 MB."""
MARKS = 200
"""Maximum number of alerts and compiles, the newest, in a chart in a browser."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#C46A9C", "#B58900", "#3D97CC")
"""Colours of lines: those of Okabe and Ito, with a contrast of 3:1 to light and dark backgrounds
(`workbench.plot.series`)."""
FAINT = "#888888"
"""Colour of ticks, frame and levels, with a contrast of 3:1 to both backgrounds."""
PAINTS = {
    "ground": ("#ffffff", "#111111"),
    "ink": ("#333333", "#dddddd"),
    "odd": ("#c00000", "#ff6b6b"),
}
"""Colours on a light and on a dark page; text has a contrast of 4.5:1 to the background. `odd` marks non-finite
values."""
# `svg:root` matches a chart that is a separate document; of an inline chart, the root is the page's.
STYLE = (
    "svg:root{color-scheme:light dark}[data-jp-theme-light=false] .apr-chart{color-scheme:dark}"
    + "".join(
        f".apr-chart .{name}{{fill:{light};fill:light-dark({light},{dark})}}"
        for name, (light, dark) in PAINTS.items()
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Named rows (x, y) whose x never decreases. With `points` each row is marked, with `line` they are joined."""

    name: str
    rows: tuple[Row, ...]
    points: bool = False
    line: bool = True


# The figures


def run_figures(view: RunView, *, limit: int = LIMIT) -> list[str]:
    """Return the charts of a run as SVG, over its steps, or over seconds if it has fewer than two."""
    steps, begin = view.steps, view.first_unix_s or 0.0
    by_step = len(steps) > 1
    whole = (steps.value("step", 0) or 0.0, steps.last("step") or 0.0) if by_step else None

    def places(curve: Curve) -> Column:
        if by_step and "step" in curve.table.columns:
            return curve.table.column("step")
        return placed([at or 0.0 for at in curve.table.values(curve.times)])

    def placed(times: list[float]) -> list[float]:
        if by_step:
            return steps.interpolated("step", "clock_s", times) if times else []
        return [at - begin for at in times]

    charts = []
    for figure in figures_of(view):
        series = []
        for curve in figure.curves:
            rows = points(places(curve), curve.table.column(curve.column), limit)
            rows = tuple((x, y if y is None else curve.drawn(y)) for x, y in rows)
            series.append(Series(name=curve.name, rows=rows, points=figure.points))
        signs = zip(placed([mark.unix_s for mark in figure.marks]), figure.marks, strict=True)
        charts.append(
            line_chart(
                figure.title,
                series,
                x_name="step" if by_step else "seconds",
                unit=figure.unit,
                levels=figure.levels,
                signs=[(x, mark.sign, mark.text) for x, mark in signs][:limit],
                ends=whole,
            )
        )
    return charts


def described(figure: Figure, begin_unix_s: float) -> dict[str, Any]:
    """Return a chart as chart.js expects it: the names of its series, and its static parts."""
    return {
        "id": figure.id,
        "title": figure.title,
        "unit": figure.unit,
        "points": figure.points,
        "series": [[series_key(figure, curve), curve.name] for curve in figure.curves],
        "levels": [[name, y] for name, y in figure.levels],
        "marks": [
            [round(mark.unix_s - begin_unix_s, 3), mark.sign, printable(mark.text)]
            for mark in figure.marks[-MARKS:]
        ],
    }


def series_key(figure: Figure, curve: Curve) -> str:
    """Return the key of a series, which is unique on a page."""
    return f"{figure.id}.{curve.name}"


def browser_charts(view: RunView) -> dict[str, Any]:
    """Return the charts of a run for chart.js: each series as seconds since the run began and values, None for a
    value that is not finite; `step` has the step at each of its seconds."""
    figures, begin = figures_of(view), view.first_unix_s or 0.0
    curves = {"step": Curve(name="step", table=view.steps, column="step")}
    curves |= {series_key(figure, curve): curve for figure in figures for curve in figure.curves}
    series = {}
    for key, curve in curves.items():
        rows = points(
            numbers(curve.table.column(curve.times)) - begin,
            curve.table.column(curve.column),
            min(LIMIT, PAGE_ROWS // len(curves)),
        )
        values = (None if y is None else curve.drawn(y) for _, y in rows)
        series[key] = [
            _apart(x for x, _ in rows),
            [_rounded(y) for y in values],
        ]
    return {"charts": [described(figure, begin) for figure in figures], "series": series}


def _rounded(y: float | None) -> float | None:
    return float(f"{y:.6g}") if y is not None and math.isfinite(y) else None


def _apart(seconds: Iterable[float]) -> list[float]:
    """Return times in seconds, rounded to milliseconds and strictly increasing: chart.js finds a row's step by its
    time, and two steps may be logged at the same time."""
    distinct: list[float] = []
    for second in seconds:
        at = round(second, 3)
        distinct.append(max(at, round(distinct[-1] + 0.001, 3)) if distinct else at)
    return distinct


def compared_charts(
    names: Sequence[str], views: Sequence[RunView]
) -> tuple[dict[str, Any], list[str]]:
    """Return the charts of compared runs, with one line for each run over its steps: for chart.js, and as SVG."""
    charts, stills = [], []
    high = max((view.steps.last("step") or 0.0 for view in views), default=0.0)
    series: dict[str, list[list[float | None]]] = {"step": [[0.0, max(high, 1.0)]] * 2}
    for metric in METRICS:
        rows = [_rows_of(view, metric.column) for view in views]
        if not any(rows):
            continue
        points_only = not metric.column
        lines = []
        for name, values in zip(names, rows, strict=True):
            key = f"{metric.name}.{name}"
            lines.append([key, name])
            series[key] = [
                [x for x, _ in values],
                [_rounded(y) for _, y in values],
            ]
        unit = metric.unit if metric.unit == "s" else ""
        title = metric.title if not unit else metric.name
        chart = {"id": metric.name, "title": title, "unit": unit, "points": points_only}
        charts.append({**chart, "series": lines, "levels": [], "marks": []})
        drawn = [
            Series(name=name, rows=values, points=points_only)
            for name, values in zip(names, rows, strict=True)
        ]
        stills.append(
            line_chart(title, drawn, x_name="step", unit=unit, ends=(0.0, max(high, 1.0)))
        )
    return {"axis": "step", "charts": charts, "series": series}, stills


def _rows_of(view: RunView, column: str) -> tuple[Row, ...]:
    """Return the rows of a column over steps; of the held-out loss if `column` is empty. Empty if there is no
    value."""
    if not column:
        return tuple(held_out(view))
    span = view.steps.range(column)
    if span.low is None and not span.non_finite:
        return ()
    return points(view.steps.column("step"), view.steps.column(column), LIMIT)


def flip_figure(plan: Plan, pairs: Sequence[Pair]) -> str:
    """Draw the ratio B / A of each comparable pair, with the limits of the margin as levels."""
    known = [(p.number, d) for p in pairs if (d := p.difference) is not None]
    rows = tuple((float(number), math.exp(d)) for number, d in known)
    ends = (0.5, max([p.number for p in pairs], default=1) + 0.5)
    levels = (
        ("no change", 1.0),
        ("1 + margin", 1 + plan.margin),
        ("1 / margin", 1 / (1 + plan.margin)),
    )
    series = [Series(name="B/A", rows=rows, points=True, line=False)]
    title = f"{plan.metric}, B over A"
    return line_chart(title, series, x_name="pair", levels=levels, ends=ends)


# Drawing


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str,
    unit: str = "",
    levels: Sequence[tuple[str, float]] = (),
    signs: Sequence[tuple[float, str, str]] = (),
    ends: tuple[float, float] | None = None,
) -> str:
    """Draw `series` over one x axis as SVG.

    `unit` is `bytes`, `%` for an axis from 0 to 100, or a unit written after the numbers of the y axis. `levels` are
    the names and y of dashed lines; `signs` are x, a character and its meaning; `ends` are the ends of the x axis, by
    default those of the series.
    """
    drawn = [curve for curve in series if curve.rows]
    values = [y for curve in drawn for _, y in curve.rows]
    low, high = (
        (0.0, 100.0) if unit == "%" else value_range([*values, *(y for _, y in levels if drawn)])
    )
    begin = min((curve.rows[0][0] for curve in drawn), default=0.0) if ends is None else ends[0]
    end = max((curve.rows[-1][0] for curve in drawn), default=1.0) if ends is None else ends[1]
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        share = (x - begin) / ((end - begin) or 1.0)
        return _LEFT + inner_w * min(max(share, 0.0), 1.0)

    def y_of(y: float) -> float:
        return _TOP + inner_h * (1 - min(max((y - low) / (high - low), 0.0), 1.0))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="apr-chart" font-family="monospace" font-size="11">',
        f"<title>{as_html(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="ground"/>',
        _text(_LEFT, 14, title),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{inner_w}" height="{inner_h}" fill="none" stroke="{FAINT}"/>',
    ]
    if not drawn:
        return (
            "\n".join([*parts, _text(_LEFT + 8, _TOP + 20, "nothing was measured"), "</svg>"])
            + "\n"
        )
    # Ticks of bytes are round numbers in the unit that is shown, such as GiB.
    scale = 1024.0 ** int(math.log(max(high, 1.0), 1024)) if unit == "bytes" else 1.0
    for tick in Axis(low / scale, high / scale, inner_h).ticks(4):
        y = y_of(tick.value * scale)
        parts += [
            _rule(_LEFT - 4, y, _LEFT, y),
            _text(_LEFT - 7, y + 4, _number(tick.value * scale, unit), "end"),
        ]
    for tick in Axis(begin, end, inner_w).ticks(5):
        x = x_of(tick.value)
        parts += [
            _rule(x, _TOP + inner_h, x, _TOP + inner_h + 4),
            _text(x, HEIGHT - 6, _place_of(tick.value), "middle"),
        ]
    parts.append(_text(4, HEIGHT - 6, x_name))
    names: list[tuple[float, str, str]] = []
    for name, y in levels:
        parts.append(_rule(_LEFT, y_of(y), _LEFT + inner_w, y_of(y), dash="6 4"))
        names.append((y_of(y), name, ""))
    # As in chart.js, a series without rows keeps its colour, so that each compared run has one colour in all charts.
    for number, curve in enumerate(series):
        if not curve.rows:
            continue
        colour = COLOURS[number % len(COLOURS)]
        end_y = None
        for piece in _pieces(curve.rows):
            places = [(x_of(x), y_of(y)) for x, y in piece]
            end_y = places[-1][1]
            if curve.line and len(places) > 1:
                parts.append(_line(places, colour))
            if curve.points or len(places) == 1:
                parts += [_diamond(x, y, colour) for x, y in places]
        parts += [
            _text(x_of(x), _TOP + 10, "×", "middle", "odd")
            for x, y in curve.rows
            if y is not None and not math.isfinite(y)
        ]
        names.append((_TOP if end_y is None else end_y, curve.name, colour))
    parts += _signs(signs, x_of)
    parts += _names(names)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _signs(
    signs: Sequence[tuple[float, str, str]], x_of: Callable[[float], float]
) -> Iterator[str]:
    """Yield the signs of events along the upper edge, if there is room; their meaning is the tooltip."""
    last = -math.inf
    for place, sign, words in sorted(signs):
        x = x_of(place)
        if x - last >= _LETTER:
            last = x
            yield _text(x, _TOP + 10, sign, "middle", words=words)


def _names(names: Sequence[tuple[float, str, str]]) -> Iterator[str]:
    """Yield each name at the right end of its line, after a sample of the line's colour (a level has none); names
    that would overlap are moved."""
    left, lowest = WIDTH - _RIGHT + 6, HEIGHT - _BOTTOM
    most = (lowest - _TOP) // _ROW
    placed = sorted(names, key=lambda name: name[0])
    if len(placed) > most:
        # The number of names that do not fit is shown: the names of eight GPUs would exceed the chart.
        placed = [*placed[: most - 1], (lowest, f"+{len(placed) - most + 1}", "")]
    places, taken = [], -math.inf
    for y, _, _ in placed:
        taken = max(y + 4, taken + _ROW)
        places.append(taken)
    free = math.inf
    for number in reversed(range(len(places))):
        free = places[number] = min(places[number], free - _ROW, lowest)
    for at, (_, name, colour) in zip(places, placed, strict=True):
        if colour:
            yield f'<rect x="{left}" y="{at - 5:.1f}" width="{_SWATCH}" height="3" fill="{colour}"/>'
        yield _text(left + _SWATCH + 4, at, name[:_NAMED])


def _text(
    x: float, y: float, text: str, anchor: str = "start", paint: str = "ink", words: str = ""
) -> str:
    content = as_html(text) + (f"<title>{as_html(words)}</title>" if words else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{paint}">{content}</text>'


def _line(places: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>'


def _rule(x0: float, y0: float, x1: float, y1: float, *, dash: str = "") -> str:
    """Draw a tick or, with `dash`, a level."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {ends} stroke="{FAINT}"{dashed}/>'


def _diamond(x: float, y: float, colour: str) -> str:
    corners = f"{x:.1f},{y - 4:.1f} {x + 4:.1f},{y:.1f} {x:.1f},{y + 4:.1f} {x - 4:.1f},{y:.1f}"
    return f'<polygon points="{corners}" fill="{colour}"/>'


def _place_of(x: float) -> str:
    """Format an x value: steps are integers, and seconds need three digits."""
    return f"{x:.0f}" if x == round(x) or abs(x) >= 100 else f"{x:.3g}"


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.4g}{f' {unit}' if unit else ''}"


def _pieces(rows: Sequence[Row]) -> list[list[tuple[float, float]]]:
    """Split rows at non-finite values into runs of rows with finite values."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in rows:
        if y is not None and math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
