"""Several series in one line chart as SVG: the figures that a report and a closed notebook show.

Rectangles, lines and text; no script, no font, no file beside it, so a page with it opens offline. A
value that is not finite breaks the line and is marked with a cross at the top: a chart that draws over
a NaN hides what matters most. An absent value is no row. The same rows give the same bytes.

`thin` makes few rows of very many, keeping of each share the lowest, the highest and one that is not
finite, so that a spike of one step in a million is drawn. Not covered: logarithmic axes, and more than
the six dash patterns below in one chart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.units import format_bytes

WIDTH, HEIGHT = 620, 190
LIMIT = 300
"""Shares of a series that is drawn; each gives two or three rows."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 40, 22
_LETTER = 7
"""What a letter is wide, with room to spare: a page draws with the font that it has."""
_COLOURS = ("#1f5fa8", "#b3541e", "#2e7d32", "#7b3fa0", "#8a6d00", "#555555")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 4", "1 4")

Row = tuple[float, float]
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Rows (x, y) of one name, x never decreasing; `marks` draws signs and no line."""

    name: str
    rows: tuple[Row, ...]
    marks: bool = False


def thin(xs: Values, ys: Values, limit: int = LIMIT) -> tuple[Row, ...]:
    """Rows (x, y) without the absent ones; above 2 * `limit` of them at most 3 * `limit`.

    Works on slices, so a million rows take a fraction of a second.
    """
    if len(ys) <= 2 * limit:
        return _present(xs, ys)
    kept: list[Row] = []
    edges = [round(i * len(ys) / limit) for i in range(limit + 1)]
    for begin, end in pairwise(edges):
        share = ys[begin:end]
        finite: Values = share
        # One sum tells whether every value is finite: NaN and infinity go through it.
        if None in share or not math.isfinite(sum(share)):  # type: ignore[arg-type]
            finite = [y for y in share if y is not None and math.isfinite(y)]
        rows = set()
        if finite:
            rows |= {share.index(min(finite)), share.index(max(finite))}  # type: ignore[type-var]
        if len(finite) < len(share):
            odd = (i for i, y in enumerate(share) if y is not None and not math.isfinite(y))
            rows |= {i for i in [next(odd, None)] if i is not None}
        order = sorted(rows)
        kept += _present([xs[begin + i] for i in order], [share[i] for i in order])
    return tuple(kept)


def _present(xs: Values, ys: Values) -> tuple[Row, ...]:
    return tuple((x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None)


def line_chart(title: str, series: Sequence[Series], *, x_name: str, unit: str = "") -> str:
    """An SVG of `series` over one x; `unit` is `bytes` or a word behind the numbers of the y axis."""
    drawn = [one for one in series if one.rows]
    low, high = _range([y for one in drawn for _, y in one.rows])
    begin = min((one.rows[0][0] for one in drawn), default=0.0)
    end = max((one.rows[-1][0] for one in drawn), default=1.0)
    span = (end - begin) or 1.0
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(row: Row) -> tuple[float, float]:
        x = _LEFT + inner_w * (row[0] - begin) / span
        return x, _TOP + inner_h * (1 - (row[1] - low) / (high - low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="monospace" font-size="11">',
        f"<title>{html.escape(title)}</title>",
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
        # The seventh has the colour of the first and another dash.
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
        after = left + 26 + _LETTER * len(one.name) + 12
        if after <= WIDTH - 3 * _LETTER:
            if one.marks:
                parts.append(_diamond(left + 10, 25, colour))
            else:
                parts.append(_line([(left, 25), (left + 20, 25)], colour, dash))
            parts.append(_text(left + 26, 29, one.name))
            left = after
        elif left < WIDTH:
            # What has no room is counted: the names of eight GPUs would run out of the chart.
            parts.append(_text(left, 29, f"+{len(drawn) - number}"))
            left = WIDTH
        for piece in _pieces(one.rows):
            places = [place(row) for row in piece]
            if one.marks or len(places) == 1:
                parts += [_diamond(x, y, colour) for x, y in places]
            else:
                parts.append(_line(places, colour, dash))
        for x, y in one.rows:
            if not math.isfinite(y):
                at = _LEFT + inner_w * (x - begin) / span
                parts.append(_text(at, _TOP + 10, "×", "middle", "#c00000"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#333333") -> str:
    said = html.escape(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{said}</text>'


def _line(places: Sequence[tuple[float, float]], colour: str, dash: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"{dashed}/>'


def _diamond(x: float, y: float, colour: str) -> str:
    corners = f"{x:.1f},{y - 4:.1f} {x + 4:.1f},{y:.1f} {x:.1f},{y + 4:.1f} {x - 4:.1f},{y:.1f}"
    return f'<polygon points="{corners}" fill="{colour}"/>'


def _place_of(x: float) -> str:
    """A step is whole; of seconds three digits say enough."""
    return f"{x:.0f}" if x == round(x) or abs(x) >= 100 else f"{x:.3g}"


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.4g}{f' {unit}' if unit else ''}"


def _range(ys: Sequence[float]) -> tuple[float, float]:
    values = [y for y in ys if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high > low:
        return low, high
    # Of a flat line it matters how far it is from nothing.
    return min(low, 0.0), max(high, 0.0) if high else 1.0


def _pieces(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs of finite rows."""
    pieces: list[list[Row]] = [[]]
    for row in rows:
        if math.isfinite(row[1]):
            pieces[-1].append(row)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
