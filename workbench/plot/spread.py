"""The band around the mean of several runs: dotted edges and a sparse fill, so that lines stay readable over it.

    ⠁⠈⡀⢀a⠈⠁⢀    ..a.        the upper edge, with the small letter of its line now and then
    ⣀⣀⡠⠤⠒⠊⠉⠉    ####        the line itself, drawn by the chart
    ⢀⡀a⠈⠁⢀ ⠈    .a..        the lower edge

In ASCII the edges are small letters in every second column, without a fill.
"""

from __future__ import annotations

from engine.log.axis import Axis
from workbench.plot.canvas import Canvas
from workbench.traces import Trace

APART = 16
"""Cells between two letters on one edge."""
EVERY = 4
"""The fill has one dot in this many columns and rows of dots."""


def draw_spread(
    canvas: Canvas, trace: Trace, x_axis: Axis, y_axis: Axis, slot: int, letter: str
) -> None:
    """Draw a band from the lowest to the highest value of each bucket."""
    role, small = f"trace{slot}", letter.lower() or "."
    is_ascii = canvas.dots_per_column == 1
    known = [b for b in trace.buckets if b.low is not None and b.high is not None]
    columns = x_axis.dots_of([(b.x_first + b.x_last) / 2 for b in known])
    lows = y_axis.heights([b.low for b in known])
    highs = y_axis.heights([b.high for b in known])
    letters: list[tuple[int, int]] = []
    last = -APART
    for x, low, high in zip(columns, lows, highs, strict=True):
        if high is None:
            continue
        # On a logarithmic axis a band that reaches to 0 or below ends at the bottom.
        bottom = low or 0
        if x % 2 == slot % 2:
            for y in (bottom, high):
                canvas.dot(x, y, small, role)
        if is_ascii:
            continue
        if x % EVERY == slot % EVERY:
            for y in range(bottom + 1, high):
                if y % EVERY == (slot + x // EVERY) % EVERY:
                    canvas.dot(x, y, small, role)
        column = canvas.cell(x, 0)[0]
        if letter and column - last >= APART and column % APART >= 2 * slot + 2:
            letters += [(column, canvas.cell(x, y)[1]) for y in (bottom, high)]
            last = column
    for column, row in letters:
        canvas.char(column, row, small, role)
