"""Small terminals: a curve, whole words and every verdict where there is hardly any room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.downsample import Bucket, Trace
from tests.support.charts import chart_of
from tests.support.run_folders import completed, killed, running
from tests.support.screens import on_screen, press, resize, text_of
from workbench.feed import RunFeed
from workbench.listing import Row
from workbench.marks import all_marks
from workbench.plot.canvas import Span, plain
from workbench.plot.chart import Chart, Level, Line, legend_rows, render_chart
from workbench.tui.widgets.loss_chart import signs_of
from workbench.tui.widgets.row_list import lines_of

BRAILLE = {chr(0x2800 + bits) for bits in range(1, 256)}


def rows_with_a_curve(text: str) -> int:
    curve = BRAILLE | {"◆"}
    return sum(bool(curve & set(row)) and "⣤⣤" not in row for row in text.splitlines())


@pytest.mark.parametrize(("size", "rows"), [((40, 12), 3), ((40, 11), 3), ((40, 10), 2)])
def test_the_smallest_screen_has_a_curve_and_the_newest_loss(
    tmp_path: Path, size: tuple[int, int], rows: int
) -> None:
    scene = running(tmp_path / "kd-qwen3-14b-to-0.6b-alpha0.1-seed0", done=400, total=1000)

    async def script(pilot: Pilot[None]) -> None:
        text = text_of(pilot)
        assert rows_with_a_curve(text) >= rows, text
        assert "loss 2.0000" in text
        assert "RUNNING | step 400/1000" in text
        assert "4.1k tok/s" in text
        assert "left" in text
        assert all(f" {digit}" in text.splitlines()[-2] for digit in range(2, 10)), text
        assert "? help" in text.splitlines()[-1]

    on_screen([scene.run.path], size, script)
    scene.close()


@pytest.mark.parametrize("size", [(39, 12), (40, 9), (20, 5)])
def test_below_it_there_is_the_status_alone(tmp_path: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert "KILLED" in text_of(pilot)
        assert rows_with_a_curve(text_of(pilot)) == 0
        assert "help" not in text_of(pilot)

    on_screen([killed(tmp_path / "kd").path], size, script)


def test_a_nan_is_a_cross_on_the_smallest_curve(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        text = text_of(pilot)
        assert "× not finite: 30" in text
        assert any("×" in row for row in text.splitlines()[4:8]), text

    on_screen([completed(tmp_path / "kd", nan=(30,)).path], (40, 12), script)


def low_line(**changes: object) -> Chart:
    buckets = [
        Bucket(x_first=x, x_last=x, low=9 - x / 9, high=9 - x / 9, non_finite=False)
        for x in range(60)
    ]
    trace = Trace(name="loss", buckets=tuple(buckets), last=2.5)
    chart = Chart(low=0.0, high=59.0, lines=(Line(trace=trace, slot=0),), signs=())
    return replace(chart, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("height", range(4, 9))
def test_on_few_rows_marks_stand_on_the_axis_and_the_cursor_takes_the_legend(
    height: int, ascii_only: bool, tmp_path: Path
) -> None:
    (mark,) = [
        mark
        for mark in all_marks(RunFeed(killed(tmp_path / "kd")).read_all().view)
        if mark.kind == "checkpoint"
    ]
    line = low_line(signs=signs_of([(30.0, mark)], ascii_only=ascii_only))
    rows = plain(render_chart(line, 38, height, ascii_only=ascii_only))
    assert [len(row) for row in rows] == [38] * height
    assert "loss 2.5" in rows[0]
    assert sum("s" in row[7:] for row in rows[1:]) == 1, rows
    assert not ascii_only or "".join(rows).isascii()
    line = low_line(cursor=30.0, readout=("step 30: loss 5.6",))
    assert plain(render_chart(line, 38, height, ascii_only=ascii_only))[0].startswith("step 30")


def test_two_levels_on_one_row_do_not_write_over_each_other() -> None:
    buckets = [
        Bucket(x_first=n, x_last=n, low=9.0 - n / 9, high=9.0, non_finite=False) for n in (0, 70)
    ]
    trace = Trace(name="loss", buckets=tuple(buckets), last=9.0)
    levels = [Level(y=3.0, name="ln V"), Level(y=3.0001, name="teacher")]
    chart = replace(chart_of([trace]), levels=tuple(levels))
    rows = plain(render_chart(chart, 70, 16, ascii_only=False))
    assert any(" ln V " in row and " teacher " in row for row in rows[2:]), rows


@pytest.mark.parametrize("width", range(20, 100, 7))
def test_a_legend_leaves_items_out_whole(width: int) -> None:
    items = [
        (Span("==", "level"), Span(f" {name} 1.2345", "legend")) for name in ("a", "bb", "ccc")
    ]
    (row,) = plain(legend_rows(items * 3, width, 1))
    words = row.replace("..", "").split("  ")
    assert {word.strip() for word in words if word.strip()} <= {
        f"== {name} 1.2345" for name in ("a", "bb", "ccc")
    }
    assert ".." in row


@pytest.mark.parametrize("width", [38, 44, 76])
def test_a_narrow_list_cuts_names_before_verdicts(width: int) -> None:
    names = ("apr-distill-smoke-validation-v1", "apr-distill-smoke-validation-v2", "run-log-v1")
    rows = [Row(key=name, name=name, text="UNKNOWN  proven     2h") for name in names]
    lines = lines_of(rows, width)
    assert len({line.index("UNKNOWN") for line in lines}) == 1, "in one column"
    assert all(line[: max(width, 30)].find("UNKNOWN") > 0 for line in lines)
    assert len(set(lines)) == 3


def test_the_key_bar_has_whole_words_and_help(tmp_path: Path) -> None:
    killed(tmp_path / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        for keys in ((), ("enter",), ("escape", "w")):
            await press(pilot, *keys)
            if pilot.app.screen.is_modal:
                await press(pilot, "enter")
            for size in ((40, 12), (80, 24), (120, 40), (160, 45)):
                await resize(pilot, size)
                bar = text_of(pilot).splitlines()[-1]
                assert " help" in bar, bar
                assert "…" not in bar.replace("  …", ""), bar

    on_screen([tmp_path / "runs"], (40, 12), script)
