"""Flips of a training script that is not ours, with real runs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadInput
from engine.flips import arms
from engine.flips.arms import Stopped, run_arm
from engine.flips.command import WORDS
from engine.flips.flip import run_flip
from engine.flips.flip_folder import find_flips, read_pairs, read_plan_of
from engine.flips.plan import make_command_plan
from engine.flips.text import answer_lines
from engine.flips.watched import difference, watched_plan
from engine.log.folder import RunFolder, create_run, read_command
from engine.log.view import RunView
from tests.support.attached import BEGIN
from tests.support.attached_scripts import LOADED, SLEEPING
from tests.support.running import engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script lies, with a lock of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BEGIN + SLEEPING)
    return tmp_path


def ends(pid: int) -> bool:
    """Whether the process has ended, or does so now that it was killed."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    found = select.select([process], [], [], 10.0)[0]
    os.close(process)
    return bool(found)


def flip(
    a: str, b: str, *words: str, out: str = "flips/1", use_controls: str = "skip", **how: Any
) -> dict[str, Any]:
    command = words or (sys.executable, "train.py", "{}", "--out", "{out}")
    how = {"order_seed": 1, "steps": 6, "budget_s": 900.0} | how
    plan = make_command_plan(command, {WORDS: a}, {WORDS: b}, **how)
    return run_flip(plan, Path(out), use_controls=use_controls)


def answer_of(verdict: dict[str, Any]) -> list[str]:
    return answer_lines(verdict)


@pytest.mark.soak  # two arms in suite: the test below and test_fixes
def test_an_arm_whose_steps_take_several_times_as_long_is_measured_so(folder: Path) -> None:
    verdict = flip("--sleep 0.02", "--sleep 0.2", pairs_max=1)
    assert verdict["verdict"] == "INCONCLUSIVE" and verdict["n_pairs"] == 1, verdict["reason"]
    # Four such pairs are judged in test_verdict. The margin is for their interval: the noise of one pair crosses it.
    assert verdict["effect"] is not None and verdict["effect"] > 2
    assert verdict["controls"]["manipulation"]["level"] == "pass"
    assert verdict["controls"]["equal"]["level"] == "pass"
    (found,) = find_flips(folder / "flips")
    assert read_plan_of(found).kind == "command"
    (pair,) = read_pairs(found)
    # A sleep never ends early, however busy the machine is.
    assert pair.b.value is not None and pair.b.value >= 0.2
    for outcome in (pair.a, pair.b):
        # Ended by the probe as the script would end: what it has to close is closed, with trackers offline.
        assert (outcome.state, outcome.steps) == ("completed", 6)
        assert (found / "out" / Path(outcome.run).name / "closed").read_text() == "offline"
        command = read_command(RunFolder(found / outcome.run))
        assert command is not None and command.arguments[1] == "train.py"


@pytest.mark.soak  # eight arms; one pair of them is measured above, and four pairs are judged in test_verdict
def test_an_arm_whose_steps_take_several_times_as_long_is_slower(folder: Path) -> None:
    verdict = flip("--sleep 0.02", "--sleep 0.2")
    assert verdict["verdict"] == "B_SLOWER", verdict["reason"]
    assert answer_of(verdict)[0].startswith("--sleep 0.2 is slower: time per step +")


# `engine why test` of a script runs in copies too, and the probe's change of workers has tests of its own.
@pytest.mark.soak
def test_a_watched_run_is_flipped_with_more_workers_in_a_copy_of_its_folder(folder: Path) -> None:
    (folder / "loaded.py").write_text(BEGIN + LOADED)
    watch = [sys.executable, "-m", "engine", "watch", "--quiet", "--name", "loaded", "--"]
    subprocess.run([*watch, sys.executable, "loaded.py", "--steps", "45"], check=True)
    (folder / "kept.txt").write_text("of the watched run")
    plan = watched_plan(folder / "runs" / "loaded", {"loader.workers": "4"}, order_seed=1)
    assert plan.steps == 45, "as many as the run made"
    verdict = run_flip(plan, Path("flips/1"), use_controls="skip")
    assert verdict["verdict"] == "B_FASTER", verdict["reason"]
    assert answer_of(verdict)[1].startswith("next: set num_workers=4")
    assert (folder / "kept.txt").read_text() == "of the watched run"
    assert not (folder / "flips" / "1" / "work").exists()


def test_a_setting_that_changes_nothing_in_b_is_not_judged(folder: Path) -> None:
    how = ("--steps", 6, "--pairs", 1, "--controls", "skip", "--out", "flips/1")
    # In a process that forks what it starts.
    done = engine("flip", "--set", "loader.workers=4", *how, "--", sys.executable, "train.py")
    assert done.returncode == 2, done.stderr
    assert "loader.workers=4 changed nothing in arm B" in done.stdout.splitlines()[0]
    assert json.loads(Path("flips/1/verdict.json").read_text())["verdict"] == "INVALID"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.py:99999=pass", "a file of "),
        ("nowhere.py:1=pass", "nothing there"),
        ("../other.py:1=pass", "a file outside it"),
        ("link.py:1=pass", "a file outside it, or a link"),
        ("train.py:2=import json, os, sys", "arms that differ"),
    ],
)
def test_a_line_that_is_none_is_refused(folder: Path, name: str, said: str) -> None:
    (folder.parent / "other.py").write_text("x\n")
    (folder / "link.py").symlink_to("train.py")
    command = {"arguments": [sys.executable, "train.py"], "folder": str(folder), "commit": None}
    run = create_run(folder / "runs" / "r", "", {"command": command, "spec": {}})
    with pytest.raises(BadInput, match=said):
        watched_plan(run.path, difference(name), order_seed=1)


@pytest.mark.soak
def test_a_script_with_fewer_steps_than_are_asked_for_is_said_to_have_them(folder: Path) -> None:
    verdict = flip("--steps 4", "--steps 5", pairs_max=1)
    assert verdict["verdict"] == "INVALID" and "ended early after 4 steps" in verdict["reason"]
    assert "fewer --steps" in answer_of(verdict)[1]


def test_a_script_that_fails_at_once_is_said_with_its_last_line(folder: Path) -> None:
    verdict = flip("1", "2", sys.executable, "-c", "raise SystemExit('no data')", "{}", pairs_max=1)
    assert verdict["verdict"] == "INVALID"
    assert (
        "A failed after 0 steps" in verdict["reason"]
        and "its last line: no data" in verdict["reason"]
    )


def test_a_command_without_a_training_is_said_to_have_no_step(folder: Path) -> None:
    verdict = flip("1", "2", "true", "{}", pairs_max=1)
    assert "no optimizer of torch stepped" in answer_of(verdict)[0]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(3))
def test_a_command_against_itself_is_never_faster_or_slower(folder: Path, number: int) -> None:
    verdict = flip("--sleep 0.05", "--sleep 0.050", order_seed=number, steps=12)
    assert verdict["verdict"] in ("EQUIVALENT", "INCONCLUSIVE"), verdict["reason"]


@pytest.mark.soak
def test_both_controls_of_a_command_are_run(folder: Path) -> None:
    verdict = flip("--sleep 0.05", "--sleep 0.2", use_controls="run", steps=12)
    assert {p.name for p in Path("flips/1/controls").iterdir()} == {"same", "slow"}
    assert verdict["verdict"] == "B_SLOWER"


def test_an_arm_that_is_ended_leaves_no_process_that_it_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "STOP_GRACE_S", 0.5)
    # Neither the command nor what it starts heeds SIGTERM.
    script = "trap '' TERM; sleep 600 & echo $! > worker; wait; wait"
    words = ("sh", "-c", script, "sh", "{}")
    plan = make_command_plan(words, {WORDS: "1"}, {WORDS: "2"}, order_seed=1)
    seen: list[RunView] = []
    with pytest.raises(Stopped):
        run_arm(
            plan,
            b=True,
            pair=1,
            folder=folder / "flip" / "arms" / "01-b",
            watch=seen.append,
            stop=lambda: Path("worker").exists() and seen[-1].trainer_pid is not None,
        )
    worker = int(Path("worker").read_text())
    assert seen[-1].trainer_pid is not None and ends(seen[-1].trainer_pid) and ends(worker)
