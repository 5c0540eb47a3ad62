"""Live in a kernel without a page: what it sends, what it costs, and that nothing is left of it.

Comms are counted where ipywidgets makes them, so a byte here is a byte that a page would have got.
"""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import comm
import pytest
from conftest import Kit
from notebook_pages import CountedComm, rows_of, until
from run_folders import Scene, completed, step

from engine.errors import BadInput, RunLogError, UsageError
from engine.runlog.folder import RunFolder
from workbench.notebook.live import PREVIEW_S, PREVIEWS_AFTER, Live
from workbench.notebook.stream import HISTORY, STEPS, Stream

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountedComm]]:
    CountedComm.alive, CountedComm.sent = [], []
    monkeypatch.setattr(comm, "create_comm", CountedComm)
    yield CountedComm


def opened(live: Live, comms: type[CountedComm]) -> None:
    """As a page does when it draws the widget."""
    before = len(comms.sent)
    live._hear(None, {"kind": "ready"}, [])
    until(lambda: len([1 for kind, _ in comms.sent[before:] if kind == "comm_msg"]) >= 3)


def test_opening_costs_less_than_its_budget_and_nothing_is_left_after_close(
    tmp_path: Path, comms: type[CountedComm]
) -> None:
    run = completed(tmp_path / "run", total=3000, nan=(50,))
    live = Live(run.path)
    assert live.wait(30)
    # Before a page asks, a row has nowhere to go.
    assert not [kind for kind, size in comms.sent if kind == "comm_msg" and size > 4000]
    opened(live, comms)
    total = sum(size for _, size in comms.sent)
    assert 5_000 < total < 200_000, total
    assert total < 60_000 + len(STEPS) * 3 * HISTORY * 8
    thread, plot = live._thread, weakref.ref(live._plot)
    live.close()
    live.close()
    assert comms.alive == [] and not thread.is_alive()
    sent = len(comms.sent)
    live._hear(None, {"kind": "ready"}, [])
    live.tick()
    assert len(comms.sent) == sent
    del live
    gc.collect()
    assert plot() is None


def test_eight_of_them_share_a_page_and_leave_no_thread(
    tmp_path: Path, comms: type[CountedComm]
) -> None:
    run = completed(tmp_path / "run", total=200)
    before = threading.active_count()
    many = [Live(run.path) for _ in range(8)]
    assert all(live.wait(30) for live in many)
    for live in many:
        live.close()
    assert comms.alive == [] and threading.active_count() == before


def test_a_page_that_is_not_heard_gets_the_run_in_little_and_not_for_ever(
    tmp_path: Path, comms: type[CountedComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.notebook.live.PREVIEW_S", 0.0)
    live = Live(completed(tmp_path / "run", total=3000).path, refresh_s=0.01)
    assert live.wait(30)
    before = len(comms.sent)
    live._shown = True
    until(lambda: not live._previews_left)
    sent = [size for kind, size in comms.sent[before:] if kind == "comm_msg"]
    # Clear, rows and words, as often as it may take a page to open.
    assert len(sent) == 3 * PREVIEWS_AFTER
    assert sum(sent[:3]) < PREVIEW_S * 20_000
    live.close()


def test_an_idle_run_is_silent(tmp_path: Path, comms: type[CountedComm]) -> None:
    live = Live(completed(tmp_path / "run").path, refresh_s=0.01)
    live.wait(30)
    opened(live, comms)
    sent, polls = len(comms.sent), live.snapshot
    until(lambda: live.snapshot is not polls)
    until(lambda: live.snapshot is not polls)
    assert len(comms.sent) == sent
    live.close()


def long_run(path: Path, steps: int) -> RunFolder:
    """A run whose log was written as text: the writer would take minutes."""
    scene = Scene(path).open().begin(steps).steps(1, 1)
    run = scene.close().run
    first = json.loads(run.events.read_bytes().splitlines()[-1])
    line = json.dumps(first | {"seq": "SEQ", "t_s": "TIME", "step": "STEP", "loss": "LOSS"})
    for word in ("SEQ", "TIME", "STEP", "LOSS"):
        line = line.replace(f'"{word}"', f"{{{word}}}")
    line = "{" + line.replace("{", "{{").replace("}", "}}")[1:] + "\n"
    for word in ("SEQ", "TIME", "STEP", "LOSS"):
        line = line.replace(f"{{{{{word}}}}}", f"{{{word}}}")
    begin = first["seq"]
    with run.events.open("a") as file:
        for n in range(2, steps + 1):
            loss = 90.0 if n == steps // 2 else 3.0 + n % 7
            file.write(line.format(SEQ=begin + n - 1, TIME=n * 0.5, STEP=n, LOSS=loss))
    return run


@pytest.mark.parametrize(
    ("steps", "limit_s"),
    [(50_000, 15.0), pytest.param(1_000_000, 15.0, marks=pytest.mark.soak)],
)
def test_a_long_run_opens_within_its_budget_and_keeps_its_spike(
    steps: int, limit_s: float, tmp_path: Path, comms: type[CountedComm]
) -> None:
    run = long_run(tmp_path / "run", steps)
    begin = time.monotonic()
    live = Live(run.path)
    assert live.wait(60)
    opened(live, comms)
    took = time.monotonic() - begin
    # Wide, because other tests share the machine; what it is alone stands in the log of measurements.
    assert took < limit_s
    assert sum(size for _, size in comms.sent) < 200_000
    assert live.snapshot is not None and live.snapshot.view.last_step == steps
    rows = rows_of(list(Stream().messages(live.snapshot)))["loss"]
    assert (steps // 2, 90.0) in rows
    live.close()


def test_a_spec_is_started_stopped_and_resumed(kit: Kit, tmp_path: Path) -> None:
    spec = kit.spec(tmp_path, train__steps=2000, eval__every=0, checkpoint__every=0)
    live = Live(spec, out=tmp_path / "run")
    assert live.run is None and not live._buttons["start"].disabled
    with pytest.raises(UsageError):
        live.stop()
    run = live.start()
    assert run.path == tmp_path / "run" and live.start() == run
    until(lambda: live.snapshot is not None and live.snapshot.view.last_step)
    assert live._buttons["start"].disabled and not live._buttons["stop"].disabled
    live._buttons["stop"].click()
    assert live.wait(60) and live.snapshot is not None
    assert live.snapshot.state == "stopped"
    until(lambda: not live._buttons["resume"].disabled)
    live.close()
    # The cell, run again in another kernel, attaches to the run that is there.
    again = Live(spec, out=tmp_path / "run")
    assert again.start() == run and again.wait(30)
    again._buttons["resume"].click()
    until(lambda: not again.is_over)
    again.stop()
    assert again.wait(60)
    again.close()


def test_a_refusal_is_raised_from_code_and_said_after_a_click(kit: Kit, tmp_path: Path) -> None:
    spec = kit.spec(tmp_path, loss__alpha=7)
    live = Live(spec, out=tmp_path / "run")
    with pytest.raises(BadInput, match="alpha"):
        live.start()
    live._buttons["start"].click()
    until(lambda: "alpha" in live._said.value)
    assert not (tmp_path / "run").exists()
    live.close()


def test_what_is_no_run_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunLogError):
        Live(tmp_path / "nothing")
    run = completed(tmp_path / "run")
    with pytest.raises(BadInput, match="a spec"):
        Live(run.path, set=["train.steps=3"])


def test_a_selected_window_is_in_unix_seconds(tmp_path: Path) -> None:
    live = Live(completed(tmp_path / "run").path)
    live.wait(30)
    live._hear(None, {"kind": "window", "from": 1.0, "to": 3.5}, [])
    assert live.snapshot is not None and live.snapshot.view.first_unix_s is not None
    begin = live.snapshot.view.first_unix_s
    assert live.window == (begin + 1.0, begin + 3.5)
    live.close()


def test_the_still_is_small_and_says_how_it_ended(tmp_path: Path) -> None:
    live = Live(completed(tmp_path / "run", total=5000, nan=(70,)).path)
    live.wait(30)
    bundle = live._bundle(*live.still())
    assert "COMPLETED" in bundle["text/plain"] and "NON-FINITE" in bundle["text/html"]
    assert "×" in bundle["text/html"] and len(bundle["text/html"]) < 60_000
    live.close()


def test_frames_keep_absent_and_nan_apart(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(3)
    scene.events(step(1, 3.0), step(2, math.nan), step(3, None))
    live = Live(scene.close().run.path)
    live.wait(30)
    import pandas

    loss = list(live.frame()["loss"])
    assert loss[0] == 3.0 and math.isnan(loss[1]) and loss[2] is pandas.NA
    assert list(live.frame("device")["source"]) == ["host"]
    assert len(live.frame("compiles")) == 0
    with pytest.raises(UsageError, match="steps, device, compiles"):
        live.frame("weather")
    live.close()


def test_the_notebook_loads_no_torch_and_the_terminal_no_notebook() -> None:
    code = (
        "import sys, {}; bad = {{'torch', 'safetensors', 'tokenizers', {}}} & set(sys.modules); "
        "assert not bad, bad"
    )
    for module, others in (
        ("workbench.notebook", "'textual', 'pandas', 'plotly'"),
        ("workbench.tui.app, workbench.cli", "'ipywidgets', 'anywidget', 'IPython'"),
    ):
        subprocess.run([sys.executable, "-c", code.format(module, others)], check=True)
