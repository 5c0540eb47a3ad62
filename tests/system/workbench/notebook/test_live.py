"""Live in a kernel without a page: runs that are read, started, stopped, resumed, and shown when nothing is alive."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.errors import BadInput, RunLogError, UsageError
from engine.log.folder import RunFolder
from tests.support import notebook_pages
from tests.support.kit import Kit
from tests.support.notebook_pages import CountedComm, drawn, opened, rows_of, until
from tests.support.perf import within
from tests.support.run_folders import Scene, completed, step
from workbench.feed import RunFeed, Snapshot
from workbench.notebook import Compare
from workbench.notebook.live import Live
from workbench.notebook.stream import Stream

pytestmark = pytest.mark.filterwarnings("default")
comms = notebook_pages.comms


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


@pytest.mark.perf
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
    within(time.monotonic() - begin, limit_s)
    assert sum(size for _, size in comms.sent) < 200_000
    assert live.snapshot is not None and live.snapshot.view.last_step == steps
    rows = rows_of(list(Stream().messages(live.snapshot)))["training.loss"]
    assert (pytest.approx(steps // 2 * 0.5), 90.0) in rows
    live.close()


def listening(pid: int) -> set[str]:
    """The addresses at which a process waits for others."""
    own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                found.add(local)
    return found


def test_a_listening_process_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert any(address.endswith(f":{port:04X}") for address in listening(os.getpid()))


def test_a_spec_is_started_stopped_and_resumed(kit: Kit, tmp_path: Path) -> None:
    spec = kit.spec(tmp_path, train__steps=2000, eval__every=0, checkpoint__every=0)
    live = Live(spec, out=tmp_path / "run")
    assert live.run is None and not live._buttons["start"].disabled
    with pytest.raises(UsageError):
        live.stop()
    run = live.start()
    assert run.path == tmp_path / "run" and live.start() == run
    until(lambda: live.snapshot is not None and live.snapshot.view.last_step)
    assert live.snapshot is not None and live.snapshot.view.trainer_pid
    assert not listening(live.snapshot.view.trainer_pid)
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


def test_the_still_is_small_and_says_how_it_ended(tmp_path: Path) -> None:
    live = Live(completed(tmp_path / "run", total=5000, nan=(70,)).path)
    live.wait(30)
    bundle = live._bundle(*live.still())
    assert "COMPLETED" in bundle["text/plain"] and "NON-FINITE" in bundle["text/html"]
    assert "×" in drawn(bundle["text/html"]) and len(bundle["text/html"]) < 80_000
    live.close()


def test_a_run_that_is_read_while_its_cell_is_drawn_is_in_the_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, seen = threading.Event(), []
    poll = RunFeed.poll

    def later(feed: RunFeed) -> Snapshot:
        may_read.wait(30)
        return poll(feed)

    def show(bundle: dict[str, str], key: str = "") -> None:
        may_read.set()
        until(lambda: live.is_over)
        seen.append(bundle)

    monkeypatch.setattr(RunFeed, "poll", later)
    monkeypatch.setattr("workbench.notebook.panel.FIRST_LOOK_S", 0.0)
    monkeypatch.setattr("workbench.notebook.panel.show", show)
    monkeypatch.setattr("workbench.notebook.panel.replace", lambda bundle, key: seen.append(bundle))
    live = Live(completed(tmp_path / "run").path)
    live._ipython_display_()
    until(lambda: "<svg" in drawn(seen[-1].get("text/html", "")))
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


def test_without_pandas_a_table_is_refused_and_everything_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    live = Live(completed(tmp_path / "run").path)
    assert live.wait(30) and live.still()[0]
    with pytest.raises(UsageError, match="expected pandas"):
        live.frame()
    assert Compare([live.run.path])._repr_mimebundle_()["text/html"]  # type: ignore[union-attr]
    live.close()
