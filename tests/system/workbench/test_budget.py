"""What the workbench costs beside a run: time to the first frame, bytes to the terminal, processor.

`python -m pytest -m soak -s tests/system/workbench/test_budget.py` prints what it measured.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.support.run_folders import completed, running
from tests.support.terminals import ENTER_ALTERNATE, Terminal

pytestmark = [pytest.mark.soak, pytest.mark.perf]
WATCHED_S = 20.0
STEP_EVERY_S = 0.25
KIB = 1024
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has had (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@contextmanager
def a_run_that_goes_on(path: Path) -> Iterator[Path]:
    """A run that logs a step every STEP_EVERY_S."""
    scene = running(path, done=400, total=100_000)
    over = threading.Event()

    def go_on() -> None:
        number = 400
        while not over.wait(STEP_EVERY_S):
            number += 1
            scene.steps(number, number)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield scene.run.path
    finally:
        over.set()
        thread.join()
        scene.close()


def watched(path: Path, **environ: str) -> tuple[float, float]:
    """Bytes a second and share of a core while a run is watched at 160 x 45."""
    terminal = Terminal(str(path), columns=160, rows=45, **environ)
    terminal.read_until(ENTER_ALTERNATE, "RUNNING")
    terminal.read_for(3.0)
    before_s = processor_s(terminal.pid)
    count = terminal.read_for(WATCHED_S)
    share = (processor_s(terminal.pid) - before_s) / WATCHED_S
    terminal.press("q")
    assert terminal.wait() == 0
    return count / WATCHED_S, share


MOST = 0.04
"""Of a core: 2.6 to 3.4 % by the machine, for the same code."""


def test_at_one_look_a_second_it_costs_little(tmp_path: Path) -> None:
    with a_run_that_goes_on(tmp_path / "kd") as path:
        rate, share = watched(path)
        # Beside other programs the same work takes more of a core; what it costs is the least.
        for _ in range(2):
            if share >= MOST:
                share = min(share, watched(path)[1])
    print(f"\n1 Hz, 160x45: {rate / KIB:.1f} KiB/s to the terminal, {share:.2%} of a core")
    assert rate < 60 * KIB
    assert share < MOST


@pytest.mark.parametrize("variable", ["SSH_CONNECTION", "TMUX"])
def test_through_ssh_and_tmux_it_sends_less(tmp_path: Path, variable: str) -> None:
    with a_run_that_goes_on(tmp_path / "kd") as path:
        here, _ = watched(path)
        far, share = watched(path, **{variable: "x"})
    print(f"\n{variable}: {far / KIB:.1f} KiB/s instead of {here / KIB:.1f}, {share:.2%} of a core")
    assert far < 0.75 * here


def test_the_first_frame_is_there_within_a_second(tmp_path: Path) -> None:
    run = completed(tmp_path / "kd")
    taken, used = [], []
    for _ in range(5):
        began_s = time.monotonic()
        terminal = Terminal(str(run.path), columns=160, rows=45)
        terminal.read_until("kd")
        taken.append(time.monotonic() - began_s)
        used.append(processor_s(terminal.pid))
        terminal.press("q")
        assert terminal.wait() == 0
    print(
        f"\nfirst frame: {median(taken):.2f} s (median of 5; processor time {median(used):.2f} s)"
    )
    # Processor time leaves out what other programs took meanwhile.
    assert min(taken) < 1.0 or median(used) < 1.0


def test_the_engine_does_not_wait_for_a_viewer_that_has_stopped_reading(tmp_path: Path) -> None:
    """A terminal whose other side reads nothing stops the screen, and only the screen."""
    with a_run_that_goes_on(tmp_path / "kd") as path:
        terminal = Terminal(str(path), columns=160, rows=45)
        terminal.read_until("RUNNING")
        before = (path / "events.jsonl").stat().st_size
        until_s = time.monotonic() + 120
        while (path / "events.jsonl").stat().st_size < before + 4000:
            assert time.monotonic() < until_s, "the log has stopped"
            time.sleep(0.1)
        terminal.press("q")
        assert terminal.wait() == 0
    assert re.search(r"RUNNING", terminal.output)
