"""The time line as text: loss, marks and step time on one x axis, and nothing bridged that is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.log.downsample import window_traces
from engine.log.events import Compiled
from engine.log.figures import marks_of
from engine.log.fold import Follower
from engine.log.table import Table
from engine.units import format_seconds
from tests.support.judged import alert_end, alert_event, number_event
from tests.support.run_folders import Scene, checkpoint, resumed, step
from workbench.marks import Mark, all_marks
from workbench.plot.canvas import plain
from workbench.plot.chart import Band, Chart, Line, dots_of, margin_of, render_chart
from workbench.plot.window import SMALLEST, Window
from workbench.tui.widgets.loss_chart import SIGNS, clock_ticks, signs_of

WIDTH, HEIGHT = 60, 20


def table_of(ys: Sequence[float | None], steps: Sequence[int] | None = None) -> Table:
    steps = steps or range(1, len(ys) + 1)
    rows = [{"step": float(n), "loss": y, "step_s": 0.5} for n, y in zip(steps, ys, strict=True)]
    return Table(("step", "loss", "step_s")).extended(rows)


def lines_of(
    ys: Sequence[float | None],
    *,
    steps: Sequence[int] | None = None,
    ascii_only: bool = False,
    width: int = WIDTH,
    height: int = HEIGHT,
    marks: Sequence[tuple[float, Mark]] = (),
    **fields: object,
) -> list[str]:
    table = table_of(ys, steps)
    low, high = table.value("step", 0) or 0.0, table.last("step") or 1.0
    dots = dots_of(width, ascii_only=ascii_only)
    loss, pace = window_traces(table, ("loss", "step_s"), low, high, dots, gap=1.5)
    lines = (Line(trace=loss, slot=0),)
    signs = signs_of(marks, ascii_only=ascii_only)
    bands = (Band(trace=pace, name="step time", y_text=format_seconds, clip=True),)
    chart = Chart(low=low, high=high, lines=lines, bands=bands, signs=signs, **fields)  # type: ignore[arg-type]
    return plain(render_chart(chart, width, height, ascii_only=ascii_only))


def cells(lines: Sequence[str], width: int = WIDTH) -> list[str]:
    """The rows of the loss, without labels."""
    edge = margin_of(width) + 1
    top = next(row for row, text in enumerate(lines) if text[edge] in "│┤|+")
    marks = next(row for row, text in enumerate(lines) if text.lstrip().startswith("marks"))
    return [text[edge + 1 :] for text in lines[top:marks]]


def mark(kind: str, step: float, title: str = "x") -> Mark:
    return Mark(kind=kind, step=step, unix_s=step, words=(title,))  # type: ignore[arg-type]


# What a bucket holds.


@given(
    st.lists(st.none() | st.floats(), min_size=1, max_size=300),
    st.integers(1, 60),
    st.floats(0, 320),
    st.floats(0, 320),
)
def test_buckets_of_a_window_hold_the_extremes_of_all_its_rows(
    ys: list[float | None], count: int, a: float, b: float
) -> None:
    low, high = min(a, b), max(a, b)
    (trace,) = window_traces(table_of(ys), ("loss",), low, high, count)
    inside = [y for n, y in enumerate(ys, start=1) if low <= n <= high]
    finite = [y for y in inside if y is not None and math.isfinite(y)]
    lows = [x.low for x in trace.buckets if x.low is not None]
    highs = [x.high for x in trace.buckets if x.high is not None]
    assert min(lows, default=None) == min(finite, default=None)
    assert max(highs, default=None) == max(finite, default=None)
    assert any(x.non_finite for x in trace.buckets) == any(
        y is not None and not math.isfinite(y) for y in inside
    )
    assert len(trace.buckets) <= count
    ends = [x for bucket in trace.buckets for x in (bucket.x_first, bucket.x_last)]
    assert ends == sorted(ends)


def test_one_spike_of_a_million_steps_is_drawn_and_zoomed_to() -> None:
    ys = [1.0] * 1_000_000
    ys[777_776] = 9.0
    rows = {"step": [float(n) for n in range(1, 1_000_001)], "loss": ys}
    table = Table(("step", "loss")).extended_by(rows)
    (whole,) = window_traces(table, ("loss",), 1, 1_000_000, 200)
    (spike,) = [x for x in whole.buckets if x.high == 9.0]
    (near,) = window_traces(table, ("loss",), spike.x_first, spike.x_last, 200)
    assert [x.high for x in near.buckets].count(9.0) == 1
    (close,) = window_traces(table, ("loss",), 777_770, 777_790, 200)
    assert [x.x_first for x in close.buckets if x.high == 9.0] == [777_777.0]


# What is drawn.


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_gap_is_not_bridged(ascii_only: bool) -> None:
    steps = [*range(1, 21), *range(80, 101)]
    gapped = cells(lines_of([2.0] * 41, steps=steps, ascii_only=ascii_only))
    middle = {row[len(row) // 2] for row in gapped}
    assert middle == {" "}
    joined = cells(lines_of([2.0] * 100, ascii_only=ascii_only))
    assert {row[len(row) // 2] for row in joined} != {" "}


def test_absent_values_leave_a_gap_and_nan_a_cross() -> None:
    absent = cells(lines_of([2.0] * 20 + [None] * 30 + [2.0] * 20))
    assert {row[len(row) // 2] for row in absent} == {" "}
    faulty = cells(lines_of([2.0] * 20 + [math.nan] * 30 + [2.0] * 20))
    assert faulty[0].count("×") > 10
    assert {row[len(row) // 2] for row in faulty[1:]} == {" "}


def test_loss_marks_and_step_time_share_their_columns() -> None:
    ys: list[float | None] = [1.0] * 99
    ys[49] = 5.0
    lines = lines_of(ys, marks=((50.0, mark("alert", 50.0)),), cursor=50.0)
    spike = next(i for i, c in enumerate(cells(lines)[0]) if c != " ")
    row = next(text for text in lines if text.lstrip().startswith("marks"))
    begin = margin_of(WIDTH) + 2
    assert row[begin:].index("!") == spike
    under = next(text for text in lines if "└" in text)
    assert under[begin:].index("┴") == spike
    assert any("500 ms" in text for text in lines), "the step time has an axis of its own"


def test_the_most_pressing_mark_of_a_column_is_drawn() -> None:
    marks = tuple((50.0, mark(kind, 50.0)) for kind in ("checkpoint", "nan", "alert", "compile"))
    row = next(t for t in lines_of([1.0] * 99, marks=marks) if t.lstrip().startswith("marks"))
    assert "×" in row and not set("!sc") & set(row.replace("marks", ""))


def test_every_kind_of_mark_has_a_sign_of_its_own_in_ascii() -> None:
    assert len({sign for _, sign in SIGNS.values()}) == len(SIGNS)
    assert all(sign.isascii() for _, sign in SIGNS.values())


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("height", [0, 1, 5, 6, 7, 12, 13, 40])
@pytest.mark.parametrize("width", [0, 1, 23, 24, 40, 120])
def test_every_size_is_filled_exactly(width: int, height: int, ascii_only: bool) -> None:
    lines = lines_of(
        [3.0, math.inf, None, -1.0, math.nan, 2.0],
        width=width,
        height=height,
        ascii_only=ascii_only,
        marks=((2.0, mark("nan", 2.0)),),
        cursor=3.0,
        readout=("step 3", "x"),
    )
    assert len(lines) == (height if width else 0)
    assert all(len(text) == width for text in lines)
    assert not ascii_only or "".join(lines).isascii()


def test_a_run_without_a_finite_loss_says_so() -> None:
    assert any("no finite value" in text for text in lines_of([math.nan, math.inf]))
    assert any("no finite value above 0" in t for t in lines_of([-1.0, 0.0], log_y=True))


def test_clock_ticks_are_round_and_on_the_axis() -> None:
    ticks = clock_ticks(1_750_000_017.0, 1_750_003_617.0, 5)
    assert 3 <= len(ticks) <= 13
    assert all(1_750_000_017.0 <= x <= 1_750_003_617.0 and x % 60 == 0 for x in ticks)
    assert clock_ticks(5.0, 5.0, 3) in ([], [5.0])
    assert len(clock_ticks(0.0, 4e8, 4)) <= 6


# The window.


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("zoomed"), st.sampled_from([0.5, 2.0])),
            st.tuples(st.just("moved"), st.floats(-10, 2000)),
        ),
        max_size=12,
    )
)
def test_a_window_stays_in_the_run_and_around_its_cursor(moves: list[tuple[str, float]]) -> None:
    first, last = 1.0, 1000.0
    window = Window()
    for name, value in moves:
        window = getattr(window, name)(value, first, last)
        low, high = window.bounds(first, last)
        assert first <= low <= high <= last
        assert high - low >= min(SMALLEST, last - first) - 1e-6
        if name == "moved":
            assert window.cursor is not None and low - 1e-6 <= window.cursor <= high + 1e-6


def test_zooming_keeps_the_cursor_in_its_column() -> None:
    window = Window(cursor=250.0).zoomed(0.5, 0.0, 1000.0)
    low, high = window.bounds(0.0, 1000.0)
    assert (250.0 - low) / (high - low) == pytest.approx(0.25)
    assert high - low == 500.0


def test_a_window_at_the_end_follows_the_newest_step() -> None:
    window = Window().zoomed(0.5, 0.0, 100.0)
    assert window.bounds(0.0, 100.0) == (50.0, 100.0)
    assert window.bounds(0.0, 130.0) == (80.0, 130.0)


# Marks.


def test_each_thing_that_stands_out_is_a_mark_at_its_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(60).steps(1, 20)
    late = Compiled(
        compiler="triton",
        kernel="k",
        key="k[rows=3]",
        digest="",
        compile_s=1.0,
        disk_hit=False,
        after_warm_up=True,
        differs=["rows"],
    )
    scene.events(late, checkpoint(20))
    scene.steps(21, 30, nan={25, 26})
    scene.watch(alert_event(id="data_wait", level="suspicion", text="waits", flip="--set a.b=1"))
    scene.watch(alert_end(id="data_wait", active_s=1.0)).steps(31, 40).close()
    found = all_marks(Follower(scene.run).read_all())
    assert [(m.kind, m.step) for m in found] == [
        ("late compile", 20.0),
        ("checkpoint", 20.0),
        ("nan", 25.0),
        ("alert", 30.0),
    ]
    words = {m.kind: "\n".join(m.lines) for m in found}
    assert "differs in: rows" in words["late compile"]
    assert "to 26" in words["nan"]
    assert "test it: --set a.b=1" in words["alert"], "an alert that is over is still a mark"


def test_what_was_judged_late_is_a_mark_where_it_began(tmp_path: Path) -> None:
    """As of a log that is imported, whose judgements are all made at its end."""
    scene = Scene(tmp_path / "run").open().begin(60).steps(1, 40)
    scene.watch(
        alert_event(id="overfits", level="suspicion", text="overfits", step=40, first_step=25)
    )
    view = Follower(scene.close().run).read_all()
    (mark,) = all_marks(view)
    assert (mark.kind, mark.step) == ("alert", 25.0)
    (drawn,) = marks_of(view)
    assert drawn.unix_s == mark.unix_s == view.steps.value("clock_s", 24)


def test_a_resume_is_a_mark_and_drops_those_of_the_steps_it_replaced(tmp_path: Path) -> None:
    run = resumed(tmp_path / "run")
    kinds = [(m.kind, m.step) for m in all_marks(Follower(run).read_all())]
    assert kinds == [("restart", 20.0)]


def test_a_run_that_diverged_for_long_is_one_mark(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(3000)
    for number in range(1, 2001):
        scene.events(number_event(step=number, field="loss", value="nan"), step(number, math.nan))
    view = Follower(scene.close().run).read_all()
    (only,) = all_marks(view)
    assert (only.kind, only.step) == ("nan", 1.0) and "2000" in only.title


def test_steps_that_all_took_the_same_time_name_it_once() -> None:
    lines = lines_of([3.0, 2.0, 1.0])
    assert sum(line.lstrip().startswith("500 ms") for line in lines) == 1


def test_a_run_that_goes_on_keeps_all_buckets_but_the_newest() -> None:
    table = table_of([1.0] * 500)
    (before,) = window_traces(table, ("loss",), 1.0, 500.0, 100)
    table = table.extended([{"step": 501.0, "loss": 9.0, "step_s": 0.5}])
    (after,) = window_traces(table, ("loss",), 1.0, 501.0, 100)
    kept = sum(a == b for a, b in zip(before.buckets, after.buckets, strict=False))
    assert kept >= len(before.buckets) - 1
    assert after.buckets[-1].high == 9.0
