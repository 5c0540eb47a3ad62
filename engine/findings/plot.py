"""A line plot as SVG text, and the same in one line of text: enough to see where a number went.

Nothing but rectangles, lines and text; no script, no font, no colour that light or dark pages would
swallow. A value that is absent or not finite breaks the line. The same points give the same bytes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise

from engine.findings.logs import Point

WIDTH, HEIGHT = 560, 140
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 24, 22
_MOST_POINTS = 400
_BARS = "▁▂▃▄▅▆▇█"


def line_plot(points: Sequence[Point], title: str) -> str:
    """An SVG of the values over seconds since the first point."""
    begin = points[0].unix_s if points else 0.0
    span_s = max((points[-1].unix_s - begin) if points else 0.0, 1e-9)
    low, high = _range(points)
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(point: Point) -> tuple[float, float]:
        assert point.value is not None
        x = _LEFT + inner_w * (point.unix_s - begin) / span_s
        return x, _TOP + inner_h * (1 - (point.value - low) / (high - low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="monospace" font-size="11">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 14, title),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#999999"/>',
        _text(_LEFT - 4, _TOP + 9, f"{high:.4g}", "end"),
        _text(_LEFT - 4, _TOP + inner_h, f"{low:.4g}", "end"),
        _text(_LEFT, HEIGHT - 6, "0 s"),
        _text(WIDTH - _RIGHT, HEIGHT - 6, f"{span_s if len(points) > 1 else 0:.4g} s", "end"),
    ]
    for piece in _pieces(points):
        places = [place(point) for point in piece]
        if len(places) == 1:
            (x, y) = places[0]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#1f5fa8"/>')
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def sparkline(points: Sequence[Point], width: int = 60) -> str:
    """The values as bars, each the mean of its share of the points; a dot where one of them is none."""
    low, high = _range(points)
    bars = []
    for bucket in _buckets(points, width):
        values = _finite(bucket)
        if len(values) < len(bucket):
            bars.append("·")
        else:
            share = (math.fsum(values) / len(values) - low) / (high - low)
            bars.append(_BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])
    return "".join(bars)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#333333">{html.escape(text)}</text>'


def _range(points: Sequence[Point]) -> tuple[float, float]:
    values = _finite(points)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high > low:
        return low, high
    # Of a flat line it matters how far it is from nothing.
    return min(low, 0.0), max(high, 0.0) if high else 1.0


def _finite(points: Sequence[Point]) -> list[float]:
    return [p.value for p in points if p.value is not None and math.isfinite(p.value)]


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Runs of points that have a value."""
    pieces: list[list[Point]] = [[]]
    for point in _thinned(points):
        if point.value is None or not math.isfinite(point.value):
            pieces.append([])
        else:
            pieces[-1].append(point)
    return [piece for piece in pieces if piece]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """What is drawn of very many points: of each share the lowest, the highest and any that breaks the
    line, so that no spike and no gap is lost."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    kept = []
    for bucket in _buckets(points, _MOST_POINTS // 2):
        numbered = [(i, p.value) for i, p in enumerate(bucket)]
        finite = [(v, i) for i, v in numbered if v is not None and math.isfinite(v)]
        gap = [i for i, v in numbered if v is None or not math.isfinite(v)][:1]
        ends = [min(finite)[1], max(finite)[1]] if finite else []
        kept += [bucket[i] for i in sorted({*gap, *ends})]
    return kept


def _buckets(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    count = min(count, len(points))
    edges = [round(i * len(points) / count) for i in range(count + 1)] if count else []
    return [points[a:b] for a, b in pairwise(edges)]
