"""Logs with one fault are named with its step, and healthy ones that look like faults are left alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine.interchange.importing import diagnose_recorded
from engine.interchange.kinds import find_logs
from engine.interchange.sources import Recorded
from engine.watch.verdict_line import HEALTHY, RunVerdict, verdict_of
from tests.support.curves import drawn, faults, healthy, learns, named
from tests.support.foreign_logs import KINDS
from tests.support.perf import within
from tests.support.running import engine_here

FAULTS, SOUND = faults(), healthy()


def judged(path: Path) -> tuple[RunVerdict, Any]:
    (log,) = find_logs(path)
    assert log.read is not None
    recorded = Recorded(path=log.path)
    log.read(recorded, {})
    found = diagnose_recorded(recorded, log.source, {}).found
    assert found.view.finished is not None
    return verdict_of(found.judged_view, found.view.finished.state), found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_the_step_at_which_it_begins(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    # Each in a kind of log that has what the fault shows itself in.
    kinds = {
        "slow_steps": ["nanogpt"],
        "slow_for_a_while": ["nanogpt", "coqui"],
        "slows_down": ["nanogpt"],
        "stalls": ["table", "torchtitan", "mlflow_files"],
    }
    for kind in kinds.get(name, ["table", "trainer_state", "json_lines"]):
        verdict, found = judged(KINDS[kind](fault.points, tmp_path / kind))
        names = [one.alert.id for one in found.raised]
        assert verdict.id.removeprefix("alert ") == fault.id, (kind, verdict.line, names)
        assert verdict.since is not None and abs(verdict.since - fault.step) <= fault.within, (
            kind,
            verdict.line,
        )
        assert "engine" not in verdict.action and "--set" not in verdict.action


@pytest.mark.parametrize("name", SOUND)
def test_a_healthy_training_is_left_alone(name: str, tmp_path: Path) -> None:
    for kind in ("table", "nanogpt"):
        verdict, _ = judged(KINDS[kind](SOUND[name], tmp_path / kind))
        assert verdict.level == HEALTHY, (kind, verdict.line)


@pytest.mark.parametrize("kind", ["gan", "policy", "actor_critic"])
def test_a_loss_that_may_be_meant_to_rise_is_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in named(kind)))
    assert judged(path)[0].level == HEALTHY


def test_memory_that_grows_to_the_end_is_named_and_one_that_settles_is_not(tmp_path: Path) -> None:
    for name, memory in {
        "grows": lambda step: 10 + step / 50,
        "settles": lambda step: 10 + 4 * min(1.0, step / 100),
    }.items():
        lines = [f"step {n} loss={2 + 3 / n:.4f} memory: {memory(n):.2f}GiB" for n in range(1, 500)]
        (tmp_path / f"{name}.log").write_text("\n".join(lines))
    verdict = judged(tmp_path / "grows.log")[0]
    assert (
        verdict.id == "alert logged_memory_grows"
        and "memory grows from step to step" in verdict.line
    )
    assert judged(tmp_path / "settles.log")[0].level == HEALTHY


@pytest.mark.perf
def test_thirty_logs_take_few_seconds_of_a_processor(tmp_path: Path) -> None:
    texts = ("nanogpt", "torchtitan", "table", "trainer_state", "mlflow_files")
    logs = [
        KINDS[kind](SOUND[name], tmp_path / kind / name) for kind in texts for name in [*SOUND][:6]
    ]
    judged(logs[0])
    began_s = time.process_time()
    assert all(judged(path)[0].level == HEALTHY for path in logs)
    within(time.process_time() - began_s, 4.5)


def test_a_log_is_compared_with_another_beyond_their_noise(tmp_path: Path) -> None:
    old = KINDS["nanogpt"](drawn(learns, seed=1), tmp_path / "old")
    same = KINDS["nanogpt"](drawn(learns, seed=2), tmp_path / "same")
    worse = drawn(lambda s, n: learns(s, n, end=1.6), seed=3, step_s=lambda step: 0.6)
    new = KINDS["nanogpt"](worse, tmp_path / "new")
    done = engine_here("diagnose", same, "--baseline", old, "--fail-on", "suspect")
    assert done.returncode == 0 and "the same within noise: loss, step_s" in done.stdout
    done = engine_here("diagnose", new, "--baseline", old, "--fail-on", "suspect")
    lines = [line.split() for line in done.stdout.splitlines() if line.endswith(", worse")]
    assert done.returncode == 1 and [line[0] for line in lines] == ["loss", "step_s"]
    assert abs(float(lines[0][1]) - 1.6) < 0.02 and abs(float(lines[0][2]) - 1.5) < 0.02
    assert engine_here("diagnose", new, "--baseline", old, "--fail-on", "wrong").returncode == 0


def test_rates_and_settings_that_differ_are_in_the_table(tmp_path: Path) -> None:
    old = KINDS["mlflow_files"](drawn(learns, seed=1), tmp_path / "old")
    new = KINDS["mlflow_files"](
        drawn(learns, seed=1, lr=lambda step: 1e-3 if step < 90 else 5e-4), tmp_path / "new"
    )
    (new / "params" / "optimizer").write_text("sgd")
    said = engine_here("diagnose", new, "--baseline", old, "--json").stdout
    found = {one["name"]: one for one in json.loads(said)["compared"]}
    assert found["lr"]["why"] == "in 511 of 600 steps, first 90" and found["lr"]["new"] == 5e-4
    assert (found["optimizer"]["new"], found["optimizer"]["old"]) == ("sgd", "adamw")
    assert found["loss"]["why"] == ""


@pytest.mark.parametrize(("name", "codes"), [("nan", (1, 1)), ("spike", (0, 1))])
def test_a_continuous_integration_fails_on_what_it_names(
    name: str, codes: tuple[int, int], tmp_path: Path
) -> None:
    path = KINDS["table"](FAULTS[name].points, tmp_path)
    asked = ("wrong", "suspect")
    assert tuple(engine_here("diagnose", path, "--fail-on", on).returncode for on in asked) == codes
    assert (
        engine_here(
            "diagnose", KINDS["table"](SOUND["short"], tmp_path), "--fail-on", "suspect"
        ).returncode
        == 0
    )
