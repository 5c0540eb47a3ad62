"""Line charts as SVG, for reports, closed notebooks and findings.

    losses       loss, ce, kd and the held-out loss of the student, nats over steps
    step time    seconds over steps
    GPU          utilisation and tensor activity, percent over seconds
    memory       of GPU, trainer and host, bytes over seconds
    pairs        B over A of each pair of a flip, with the margin
    a metric     over the window that evidence refers to; also as a sparkline in one line of text

A chart holds rectangles, lines and text, and no script, font or separate file. So a page with it opens
offline, in Markdown too, and a figure takes some KiB. A non-finite value breaks the line and is marked with a
cross at the top, because a chart that draws over a NaN hides what matters most. An absent value has no row,
or breaks the line if its row holds None. A column that was never logged has no line, and a figure without any
line says so. The same rows give the same bytes.

`thin` reduces very many rows to few. From each interval it keeps the lowest, the highest and one non-finite
value, so a spike of one step in a million is still drawn. Not covered: logarithmic axes, and more than the
six dash patterns below in one chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.flips.plan import Plan
from engine.flips.verdict import Pair
from engine.log.table import Table
from engine.log.view import RunView
from engine.terminal import as_html
from engine.units import format_bytes

WIDTH, HEIGHT = 620, 190
LIMIT = 300
"""Number of intervals that a drawn series is cut into; each gives two or three rows."""
LOSSES = ("loss", "ce", "kd")
GPU = {"gpu_util_pct": "utilisation", "tensor_util_pct": "tensor", "sm_util_pct": "SM busy"}
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 40, 22
_LETTER = 7
"""Width of a letter with some margin, because the font depends on the viewer."""
_COLOURS = ("#1f5fa8", "#b3541e", "#2e7d32", "#7b3fa0", "#8a6d00", "#555555")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 4", "1 4")
_BARS = "▁▂▃▄▅▆▇█"

Row = tuple[float, float | None]
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Named rows (x, y) with x never decreasing; with `marks` they are drawn as marks without a line."""

    name: str
    rows: tuple[Row, ...]
    marks: bool = False


# The figures


def run_figures(view: RunView, *, limit: int = LIMIT) -> list[str]:
    """The four figures of a run as SVG."""

    def of_steps(name: str) -> Series:
        table = view.steps
        return Series(name=name, rows=thin(table.values("step"), table.values(name), limit))

    def of_time(table: Table, name: str, words: str) -> Series:
        begin = view.first_unix_s or 0.0
        rows = thin(table.values("unix_s"), table.values(name), limit)
        return Series(name=words, rows=tuple((x - begin, y) for x, y in rows))

    held = tuple((float(e.step), e.loss) for e in view.evals if e.subject == "student" and e.loss)
    tables = sorted(view.gpu_tables.items())
    losses = [*map(of_steps, LOSSES), Series(name="held-out", rows=held, marks=True)]
    gpu = [of_time(t, name, f"{words} {i}") for i, t in tables for name, words in GPU.items()]
    memory = [
        *(of_time(t, "gpu_mem_used_bytes", f"GPU {i}") for i, t in tables),
        of_time(view.hosts, "trainer_rss_bytes", "trainer"),
        of_time(view.hosts, "host_available_bytes", "available"),
    ]
    return [
        line_chart("losses, nats", losses, x_name="step"),
        line_chart("step time", [of_steps("step_s")], x_name="step", unit="s"),
        line_chart("GPU", gpu, x_name="seconds", unit="%"),
        line_chart("memory", memory, x_name="seconds", unit="bytes"),
    ]


def flip_figure(plan: Plan, pairs: Sequence[Pair]) -> str:
    """B over A of each comparable pair, between the edges of the margin."""
    known = [(p.number, d) for p in pairs if p.complete and (d := p.difference) is not None]
    rows = tuple((float(number), math.exp(d)) for number, d in known)
    ends = (0.5, max([p.number for p in pairs], default=1) + 0.5)
    levels = {
        "no difference": 1.0,
        "1 + margin": 1 + plan.margin,
        "1 / margin": 1 / (1 + plan.margin),
    }
    series = [
        Series(name="B/A", rows=rows, marks=True),
        *(Series(name=name, rows=tuple((x, y) for x in ends)) for name, y in levels.items()),
    ]
    return line_chart(f"{plan.metric}, B over A", series, x_name="pair")


def metric_figure(points: Sequence[Row], title: str) -> str:
    """A metric over the seconds since its first point; `points` are (unix seconds, value)."""
    begin = points[0][0] if points else 0.0
    rows = thin([x - begin for x, _ in points], [y for _, y in points], gaps=True)
    return line_chart(title, [Series(name=title, rows=rows)], x_name="seconds")


def sparkline(values: Values, width: int = 60) -> str:
    """Draw the values as bars, each the mean of its interval; a dot where the interval holds an absent or
    non-finite value."""
    low, high = _range(values)
    bars = []
    for begin, end in _shares(len(values), min(width, len(values))):
        share = values[begin:end]
        finite = _finite(share)
        if len(finite) < len(share):
            bars.append("·")
        else:
            height = (math.fsum(finite) / len(finite) - low) / (high - low)
            bars.append(_BARS[min(len(_BARS) - 1, int(height * len(_BARS)))])
    return "".join(bars)


# Reducing rows


def thin(xs: Values, ys: Values, limit: int = LIMIT, *, gaps: bool = False) -> tuple[Row, ...]:
    """Return rows (x, y) without the absent ones; more than 2 * `limit` rows become at most 3 * `limit`.

    With `gaps` an absent y is a row with None, and one such row per interval is kept. It works on slices, so a
    million rows take a fraction of a second.
    """

    if len(ys) <= 2 * limit:
        paired = zip(xs, ys, strict=True)
        return tuple((x, y) for x, y in paired if x is not None and (gaps or y is not None))
    rows: list[Row] = []
    for begin, end in _shares(len(ys), limit):
        share = ys[begin:end]
        finite: Values = share
        odd: dict[bool, int] = {}
        # One sum tells whether every value is finite, because NaN and infinity propagate through it.
        if None in share or not math.isfinite(sum(share)):  # type: ignore[arg-type]
            finite = _finite(share)
            unlike = [
                (y is None, i) for i, y in enumerate(share) if y is None or not math.isfinite(y)
            ]
            odd = dict(reversed(unlike))
        if not gaps:
            odd.pop(True, None)
        chosen = {share.index(y) for y in (min(finite), max(finite))} if finite else set()  # type: ignore[type-var]
        picked = [(xs[begin + i], share[i]) for i in sorted(chosen | set(odd.values()))]
        rows += [(x, y) for x, y in picked if x is not None]
    return tuple(rows)


def _shares(count: int, shares: int) -> list[tuple[int, int]]:
    """Begin and end of each of `shares` equal intervals of `count` items."""
    return list(pairwise(round(i * count / shares) for i in range(shares + 1))) if shares else []


def _finite(ys: Values) -> list[float]:
    return [y for y in ys if y is not None and math.isfinite(y)]


# Drawing


def line_chart(title: str, series: Sequence[Series], *, x_name: str, unit: str = "") -> str:
    """Draw `series` over one x axis as SVG; `unit` is `bytes` or a word behind the numbers of the y axis."""
    drawn = [one for one in series if one.rows]
    low, high = _range([y for one in drawn for _, y in one.rows])
    begin = min((one.rows[0][0] for one in drawn), default=0.0)
    end = max((one.rows[-1][0] for one in drawn), default=1.0)
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + inner_w * (x - begin) / ((end - begin) or 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="monospace" font-size="11">',
        f"<title>{as_html(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 14, title),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#999999"/>',
    ]
    if drawn:
        parts += [
            _text(_LEFT - 4, _TOP + 9, _number(high, unit), "end"),
            _text(_LEFT - 4, _TOP + inner_h, _number(low, unit), "end"),
            _text(_LEFT, HEIGHT - 6, f"{x_name} {_place_of(begin)}"),
            _text(WIDTH - _RIGHT, HEIGHT - 6, _place_of(end), "end"),
        ]
    else:
        parts.append(_text(_LEFT + 8, _TOP + 20, "nothing was measured"))
    left = _LEFT
    for number, one in enumerate(drawn):
        # The seventh series has the colour of the first and another dash pattern.
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
        after = left + 26 + _LETTER * len(one.name) + 12
        if after <= WIDTH - 3 * _LETTER:
            sign = _diamond(left + 10, 25, colour)
            parts.append(sign if one.marks else _line([(left, 25), (left + 20, 25)], colour, dash))
            parts.append(_text(left + 26, 29, one.name))
            left = after
        elif left < WIDTH:
            # Names that do not fit are counted: those of eight GPUs would run out of the chart.
            parts.append(_text(left, 29, f"+{len(drawn) - number}"))
            left = WIDTH
        for piece in _pieces(one.rows):
            places = [(x_of(x), _TOP + inner_h * (1 - (y - low) / (high - low))) for x, y in piece]
            if one.marks or len(places) == 1:
                parts += [_diamond(x, y, colour) for x, y in places]
            else:
                parts.append(_line(places, colour, dash))
        parts += [
            _text(x_of(x), _TOP + 10, "×", "middle", "#c00000")
            for x, y in one.rows
            if y is not None and not math.isfinite(y)
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#333333") -> str:
    said = as_html(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{said}</text>'


def _line(places: Sequence[tuple[float, float]], colour: str, dash: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"{dashed}/>'


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


def _range(ys: Values) -> tuple[float, float]:
    values = _finite(ys)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high > low:
        return low, high
    # For a flat line the distance from zero matters.
    return min(low, 0.0), max(high, 0.0) if high else 1.0


def _pieces(rows: Sequence[Row]) -> list[list[tuple[float, float]]]:
    """Split rows into stretches with finite values."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in rows:
        if y is not None and math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
