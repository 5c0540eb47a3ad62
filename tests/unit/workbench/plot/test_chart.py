"""Plots: the right size at every size, and what is not finite is seen and never drawn over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.log.axis import Axis
from engine.log.downsample import Trace, bucket_at, buckets, equal_widths, points_of
from tests.support.charts import chart_of
from workbench.plot.canvas import ASCII, UNICODE, plain
from workbench.plot.chart import Band, LaneRow, Level, Point, render_chart

WIDTH, HEIGHT = 60, 12


def trace_of(ys: Sequence[float | None], name: str = "loss", first: int = 1) -> Trace:
    buckets = [bucket_at(float(x), y) for x, y in enumerate(ys, first)]
    return Trace(name=name, buckets=tuple(buckets), last=ys[-1] if ys else None)


def rows_of(
    traces: Sequence[Trace],
    width: int = WIDTH,
    height: int = HEIGHT,
    *,
    ascii_only: bool = False,
    **options: object,
) -> list[str]:
    chart = replace(chart_of(traces), **options)  # type: ignore[arg-type]
    return plain(render_chart(chart, width, height, ascii_only=ascii_only))


def lines_of(ys: Sequence[float | None], **options: object) -> list[str]:
    return rows_of([trace_of(ys)], **options)


def area(lines: list[str]) -> list[str]:
    """The cells right of the y axis and above the x axis."""
    corner = len(lines[-2]) - len(lines[-2].lstrip())
    return [line[corner + 1 :] for line in lines[:-2] if line[corner] in "│┤|+"]


FLOATS = st.none() | st.floats() | st.floats(-1e3, 1e3)


@settings(max_examples=200)
@given(
    ys=st.lists(FLOATS, max_size=40),
    width=st.integers(-1, 130),
    height=st.integers(-1, 40),
    log_y=st.booleans(),
    ascii_only=st.booleans(),
    mark=st.floats(),
    level=st.floats(),
)
def test_a_plot_has_exactly_its_size_whatever_it_shows(
    ys: list[float | None],
    width: int,
    height: int,
    log_y: bool,
    ascii_only: bool,
    mark: float,
    level: float,
) -> None:
    lines = rows_of(
        [trace_of(ys), trace_of(ys[::2], "ce"), trace_of([], "kd")],
        width,
        height,
        log_y=log_y,
        ascii_only=ascii_only,
        points=(Point(x=3.0, y=mark),),
        levels=(Level(y=level, name="ln V"),),
    )
    assert len(lines) == (max(0, height) if width > 0 else 0)
    assert {len(line) for line in lines} <= {width}
    if ascii_only:
        assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_fault_is_a_cross_in_its_column_with_nothing_drawn_over_it(
    fault: float, ascii_only: bool
) -> None:
    ys: list[float | None] = [1.0, 2.0, fault, 2.0, 1.0]
    lines = lines_of(ys, ascii_only=ascii_only)
    cells = area(lines)
    cross = UNICODE.cross if not ascii_only else ASCII.cross
    columns = [x for row in cells for x, cell in enumerate(row) if cell == cross]
    (column,) = columns
    assert abs(column - len(cells[0]) // 2) <= 1, "step 3 of 5 is in the middle"
    width = len(cells[0])
    between = range(width // 4 + 2, width * 3 // 4 - 2)
    drawn = [x for x in between if x != column and any(row[x] != " " for row in cells)]
    assert drawn == [], "no line leads to the fault or from it"
    assert "not finite: 3" in lines[0]


def test_neighbours_of_numbers_are_joined() -> None:
    cells = area(lines_of([1.0, 2.0, 2.0, 2.0, 1.0]))
    assert all(any(row[x] != " " for row in cells) for x in range(len(cells[0])))


def test_an_absent_value_is_a_gap_and_no_fault() -> None:
    lines = lines_of([1.0, 2.0, None, 2.0, 1.0])
    cells = area(lines)
    middle = len(cells[0]) // 2
    assert all(row[middle] == " " for row in cells)
    assert UNICODE.cross not in "".join(lines)


def test_many_faults_are_counted() -> None:
    lines = lines_of([1.0, math.nan, 1.0, math.nan, math.inf])
    assert "not finite: 2 and 2 more" in lines[0]


def test_a_fault_among_a_hundred_thousand_rows_is_seen() -> None:
    ys: list[float | None] = [2.0 + i % 7 for i in range(100_000)]
    ys[50_000] = math.nan
    assert UNICODE.cross in "".join(area(lines_of(ys)))


def test_a_spike_among_a_hundred_thousand_rows_reaches_the_top() -> None:
    ys: list[float | None] = [2.0] * 100_000
    ys[50_000] = 9.0
    assert area(lines_of(ys))[0].strip() != ""


@pytest.mark.parametrize("log_y", [False, True])
def test_nothing_logged_says_so(log_y: bool) -> None:
    assert "nothing logged yet" in "\n".join(lines_of([], log_y=log_y))
    assert "nothing logged yet" in "\n".join(lines_of([None, None], log_y=log_y))


def test_nothing_but_faults_says_so() -> None:
    text = "\n".join(lines_of([math.nan, math.inf]))
    assert "no finite value" in text
    assert "not finite: 1 and 1 more" in text


def test_one_point_is_drawn_and_named() -> None:
    lines = lines_of([2.5])
    assert sum(cell != " " for row in area(lines) for cell in row) == 1
    assert "2.5" in lines[0]
    assert any(line.lstrip().startswith("2.5") for line in lines[1:])


def test_a_log_axis_marks_what_it_has_no_place_for() -> None:
    text = "".join(area(lines_of([1.0, 10.0, 0.0, -5.0, 100.0], log_y=True)))
    assert text.count(UNICODE.below) == 2


def test_a_log_axis_spaces_decades_evenly() -> None:
    axis = Axis(0.0, 4.0, 41, is_log=True)
    assert [axis.dot(10.0**n) for n in range(5)] == [0, 10, 20, 30, 40]


def test_letters_tell_solid_lines_apart_without_colour() -> None:
    traces = [trace_of([5.0 - i] * 40, name) for i, name in enumerate(("loss", "ce", "kd"))]
    lines = rows_of(traces, 80)
    drawn = {row.strip() for row in area(lines)} - {""}
    assert len(drawn) == 3 and {letter for row in drawn for letter in row if letter.isascii()} == {
        "A",
        "B",
        "C",
    }
    for item in ("A ⣤⣤ loss 5.0", "B ⣤⣤ ce 4.0", "C ⣤⣤ kd 3.0"):
        assert item in lines[0]


def test_ascii_draws_a_character_for_each_trace() -> None:
    traces = [trace_of([5.0 - i] * 40, name) for i, name in enumerate(("loss", "ce", "kd"))]
    cells = "".join(area(rows_of(traces, ascii_only=True)))
    assert {"#", "o", "."} <= set(cells)


def test_one_slow_step_does_not_flatten_the_others() -> None:
    slow: list[float | None] = [50.0, *(1.0 + (i % 5) / 10 for i in range(60))]
    lines = lines_of(
        [2.0] * 61, bands=(Band(trace=trace_of(slow), name="step time", clip=True),), height=24
    )
    (top,) = [row for row in lines if UNICODE.above in row]
    assert top.split()[0] == "1.4000"
    assert not any("50" in line[:8] for line in lines)


def test_marks_are_drawn_over_traces() -> None:
    lines = lines_of([2.0, 2.0, 2.0], points=(Point(x=2.0, y=2.0),))
    assert "".join(area(lines)).count(UNICODE.mark) == 1


def test_a_band_without_room_still_shows_what_is_not_finite() -> None:
    band = Band(trace=trace_of([1.0, math.nan, 1.0]), name="training loss")
    for height in (8, 12, 24):
        lines = lines_of([2.0, 2.0, 2.0], bands=(band,), height=height)
        assert any("×" in row for row in area(lines)), height


def test_a_lane_is_a_row_of_shares_and_absent_cells_stay_empty() -> None:
    shares = [None, 0.0, 0.5, 1.0] + [None] * 100
    for ascii_only, bars in ((False, " ▁▅█ "), (True, " _+@ ")):
        lane = LaneRow(name="SM", shares=shares, newest=0.97)
        lines = lines_of([2.0] * 9, lanes=(lane,), height=20, ascii_only=ascii_only)
        (row,) = [line for line in lines if line.lstrip().startswith("SM 97%")]
        assert row.split("|" if ascii_only else "│")[1].startswith(bars)


def test_before_any_step_the_lanes_are_drawn_alone() -> None:
    lane = LaneRow(name="SM", shares=[0.0] * 100, newest=0.0)
    lines = rows_of([], lanes=(lane,), signs=())
    text = "\n".join(lines)
    assert "no step yet" in text and "SM 0%" in text and "▁▁▁" in text


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 1.0),
        (2.1, 2.1029),
        (1e-9, 3e-8),
        (-1.7e308, 1.7e308),
        (123456.0, 123486.0),
        (5.0, 5.0),
    ],
)
def test_ticks_are_on_the_axis_and_differ_in_words(low: float, high: float) -> None:
    ticks = Axis(low, high, 20).ticks(4)
    assert ticks
    assert all(low <= tick.value <= high for tick in ticks)
    assert len({tick.text for tick in ticks}) == len(ticks)


@settings(max_examples=200)
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(1, 12),
)
def test_every_finite_axis_has_ticks(a: float, b: float, count: int) -> None:
    ticks = Axis(min(a, b), max(a, b), 20).ticks(count)
    assert 1 <= len(ticks) <= 4 * count + 4


def test_the_x_axis_is_named_after_what_it_counts_and_keeps_the_digits_of_seconds() -> None:
    seconds = points_of("loss", [(0.0, 1.0), (0.25, 2.0), (0.75, 3.0)])
    words = rows_of([seconds], x_name="s")[-1].split()
    assert words[0] == "s" and words[-1] == "0.75"
    assert lines_of([1.0, 2.0, 3.0])[-1].split()[0] == "step"


@pytest.mark.parametrize("columns", [3, 7, 40, 150, 400])
def test_as_many_values_are_not_finite_at_every_width(columns: int) -> None:
    ys = [math.nan if 100 <= step <= 249 else 1.0 + step % 7 for step in range(400)]
    xs = [float(step) for step in range(400)]
    found = tuple(buckets(xs, ys, equal_widths(xs, 0.0, 399.0, columns)))
    trace = Trace(name="loss", buckets=found, last=ys[-1])
    text = "\n".join(rows_of([trace], width=max(40, columns)))
    assert " and 149 more" in text
    assert sum(bucket.non_finite for bucket in found) == 150
