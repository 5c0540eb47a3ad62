"""The checks as a whole: healthy runs raise nothing, nothing is changed by them, and they can be left
out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine.checks
from engine.catalogue import BY_ID, CHECKS, STAGES, When, skipped_ids
from engine.checks import runner
from engine.cli import checks as command
from engine.errors import EXIT_FAIL, EXIT_PASS, EXIT_UNKNOWN, SpecError, UsageError
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.text import event_text
from engine.log.write import LogWriter
from engine.verdict import Level
from engine.watch.verdict_line import verdict_of
from tests.support.checked_runs import Run, World, make_run, make_world
from tests.support.judged import check_event
from tests.support.kit import Kit

STEPS = 6


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def healthy(world: World, seed: int, folder: Path) -> Run:
    run = make_run(world, seed=seed).begin()
    run.step(12)
    run.save(folder / "checkpoints")
    run.end(folder / "student")
    return run


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
)
def test_a_healthy_run_raises_nothing(world: World, seed: int, tmp_path: Path) -> None:
    run = healthy(world, seed, tmp_path)
    assert run.failures() == {}
    assert run.results.keys() == BY_ID["check"].keys()
    # A CPU run plans no memory here.
    assert run.unknowns().keys() <= {"memory_as_planned"}
    assert all(result.cost_s >= 0 for result in run.results.values())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_twenty_healthy_runs_raise_nothing(world: World, seed: int, tmp_path: Path) -> None:
    assert healthy(world, seed, tmp_path).failures() == {}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"loss__alpha": 1.0}, marks=pytest.mark.soak),
        {"loss__alpha": 0.0},
        pytest.param({"loss__temperature": 1.0}, marks=pytest.mark.soak),
        {"train__accumulation": 2, "train__rows": 2},
        {"train__warmup_steps": 0, "train__lr": 1e-2},
        pytest.param({"train__clip_norm": 0.0}, marks=pytest.mark.soak),
        {"train__schedule": "constant", "train__weight_decay": 0.0},
    ],
    ids=str,
)
def test_no_setting_of_a_healthy_run_raises_anything(
    world: World, changes: dict[str, object]
) -> None:
    run = make_run(world, **changes).begin()
    run.step(4)
    assert run.failures() == {}


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_word_embeddings": False},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    ],
    ids=["untied", "qwen3", "llama"],
)
def test_no_family_of_students_raises_anything(world: World, shape: dict[str, object]) -> None:
    run = make_run(world, student=shape).begin()
    run.step(2)
    assert run.failures() == {}


def test_a_run_with_checks_is_bit_for_bit_the_run_without(world: World, tmp_path: Path) -> None:
    def train(checked: bool) -> tuple[list[tuple[float, ...]], Run, torch.Tensor]:
        torch.manual_seed(5)
        run = make_run(world, train__accumulation=2, checks__enabled=checked).begin()
        run.trainer.student.eval()
        steps = run.step(STEPS)
        run.save(tmp_path / str(checked))
        run.end(tmp_path / f"student-{checked}")
        numbers = [(s.loss, s.ce, s.kd or 0.0, s.grad_norm, s.lr, s.position) for s in steps]
        return numbers, run, torch.rand(4)

    with_checks, one, random_one = train(True)
    without, other, random_other = train(False)
    assert one.failures() == {} and len(one.results) == len(CHECKS)
    assert with_checks == without
    assert torch.equal(random_one, random_other)
    for name, parameter in one.trainer.student.named_parameters():
        twin = other.trainer.student.get_parameter(name)
        assert torch.equal(parameter, twin), name
        assert parameter.grad is not None and twin.grad is not None
        assert torch.equal(parameter.grad, twin.grad), name
        mine, its = one.trainer.optimizer.state[parameter], other.trainer.optimizer.state[twin]
        assert all(torch.equal(mine[key], its[key]) for key in its), name


def test_checks_before_training_leave_no_gradient_and_no_mode(world: World) -> None:
    run = make_run(world)
    run.trainer.student.eval()
    before = {n: p.clone() for n, p in run.trainer.student.named_parameters()}
    run.begin()
    assert not run.trainer.student.training
    assert run.trainer.position == run.trainer.step == 0 and not run.trainer.optimizer.state
    for name, parameter in run.trainer.student.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name]), name


def test_a_skipped_check_is_unknown_and_the_others_are_asked(world: World) -> None:
    run = make_run(world, checks__skip="weights_alive, step_student").begin()
    run.step(2)
    for name in ("weights_alive", "step_student"):
        verdict = run.results[name].verdict
        assert verdict.level is Level.UNKNOWN and verdict.reason == "skipped by checks.skip"
    assert run.results["step_gradients"].verdict.level is Level.PASS


def test_switched_off_checks_are_all_unknown(world: World) -> None:
    run = make_run(world, checks__enabled=False).begin()
    run.step(1)
    assert run.results.keys() == BY_ID["check"].keys()
    assert {str(r.verdict) for r in run.results.values()} == {
        "unknown: skipped by checks.enabled=false"
    }


def test_a_skip_that_names_no_check_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="found 'step_gradeints'; did you mean step_gradients"):
        skipped_ids("weights_alive,step_gradeints")
    with pytest.raises(SpecError, match="found 'loss_gradient', which is now step_gradients"):
        skipped_ids("loss_gradient")
    assert skipped_ids(" ") == frozenset()
    # A run of an earlier version can be resumed.
    assert skipped_ids("weights_alive,receipt_agrees") == {"weights_alive", "receipt_agrees"}


def test_a_check_that_breaks_is_unknown_and_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_context: object) -> None:
        torch.manual_seed(1)
        raise RuntimeError("no kernel for it")

    monkeypatch.setitem(runner.FUNCTIONS, "weights_alive", broken)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    run = make_run(world)
    torch.set_rng_state(state)
    run.begin()
    verdict = run.results["weights_alive"].verdict
    assert str(verdict) == "unknown: the check raised RuntimeError: no kernel for it"
    assert torch.equal(torch.get_rng_state(), state)


def test_only_a_failure_that_makes_the_run_worthless_stops_it(world: World) -> None:
    run = make_run(world).begin()
    run.step(1)
    gradient, split = run.results["teacher_knows_text"], run.results["split_disjoint"]
    bad = dataclasses.replace(gradient.verdict, level=Level.FAIL)
    unsure = dataclasses.replace(gradient.verdict, level=Level.UNKNOWN)
    assert run.checks.ends_run(dataclasses.replace(gradient, verdict=bad))
    assert not run.checks.ends_run(dataclasses.replace(gradient, verdict=unsure))
    assert not run.checks.ends_run(dataclasses.replace(split, verdict=bad))
    lenient = make_run(world, checks__on_fail="report").checks
    assert not lenient.ends_run(dataclasses.replace(gradient, verdict=bad))


def test_every_check_in_the_catalogue_is_made_and_documented() -> None:
    stages = [one.id for one in STAGES]
    made = [*runner.FUNCTIONS, *stages]
    assert sorted(made) == sorted(BY_ID["check"]) and len(made) == len(set(made)) == len(CHECKS)
    table = (engine.checks.__doc__ or "").split("What they are,")[0]
    listed = [
        line.split()[0]
        for line in table.splitlines()
        if line.startswith(" " * 6) and line[6] != " "
    ]
    assert sorted(listed) == sorted(BY_ID["check"])
    for about in CHECKS:
        assert about.question.endswith("?") and about.means and about.remedy
        assert about.id in (stages if about.when is When.AT_STEP else runner.FUNCTIONS)


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, engine.cli.checks as c, engine.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What is read from a log


def logged(folder: Path, levels: dict[str, str]) -> RunFolder:
    (folder / "effective.json").write_text("{}")
    run = RunFolder(folder)
    with LogWriter(run.events, writer="trainer") as log:
        for name, level in levels.items():
            numbers = {"kl": math.nan, "step": 1.0}
            log.write(
                check_event(id=name, level=level, text="so", numbers=numbers, cost_s=0.25, step=0)
            )
    return run


def ask(run: RunFolder | None, **options: bool) -> int:
    defaults = {"list": False, "json": False}
    path = run.path if run is not None else None
    return command.checks(argparse.Namespace(run=path, **(defaults | options)))


def test_the_exit_code_is_the_lowest_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = dict.fromkeys(BY_ID["check"], "pass")
    for number, (changed, code) in enumerate(
        [
            ({}, EXIT_PASS),
            ({"weights_alive": "unknown"}, EXIT_UNKNOWN),
            ({"weights_alive": "unknown", "step_gradients": "fail"}, EXIT_FAIL),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert ask(logged(folder, every | changed)) == code
    out = capsys.readouterr().out
    assert "FAIL     step_gradients" in out and BY_ID["check"]["step_gradients"].means[:40] in out
    assert f"{len(BY_ID['check']) - 2} passed, 1 failed, 1 unknown" in out


def test_the_answers_of_an_earlier_version_count_and_name_the_stage_of_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = dict.fromkeys(BY_ID["check"], "pass") | {"loss_gradient": "fail"}
    assert ask(logged(tmp_path, every)) == EXIT_FAIL
    out = capsys.readouterr().out
    assert "FAIL     loss_gradient" in out and "so (now step_gradients)" in out


def test_a_check_that_has_not_answered_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(logged(tmp_path, {"weights_alive": "pass"}), json=True) == EXIT_UNKNOWN
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert rows["step_gradients"]["reason"] == "has no result in this session"
    assert rows["weights_alive"]["numbers"] == {"kl": "nan", "step": 1.0}


def test_the_view_keeps_the_newest_answer_and_the_status_names_failures(tmp_path: Path) -> None:
    run = logged(tmp_path, {"weights_alive": "pass", "no_late_compile": "fail"})
    follower = Follower(run)
    follower.read_all()
    view = follower.view
    assert view.checks["no_late_compile"].level == "fail"
    assert verdict_of(view, "running").text == "a step waited for a compiler"
    assert event_text(view.checks["no_late_compile"]).startswith("check no_late_compile: FAIL: so")
    with LogWriter(run.events, writer="trainer"):
        pass
    follower.read_all()
    assert follower.view.checks == {}, "a resumed run asks anew"


def test_the_list_has_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(None, list=True) == EXIT_PASS
    text = capsys.readouterr().out
    assert all(about.id in text for about in CHECKS)
    assert ask(None, list=True, json=True) == EXIT_PASS
    assert len(json.loads(capsys.readouterr().out)) == len(CHECKS)
    with pytest.raises(UsageError):
        ask(None)
