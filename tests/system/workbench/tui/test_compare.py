"""Runs over each other: told apart without colour, every hole seen, and what they differ in."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.downsample import Bucket, Trace
from engine.log.folder import RunFolder
from engine.report.compared import METRICS, results_table, settings_note
from tests.support.run_folders import completed, corrupt, evaluated, killed, resumed, running, torn
from tests.support.running import engine_here
from tests.support.screens import on_screen, poll, press, resize, shows, text_of, words_of
from workbench.compared import (
    AXES,
    Compared,
    CompareFeed,
    differences,
)
from workbench.paths import path_text, with_short_paths
from workbench.plot.canvas import plain
from workbench.plot.chart import Chart, Line, dots_of, render_chart
from workbench.plot.series import SERIES

METRIC = {metric.name: metric for metric in METRICS}
SIZES = [
    ((80, 24), True),
    *(
        pytest.param(size, False, marks=pytest.mark.soak)
        for size in ((160, 45), (120, 40), (40, 12))
    ),
]


def compared(*runs: RunFolder) -> tuple[Compared, ...]:
    feed = CompareFeed(dict(enumerate(runs)))
    while (comparison := feed.poll()).behind:
        pass
    return comparison.runs


def with_settings(run: RunFolder, **settings: object) -> RunFolder:
    """The run, with other effective settings."""
    spec: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, name = key.split("__")
        spec.setdefault(section, {})[name] = value
    run.effective.write_text(json.dumps({"spec": spec}))
    return run


# What is read.


@pytest.mark.parametrize(
    ("axis", "x", "step"), [("step", 7, 7), ("tokens", 7 * 2048, 7), ("time", 3.5, 7)]
)
def test_the_same_step_is_found_on_every_axis(
    tmp_path: Path, axis: str, x: float, step: int
) -> None:
    (run,) = compared(completed(tmp_path / "run"))
    expected = run.view.steps.value("loss", step - 1)
    assert run.value_at(METRIC["loss"], axis, x) == expected
    assert run.value_at(METRIC["loss"], axis, x + 0.1) == expected, "until the next step"


def test_a_run_has_no_value_before_its_first_step_and_after_its_last(tmp_path: Path) -> None:
    (run,) = compared(killed(tmp_path / "run"))
    assert run.value_at(METRIC["loss"], "step", 30) is not None
    assert run.value_at(METRIC["loss"], "step", 31) is None
    assert run.value_at(METRIC["loss"], "step", 0) is None


def test_held_out_losses_begin_before_the_first_step(tmp_path: Path) -> None:
    (run,) = compared(completed(tmp_path / "run"))
    trace = run.trace(METRIC["held-out"], "step", 0, 60, 100)
    assert [(b.x_first, b.low) for b in trace.buckets] == [(0, 6.95), (60, 2.6290)]
    assert run.value_at(METRIC["held-out"], "step", 59) == 6.95


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
@pytest.mark.parametrize("axis", AXES)
def test_few_buckets_keep_the_extremes(tmp_path: Path, metric: object, axis: str) -> None:
    (run,) = compared(completed(tmp_path / "run"))
    low, high = run.extent(metric, axis) or (0.0, 0.0)  # type: ignore[arg-type]
    fine = run.trace(metric, axis, low, high, 1000).buckets  # type: ignore[arg-type]
    few = run.trace(metric, axis, low, high, 4).buckets  # type: ignore[arg-type]
    assert len(few) <= 4
    assert max(b.high for b in few if b.high is not None) == max(
        b.high for b in fine if b.high is not None
    )


def test_a_resumed_run_counts_its_repeated_tokens_once(tmp_path: Path) -> None:
    (run,) = compared(resumed(tmp_path / "run"))
    assert run.extent(METRIC["loss"], "tokens") == (2048.0, 60 * 2048.0)


def test_a_stretch_between_two_sessions_is_open_on_the_time_axis(tmp_path: Path) -> None:
    (run,) = compared(resumed(tmp_path / "run"))
    low, high = run.extent(METRIC["loss"], "time") or (0.0, 0.0)
    trace = run.trace(METRIC["loss"], "time", low, high, 1000)
    gaps = [b.x_first - a.x_last for a, b in zip(trace.buckets, trace.buckets[1:], strict=False)]
    assert [gap > trace.gap for gap in gaps].count(True) == 1


def test_a_metric_that_another_tool_logged_every_ten_steps_is_joined_but_not_over_a_hole(
    tmp_path: Path,
) -> None:
    # The rate is logged twice as often, so every second row has no loss.
    rows = [f"{n},{3.0 - n / 100 if n % 10 == 0 else ''},0.1" for n in range(5, 205, 5)]
    kept = [row for row in rows if not row.startswith(("100,", "110,", "120,"))]
    (tmp_path / "log.csv").write_text("\n".join(["step,loss,lr", *kept, ""]))
    done = engine_here("import", "csv", tmp_path / "log.csv", "--out", tmp_path, "--name", "run")
    assert done.returncode == 0, done.stderr
    (run,) = compared(RunFolder(tmp_path / "run"))
    trace = run.trace(METRIC["loss"], "step", 0, 200, 1000)
    far = [
        (a.x_last, b.x_first)
        for a, b in pairwise(trace.buckets)
        if b.x_first - a.x_last > trace.gap
    ]
    assert far == [(90.0, 130.0)]
    assert len(trace.buckets) == 17


def test_only_settings_that_differ_are_in_the_table(tmp_path: Path) -> None:
    first = with_settings(completed(tmp_path / "a"), loss__alpha=0.3, run__name="a", train__lr=1.0)
    other = with_settings(completed(tmp_path / "b"), loss__alpha=0.5, run__name="b", train__lr=1.0)
    (found,) = differences(compared(first, other))
    assert (found.key, found.values) == ("loss.alpha", (((0,), "0.3"), ((1,), "0.5")))


def test_numbers_that_change_results_come_first_and_paths_last(tmp_path: Path) -> None:
    sets = ("teacher__path", "loss__divergence", "data__seq_len", "eval__every", "train__rows")
    first = {name: "a" for name in (*sets, "loss__alpha", "train__lr")}
    runs = compared(
        with_settings(completed(tmp_path / "a"), **first),
        with_settings(completed(tmp_path / "b"), **dict.fromkeys(first, "b")),
    )
    keys = [found.key for found in differences(runs)]
    assert keys[:4] == ["train.lr", "loss.alpha", "train.rows", "data.seq_len"]
    assert keys[4:] == ["eval.every", "loss.divergence", "teacher.path"]


def test_a_path_is_shown_from_where_the_user_stands() -> None:
    here = Path("/home/user/project")
    assert path_text("/home/user/project/models/teacher", here) == "models/teacher"
    assert path_text("/home/user/teacher.gguf", here) == "../teacher.gguf"
    assert path_text("/mnt/teacher", here) == "/mnt/teacher"
    assert path_text("Qwen/Qwen2.5-0.5B", here) == "Qwen/Qwen2.5-0.5B"
    assert path_text("/home/user/project", here) == "/home/user/project", "a dot names nothing"
    saved = "saved in /home/user/project/runs/a/student, at 4.1k tok/s (/mnt/data; https://a.b/c)"
    expected = "saved in runs/a/student, at 4.1k tok/s (/mnt/data; https://a.b/c)"
    assert with_short_paths(saved, here) == expected


def test_what_auto_became_is_in_the_table(tmp_path: Path) -> None:
    first = with_settings(completed(tmp_path / "a"), teacher__backend="auto")
    other = with_settings(completed(tmp_path / "b"), teacher__backend="cached")
    (found,) = differences(compared(first, other))
    assert [value for _, value in found.values] == ["auto: dequantized", "cached: dequantized"]


def test_a_run_without_settings_on_record_differs_in_none_and_is_named(tmp_path: Path) -> None:
    first = with_settings(completed(tmp_path / "a"), loss__alpha=0.3, train__lr=1.0)
    other = with_settings(completed(tmp_path / "b"), loss__alpha=0.5, train__lr=1.0)
    runs = compared(first, other, with_settings(killed(tmp_path / "c")))
    assert [found.key for found in differences(runs)] == ["loss.alpha"]
    assert settings_note(runs, "ABC") == "C: no settings on record, so not compared"
    assert settings_note(runs[:2], "AB") == ""


def test_six_long_names_lose_no_run_at_any_size(tmp_path: Path) -> None:
    for seed in range(6):
        killed(tmp_path / f"kd-qwen3-14b-to-0.6b-alpha0.5-tau2.0-lr4e-3-seed{seed}-again")

    async def script(pilot: Pilot[None]) -> None:
        await compare_all(pilot, 6)
        for size in ((160, 45), (120, 40), (80, 24), (40, 12)):
            await resize(pilot, size)
            await press(pilot, "2")
            pane = pilot.app.screen.query_one("#results")
            strips = pilot.app.screen._compositor.render_strips()
            shown = pane.region
            rows = [s.text[shown.x : shown.right] for s in strips[shown.y : shown.bottom]]
            words = " ".join(rows).split()
            assert set("ABCDEF") <= set(words), (size, rows)
            assert words.count("killed") == 6, (size, rows)

    on_screen([tmp_path], (160, 45), script)


def test_results_stand_side_by_side(tmp_path: Path) -> None:
    runs = compared(completed(tmp_path / "a", nan={5}), killed(tmp_path / "b"))
    rows = {name: cells for name, *cells in results_table(runs)}
    assert rows["state"] == ["completed", "killed"]
    assert rows["held-out"] == ["2.6290", "-"]
    assert rows["not finite"] == ["1", "0"]


# What is drawn.


def line(slot: int, *ys: float | None, gap: float = math.inf, xs: tuple[float, ...] = ()) -> Line:
    buckets = []
    for x, y in zip(xs or range(len(ys)), ys, strict=True):
        bad = y is not None and not math.isfinite(y)
        value = None if bad else y
        buckets.append(Bucket(x_first=x, x_last=x, low=value, high=value, non_finite=bad))
    trace = Trace(name="run", buckets=tuple(buckets), last=1.0, gap=gap)
    return Line(slot=slot, letter=SERIES[slot].letter, trace=trace)


def drawn(*lines: Line, ascii_only: bool = True, **changes: object) -> list[str]:
    top = max(b.x_last for one in lines for b in one.trace.buckets)
    chart = Chart(low=0.0, high=top, lines=lines, **changes)  # type: ignore[arg-type]
    return plain(render_chart(chart, 60, 16, ascii_only=ascii_only))


@pytest.mark.parametrize("ascii_only", [True, False])
def test_six_runs_have_six_letters_on_solid_lines(ascii_only: bool) -> None:
    rows = drawn(*(line(n, n, n, n) for n in range(6)), ascii_only=ascii_only)
    for n, style in enumerate(SERIES):
        assert any(style.letter in row for row in rows[2:]), style
        level = next(row for row in rows[2:] if style.letter in row)
        assert set(level[10:]) - set("ABCDEF |│┤"), f"{n} has no line"


def test_a_nan_is_a_cross_with_the_letter_of_its_run_and_no_line_over_it() -> None:
    rows = drawn(line(2, 1.0, math.nan, 1.0))
    top = next(n for n, row in enumerate(rows) if row[:10].strip().endswith(("|", "+")))
    column = rows[top].index("X")
    assert rows[top + 1][column] == "C"
    body = [row for row in rows[top + 2 : -2] if "." in row[10:]]
    assert all(row[column - 5 : column + 6].strip(" ") in ("", "C") for row in body)
    assert "X C not finite: 1" in " ".join(rows[:2])


def test_lost_steps_leave_the_line_open() -> None:
    joined = drawn(line(0, 1.0, 1.0, xs=(0, 40)))
    opened = drawn(line(0, 1.0, 1.0, gap=1.5, xs=(0, 40)))
    assert max(row.count("#") for row in joined) > 30
    assert max(row.count("#") for row in opened[2:]) <= 2


def test_the_form_of_a_run_does_not_depend_on_the_others() -> None:
    alone = drawn(line(4, 1.0, 2.0))
    beside = drawn(line(0, None, None), line(4, 1.0, 2.0))
    assert alone[3:] == beside[3:]


def test_the_cursor_is_a_line_with_its_place_named() -> None:
    rows = drawn(line(0, 1.0, 2.0, 3.0, 4.0, 5.0), cursor=3.0)
    column = rows[-1].index("3")
    assert sum(row[column] == ":" for row in rows[2:-2]) > 5


@pytest.mark.parametrize("width", range(0, 70, 3))
@pytest.mark.parametrize("height", [0, 1, 4, 5, 9, 30])
def test_any_size_gives_rows_of_that_size(width: int, height: int) -> None:
    lines = (line(0, 1.0, math.inf, None), line(5, -3.0, 1e300, 1e-300))
    chart = Chart(low=0.0, high=2.0, lines=lines, cursor=1.0, log_y=height % 2 == 0)
    rows = plain(render_chart(chart, width, height, ascii_only=False))
    assert [len(row) for row in rows] == [width] * (height if width else 0)
    assert dots_of(width, ascii_only=False) >= 1


# The screen.


async def compare_all(pilot: Pilot[None], count: int) -> None:
    await press(pilot, "1", "ctrl+home", *["space"] * count, "c")


@pytest.mark.parametrize(("size", "ascii_only"), SIZES)
def test_broken_and_whole_runs_are_compared_at_every_size(
    tmp_path: Path, size: tuple[int, int], ascii_only: bool
) -> None:
    completed(tmp_path / "a-whole", nan={20})
    torn(tmp_path / "b-torn")
    corrupt(tmp_path / "c-corrupt")

    async def script(pilot: Pilot[None]) -> None:
        await compare_all(pilot, 3)
        text = words_of(pilot)
        assert "loss by step" in text
        assert "B not finite" not in text
        assert "A not finite: 20" in text
        await press(pilot, "2")
        assert "completed" in words_of(pilot)
        await press(pilot, "3")
        if size[1] > 12:
            assert await shows(pilot, "C: run log:")
            # Where the lines of its fault break depends on the length of the path before it.
            assert {"expected", "number", "altered"} <= set(words_of(pilot).split())
        for _ in AXES:
            await press(pilot, "m", "x", "l", "left")
        assert not ascii_only or text_of(pilot).isascii()

    on_screen([tmp_path], size, script, ascii_only=ascii_only)


def test_the_cursor_tells_the_value_of_each_run(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    killed(tmp_path / "beta")

    async def script(pilot: Pilot[None]) -> None:
        await compare_all(pilot, 2)
        await press(pilot, "left")
        first = text_of(pilot).splitlines()[0]
        assert "step 60" in first
        assert "alpha 2.1991" in first
        assert "beta no value" in first
        await press(pilot, *["comma"] * 8)
        assert "beta no value" not in text_of(pilot).splitlines()[0]
        await press(pilot, "escape")
        assert "step " not in text_of(pilot).splitlines()[0]
        await press(pilot, "escape")
        assert "2 runs in" in words_of(pilot)

    on_screen([tmp_path], (120, 40), script)


def test_a_key_shows_the_next_metric(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    killed(tmp_path / "beta")

    async def script(pilot: Pilot[None]) -> None:
        await compare_all(pilot, 2)
        assert "loss by step" in words_of(pilot)
        await press(pilot, "m")
        assert "held-out by step" in words_of(pilot)
        await press(pilot, "m")
        assert "held-out by step" not in words_of(pilot)
        await resize(pilot, (80, 24))
        assert "step time by step" in words_of(pilot)

    on_screen([tmp_path], (120, 40), script)


def test_a_living_run_goes_on_in_the_comparison(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    scene = running(tmp_path / "beta", done=10)

    async def script(pilot: Pilot[None]) -> None:
        await compare_all(pilot, 2)
        assert "10/60" in words_of(pilot)
        scene.steps(11, 20).events(evaluated(20, "student", 3.5))
        await poll(pilot)
        assert "20/60" in words_of(pilot)
        assert "3.5000" in words_of(pilot)

    on_screen([tmp_path], (120, 40), script)
    scene.close()
