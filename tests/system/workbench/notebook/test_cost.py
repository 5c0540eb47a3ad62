"""What widgets cost, counted where ipywidgets makes its comms: a byte here is a byte that a page would have got.

And what is left after they are closed, what their callbacks may load, and that nothing is reached over a network.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import ipywidgets
import pytest
from msgspec.structs import replace

from tests.support import notebook_pages
from tests.support.findings import hanging_run
from tests.support.notebook_pages import CountedComm, opened, until
from tests.support.run_folders import completed, gpu, running
from workbench.notebook import Flip, Whys
from workbench.notebook.live import PREVIEW_S, PREVIEWS_AFTER, Live
from workbench.notebook.panel import Panel
from workbench.notebook.stream import HISTORY

pytestmark = pytest.mark.filterwarnings("default")
comms = notebook_pages.comms


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
    assert total < 60_000 + 5 * 3 * HISTORY * 8, "step, losses and step time"
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


def test_a_fast_run_on_eight_gpus_streams_less_than_its_budget(
    tmp_path: Path, comms: type[CountedComm]
) -> None:
    scene = running(tmp_path / "run", done=2, total=100_000)
    # Its own thread waits an hour for the next look: this one looks, twice a second of the run.
    live = Live(scene.run.path, refresh_s=3600)
    until(lambda: live.snapshot)
    opened(live, comms)
    live._closing.set()
    live._wake.set()
    live._thread.join()
    before, seconds, last = len(comms.sent), 20, 2
    reading = gpu(90.0)
    for half in range(2 * seconds):
        # 100 steps a second, whatever their own clock says.
        scene.steps(last + 1, last + 50)
        last += 50
        if half % 2:
            utils = {"gpu_util_pct": 50.0 + half, "tensor_util_pct": 20.0 + half}
            scene.device(*(replace(reading, index=index, **utils) for index in range(8)))
        live.tick()
    scene.close()
    sent = comms.sent[before:]
    assert 2 * seconds <= len(sent) <= 3 * 2 * seconds
    assert sum(size for _, size in sent) < 20_000 * seconds, sum(size for _, size in sent)
    live._closing.clear()
    live.close()
    assert comms.alive == []


@pytest.mark.parametrize("kind", ["Live", "Flip", "Whys"])
def test_after_close_no_comm_no_thread_and_no_object_is_left(
    kind: str, tmp_path: Path, comms: type[CountedComm]
) -> None:
    run = completed(tmp_path / "run").path
    threads, widgets = threading.active_count(), len(ipywidgets.widgets.widget._instances)
    made: Panel
    if kind == "Live":
        made = Live(run)
    elif kind == "Flip":
        made = Flip(run, flips=tmp_path / "flips")
    else:
        made = Whys.of(hanging_run(tmp_path / "hang").path, folder=tmp_path / "evidence")
    assert len(comms.alive) > 3 and threading.active_count() == threads + 1
    root = weakref.ref(made._root)
    made._ipython_display_()
    made.close()
    assert comms.alive == [] and threading.active_count() == threads
    assert len(ipywidgets.widgets.widget._instances) == widgets
    del made
    gc.collect()
    assert root() is None


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
    # Clear, charts, rows and words, as often as it may take a page to open.
    assert len(sent) == 4 * PREVIEWS_AFTER
    assert sum(sent[:4]) < PREVIEW_S * 20_000
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


USED = """
import pathlib, sys, threading
sockets = []
sys.addaudithook(lambda name, of: sockets.append(of) if name == "socket.__new__" and of[1] != 1 else None)
from workbench.notebook import Compare, Flip, Live, Whys
place = pathlib.Path(sys.argv[1])
live = Live(place / "run")
live.wait()
flip = Flip(place / "run", flips=place / "flips")
whys = Whys.of(place / "hang", "alert gpu_idle", folder=place / "evidence")
Compare([place / "run"])._repr_mimebundle_()
def page():
    # What a page can cause: a question, a selection, a choice, every button.
    live._hear(None, {"kind": "ready"}, [])
    flip._set.value = "compute.threads=1"
    whys._change.value = "compute.threads=1"
    # All but the one that starts runs, which would go on behind this test.
    found = [button for name, button in whys._buttons.items() if name != "test"]
    for button in (*live._buttons.values(), *found, flip._stop_button):
        button.click()
before = set(threading.enumerate())
other = threading.Thread(target=page)
other.start()
other.join()
for thread in set(threading.enumerate()) - before:
    thread.join()
assert whys.bundle.load().causes, whys._said.value
for panel in (live, flip, whys):
    panel.close()
bad = {"torch", "cuda", "triton"} & set(sys.modules)
assert not bad and not sockets, (bad, sockets)
"""


def test_callbacks_on_another_thread_load_no_torch_and_open_no_socket_of_a_network(
    tmp_path: Path,
) -> None:
    completed(tmp_path / "run")
    hanging_run(tmp_path / "hang")
    subprocess.run([sys.executable, "-c", USED, str(tmp_path)], check=True, cwd=tmp_path)


def test_the_notebook_loads_no_torch_and_no_terminal() -> None:
    unwanted = "torch safetensors tokenizers textual pandas plotly"
    code = (
        "import sys, workbench.notebook; "
        f"bad = set('{unwanted}'.split()) & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
