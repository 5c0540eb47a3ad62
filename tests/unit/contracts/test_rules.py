"""Each rule of a contract file is tripped by one change of one field, and by that alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.contracts import contract as contract_module
from engine.contracts.contract import (
    Problem,
    checked_contracts,
    contract_files,
    load_all,
    load_file,
)
from engine.errors import BadInput
from tests.support.contract_files import THING, Change, drop, make_project, put, write_contract
from tests.support.paths import ROOT

OBLIGATION, TEST = "proof_obligations", "falsification_tests"
PLANTED = ("qa_gate", "planted", 0)
CHANGES: dict[str, Change] = {
    "W-FORM": put("metadata", "description", value=3),
    "W-REF": put(TEST, 0, "obligations", value=["TWICE", "THRICE"]),
    "W-CLAIM": put(OBLIGATION, 1, value={"id": "NEW", "type": "bound", "property": "small"}),
    "W-TOL": drop(OBLIGATION, 0, "tolerance"),
    "W-DEMOTE": drop(OBLIGATION, 1, "demoted_by"),
    "W-CTRL": drop(*PLANTED),
    "W-TEST": put(TEST, 0, "test", value="python:tests/test_thing.py::test_nowhere"),
    "W-EDIT": put(*PLANTED, "edit", "replace", value="return 4 * x"),
    "W-BIND": put("binds", value=["thing.double:unused", "thing.double:double"]),
}


def rules(problems: Sequence[Problem]) -> list[str]:
    return [problem.rule for problem in problems]


def test_a_sound_contract_has_no_problem(tmp_path: Path) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path))
    assert loaded.problems == () and loaded.contract is not None


@pytest.mark.parametrize("rule", CHANGES)
def test_one_field_trips_one_rule(tmp_path: Path, rule: str) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path, CHANGES[rule]))
    assert rules(loaded.problems) == [rule], loaded.problems
    assert loaded.contract is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("metadata: [1, 2\nbinds: []\n", "W-YAML"),
        ("dialect: engine-1\ndialect: engine-1\n", "the key 'dialect' occurs twice"),
        ("", "Expected `object`, got `null`"),
        ("dialect: engine-2\n", "dialect: Invalid enum value 'engine-2'"),
        ("dialect: !!python/object:os.system {}\n", "W-YAML"),
    ],
)
def test_a_file_that_is_no_contract_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    (problem,) = load_file(path).problems
    assert said in str(problem)


def test_two_files_of_one_name_trip_one_rule(tmp_path: Path) -> None:
    paths = [write_contract(tmp_path / folder / "a.yaml", THING) for folder in ("one", "two")]
    first, second = load_all(paths)
    assert rules(first.problems) == [] and rules(second.problems) == ["W-STEM"]


@pytest.mark.parametrize(
    "change",
    [
        put("proof_harnesses", 0, "obligation", value="NOWHERE"),
        put("proof_harnesses", 0, "id", value="F-1"),
        put(*PLANTED, "id", value="P-1"),
        put(*PLANTED, "turns_red", value=["F-1", "F-9"]),
        put("metadata", "depends_on", value=["none-v1"]),
        put(OBLIGATION, 1, "id", value="TWICE"),
    ],
)
def test_every_id_that_is_named_is_there_and_no_id_is_there_twice(
    tmp_path: Path, change: Change
) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path, change))
    assert "W-REF" in rules(loaded.problems), loaded.problems


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("metadata", "demoted_by", value="a finding"), "allowed only with `status: demoted`"),
        (put(TEST, 0, "status", value="demoted"), "expected the finding that demoted the claim"),
        (put(*PLANTED, "edit", "with", value="return 2 * x"), "nothing changes"),
        (put(*PLANTED, "edit", "with", value="return ("), "the module no longer compiles"),
        (put(*PLANTED, "edit", "module", value="thing.gone"), "no module thing.gone"),
        (put(TEST, 0, "test", value="pytest something"), "expected `python:` and a pytest node"),
        (put(TEST, 0, "test", value="python:tests/gone.py::test_x"), "no file tests/gone.py"),
        (put("proof_harnesses", 0, "harness", value="thing.double:gone"), "no function"),
        (put("binds", value=["thing.double:gone"]), "no function thing.double:gone"),
        (put("binds", value=[]), "expected the code that the contract is about"),
        (put(TEST, 0, "predicton", value="2x"), "unknown field `predicton`"),
        (put(OBLIGATION, 0, "tolerance", value=0.1), "proof_obligations[0].tolerance"),
        (put(OBLIGATION, 0, "type", value="invarient"), "Invalid enum value 'invarient'"),
        (put("verification_summary", value={"passed": 3}), "unknown field"),
        (put("proof_harnesses", 0, "timeout_s", value=0), ">= 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, change: Change, said: str) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path, change))
    assert any(said in str(problem) for problem in loaded.problems), loaded.problems


def test_a_comment_that_no_contract_answers_is_named_with_its_line(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    source = root / "thing" / "double.py"
    text = source.read_text("utf-8")
    source.write_text(text.replace("def unused", "# contract: gone-v1\ndef unused"), "utf-8")
    (loaded,) = checked_contracts((), root)
    (problem,) = loaded.problems
    assert (problem.rule, problem.file) == ("W-BIND", "thing/double.py:9")
    # One file alone cannot say that no other contract answers it.
    (alone,) = checked_contracts([root / "contracts" / "thing-v1.yaml"], root)
    assert alone.problems == ()
    source.write_text('"""# contract: gone-v1"""\n' + text, "utf-8")
    assert checked_contracts((), root)[0].problems == ()


def test_every_rule_has_its_fixture() -> None:
    described = re.findall(r"^    (W-\S+) ", contract_module.__doc__ or "", re.MULTILINE)
    assert {*CHANGES, "W-STEM", "W-YAML"} == {*described}


def test_problems_come_as_lines_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_contract(tmp_path / "a.yaml", THING, drop(OBLIGATION, 0, "tolerance"))
    assert main(["contracts", "validate", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == 1 and "W-TOL" in [problem["rule"] for problem in found["problems"]]
    assert all(problem["file"] and problem["text"] for problem in found["problems"])
    assert main(["contracts", "validate", str(path)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"1 contracts, {len(lines)} problems"


def test_other_files_beside_contracts_are_not_read(tmp_path: Path) -> None:
    for name in ("a-v1.yaml", ".hidden.yaml", "notes.md"):
        (tmp_path / name).write_text("x: 1\n")
    assert [path.name for path in contract_files([tmp_path])] == ["a-v1.yaml"]
    with pytest.raises(BadInput, match="nothing there"):
        contract_files([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"\*\.yaml"):
        contract_files([tmp_path / "empty"])


def test_the_contracts_of_this_project_have_no_problem() -> None:
    loaded = checked_contracts((), ROOT)
    assert [str(p) for one in loaded for p in one.problems] == []
    assert all(one.contract is not None for one in loaded)
