"""Several charts of the same lines side by side, each with its title.

loss                  held-out
  6 ┤⡇                  6 ┤⡇
  4 ┤ ⠱⣀                4 ┤ ⠱⣀
    └┬────────            └┬────────
step 0                step 0
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.plot.canvas import Row, Span, fit
from workbench.plot.chart import Chart, dots_of, render_chart

MIN_WIDTH, MIN_HEIGHT = 34, 7
"""The smallest cell in which a curve has a shape."""
ASPECT = 4.0
"""Width over height, in characters, of the cell that is liked best."""
GAP = 1


def shape_of(count: int, width: int, height: int) -> tuple[int, int]:
    """Return the columns and rows of the grid that shows as many of `count` charts as fit, in the cells of the
    best shape; at least one."""
    most_columns = max(1, (width + GAP) // (MIN_WIDTH + GAP))
    most_rows = max(1, height // MIN_HEIGHT)
    shapes = [(x, y) for x in range(1, most_columns + 1) for y in range(1, most_rows + 1)]

    def worth(shape: tuple[int, int]) -> tuple[int, int, float]:
        columns, rows = shape
        aspect = cell_width(columns, width) / max(1, height // rows)
        unused = max(0, columns * rows - count)
        return (
            min(count, columns * rows),
            -unused,
            -max(aspect / ASPECT, ASPECT / max(aspect, 1e-9)),
        )

    return max(shapes, key=worth)


def cell_width(columns: int, width: int) -> int:
    """Return the width of one of several columns."""
    return (width - GAP * (columns - 1)) // columns


def grid_dots(columns: int, width: int, *, ascii_only: bool) -> int:
    """Return the number of buckets that a chart in one of several columns can show."""
    return dots_of(cell_width(columns, width), ascii_only=ascii_only)


def render_grid(
    charts: Sequence[Chart],
    columns: int,
    width: int,
    height: int,
    *,
    ascii_only: bool,
) -> list[Row]:
    """Draw the charts row by row in cells of one size, on `height` rows."""
    if width <= 0 or height <= 0:
        return []
    lines = max(1, -(-len(charts) // columns))
    cell = cell_width(columns, width)
    drawn: list[Row] = []
    for line in range(lines):
        # The rows that are left over go to the upper cells.
        left = height - len(drawn)
        rows = -(-left // (lines - line))
        cells = [
            render_chart(chart, cell, rows, ascii_only=ascii_only)
            for chart in charts[line * columns : (line + 1) * columns]
        ]
        for row in range(rows):
            # A cell without width has no rows.
            parts = [spans for cell_rows in cells for spans in cell_rows[row : row + 1]]
            gap = Span(" " * GAP, "axis")
            drawn.append(fit([span for part in parts for span in (*part, gap)], width))
    return drawn[:height]
