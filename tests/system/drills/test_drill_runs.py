"""Drills as real runs: through the command, with the defect, without it, and where it cannot be tried."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.drills import defects_process
from engine.drills.carry import carry_out
from engine.drills.catalogue import DRILLS, drill
from engine.drills.text import table
from engine.verdict import Level
from tests.support.bounded_soak import soak_count
from tests.support.running import engine, engine_here, environment


@pytest.mark.soak
def test_planted_defects_are_named_through_the_command(tmp_path: Path) -> None:
    out = tmp_path / "drills"
    done = engine("drill", "rotary_neighbours", "loader_stalls", "--json", "--out", out, "--keep")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["drill"]: row for row in json.loads(done.stdout)["drills"]}
    turned, stalled = rows["rotary_neighbours"], rows["loader_stalls"]
    assert turned["named_by"] == "check forward_is_the_model" and turned["before_step_1"]
    assert turned["state"] == "failed" and turned["steps"] == 0
    assert stalled["named_by"] == "alert stalled" and not stalled["also_said"]
    assert "engine/drills/defects_process.py" in stalled["evidence"]
    assert str(tmp_path) not in done.stdout
    # A batch is taken ahead of the step that it is for.
    assert 1.0 < stalled["after_s"] < 240.0 and stalled["steps"] >= defects_process.AFTER - 2
    # The run says itself that its trainer was not the usual one.
    watch = (out / "rotary_neighbours" / "watch.jsonl").read_text()
    assert "engine.drills.plant rotary_neighbours --" in watch and "APR_WORKBENCH_TRAINER" in watch
    assert "2 PASS" in (out / "drills.txt").read_text()
    again = engine_here("drill", "rotary_neighbours", "--out", out)
    assert again.returncode == 65 and "one that exists" in again.stderr


def test_a_drill_without_its_defect_fails(tmp_path: Path) -> None:
    sound = dataclasses.replace(drill("causal_mask_missing"), planted=False)
    done = carry_out(sound, tmp_path)
    assert done.verdict.level == Level.FAIL and done.named is None
    assert done.verdict.reason == (
        "expected check causal_mask, found nothing was said; the run: completed"
    )


@pytest.mark.soak  # `make drills` carries out every drill
def test_a_plan_that_cannot_fit_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    refused = carry_out(drill("plan_that_cannot_fit"), tmp_path)
    assert refused.verdict.level == Level.PASS, refused.verdict
    assert refused.steps == 0 and refused.after_s is None
    assert "model" not in {
        json.loads(line)["kind"]
        for line in (tmp_path / "plan_that_cannot_fit" / "events.jsonl").read_text().splitlines()
    }


def test_a_drill_that_cannot_be_tried_here_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = carry_out(drill("cuda_wait"), tmp_path)
    assert done.verdict.level == Level.UNKNOWN and "no CUDA GPU" in done.verdict.reason
    assert not list(tmp_path.iterdir())
    *_, why, count = table([done])
    assert why.startswith("UNKNOWN cuda_wait: no CUDA GPU") and count == "1 UNKNOWN"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of NAME, --all"),
        (("--all", "--healthy"), "one of NAME, --all"),
        (("deadlock", "--seeds", "2"), "belongs to --healthy"),
        (("deadlock", "--keep"), "--keep needs --out"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], said: str
) -> None:
    done = engine_here("drill", *arguments)
    assert done.returncode == 64 and said in done.stderr


def test_the_list_is_there_without_torch() -> None:
    code = (
        "import sys; from engine.cli.main import main; main(['drill', '--list']);"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "rotary_neighbours: rotary positions turn" in done.stdout


@pytest.mark.soak
def test_every_drill_is_named_or_says_why_it_cannot_be_tried(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "drill", "--all", "--json", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    rows = json.loads(done.stdout)["drills"]
    assert [row["drill"] for row in rows if row["level"] == "fail"] == [], done.stderr
    assert len(rows) == len(DRILLS)


@pytest.mark.soak
def test_nothing_is_said_of_healthy_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine", "drill", "--healthy", "--json"]
    command += ["--seeds", str(soak_count(20))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["spoke"] == []
