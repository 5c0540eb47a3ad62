"""Plans whose arms are a command that is not ours: no process runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import build_parser
from engine.errors import EngineError
from engine.flips.arms import usual_step_s
from engine.flips.command import NOTHING, WORDS
from engine.flips.controls import kinds_of
from engine.flips.plan import Plan, make_command_plan, read_plan
from engine.flips.script_settings import OWN
from engine.flips.text import plan_lines
from engine.flips.verdicts import answer
from tests.support.flip_pairs import plan as plan_of_spec

TRAIN = (sys.executable, "train.py", "{}")


def plan(
    a: dict[str, str | None], b: dict[str, str | None], words: tuple[str, ...] = TRAIN, **how: Any
) -> Plan:
    return make_command_plan(words, a, b, order_seed=1, **how)


def test_the_words_of_an_arm_replace_braces_as_a_shell_would_split_them() -> None:
    made = plan({WORDS: "--name 'a b'"}, {WORDS: ""}, (*TRAIN, "--out={out}", "--seed", "{seed}"))
    out = Path("/flip/out/02-a")
    words, variables, *_ = made.arm_of_command(False, out, 2)
    assert words[1:] == ["train.py", "--name", "a b", f"--out={out}", "--seed", "2"]
    assert made.arm_of_command(True, out, 2)[0][1:] == ["train.py", f"--out={out}", "--seed", "2"]
    assert variables["WANDB_MODE"] == "offline" and variables["WANDB_DIR"] == str(out)


def test_braces_inside_a_word_are_replaced_in_it() -> None:
    made = plan({WORDS: "1"}, {WORDS: "2"}, (sys.executable, "train.py", "--workers={}"))
    assert made.arm_of_command(True, Path(), 1)[0][2:] == ["--workers=2"]


def test_a_variable_that_one_arm_lacks_is_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESENT", "1")
    monkeypatch.delenv("ABSENT", raising=False)
    made = plan({}, {"PRESENT": "2", "ABSENT": "3"})
    assert [str(change) for change in made.changes] == ["PRESENT: 1 -> 2", "ABSENT: unset -> 3"]
    variables = made.arm_of_command(False, Path(), 1).variables
    assert variables["PRESENT"] == "1" and "ABSENT" not in variables


def test_a_setting_is_the_scripts_own_in_one_arm_and_changed_by_the_probe_in_the_other() -> None:
    made = plan({}, {"loader.workers": "4"}, TRAIN[:2])
    assert str(made.changes[0]) == f"loader.workers: {OWN} -> 4"
    assert made.arm_of_command(True, Path(), 1).changed == {"loader.workers": "4"}
    a = made.arm_of_command(False, Path(), 1)
    assert not a.changed and "loader.workers" not in a.variables
    assert made.command_line().startswith("engine flip --set loader.workers=4 -- ")
    assert read_plan(made.to_json()) == made


@pytest.mark.parametrize(
    ("b", "how", "steps", "warm_up"),
    [
        ({"loader.workers": "4"}, {}, 40, 11),
        ({WORDS: "--num_workers=8 --lr 900"}, {}, 40, 19),
        ({WORDS: "--workers 40"}, {"steps": 12}, 12, 6),
        ({WORDS: "--lr 900"}, {}, 12, 3),
    ],
)
def test_batches_that_workers_prepared_ahead_are_warm_up(
    b: dict[str, str | None], how: dict[str, Any], steps: int, warm_up: int
) -> None:
    made = plan({}, b, **how)
    assert (made.steps, made.warm_up_steps) == (steps, warm_up)


def test_trackers_write_into_the_folder_of_the_run() -> None:
    variables = plan({"X": "1"}, {"X": "2"}).arm_of_command(False, Path("/o"), 1).variables
    assert variables["MLFLOW_TRACKING_URI"] == "file:///o/mlruns"
    assert variables["COMET_AUTO_LOG_DISABLE"] == "1"


def test_bursts_of_loader_workers_count_with_the_steps_that_wait_for_them() -> None:
    burst = [40.0, 20.0, 4.0, 4.0]
    assert usual_step_s(burst * 2) == usual_step_s(burst * 40) == 17.0
    assert usual_step_s([1.0] * 99 + [500.0]) == 1.0, "a checkpoint among many steps"


def test_a_plan_of_a_command_is_read_as_it_was_written() -> None:
    made = plan({WORDS: "--a"}, {WORDS: "--b", "X": "1"})
    assert read_plan(made.to_json()) == made
    assert made.name == "b+X" and made.kind == "command"
    assert plan_of_spec().kind == "spec" and "command" not in plan_of_spec().to_json()


def test_a_plan_names_the_command_that_registers_it_again() -> None:
    made = plan({WORDS: ""}, {WORDS: "--fused 1", "X": "1"}, ("python", "a b.py", "{}", "{out}"))
    line = "engine flip --a '' --b '--fused 1' --env-b X=1 --pairs 9 -- python 'a b.py' {} {out}"
    assert made.command_line(" --pairs 9") == line


def test_a_plan_says_where_runs_end_and_that_trackers_are_offline() -> None:
    lines = plan_lines(plan({WORDS: "1"}, {WORDS: "2"}, steps=9))
    assert any("ended after 9 optimizer steps" in line for line in lines)
    assert any("WANDB_MODE=offline" in line for line in lines)
    assert not any("seed: no" in line for line in lines)


def test_a_loss_without_a_seed_of_its_own_in_each_pair_is_said_to_be() -> None:
    lines = plan_lines(plan({WORDS: "1"}, {WORDS: "2"}, metric="final_loss"))
    assert any("seed: no {seed} in the command" in line for line in lines)


def test_a_command_has_both_controls_and_those_of_other_words_do_not_speak_of_it() -> None:
    made = plan({WORDS: "1"}, {WORDS: "2"})
    slow = made.control(slow=True)
    assert kinds_of(made) == ("same", "slow") and slow.slow_a_by > 0
    assert slow.subject == made.subject != plan({WORDS: "3"}, {WORDS: "2"}).subject
    assert slow.arm_of_command(True, Path(), 1) == made.arm_of_command(False, Path(), 1)


@pytest.mark.parametrize(
    ("a", "b", "words", "said"),
    [
        ({WORDS: "1"}, {WORDS: "2"}, TRAIN[:2], "expected {} where the words"),
        ({WORDS: "1"}, {WORDS: "1"}, TRAIN, "expected arms that differ, found {} '1' in both"),
        ({"X": "1"}, {"X": "1"}, TRAIN, "expected arms that differ, found X '1' in both"),
        ({WORDS: "1"}, {WORDS: "2"}, ("nosuch", "{}"), "nosuch — expected a program to start"),
        ({WORDS: ""}, {WORDS: "nosuch"}, ("{}",), "expected a program to start"),
        ({WORDS: "'1"}, {WORDS: "2"}, TRAIN, "expected words quoted as in a shell"),
    ],
)
def test_arms_that_cannot_be_run_are_refused_in_one_line(
    a: dict[str, str | None], b: dict[str, str | None], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(EngineError) as refused:
        plan(a, b, words)
    assert said in str(refused.value) and "\n" not in refused.value.message


def test_words_that_begin_with_a_dash_belong_to_the_option_in_front_of_them() -> None:
    line = ["flip", "--a", "--fused", "--b", "--x=1", "--", "python", "t.py", "{}", "--a", "--c"]
    found = build_parser().parse_args(line)
    assert (found.a, found.b) == ("--fused", "--x=1")
    assert found.source == ["python", "t.py", "{}", "--a", "--c"]


DECIDED: dict[str, Any] = {
    "effect": 0.5,
    "interval": [0.4, 0.6],
    "class": "measured",
    "controls": {name: {"level": "pass", "reason": ""} for name in ("AA", "positive")},
}


def fields(change: str) -> dict[str, Any]:
    return {
        "verdict": "EQUIVALENT",
        "changes": [change],
        "metric": "step_s",
        "margin": 0.05,
        "effect": 1.0,
        "interval": [0.99, 1.01],
        "n_pairs": 4,
        "diagnostics": {"deviation": 0.01},
    }


def test_the_answer_names_words_as_they_are_and_a_variable_with_its_value() -> None:
    said = answer(fields("{}: --workers 0 -> --workers 4"))
    assert said.sentence.startswith("--workers 4 makes no difference that matters")
    assert said.action == "keep --workers 0 and look for another cause"
    said = answer(fields(f"loader.workers: {OWN} -> 4") | {"verdict": "B_FASTER"} | DECIDED)
    assert said.action == "set num_workers=4"
    assert answer(fields("X: unset -> 1")).sentence.startswith("X=1 makes no difference")
    empty = plan({WORDS: "--fused"}, {WORDS: ""}).changes[0]
    assert answer(fields(str(empty))).sentence.startswith(f"{NOTHING} makes no difference")


def test_the_hash_of_a_plan_covers_its_command() -> None:
    made = plan({WORDS: "1"}, {WORDS: "2"})
    assert made.command is not None
    other = replace(made, command=replace(made.command, folder="/elsewhere"))
    assert made.sha256 != other.sha256
