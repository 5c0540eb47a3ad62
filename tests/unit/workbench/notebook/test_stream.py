"""What a page is sent of a run: every row of a short one, the extremes of a long one, and little of a fast one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.findings.chart import Series, line_chart, thin
from engine.log.events import Compiled
from tests.support.notebook_pages import rows_of
from tests.support.run_folders import Scene, gpu, killed, resumed, running, step
from workbench.feed import RunFeed
from workbench.notebook.stream import GPU, HOST, LIVE, STEPS, Stream

pytestmark = pytest.mark.filterwarnings("default")


def test_a_page_gets_every_row_of_a_short_run_and_then_what_is_added(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=30)
    feed, stream = RunFeed(scene.run), Stream()
    messages = list(stream.messages(feed.read_all()))
    scene.steps(31, 40)
    added = list(stream.messages(feed.read_all()))
    assert [x for x, _ in rows_of(added)["loss"]] == list(range(31, 41))
    whole = rows_of(messages + added)
    expected = [
        (n, pytest.approx(feed.poll().view.steps.value("loss", n - 1))) for n in range(1, 41)
    ]
    assert whole["loss"] == expected
    assert whole["step_s"][0] == (1.0, 0.5) and "host_available_bytes" in whole
    # Nothing changed: nothing is sent, not even words.
    assert [m.content["kind"] for m in stream.messages(feed.poll())] == []
    scene.close()


def test_nan_and_infinity_reach_the_page_and_absence_does_not(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(4)
    scene.events(step(1, 3.0), step(2, math.nan), step(3, math.inf), step(4, None))
    rows = rows_of(list(Stream().messages(RunFeed(scene.close().run).read_all())))["loss"]
    assert rows[0] == (1.0, 3.0) and math.isnan(rows[1][1]) and rows[2] == (3.0, math.inf)
    assert len(rows) == 3


def test_a_resume_takes_back_the_steps_it_repeats(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    feed, stream = RunFeed(run), Stream()
    messages = list(stream.messages(feed.read_all()))
    whole = resumed(tmp_path / "other" / "run")
    for name in ("events", "watch", "device"):
        text = getattr(whole, name).read_bytes()
        with getattr(run, name).open("ab") as file:
            file.write(text[getattr(run, name).stat().st_size :])
    messages += stream.messages(feed.read_all())
    assert [x for x, _ in rows_of(messages)["loss"]] == list(range(1, 61))


def test_gpu_readings_and_compiles_stand_on_the_same_seconds(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=4)
    scene.device(gpu(90.0))
    fields: dict[str, Any] = {"compiler": "triton", "kernel": "k", "key": "x", "digest": "d"}
    scene.events(Compiled(**fields, compile_s=0.1, disk_hit=False, after_warm_up=True))
    rows = rows_of(list(Stream().messages(RunFeed(scene.close().run).read_all())))
    assert rows["gpu0.gpu_util_pct"] == [(2.0, 90.0)] and rows["compile"] == [(2.0, 90.0)]


@given(
    st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=400),
    st.integers(min_value=1, max_value=40),
)
def test_thinning_loses_no_extreme_and_hides_no_nan(ys: list[float | None], limit: int) -> None:
    xs = [float(i) for i in range(len(ys))]
    kept = thin(xs, ys, limit)
    assert len(kept) <= 3 * limit
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    finite = [y for y in ys if y is not None and math.isfinite(y)]
    left = [y for _, y in kept if math.isfinite(y)]
    assert (min(left, default=None), max(left, default=None)) == (
        min(finite, default=None),
        max(finite, default=None),
    )
    odd = any(y is not None and not math.isfinite(y) for y in ys)
    assert any(not math.isfinite(y) for _, y in kept) == odd
    line_chart("t", [Series(name="s", rows=kept)], x_name="step")


def test_what_is_added_costs_little_however_fast_the_run_is(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=2, total=4000)
    feed, stream = RunFeed(scene.run), Stream()
    list(stream.messages(feed.read_all()))
    scene.steps(3, 3000)
    sent = list(stream.messages(feed.read_all()))
    scene.close()
    tables = len(STEPS) + len(HOST) + len(GPU)
    rows = sum(len(buffer) for message in sent for buffer in message.buffers)
    assert 0 < rows <= tables * 3 * LIVE * 8
    # Two polls a second at the worst, words included.
    assert 2 * (rows + len(json.dumps([m.content for m in sent]))) < 20_000
