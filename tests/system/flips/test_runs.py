"""Flips with real runs: arms that are killed, that hang, that do not flip, that compute otherwise; an
interruption and what goes on from it. Times are not judged here: the machine that tests is busy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.flips import arms, controls
from engine.flips.arms import Stopped, run_arm
from engine.flips.flip import Watching, run_flip
from engine.flips.flip_folder import read_pairs, read_plan_of
from engine.flips.pair import Pair
from engine.flips.plan import Plan, make_plan
from engine.flips.statistics import Interval
from engine.flips.surroundings import device_lock, find_surroundings
from engine.log.fold import Follower
from engine.log.folder import find_runs
from engine.log.view import RunView
from tests.support.kit import Kit
from tests.support.running import engine_here, environment

DEADLINE_S = 240.0


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of its own, so that tests beside this one may flip too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def small_plan(kit: Kit, folder: Path, *sets: str, **fields: Any) -> Plan:
    spec = kit.spec(folder, checks__enabled=False)
    return make_plan(spec, sets, order_seed=1, steps=6, budget_s=600, **({"pairs_max": 1} | fields))


@pytest.mark.soak
def test_an_arm_killed_from_outside_is_said_and_the_flip_goes_on(kit: Kit, tmp_path: Path) -> None:
    plan = small_plan(kit, tmp_path, "compute.threads=2", pairs_max=2)
    killed: list[int] = []
    heard: list[tuple[str, Pair, Interval | None]] = []

    def kill(_what: str, number: int, arm: str, view: RunView) -> None:
        if (number, arm) == (1, "B") and not killed and view.phase and view.trainer_pid:
            killed.append(view.trainer_pid)
            os.kill(view.trainer_pid, signal.SIGKILL)

    folder = tmp_path / "flip"
    verdict = run_flip(
        plan, folder, Watching(on_pair=lambda *said: heard.append(said), on_arm=kill)
    )
    assert verdict["pairs_run"] == 2 and verdict["n_pairs"] == 1
    assert (
        verdict["verdict"] == "INCONCLUSIVE"
        and "the most that the plan allows" in verdict["reason"]
    )
    first, second = read_pairs(folder)
    assert first.b.state == "killed_external" and first.a.completed
    assert first.b.value is None and first.difference is None
    assert "not the kernel's OOM killer" in verdict["diagnostics"]["left_out"][0]
    assert second.complete and second.difference is not None
    # Both pairs were heard of, the interval of the first with nothing in it.
    assert [(what, pair.number) for what, pair, _ in heard] == [("flip", 1), ("flip", 2)]
    assert heard[0][2] is None and heard[1][2] is not None
    # The arms are ordinary runs, in the order of the plan, that prove the setting was flipped.
    runs = {run.name: Follower(run).read_all() for run in find_runs(folder / "arms")}
    assert sorted(runs) == ["01-a", "01-b", "02-a", "02-b"]
    begun = {name: view.first_unix_s for name, view in runs.items()}
    for number, b_first in enumerate(plan.order(), start=1):
        a_s, b_s = begun[f"0{number}-a"], begun[f"0{number}-b"]
        assert a_s is not None and b_s is not None and (b_s < a_s) == b_first
    assert second.proofs["flipped"] is not None
    assert second.proofs["flipped"].reason == "the arms differ in compute.threads: 1 -> 2 alone"
    assert (second.a.choices["compute.threads"], second.b.choices["compute.threads"]) == ("1", "2")
    parity = second.proofs["parity"]
    assert parity is not None and parity.exit_code == 0 and len(second.a.losses) == 3
    # What was measured is what the log says.
    times = runs["02-a"].steps.values("step_s", plan.warm_up_steps)
    assert second.a.value == sorted(times)[len(times) // 2] and len(times) == 3
    # Nothing is saved by an arm; its log is its evidence.
    assert not (folder / "arms" / "02-a" / "student").exists()
    listed = engine_here("flips", tmp_path, "--json")
    (row,) = json.loads(listed.stdout)
    assert row["flip"] == str(folder) and row["verdict"] == "INCONCLUSIVE"
    assert "left out: pair 1: B killed_external" in engine_here("flips", folder).stdout


@dataclass(frozen=True)
class Hung:
    folder: Path
    verdict: dict[str, Any]
    trainer: int
    """Of arm B, which was stopped when its pid was known."""


@pytest.fixture(scope="module")
def hung(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Hung:
    """A flip whose arm B answers nothing."""
    place = tmp_path_factory.mktemp("hung")
    # Long enough for an arm that works, on a machine that does much else.
    plan = replace(small_plan(kit, place, "compute.threads=2"), run_limit_s=200.0)
    stopped: list[int] = []

    def freeze_b(_what: str, _number: int, arm: str, view: RunView) -> None:
        if arm == "B" and view.trainer_pid and not stopped:
            stopped.append(view.trainer_pid)
            os.kill(view.trainer_pid, signal.SIGSTOP)

    def now() -> float:
        """The limit of B is over as soon as it is stopped."""
        return time.monotonic() + (plan.run_limit_s if stopped else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        patch.setattr(arms, "STOP_GRACE_S", 1.5)
        patch.setattr(arms, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
        verdict = run_flip(plan, place / "flip", Watching(on_arm=freeze_b), use_controls="run")
    return Hung(place / "flip", verdict, stopped[0])


def test_an_arm_that_answers_nothing_is_killed_at_the_limit_and_keeps_its_log(hung: Hung) -> None:
    (pair,) = read_pairs(hung.folder)
    assert pair.b.state == "over the limit" and pair.b.value is None
    assert pair.b.reason.startswith("0 steps in 200 s, the last phase was ")
    with pytest.raises(ProcessLookupError):
        os.kill(hung.trainer, 0)
    runs = {run.name: run for run in find_runs(hung.folder / "arms")}
    view = Follower(runs["01-b"]).read_all()
    assert view.exit is not None and view.exit.signal == "SIGKILL"


@pytest.mark.soak  # an arm at its limit is ended in the same way
def test_a_step_that_never_ends_is_stopped_when_the_flip_is(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "STOP_GRACE_S", 1.5)
    plan = small_plan(kit, tmp_path, "train.accumulation=1000000")
    seen: list[RunView] = []
    with pytest.raises(Stopped):
        run_arm(
            plan,
            b=True,
            pair=1,
            folder=tmp_path / "arms" / "01-b",
            watch=seen.append,
            stop=lambda: bool(seen) and seen[-1].phase is not None,
        )
    (run,) = find_runs(tmp_path / "arms")
    assert not run.liveness().trainer and not run.liveness().supervisor


@pytest.mark.soak
def test_a_setting_that_auto_had_chosen_already_is_not_flipped(kit: Kit, tmp_path: Path) -> None:
    plan = small_plan(kit, tmp_path, "compute.thread_wait=passive", pairs_max=8)
    verdict = run_flip(plan, tmp_path / "flip")
    assert verdict["verdict"] == "INVALID" and verdict["pairs_run"] == 1
    assert "NotFlipped: compute.thread_wait came to passive in both arms" in verdict["reason"]
    assert verdict["next"] == [f"look: engine tail {tmp_path / 'flip' / 'arms' / '01-b'}"]


@pytest.mark.soak  # two whole arms; what parity is and what it ends are tests of test_proof and test_verdict
def test_an_arm_that_computes_otherwise_fails_parity_however_fast(kit: Kit, tmp_path: Path) -> None:
    plan = small_plan(kit, tmp_path, "student.precision=bf16", parity=1e-7, pairs_max=8)
    verdict = run_flip(plan, tmp_path / "flip")
    assert verdict["verdict"] == "PARITY_FAIL" and verdict["pairs_run"] == 1
    assert "the loss of step 1" in verdict["reason"] or "held-out loss" in verdict["reason"]
    assert verdict["controls"]["parity"]["level"] == "fail"
    assert verdict["controls"]["manipulation"]["level"] == "pass"


@pytest.mark.soak
def test_controls_are_run_after_a_first_pair_and_remembered(kit: Kit, tmp_path: Path) -> None:
    plan = small_plan(kit, tmp_path, "compute.threads=2")
    heard: list[str] = []
    folder = tmp_path / "flip"
    verdict = run_flip(
        plan, folder, Watching(on_pair=lambda what, *_: heard.append(what)), use_controls="run"
    )
    assert heard == ["flip", "control same", "control slow"]
    slow = {o.arm: o.run for p in read_pairs(folder / "controls" / "slow") for o in (p.a, p.b)}
    slowed = {
        arm: json.loads((folder / "controls" / "slow" / run / "effective.json").read_text())["spec"]
        for arm, run in slow.items()
    }
    assert slowed["A"]["compute"]["slow_by"] == pytest.approx(2 * plan.margin)
    assert slowed["B"]["compute"]["slow_by"] == 0
    # One pair says nothing, so the controls are unknown; they are found again by their own.
    found = controls.find(plan, find_surroundings(plan))
    assert {kind: c.verdict for kind, c in found.items()} == dict.fromkeys(
        ("same", "slow"), "INCONCLUSIVE"
    )
    assert verdict["controls"]["AA"]["level"] == "unknown" and verdict["class"] == "screen"
    assert str(folder / "controls" / "same") in verdict["controls"]["AA"]["reason"]


def test_a_hang_is_decided_before_any_control_is_run(hung: Hung) -> None:
    verdict = hung.verdict
    assert verdict["verdict"] == "B_DID_NOT_COMPLETE" and verdict["class"] == "screen", verdict[
        "reason"
    ]
    assert "B made 0 steps in 200 s, the last phase was " in verdict["reason"]
    assert "A made 6 in " in verdict["reason"] and not (hung.folder / "controls").exists()
    assert verdict["effect"] is None and verdict["censored"]["bound_ln_b_over_a"] > 0


def start_flip(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine", "flip", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def wait_for_pair(process: subprocess.Popen[str], folder: Path, arm: str) -> None:
    """Until one pair is on disk and the run `arm` after it has begun."""
    deadline = time.monotonic() + DEADLINE_S
    while not ((folder / "arms" / arm / "watch.jsonl").exists() and len(read_pairs(folder)) == 1):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.02)


@pytest.mark.soak
def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on_with_the_same_plan(
    kit: Kit, tmp_path: Path
) -> None:
    spec, folder = kit.spec(tmp_path, checks__enabled=False), tmp_path / "flip"
    plan = make_plan(spec, ["compute.threads=2"], order_seed=1, pairs_max=2)
    first_arm = "02-b" if plan.order()[1] else "02-a"
    given = (
        "--set",
        "compute.threads=2",
        "--steps",
        6,
        "--pairs",
        2,
        "--seed",
        1,
        "--budget",
        "20m",
    )
    flip = start_flip(spec, *given, "--out", folder)
    wait_for_pair(flip, folder, first_arm)
    second = engine_here("flip", spec, *given, "--out", tmp_path / "other")
    assert second.returncode == 65 and f"a flip in {folder}" in second.stderr
    assert "--share" in second.stderr and not (tmp_path / "other").exists()
    flip.send_signal(signal.SIGINT)
    out, err = flip.communicate(timeout=DEADLINE_S)
    assert flip.returncode == 130, (out, err)
    assert "INCONCLUSIVE (screen, interrupted): interrupted after 1 pair" in out
    assert f"--resume {folder}" in out
    assert "the pairs before it are kept" in err and "plan sha256" in err
    registered = read_plan_of(folder)
    (kept,) = read_pairs(folder)
    done = engine_here("flip", "--resume", folder, "--json")
    assert done.returncode == 2, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["prereg_sha"] == registered.sha256 and not verdict["interrupted"]
    assert verdict["pairs_run"] == 2 and verdict["class"] == "screen"
    again = read_pairs(folder)
    assert again[0] == kept and [p.b_first for p in again] == registered.order()
    assert f"{first_arm}.2" in {run["run"].removeprefix("arms/") for run in verdict["raw_runs"]}
    ended = engine_here("flip", "--resume", folder)
    assert ended.returncode == 65 and "one that ended: INCONCLUSIVE" in ended.stderr


def test_a_dry_run_shows_the_plan_and_starts_nothing(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = kit.spec(tmp_path)
    done = engine_here("flip", spec, "--set", "train.rows=8", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changes"] == [{"key": "train.rows", "a": 4, "b": 8}]
    assert "device: the CPU" in done.stderr and not (tmp_path / "flips").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 64, "either a run or spec, a command after --, or --resume"),
        (("SPEC",), 64, "expected --set KEY=VALUE"),
        (("SPEC", "--set", "train.row=8"), 65, "did you mean train.rows?"),
        (("SPEC", "--set", "train.rows=8", "--budget", "soon"), 64, "a time as 90s"),
        (("SPEC", "--set", "train.rows=8", "--margin", "5"), 64, "a share as 5% or 0.05"),
        (("SPEC", "--set", "teacher.backend=quantized"), 65, "matrices in blocks"),
        (("--resume", "nowhere"), 65, "a plan"),
        (("--resume", "nowhere", "--steps", "9"), 64, "without --steps"),
    ],
)
def test_a_command_line_that_cannot_be_carried_out_is_refused(
    kit: Kit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = str(kit.spec(tmp_path))
    done = engine_here("flip", *(spec if a == "SPEC" else a for a in arguments))
    assert done.returncode == code and said in done.stderr, done.stderr
    assert not (tmp_path / "flips").exists()


def test_a_flip_is_refused_in_this_process_where_the_device_is_taken(
    kit: Kit, tmp_path: Path
) -> None:
    plan = small_plan(kit, tmp_path, "compute.threads=2")
    with device_lock("cpu", "another"), pytest.raises(Exception, match="found another"):
        run_flip(plan, tmp_path / "flip")
    assert not (tmp_path / "flip").exists()


def test_flips_and_experiments_load_no_torch() -> None:
    code = (
        "import sys, engine.flips.flip, engine.flips.text;"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.strip() == "[]"
