"""The band around a mean: its edges are seen without colour, in both alphabets, and lines stay over it."""

from __future__ import annotations

import pytest

from engine.log.downsample import Bucket
from workbench.plot.canvas import BRAILLE_BLANK, plain
from workbench.plot.chart import Chart, Line, render_chart
from workbench.traces import Trace


def level(low: float | None, high: float | None, count: int = 40) -> Trace:
    buckets = [
        Bucket(x_first=float(x), x_last=float(x), low=low, high=high, non_finite=False)
        for x in range(count)
    ]
    return Trace(name="loss", buckets=tuple(buckets), last=low)


def rows_of(*bands: tuple[float, float, float], ascii_only: bool, log_y: bool = False) -> list[str]:
    lines = tuple(
        Line(slot=n, letter="AB"[n], trace=level(mean, mean), spread=level(low, high))
        for n, (mean, low, high) in enumerate(bands)
    )
    chart = Chart(title="loss", low=0.0, high=39.0, lines=lines, log_y=log_y)
    return plain(render_chart(chart, 60, 16, ascii_only=ascii_only))


def test_in_ascii_the_edges_are_small_letters_and_the_mean_is_unbroken() -> None:
    body = [row[9:] for row in rows_of((2, 1, 3), ascii_only=True)[1:-2]]
    inked = [row for row in body if row.strip()]
    assert len(inked) == 3, "upper edge, mean, lower edge"
    assert set(inked[0]) == set(inked[2]) == {" ", "a"}
    assert set(inked[1].strip()) == {"#", "A"}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_two_bands_are_told_apart_by_the_letters_on_their_edges(ascii_only: bool) -> None:
    body = "".join(row[9:] for row in rows_of((2, 1, 3), (6, 5, 7), ascii_only=ascii_only)[1:-2])
    assert body.count("a") >= 2
    assert body.count("b") >= 2


def test_in_braille_the_band_has_fewer_dots_than_its_line() -> None:
    body = [row[9:] for row in rows_of((2, 1, 3), ascii_only=False)[1:-2]]

    def dots(row: str) -> int:
        return sum((ord(x) - BRAILLE_BLANK).bit_count() for x in row if ord(x) >= BRAILLE_BLANK)

    counts = [dots(row) for row in body]
    assert all(counts), "a fill between the edges"
    assert "A" in body[counts.index(max(counts))]


def test_the_axis_reaches_to_the_edges_of_the_band() -> None:
    labels = [row[:8].strip() for row in rows_of((2, 1, 9), ascii_only=True)]
    assert "8" in labels


def test_on_a_logarithmic_axis_a_band_down_to_zero_ends_where_the_axis_does() -> None:
    body = [row[9:] for row in rows_of((2, 0, 9), (1, 1, 1), ascii_only=True, log_y=True)[1:-2]]
    assert "a" in body[0]
    assert not any("a" in row for row in body[1:-1])


def test_a_band_without_values_leaves_the_line_as_it_is() -> None:
    line = Line(slot=0, letter="A", trace=level(1, 1), spread=level(None, None))
    bare = Line(slot=0, letter="A", trace=level(1, 1))
    drawn, alone = (
        plain(render_chart(Chart(high=39.0, lines=(x,)), 60, 16, ascii_only=True))
        for x in (line, bare)
    )
    assert drawn == alone
