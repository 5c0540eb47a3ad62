"""The verdict on recorded folders: what stands first is right, and every surface has the same line."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.attach.summary import summary_lines
from engine.cli.main import main
from engine.log.events import (
    Event,
    Note,
    Phase,
    RunFinished,
    StepDone,
    TrainerExited,
    TrainerStarted,
    Watched,
)
from engine.log.folder import RunFolder, create_run
from engine.log.write import LogWriter
from engine.watch.runs_feed import RunsFeed
from tests.support.judged import alert_event, check_event, identity_event, is_alert, number_event
from tests.support.run_events import example_of
from tests.support.run_folders import Scene, completed, empty, killed, resumed, running, vanished
from tests.support.running import engine_here
from tests.support.screens import texts_of
from workbench.notebook.live import Live

LIMIT_S = 60.0


def checked(level: str, id: str) -> Callable[[Path], RunFolder]:
    def make(path: Path) -> RunFolder:
        scene = running(path, done=10)
        scene.events(check_event("step_rows", "pass", "8 rows", 1, cost_s=0.1))
        scene.events(check_event(id, level, "numbers of it", 1, cost_s=0.1))
        return scene.close()

    return make


def alerted(id: str, level: str, text: str, *, state: str = "") -> Callable[[Path], RunFolder]:
    """A run of the engine with an alert; it ended in `state`, or without a word."""

    def make(path: Path) -> RunFolder:
        scene = running(path, done=10)
        if state:
            scene.events(RunFinished(state=state, reason="", exit_code=0, step=10))
        return scene.watch(alert_event(id, level, text, first_step=4, no_flip="look")).close().run

    return make


def noted(path: Path) -> RunFolder:
    scene = running(path, done=10)
    return scene.events(Note(level="error", text="the corpus has shrunk")).close()


def script(
    *seen: Event, state: str = "COMPLETED", code: int = 0, signal: str | None = None
) -> Callable[[Path], RunFolder]:
    """A watched script of three steps."""

    def make(path: Path) -> RunFolder:
        about = {"arguments": ["python", "t.py"], "folder": "/", "commit": ""}
        run = create_run(path, "", {"spec": {}, "command": about})
        steps = [StepDone(step=n, loss=3.0 / n, step_s=0.1) for n in (1, 2, 3)]
        with LogWriter(run.events, writer="probe") as log:
            own = [event for event in seen if not is_alert(event)]
            for event in (example_of(Watched), Phase(name="training"), *steps, *own):
                log.write(event)
        with LogWriter(run.watch, writer="supervisor") as log:
            for event in (TrainerStarted(trainer_pid=7, supervisor_pid=8), *filter(is_alert, seen)):
                log.write(event)
            log.write(
                example_of(
                    TrainerExited, state=state, returncode=code, signal=signal, sentence="It ended."
                )
            )
        return run

    return make


def finished(state: str) -> Callable[[Path], RunFolder]:
    """A run of the engine that ends by itself after 30 steps."""

    def make(path: Path) -> RunFolder:
        end = RunFinished(state=state, reason="asked", exit_code=0, step=30)
        return running(path).events(end).close().run

    return make


def ended(state: str, code: int, signal: str | None = None) -> Callable[[Path], RunFolder]:
    """A run of the engine whose process ended like this."""

    def make(path: Path) -> RunFolder:
        exit_ = example_of(
            TrainerExited, state=state, returncode=code, signal=signal, sentence="It ended."
        )
        return running(path).watch(exit_).close().run

    return make


def falling(n: int) -> float:
    """Return the loss of step `n` of a healthy table of 60 steps."""
    return 4 - n / 60 + n % 3 / 100


def table(
    loss: Callable[[int], float] = falling,
    *,
    lr: float = 0.001,
    heldout: Callable[[int], float] | None = None,
) -> Callable[[Path], RunFolder]:
    """A table of 60 steps of another tool, with a held-out loss at every fifth of them."""

    def make(path: Path) -> RunFolder:
        rows = ["step,loss,lr,val_loss"]
        for n in range(1, 61):
            held = heldout(n) if heldout is not None and n % 5 == 0 else ""
            rows.append(f"{n},{loss(n)},{lr},{held}")
        source = path.parent / f"{path.name}.csv"
        source.write_text("\n".join(rows) + "\n")
        assert main(["import", "csv", str(source), "--out", str(path.parent)]) == 0
        return RunFolder(path)

    return make


HELD = identity_event("weights_move", "pass", 1, "each has changed")
KEPT = identity_event("kept_gradients", "fail", 2, "nothing zeroed them")
MODE = identity_event("training_mode", "suspicion", 3, "2 modules in eval mode")
LARGE = identity_event(
    "update_size", "fact", 1, "a step moves them by 15 %", numbers={"share": 0.15}
)
SHIFT = identity_event("label_shift", "suspicion", 1, "shifted twice")
BAD = number_event(2, "loss", "nan")
FOLDERS: dict[str, tuple[Callable[[Path], RunFolder], str]] = {
    "completed": (completed, "HEALTHY: completed 60 steps"),
    "killed": (killed, "ENDED at step 30: killed by SIGKILL"),
    "vanished": (vanished, "ENDED at step 30: the cause was not recorded"),
    "empty": (empty, "UNKNOWN: "),
    "labels": (
        checked("fail", "step_loss"),
        "WRONG since step 1: the logged loss is not that of the batch",
    ),
    "identical": (
        checked("fail", "teacher_not_student"),
        "WRONG since step 1: teacher and student",
    ),
    "copies": (checked("fail", "split_disjoint"), "ENDED at step 10: the cause was not recorded"),
    "idle": (alerted("gpu_idle", "fail", "GPU 0 was idle"), "WRONG since step 4: GPU 0 was idle"),
    "host": (
        alerted("cpu_bound_teacher", "fail", "the teacher is computed by the CPU"),
        "WRONG since step 4: the teacher is computed by the CPU",
    ),
    "error": (noted, "WRONG: the corpus has shrunk"),
    "held": (script(HELD), "HEALTHY: completed 3 steps; 1 identity passed"),
    "kept": (script(SHIFT, KEPT), "WRONG since step 2: gradients are not zeroed between steps"),
    "mode": (script(HELD, MODE), "SUSPECT since step 3: the model is trained in eval mode"),
    "shifted": (script(HELD, SHIFT), "SUSPECT since step 1: labels are not the tokens that follow"),
    "recovered": (script(HELD, BAD), "SUSPECT since step 2: loss was nan at step 2"),
    "table": (table(), "HEALTHY: no alert in 60 steps; only its logged numbers"),
    "nans": (
        table(lambda n: math.nan if 30 <= n < 40 else falling(n)),
        "SUSPECT since step 30: loss was nan in steps 30 to 39, and is finite",
    ),
    "overfitted": (
        table(heldout=lambda n: 4.2 - n / 60 if n <= 30 else 3.7 + (n - 30) / 20),
        "SUSPECT since step 30: held-out loss has been above its best (3.700 at step 30)",
    ),
    "guessing": (
        table(lambda n: math.log(50304) + n % 3 / 100),
        "SUSPECT since step 1: the loss stays at 10.84: guessing among 50,304 tokens",
    ),
    "diverged": (
        table(lambda n: falling(3 * n) if n <= 30 else 3.9 + n % 3 / 100),
        "WRONG since step 33: the loss diverged from 2.55 to 3.91",
    ),
    "resumed": (resumed, "HEALTHY: completed 60 steps"),
    "stopped": (finished("stopped"), "HEALTHY: stopped at step 30, as requested"),
    "large": (script(HELD, LARGE), "HEALTHY: completed 3 steps; 2 identities passed"),
    "ctrl-c": (
        script(HELD, state="INTERRUPTED", code=130),
        "HEALTHY: interrupted at step 3, as requested; 1 identity passed",
    ),
    "warm": (table(lambda n: falling(n) + 0.1 / n, lr=0.1), "HEALTHY: no alert in 60 steps"),
    "outside": (
        ended("KILLED_EXTERNAL", -9, "SIGKILL"),
        "ENDED at step 30: killed from outside, not for lack of memory",
    ),
    "script-outside": (
        script(HELD, state="KILLED_EXTERNAL", code=-9, signal="SIGKILL"),
        "ENDED at step 3: killed from outside, not for lack of memory",
    ),
    "script-memory": (
        script(HELD, KEPT, state="OOM_GLOBAL", code=-9, signal="SIGKILL"),
        "WRONG since step 2: gradients are not zeroed between steps; ended at step 3, out of memory",
    ),
    "disk": (ended("DISK_FULL", 1), "ENDED at step 30: the disk is full"),
    "memory": (
        ended("OOM_MEMCG", -9, "SIGKILL"),
        "ENDED at step 30: out of memory, its control group was full",
    ),
    "starved": (
        alerted(
            "data_wait",
            "suspicion",
            "steps wait for data for 62 % of their time",
            state="completed",
        ),
        "SUSPECT since step 4: steps wait for data for 62 % of their time",
    ),
    "rank": (
        alerted("stalled", "fail", "no step for 12m: rank 1 waits in all_reduce for rank 0"),
        "WRONG since step 4: no step for 12m: rank 1 waits in all_reduce for rank 0",
    ),
    "rate": (
        script(
            HELD,
            LARGE,
            alert_event(
                "update_too_large", "suspicion", "steps too large", first_step=1, no_flip="x"
            ),
            alert_event(
                "loss_rose_for_good", "suspicion", "the loss rose", first_step=2, no_flip="x"
            ),
        ),
        "SUSPECT since step 1: steps too large (and 1 more)",
    ),
    "raised": (script(HELD, state="FAILED", code=1), "ENDED at step 3: the command failed with"),
}


SCRIPTS = (
    "script-outside",
    "script-memory",
    "held",
    "kept",
    "mode",
    "shifted",
    "recovered",
    "raised",
    "large",
    "ctrl-c",
    "rate",
)
"""Those of a watched script."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    for name, (make, _) in FOLDERS.items():
        made = make(runs / name)
        if isinstance(made, Scene):
            made.close()
    return runs


@pytest.fixture(scope="module")
def listed(folder: Path) -> dict[str, str]:
    rows = RunsFeed([folder], budget_s=LIMIT_S).poll().rows
    return {row.name: row.verdict for row in rows}


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """The line of each run in the list of `engine runs`."""
    rows = json.loads(engine_here("runs", folder, "--json").stdout)
    return {row["run"]: row["verdict"]["line"] for row in rows}


SHOWN = {
    *("completed", "empty", "labels", "error", "outside", "starved"),  # runs of the engine
    *("held", "shifted", "script-memory", "raised", "ctrl-c"),  # watched scripts
    *("table", "nans", "diverged"),  # tables of another tool
}
"""One run of each tool with each level of a verdict, and with each kind of end."""


@pytest.mark.parametrize("name", FOLDERS)
def test_the_line_of_a_run_in_the_lists_is_the_right_one(
    folder: Path, listed: dict[str, str], printed: dict[str, str], name: str
) -> None:
    assert printed[str(folder / name)] == listed[name]
    assert listed[name].startswith(FOLDERS[name][1])


def test_the_folders_are_of_8_healthy_runs_and_of_16_with_a_fault_or_more() -> None:
    begins = [begin.partition(" ")[0].strip(":") for _, begin in FOLDERS.values()]
    assert begins.count("HEALTHY") == 8
    assert sum(begins.count(level) for level in ("SUSPECT", "WRONG", "ENDED")) >= 16


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in SHOWN)) for name in FOLDERS]
)
def test_every_surface_has_the_line_of_the_lists(
    folder: Path, listed: dict[str, str], name: str
) -> None:
    run, line = folder / name, listed[name]

    def said(*words: str) -> str:
        return engine_here(*words).stdout

    assert json.loads(said("tail", str(run), "--json"))["verdict"]["line"] == line
    assert said("tail", str(run)).splitlines()[0].endswith(f" {line}")
    assert said("diagnose", str(run)).splitlines()[0].endswith(f" {line}")
    said("report", str(run), "--out", str(run.with_suffix(".html")))
    page = html.unescape(re.sub("<[^>]*>", "", run.with_suffix(".html").read_text()))
    assert line in page
    # A cell waits for the first line of a log.
    if name != "empty":
        live = Live(run)
        try:
            live.wait(LIMIT_S)
            assert live.still()[1][0].endswith(f" {line}")
        finally:
            live.close()
    (screen,) = texts_of(run, (200, 60))
    assert line in screen
    if name in SCRIPTS:
        assert line in " ".join(" ".join(summary_lines(RunFolder(run))).split())
