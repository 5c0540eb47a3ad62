"""The pairs of a flip as a text plot: a pure function from pairs to rows of characters.

         -10%     -5%      0      +5%    +10%
     1 BA         ┊   x    │      ┊            0.951
     2 AB  ├──────┊────●───│──────┊───┤        0.960 [0.871, 1.058]
     3 BA         ┊  x├─●─┤│      ┊            0.957 [0.941, 0.973]

A row is a pair, with its arms in the order in which they ran; `x` is the ratio B/A of that pair alone, the
bar the interval of all pairs so far, which is valid however often it is checked. The two dotted lines are the
margin: an interval outside it decides, one inside it shows that the arms are equal. The axis is logarithmic;
values beyond it are drawn as an arrow at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.flips.judge import interval_of
from engine.flips.pair import Pair
from engine.flips.plan import Plan
from engine.flips.statistics import Interval
from engine.log.axis import Axis
from workbench.plot.canvas import Row, Span, fit, name_places

HEAD_WIDTH = 9
TAIL_WIDTH = 22
MIN_WIDTH = 12
UNICODE, ASCII = "┊│─●├┤", ":|-o[]"
"""Characters for the ends of the margin, zero, the interval, its middle and its ends."""
REACH_MOST = math.log(20.0)


def render_forest(
    plan: Plan, pairs: Sequence[Pair], width: int, height: int, *, ascii_only: bool
) -> list[Row]:
    """Draw at most `height` rows of `width` cells: the axis, then the newest pairs that fit.

    The roles are those of a chart: the interval is `trace0`, the margin `trace1`, a pair's own ratio `mark`.
    """
    if width <= HEAD_WIDTH + MIN_WIDTH or height < 2 or not pairs:
        return []
    tail = TAIL_WIDTH if width >= HEAD_WIDTH + TAIL_WIDTH + 20 else 0
    intervals = [interval_of(plan, pairs[:count]) for count in range(1, len(pairs) + 1)]
    reach = _reach(plan, pairs, intervals)
    axis = Axis(-reach, reach, width - HEAD_WIDTH - tail)
    rows = [_axis_row(plan, axis, width)]
    shown = list(zip(pairs, intervals, strict=True))[-(height - 1) :]
    for pair, interval in shown:
        rows.append(_pair_row(plan, pair, interval, axis, width, ascii_only=ascii_only))
    return rows


def _reach(plan: Plan, pairs: Sequence[Pair], intervals: Sequence[Interval | None]) -> float:
    """Return half the width of the axis, as a logarithm: twice the margin, or more where a value needs it."""
    known = [p.difference for p in pairs if p.difference is not None]
    newest = intervals[-1]
    if newest is not None:
        known += [x for x in (newest.low, newest.high) if math.isfinite(x)]
    return min(REACH_MOST, max([2 * math.log1p(plan.margin), *(1.1 * abs(x) for x in known)]))


def _axis_row(plan: Plan, axis: Axis, width: int) -> Row:
    delta = math.log1p(plan.margin)
    ends = ((x, f"{math.expm1(x):+.0%}") for x in (axis.low, axis.high))
    margins = ((-delta, f"-{plan.margin:.0%}"), (delta, f"+{plan.margin:.0%}"))
    texts = ((0.0, "B = A"), *ends, *margins)
    placed = zip(axis.dots_of(x for x, _ in texts), (text for _, text in texts), strict=True)
    words, _ = name_places(placed, axis.dots)
    return fit([Span(f"{'pair':<{HEAD_WIDTH}}{words}", "axis")], width)


def _pair_row(
    plan: Plan, pair: Pair, interval: Interval | None, axis: Axis, width: int, *, ascii_only: bool
) -> Row:
    edge, zero, line, middle, left, right = tuple(ASCII if ascii_only else UNICODE)
    before, after = ("<", ">") if ascii_only else ("◂", "▸")
    cells: list[tuple[str, str]] = [(" ", "axis")] * axis.dots
    delta = math.log1p(plan.margin)
    if interval is not None:
        first, mean, last = axis.dots_of((interval.low, interval.mean, interval.high))
        for column in range(first, last + 1):
            cells[column] = (line, "trace0")
    lower, centre, upper = axis.dots_of((-delta, 0.0, delta))
    cells[centre] = (zero, "axis")
    cells[lower] = cells[upper] = (edge, "trace1")
    text = ""
    if interval is not None:
        cells[first] = (left if interval.low >= axis.low else before, "trace0")
        cells[last] = (right if interval.high <= axis.high else after, "trace0")
        cells[mean] = (middle, "trace0")
        text = f"{interval.ratio:.3f}"
        if math.isfinite(interval.high):
            text += f" [{math.exp(interval.low):.3f}, {math.exp(interval.high):.3f}]"
    if pair.difference is not None:
        (ratio_dot,) = axis.dots_of((pair.difference,))
        if cells[ratio_dot][0] != middle:
            cells[ratio_dot] = ("x", "mark")
    else:
        incomplete = next((o for o in (pair.a, pair.b) if not o.completed), pair.a)
        text = f"{incomplete.arm} {incomplete.state}"
    order = "B A" if pair.b_first else "A B"
    spans = [Span(f"{pair.number:>3} {order}  ", "legend")]
    spans += [Span(char, role) for char, role in cells]
    return fit([*spans, Span(f" {text}", "legend")], width)
