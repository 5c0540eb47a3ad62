"""The verdict line: what stands first, since when, what to do, and that nothing is healthy which was not judged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.catalogue import ALERTS, BY_ID, CHECKS, IDENTITIES
from engine.log.events import Event, ProcessFound, RunFinished, ScriptEnded, TrainerExited, Watched
from engine.log.view import RunView
from engine.watch.verdict_line import RunVerdict, run_verdict_lines, verdict_of
from tests.support.judged import (
    alert_end,
    alert_event,
    check_event,
    identity_event,
    is_alert,
    is_alert_end,
    number_event,
)
from tests.support.run_events import example_of, started, step
from tests.support.run_folders import Scene


def view_of(tmp_path: Path, *events: Event) -> tuple[RunView, str]:
    from engine.log.fold import Follower

    scene = Scene(tmp_path / "run").open()
    for event in events:
        watch = is_alert(event) or is_alert_end(event) or isinstance(event, TrainerExited)
        (scene.watch if watch else scene.events)(event)
    scene.close()
    follower = Follower(scene.run)
    view = follower.read_all()
    # Without a record of its end the run would be taken for one that nobody saw end: the test has no process.
    over = view.finished is not None or view.exit is not None or view.process is not None
    return view, follower.state if over else "running"


def verdict(tmp_path: Path, *events: Event) -> RunVerdict:
    return verdict_of(*view_of(tmp_path, *events), "runs/a")


def ended(state: str, code: int | None = 1, **more: object) -> TrainerExited:
    return example_of(TrainerExited, state=state, returncode=code, sentence="It ended.", **more)


DONE = RunFinished(state="completed", reason="every step done", exit_code=0, step=2)
PASSED = check_event("step_rows", "pass", "8 rows", 1, cost_s=0.1)
FAILED = check_event("step_loss", "fail", "7 of 8 labels", 1, cost_s=0.1)
WARNED = check_event("split_disjoint", "fail", "12 texts", 0, cost_s=0.1)
KEPT = identity_event("kept_gradients", "fail", 3, "nothing zeroed them")
MODE = identity_event("training_mode", "suspicion", 51, "2 modules in eval mode")
SLOW = alert_event("step_time_drift", "suspicion", "a step takes longer", first_step=5, step=9)
WAITS = alert_event(
    "data_wait", "suspicion", "steps wait for data", first_step=2, flip="--set loader.workers=4"
)
STALL = alert_event("stalled", "fail", "no step after step 2 for 31 s", first_step=2, meaning="m")
KILLED = ended("KILLED_EXTERNAL", -9, signal="SIGKILL")


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (
            (started(steps=2), PASSED, step(1), step(2), DONE),
            "HEALTHY: completed 2 steps; 1 check",
        ),
        (
            (started(steps=2), FAILED, STALL),
            "WRONG since step 1: the logged loss is not that of the batch",
        ),
        ((started(steps=2), PASSED, WARNED, DONE), "SUSPECT since step 0: held-out text is also"),
        (
            (started(steps=2), PASSED, WAITS, SLOW),
            "SUSPECT since step 2: steps wait for data (and 1",
        ),
        ((started(steps=2), PASSED, SLOW), "SUSPECT since step 5: a step takes longer"),
        (
            (started(steps=9), step(1), step(2), STALL, KILLED),
            "WRONG since step 2: no step after step 2 for 31 s; ended at step 2, killed from outside",
        ),
        ((started(steps=9), step(1), KILLED), "ENDED at step 1: killed from outside, not for lack"),
        (
            (started(steps=9), step(1), ended("OOM_MEMCG", -9, certainty="probable")),
            "ENDED at step 1: probably out of memory, its control group was full",
        ),
        (
            (example_of(Watched), step(3), KEPT, MODE),
            "WRONG since step 3: gradients are not zeroed",
        ),
        ((example_of(Watched), step(51), MODE), "SUSPECT since step 51: the model is trained in"),
        (
            (started(steps=9), PASSED, number_event(1, "loss", "nan"), step(1), step(2)),
            "SUSPECT since step 1: loss was nan at step 1, and is finite again",
        ),
        ((started(steps=9),), "UNKNOWN: "),
        (
            (example_of(ProcessFound),),
            "UNKNOWN: its steps and its loss are not visible from outside",
        ),
    ],
)
def test_what_explains_the_others_stands_in_the_line(
    tmp_path: Path, events: tuple[Event, ...], line: str
) -> None:
    found = verdict(tmp_path, *events)
    assert found.line.startswith(line)


def test_an_alert_that_is_over_is_not_wrong_any_more(tmp_path: Path) -> None:
    assert verdict(tmp_path, PASSED, STALL, alert_end("stalled", 3.0)).level == "HEALTHY"


def test_what_to_do_is_the_remedy_of_the_framework_or_the_flip(tmp_path: Path) -> None:
    seen = identity_event("kept_gradients", "fail", 3, "t", framework="transformers")
    found = verdict(tmp_path, example_of(Watched), seen)
    assert found.action == BY_ID["identity"]["kept_gradients"].transformers
    assert verdict(tmp_path / "b", PASSED, WAITS).action == "test it: --set loader.workers=4"


def test_it_is_shown_with_a_sign_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    view, state = view_of(tmp_path, example_of(Watched), KEPT)
    first, seen, todo = run_verdict_lines(view, state)
    assert first.startswith("✗ WRONG since step 3: ") and seen == "  nothing zeroed them"
    assert todo.startswith("  do: ")
    assert verdict_of(view, state).signed(ascii_only=True).startswith("x WRONG")


def test_a_script_without_an_optimizer_is_not_seen_and_the_verdict_says_so(tmp_path: Path) -> None:
    script = ScriptEnded(how="returned", optimizers=0)
    line = verdict(tmp_path, script, ended("COMPLETED", 0)).line
    assert line == "UNKNOWN: the script created no torch optimizer, so that its steps were not seen"


def test_a_script_that_raised_is_to_be_corrected_and_not_diagnosed_again(tmp_path: Path) -> None:
    watched = example_of(Watched)
    raised = ScriptEnded(how="raised", exception="ValueError", message="bad", where="a.py:3")
    found = verdict(tmp_path, watched, raised, ended("FAILED"))
    assert "read the last lines" in found.action and "diagnose" not in found.action


def test_exit_codes_are_those_of_a_verdict(tmp_path: Path) -> None:
    runs: tuple[tuple[Event, ...], ...] = (
        (PASSED, DONE),
        (PASSED, WAITS),
        (FAILED,),
        (started(steps=9), step(1), KILLED),
        (started(steps=9),),
    )
    found = [verdict(tmp_path / str(place), *events) for place, events in enumerate(runs)]
    codes = {one.level: one.exit_code for one in found}
    assert codes == {"HEALTHY": 0, "SUSPECT": 2, "WRONG": 1, "ENDED": 1, "UNKNOWN": 2}


def test_no_id_stands_in_a_line(tmp_path: Path) -> None:
    ids = {one.id for one in (*CHECKS, *ALERTS, *IDENTITIES) if "_" in one.id}
    for about in (*CHECKS, *IDENTITIES):
        assert about.wrong and not ids & set(re.findall(r"\w+", about.wrong)), about.id
        assert about.wrong[-1] not in ".?" and len(about.wrong) <= 75, about.id
