"""What a page is sent of a run: every row of a short one, the extremes of a long one, and little of a fast one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import Compiled
from engine.log.figures import figures_of
from tests.support.notebook_pages import rows_of
from tests.support.run_folders import Scene, evaluated, gpu, killed, resumed, running, step
from workbench.feed import RunFeed
from workbench.notebook.stream import LIVE, Stream

pytestmark = pytest.mark.filterwarnings("default")


def test_a_page_gets_every_row_of_a_short_run_and_then_what_is_added(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=30)
    feed, stream = RunFeed(scene.run), Stream()
    messages = list(stream.messages(feed.read_all()))
    scene.steps(31, 40)
    added = list(stream.messages(feed.read_all()))
    assert [y for _, y in rows_of(added)["step"]] == list(range(31, 41))
    whole = rows_of(messages + added)
    view = feed.poll().view
    begin = view.first_unix_s or 0.0
    for key, column in (("training.loss", "loss"), ("pace.step", "step_s"), ("step", "step")):
        expected = [
            (pytest.approx(at - begin), pytest.approx(y))
            for at, y in zip(view.steps.values("unix_s"), view.steps.values(column), strict=True)
        ]
        assert whole[key] == expected
    assert "memory.machine" in whole
    # Nothing changed: nothing is sent, not even words.
    assert [m.content["kind"] for m in stream.messages(feed.poll())] == []
    scene.close()


def test_nan_and_infinity_reach_the_page_and_absence_does_not(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(4)
    scene.events(step(1, 3.0), step(2, math.nan), step(3, math.inf), step(4, None))
    rows = rows_of(list(Stream().messages(RunFeed(scene.close().run).read_all())))["training.loss"]
    assert rows[0][1] == 3.0 and math.isnan(rows[1][1]) and rows[2][1] == math.inf
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
    assert [y for _, y in rows_of(messages)["step"]] == list(range(1, 61))


def test_gpu_readings_and_compiles_stand_on_the_same_seconds(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=4)
    scene.device(gpu(90.0))
    fields: dict[str, Any] = {"compiler": "triton", "kernel": "k", "key": "x", "digest": "d"}
    scene.events(Compiled(**fields, compile_s=0.1, disk_hit=False, after_warm_up=True))
    messages = list(Stream().messages(RunFeed(scene.close().run).read_all()))
    assert rows_of(messages)["GPU 0.GPU"] == [(2.0, 90.0)]
    (charts,) = [m.content["charts"] for m in messages if m.content["kind"] == "charts"]
    (of_gpu,) = [chart for chart in charts if chart["id"] == "GPU 0"]
    assert of_gpu["marks"] == [[2.0, "C", "compiled k while a step waited"]]


def test_held_out_losses_are_sent_once_and_again_when_one_is_added(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=10)
    scene.events(evaluated(0, "untrained", 6.0), evaluated(5, "student", 5.0))
    feed, stream = RunFeed(scene.run), Stream()
    first = rows_of(list(stream.messages(feed.read_all())))["held-out.student"]
    scene.steps(11, 12)
    assert "held-out.student" not in rows_of(list(stream.messages(feed.read_all())))
    scene.events(evaluated(12, "student", 4.0))
    messages = list(stream.messages(feed.read_all()))
    scene.close()
    assert [y for _, y in first] == [6.0, 5.0]
    assert {"kind": "clear", "series": ["held-out.student"]} in [m.content for m in messages]
    assert [y for _, y in rows_of(messages)["held-out.student"]] == [6.0, 5.0, 4.0]


def test_what_is_added_costs_little_however_fast_the_run_is(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=2, total=4000)
    feed, stream = RunFeed(scene.run), Stream()
    list(stream.messages(feed.read_all()))
    scene.steps(3, 3000)
    sent = list(stream.messages(feed.read_all()))
    scene.close()
    tables = 1 + sum(len(figure.curves) for figure in figures_of(feed.poll().view))
    rows = sum(len(buffer) for message in sent for buffer in message.buffers)
    assert 0 < rows <= tables * 3 * LIVE * 8
    # Two polls a second at the worst, words included.
    assert 2 * (rows + len(json.dumps([m.content for m in sent]))) < 20_000
