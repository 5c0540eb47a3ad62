"""Drills as real runs: through the command, with the defect, without it, and where it cannot be tried."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.drills import carry, planting
from engine.drills.carry import Drilled, carry_out
from engine.drills.catalogue import DRILLS, Drill, drill
from engine.drills.naming import CHECK, Naming
from engine.drills.text import table
from engine.verdict import Level, Verdict
from tests.support.running import engine, engine_here, environment


@pytest.mark.parametrize(
    "name",
    [
        *("deadlock", "slow_first_step", "killed_from_outside", "swapped_tokenizer"),
        *("teacher_after_prepare", "altered_checkpoint", "plan_that_cannot_fit"),
    ],
)
def test_one_drill_of_each_kind_names_its_incident(name: str) -> None:
    """A hang, a slow machine, a kill, a wrong file, a store, a resume, and memory; `make drills` carries out all."""
    done = engine("drill", name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_incidents_are_named_through_the_command(tmp_path: Path) -> None:
    out = tmp_path / "drills"
    done = engine("drill", "swapped_tokenizer", "loader_stalls", "--json", "--out", out, "--keep")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["drill"]: row for row in json.loads(done.stdout)["drills"]}
    swapped, stalled = rows["swapped_tokenizer"], rows["loader_stalls"]
    assert swapped["named_by"] == "check teacher_knows_text"
    assert swapped["state"] == "failed" and swapped["steps"] == 0
    assert stalled["named_by"] == "alert stalled" and not stalled["also_said"]
    assert "engine/drills/planting.py" in stalled["evidence"]
    assert str(tmp_path) not in done.stdout
    # A batch is taken ahead of the step that it is for.
    assert 1.0 < stalled["after_s"] < 240.0 and stalled["steps"] >= planting.AFTER - 2
    # The run says itself that its trainer was not the usual one.
    watch = (out / "loader_stalls" / "watch.jsonl").read_text()
    assert "engine.drills.planting loader_stalls --" in watch and "APR_WORKBENCH_TRAINER" in watch
    assert "2 PASS" in (out / "drills.txt").read_text()
    again = engine_here("drill", "loader_stalls", "--out", out)
    assert again.returncode == 65 and "one that exists" in again.stderr


def test_a_drill_without_its_incident_fails(tmp_path: Path) -> None:
    sound = dataclasses.replace(drill("zero_teacher"), altered=False)
    done = carry_out(sound, tmp_path)
    assert done.verdict.level == Level.FAIL and done.named is None
    assert done.verdict.reason == (
        "expected check weights_alive, found nothing; the run: completed"
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


NAMED = Naming(kind=CHECK, id="weights_alive", text="teacher: embed.weight is 0", unix_s=9.0)


def drilled(one: Drill, folder: Path, *, device: str) -> Drilled:
    """In place of `carry_out`: what it returns for a drill that passes, fails, or cannot be tried."""
    (folder / one.id).mkdir()
    (folder / f"{one.id}.toml").write_text(device)
    if one.id == "zero_teacher":
        verdict = Verdict(Level.PASS, NAMED.text)
        return Drilled(drill=one, verdict=verdict, named=NAMED, after_start_s=2.5, state="failed")
    if one.id == "cuda_wait":
        return Drilled(drill=one, verdict=Verdict(Level.UNKNOWN, "no CUDA GPU: none"))
    verdict = Verdict(Level.FAIL, "expected alert stalled, found nothing " + "x" * 300)
    return Drilled(drill=one, verdict=verdict, state="completed", steps=60)


def test_what_drills_found_is_printed_and_kept_and_the_runs_of_those_that_passed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "carry_out", drilled)
    out, names = tmp_path / "out", ("zero_teacher", "deadlock", "cuda_wait")
    done = engine_here("drill", *names, "--out", out)
    assert done.returncode == 1, "the worst verdict of the three"
    said = done.stdout.splitlines()
    assert said[:3] == [
        "PASS     zero_teacher: the teacher's matrices are zero",
        "         check weights_alive, before step 1, 2.5 s after the start",
        "         teacher: embed.weight is 0",
    ]
    assert said[-1] == "         no CUDA GPU: none" and all(len(line) < 220 for line in said)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["deadlock", "deadlock.toml", "cuda_wait", "cuda_wait.toml", "drills.json", "drills.txt"]
    )
    table = (out / "drills.txt").read_text().splitlines()
    assert table[-1] == "1 PASS, 1 FAIL, 1 UNKNOWN" and table[-2].startswith("UNKNOWN cuda_wait")
    kept = json.loads((out / "drills.json").read_text())
    assert kept["level"] == "fail"
    passed, failed, unknown = kept["drills"]
    assert passed["named_by"] == NAMED.name and passed["before_step_1"]
    assert (failed["level"], failed["named_by"], failed["steps"]) == ("fail", None, 60)
    assert unknown["level"] == "unknown"
    again = engine_here("drill", *names, "--out", out)
    assert again.returncode == 65 and "one that exists" in again.stderr
    done = engine_here("drill", "zero_teacher", "--json", "--out", out, "--keep")
    assert done.returncode == 0 and json.loads(done.stdout)["drills"] == [passed]
    assert (out / "zero_teacher").exists() and "PASS" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of NAME, --all"),
        (("--all", "--list"), "one of NAME, --all"),
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
    assert "deadlock: two threads wait" in done.stdout


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
