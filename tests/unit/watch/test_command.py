"""`engine diagnose` and the other surfaces, on run folders written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.catalogue import CHECKS
from engine.cli.main import main
from engine.drills import naming
from engine.log.events import Judged, Phase, RunFinished, TrainerExited
from engine.log.fold import Follower
from engine.watch.rules import RULES
from tests.support.judged import alert_end, alert_event, number_event
from tests.support.run_events import example_of
from tests.support.run_folders import Scene, completed, corrupt, empty, running
from tests.support.screens import texts_of


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def sick(path: Path) -> Scene:
    """A run with two steps that were not finite."""
    scene = Scene(path).open().begin(60).events(Phase(name="training")).steps(1, 30)
    scene.events(number_event(step=30, field="loss", value="nan"))
    return scene


def test_a_run_with_an_alert_exits_1_and_tells_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = sick(tmp_path / "run").close()
    assert run("diagnose", scene.run.path) == 1
    out = capsys.readouterr().out
    assert out.startswith("✗ WRONG since step 30: loss was nan at step 30")
    assert "\nrun: 1 alert; " in out
    assert "error: non_finite: loss was nan at step 30" in out
    assert "active at the end of the log" in out and "test it: --set train.lr=" in out
    assert "could not judge" not in out


def test_whatever_was_named_while_a_run_lived_is_named_when_it_is_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = sick(tmp_path / "run")
    for rule in RULES:
        scene.watch(example_of(Judged, by="alert", level="fail", id=rule.id))
    for about in CHECKS:
        scene.events(
            example_of(Judged, by="check", id=about.id, level="fail", text=f"{about.id} is off")
        )
    scene.watch(alert_end(id="non_finite", active_s=1.0), alert_end(id="stalled", active_s=1.0))
    scene.events(RunFinished(state="failed", reason="disk: full", exit_code=65, step=30))
    scene.watch(example_of(TrainerExited, state="CRASHED", sentence="It crashed with SIGSEGV."))
    folder = scene.close().run
    live = naming.names_of(Follower(folder).read_all())
    assert run("diagnose", folder.path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    named = [(naming.CHECK, one["id"]) for one in found["checks"]]
    named += [(naming.ALERT, one["id"]) for one in found["alerts"]]
    assert found["finished"]["reason"] == "disk: full" and found["exit"]["state"] == "CRASHED"
    named += [(naming.REFUSAL, "disk"), (naming.EXIT, found["exit"]["state"])]
    assert set(named) == {(one.kind, one.id) for one in live} and len(named) == len(set(named))
    replayed = {one["id"] for one in found["alerts"] if one["replayed"]}
    assert "non_finite" in replayed and "stalled" not in replayed
    (stalled,) = (one for one in found["alerts"] if one["id"] == "stalled")
    assert stalled["cleared_unix_s"] is not None
    run("diagnose", folder.path)
    out = capsys.readouterr().out
    assert all(f": {each.id}: " in out for each in RULES)
    assert all(f"check {about.id}: {about.id} is off" in out for about in CHECKS)
    assert "disk: full" in out and "exit: CRASHED: It crashed with SIGSEGV." in out
    assert out.count("raised while the run was active") == len(RULES) - len(replayed)


def test_json_is_one_value_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = sick(tmp_path / "run").close()
    assert run("diagnose", scene.run.path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (alert,) = found["alerts"]
    assert alert["id"] == "non_finite" and alert["cleared_unix_s"] is None
    assert alert["numbers"] == {"numbers that are not finite": 1.0}
    assert alert["compared"] == {"numbers that are not finite": "expected 0"}
    assert set(found["judged"]) | set(found["unjudged"]) == {rule.id for rule in RULES}
    assert not set(found["judged"]) & set(found["unjudged"])


def test_a_healthy_run_exits_0_and_all_names_every_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = completed(tmp_path / "run")
    assert run("diagnose", folder.path, "--all") == 0
    out = capsys.readouterr().out
    assert all(rule.id in out for rule in RULES)
    assert "gpu_idle: the run computes on cpu" in out


def test_a_run_that_says_nothing_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diagnose", empty(tmp_path / "run").path, "--all") == 2
    assert "no trainer was started" in capsys.readouterr().out


def test_a_broken_log_is_told_after_what_could_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diagnose", corrupt(tmp_path / "run").path) == 65
    said = capsys.readouterr()
    assert "0 alerts" in said.out and "expected line number" in said.err


def test_the_list_documents_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", "--list") == 0
    out = capsys.readouterr().out
    for rule in RULES:
        assert f"{rule.id}: {rule.about.question}" in out and rule.threshold in out
    assert run("diagnose", "--list", "--json") == 0
    assert [r["id"] for r in json.loads(capsys.readouterr().out)] == [r.id for r in RULES]


@pytest.mark.parametrize("arguments", [[], ["--list", "RUN"]])
def test_either_a_run_or_the_list(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", *arguments) == 64
    assert "either PATH or --list" in capsys.readouterr().err


ALERT = alert_event(
    id="gpu_idle",
    level="fail",
    text="GPU 0 was 0.3 % busy",
    numbers=[("gpu_util_pct", 0.3, "at most 5")],
    meaning="the work is elsewhere",
    flip="--set teacher.backend=dequantized",
)


def test_tail_and_the_screen_show_an_alert_that_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = running(tmp_path / "run").watch(ALERT)
    assert run("tail", scene.run.path) == 0
    out = capsys.readouterr().out
    assert (
        "✗ WRONG since step 0: GPU 0 was" in out and "\nalerts\n  error: gpu_idle: GPU 0 was" in out
    )
    assert "test it: --set teacher.backend=dequantized" in out
    assert run("tail", scene.run.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["alerts"][0]["id"] == "gpu_idle"
    (text,) = texts_of(scene.run.path, (120, 40))
    scene.close()
    assert (
        "WRONG since step 0: GPU 0 was 0.3 % busy" in text
        and "ALERT gpu_idle: GPU 0 was 0.3 % busy" in text
    )
