"""Several charts in one pane: as many as fit, in cells of one size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine.log.downsample import points_of
from tests.support.charts import chart_of
from workbench.plot.canvas import plain
from workbench.plot.chart import Chart
from workbench.plot.grid import render_grid, shape_of


def chart(title: str) -> Chart:
    trace = points_of("loss", [(1.0, 3.0), (2.0, float("nan")), (3.0, 1.0)])
    return replace(chart_of([trace]), title=title)


CHARTS = tuple(chart(name) for name in ("loss", "held-out", "step time", "tokens/s"))


@pytest.mark.parametrize("width", [0, 1, 20, 78, 118])
@pytest.mark.parametrize("height", [0, 1, 2, 9, 30])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_grid_has_the_rows_and_the_width_it_is_given(
    width: int, height: int, columns: int
) -> None:
    rows = plain(render_grid(CHARTS, columns, width, height, ascii_only=True))
    assert {len(row) for row in rows} <= {width}
    assert len(rows) == (height if width else 0)


def test_every_chart_has_its_title() -> None:
    rows = plain(render_grid(CHARTS, 2, 100, 24, ascii_only=True))
    words = Counter(" ".join(rows).split())
    assert all(words[name] == 1 for name in ("loss", "held-out", "tokens/s"))


def test_what_is_not_finite_is_told_behind_the_title() -> None:
    rows = plain(render_grid(CHARTS[:1], 1, 60, 10, ascii_only=True))
    assert rows[0].split() == ["loss", "X", "not", "finite:", "2"]


@pytest.mark.parametrize(
    ("size", "shape"),
    [((30, 5), (1, 1)), ((76, 8), (2, 1)), ((116, 17), (3, 2)), ((196, 32), (3, 2))],
)
def test_six_charts_take_the_room_that_there_is(
    size: tuple[int, int], shape: tuple[int, int]
) -> None:
    assert shape_of(6, *size) == shape
