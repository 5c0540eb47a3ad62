"""Each rule of a contract file is tripped by one change of one field, and by that alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.contracts import problems as rules_of_contracts
from engine.contracts.contract import checked_contracts, load_all, load_file
from engine.contracts.problems import WARNINGS, Problem
from engine.contracts.schema import almost_a_block
from tests.support.contract_files import (
    BEAT,
    KERNEL,
    THING,
    Change,
    drop,
    make_project,
    put,
    text_of,
    write_contract,
)
from tests.support.paths import ROOT

OBLIGATION, TEST, KANI = "proof_obligations", "falsification_tests", "kani_harnesses"

OF_A_KERNEL: dict[str, Change] = {
    "SCHEMA-001": put("metadata", "references", value=[]),
    "SCHEMA-002": put("metadata", "version", value=""),
    "SCHEMA-003": put("equations", value={}),
    "SCHEMA-004": put("equations", "f", "formula", value=""),
    "SCHEMA-005": put(OBLIGATION, 0, "property", value=""),
    "SCHEMA-006": put(OBLIGATION, 1, "formal", value="one()"),
    "SCHEMA-007": put(TEST, 4, "id", value="FALSIFY-001"),
    "SCHEMA-008": put(TEST, 0, "prediction", value=""),
    "SCHEMA-009": put(TEST, 0, "if_fails", value=""),
    "SCHEMA-010": put(KANI, 1, "id", value="KANI-001"),
    "SCHEMA-011": put(KANI, 0, "obligation", value=""),
    "SCHEMA-012": drop(KANI, 0, "bound"),
    "SCHEMA-013": drop("qa_gate"),
    "SCHEMA-014": put(OBLIGATION, 1, "type", value="precondition"),
    "SCHEMA-015": put(OBLIGATION, 2, "type", value="frame"),
    "SCHEMA-016": put(OBLIGATION, 3, "type", value="invariant"),
    "SCHEMA-017": put(OBLIGATION, 3, "parent_contract", value="other-v1"),
    "SCHEMA-018": put("kind", value="KernelContract"),
    "SCHEMA-019": put("falsification_test", value=[]),
    "SCHEMA-021": drop(OBLIGATION, 4, "na_reason"),
    "SCHEMA-022": put(OBLIGATION, 4, "na_owner", value=" "),
    "SCHEMA-023": put(OBLIGATION, 0, "na_reason", value="why not"),
    "PROVABILITY-001": drop(TEST, 4),
    "W-FORM": put("metadata", "description", value=3),
    "W-KEY": put(TEST, 0, "test_harnes", value="cargo test"),
    "W-LVL": put(KANI, 0, "actually_verified", value=True),
}
PLANTED = ("qa_gate", "planted", 0)
OF_OURS: dict[str, Change] = {
    "W-REF": put(TEST, 0, "obligations", value=["TWICE", "THRICE"]),
    "W-CLAIM": put(OBLIGATION, 1, value={"id": "NEW", "type": "bound", "property": "small"}),
    "W-TOL": drop(OBLIGATION, 0, "tolerance"),
    "W-DEMOTE": drop(OBLIGATION, 1, "demoted_by"),
    "W-CTRL": drop(*PLANTED),
    "W-TEST": put(TEST, 0, "test", value="python:tests/test_thing.py::test_nowhere"),
    "W-EDIT": put(*PLANTED, "edit", "replace", value="return 4 * x"),
    "W-BIND": put("binds", value=["thing.double:unused", "thing.double:double"]),
}
OF_TEXT = {
    "SCHEMA-020": ("  author: somebody\n", "  author: somebody\n  author: somebody else\n"),
    "W-YAML": ("  author: somebody\n", "  author: &who somebody\n"),
}


def rules(problems: Sequence[Problem]) -> list[str]:
    return [problem.rule for problem in problems]


@pytest.mark.parametrize("contract", [KERNEL, BEAT])
def test_a_sound_upstream_contract_has_no_problem(tmp_path: Path, contract: dict[str, Any]) -> None:
    assert load_file(write_contract(tmp_path / "a.yaml", contract)).problems == ()


def test_a_sound_contract_of_ours_has_no_problem(tmp_path: Path) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path))
    assert loaded.problems == () and loaded.contract is not None and loaded.contract.runs


@pytest.mark.parametrize("rule", OF_A_KERNEL)
def test_one_field_of_a_kernel_trips_one_rule(tmp_path: Path, rule: str) -> None:
    loaded = load_file(write_contract(tmp_path / "a.yaml", KERNEL, OF_A_KERNEL[rule]))
    assert rules(loaded.problems) == [rule]
    assert loaded.problems[0].severity == ("warning" if rule in WARNINGS else "error")
    assert (loaded.contract is None) == (rule not in WARNINGS)


@pytest.mark.parametrize("rule", OF_OURS)
def test_one_field_of_ours_trips_one_rule(tmp_path: Path, rule: str) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path, OF_OURS[rule]))
    assert rules(loaded.problems) == [rule], loaded.problems
    assert loaded.contract is None


@pytest.mark.parametrize("rule", OF_TEXT)
def test_one_line_trips_one_rule(tmp_path: Path, rule: str) -> None:
    path = tmp_path / "a.yaml"
    before, after = OF_TEXT[rule]
    path.write_text(text_of(KERNEL).replace(before, after), encoding="utf-8")
    loaded = load_file(path)
    assert rules(loaded.problems) == [rule] and loaded.problems[0].line == 4 + (rule != "W-YAML")


def test_two_files_of_one_name_trip_one_rule(tmp_path: Path) -> None:
    paths = [write_contract(tmp_path / folder / "a.yaml", KERNEL) for folder in ("one", "two")]
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
        (put("metadata", "demoted_by", value="a finding"), "only with status: demoted"),
        (put(TEST, 0, "status", value="demoted"), "by which finding?"),
        (put(*PLANTED, "edit", "with", value="return 2 * x"), "nothing is changed"),
        (put(*PLANTED, "edit", "with", value="return ("), "the module no longer compiles"),
        (put(*PLANTED, "edit", "module", value="thing.gone"), "no module thing.gone"),
        (put(TEST, 0, "test", value="pytest something"), "expected python: and a test"),
        (put(TEST, 0, "test", value="python:tests/gone.py::test_x"), "no file tests/gone.py"),
        (put("proof_harnesses", 0, "harness", value="thing.double:gone"), "no function"),
        (put("binds", value=["thing.double:gone"]), "no function thing.double:gone"),
        (put("binds", value=[]), "of which code is this the contract?"),
        (put(OBLIGATION, 0, "tolerance", value=0.1), "a bare number"),
        (put("dialect", value="engine-2"), "expected a known word"),
        (put("equations", "double", value=None), "expected a value, found nothing"),
        (put("equations", value="f(x)"), "expected a list or a mapping, found the text 'f(x)'"),
        (put(OBLIGATION, 0, "tolerance", value="no"), "expected a number, found the text 'no'"),
        (put("proof_harnesses", 0, "timeout_s", value=0), "expected 1 or more, found 0"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: Change, said: str) -> None:
    (loaded,) = checked_contracts((), make_project(tmp_path, change))
    assert any(said in problem.text for problem in loaded.problems), loaded.problems


def test_a_comment_that_no_contract_answers_is_told_where_it_stands(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    source = root / "thing" / "double.py"
    text = source.read_text("utf-8")
    source.write_text(text.replace("def unused", "# contract: gone-v1\ndef unused"), "utf-8")
    (loaded,) = checked_contracts((), root)
    (problem,) = loaded.problems
    assert (problem.rule, problem.file, problem.line) == ("W-BIND", "thing/double.py", 9)
    # One file alone cannot say that no other contract answers it.
    (alone,) = checked_contracts([root / "contracts" / "thing-v1.yaml"], root)
    assert alone.problems == ()
    source.write_text('"""# contract: gone-v1"""\n' + text, "utf-8")
    assert checked_contracts((), root)[0].problems == ()


def test_every_rule_has_its_fixture() -> None:
    covered = {*OF_A_KERNEL, *OF_OURS, *OF_TEXT, "W-STEM"}
    described = re.findall(r"^    ([A-Z]\S+) ", rules_of_contracts.__doc__ or "", re.MULTILINE)
    assert covered == {*described} and covered > WARNINGS


def test_a_validator_that_says_nothing_fails_these_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the fixtures themselves: with the rules switched off, each of them is missed."""
    for name in ("check_upstream", "check_own"):
        monkeypatch.setattr(f"engine.contracts.contract.{name}", lambda *_: None)
    in_the_walk = {"SCHEMA-018", "SCHEMA-019", "W-FORM", "W-KEY"}
    for rule, change in OF_A_KERNEL.items():
        found = rules(load_file(write_contract(tmp_path / "a.yaml", KERNEL, change)).problems)
        assert (found == [rule]) == (rule in in_the_walk), rule


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (put(OBLIGATION, value=[]), 1),
        (put(TEST, value=[]), 2),
        (put(KANI, value=[]), 1),
        (drop("falsification_tests"), 2),
    ],
)
def test_a_kernel_without_proof_is_told_as_often_as_upstream(
    tmp_path: Path, change: Change, count: int
) -> None:
    found = load_file(write_contract(tmp_path / "a.yaml", KERNEL, change)).problems
    assert rules(found) == ["PROVABILITY-001"] * count


@pytest.mark.parametrize("kind", ["registry", "schema", "model-family", "training-loop"])
def test_other_kinds_need_no_proofs(tmp_path: Path, kind: str) -> None:
    contract = {"metadata": {**KERNEL["metadata"], "kind": kind}}
    assert load_file(write_contract(tmp_path / "a.yaml", contract)).problems == ()
    legacy = {"metadata": {**KERNEL["metadata"], "registry": True}}
    assert load_file(write_contract(tmp_path / "b.yaml", legacy)).problems == ()


@pytest.mark.parametrize(
    "change",
    [
        put("metadata", "competitor", value="somebody new"),
        put("stories", 0, "demand_score", value=99999),
        put("beat", value={"incumbent": "nobody", "direction": "sideways"}),
        put("kernel_structure", value=["phases"]),
        put("enforcement", "sum", "anything", value=[1, {"a": None}]),
        put("coq_spec", value={"lemmas": 3}),
    ],
)
def test_what_only_tools_of_upstream_use_is_taken_as_it_is(tmp_path: Path, change: Change) -> None:
    assert load_file(write_contract(tmp_path / "a.yaml", KERNEL, change)).problems == ()


def test_all_spellings_of_upstream_are_read(tmp_path: Path) -> None:
    def respell(contract: dict[str, Any]) -> None:
        for row in contract[OBLIGATION]:
            row["statement"] = row.pop("property")
        contract[OBLIGATION][0]["verification"] = contract[OBLIGATION][0].pop("formal")
        for row in contract[TEST]:
            row["description"], row["expected"] = row.pop("rule"), row.pop("prediction")
            row["command"], row["fails_if"] = row.pop("test"), row.pop("if_fails")
        contract["equations"] = [{"id": "f", **contract["equations"]["f"]}]

    loaded = load_file(write_contract(tmp_path / "a.yaml", KERNEL, respell))
    assert loaded.problems == () and loaded.contract is not None
    assert loaded.contract.equations == (("f", "f(x) = x"),)
    assert loaded.contract.falsifiers[0].test == "cargo test --lib something"


def test_a_field_in_two_spellings_is_a_key_twice(tmp_path: Path) -> None:
    change = put(TEST, 0, "description", value="again")
    found = load_file(write_contract(tmp_path / "a.yaml", KERNEL, change)).problems
    assert rules(found) == ["SCHEMA-020"]


@pytest.mark.parametrize("key", ["falsification_tests_", "Qa-Gate", "kani_harness", "equation"])
def test_almost_the_name_of_a_block_is_told_with_the_block(key: str) -> None:
    special = almost_a_block(key)
    assert special is not None and special[0] == "SCHEMA-019"


@pytest.mark.parametrize("key", ["invariants", "gates", "spec", "status", "name", "family"])
def test_other_unknown_blocks_are_unknown_keys(key: str) -> None:
    assert almost_a_block(key) is None


def test_every_problem_is_told_at_once_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(contract: dict[str, Any]) -> None:
        contract["metadata"]["version"] = ""
        contract[TEST][1]["predicton"] = "a typing error"
        contract[OBLIGATION][0]["type"] = "invarient"
        contract[KANI][0]["bound"] = "8"
        del contract["qa_gate"]

    path = write_contract(tmp_path / "a.yaml", KERNEL, spoil)
    assert main(["contracts", "validate", str(path)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "4 error(s), 1 warning(s)"
    numbered = path.read_text("utf-8").splitlines()
    for line in lines:
        number, column = map(int, line.removeprefix(f"{path}:").split(":")[:2])
        assert number == 1 or numbered[number - 1][column - 1 :], line
    said = "\n".join(lines)
    assert (
        "falsification_tests[1].predicton: a key that is not known; did you mean prediction?"
        in said
    )
    assert "proof_obligations[0].type" in said and "did you mean invariant?" in said
    (typed,) = (line for line in lines if "predicton" in line)
    number, column = map(int, typed.removeprefix(f"{path}:").split(":")[:2])
    assert numbered[number - 1][column - 1 :].startswith("predicton")


def test_the_rules_of_upstream_alone_can_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_contract(tmp_path / "a.yaml", KERNEL, put("family", value="bert"))
    assert main(["contracts", "validate", str(path)]) == 1
    assert main(["contracts", "validate", str(path), "--rules", "pv"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 error(s), 0 warning(s)"


@pytest.mark.parametrize(
    "text",
    [
        "metadata: [1, 2\nequations: {}\n",
        "",
        text_of(KERNEL, drop("metadata")),
        text_of(KERNEL, put("metadata", "description", value=3)),
        text_of(KERNEL, put("proof_obligations", value="none")),
        text_of(KERNEL, drop("falsification_tests")),
    ],
)
def test_a_broken_file_is_refused_by_the_rules_of_upstream_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["contracts", "validate", str(path), "--rules", "pv"]) == 1


def test_problems_come_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_contract(tmp_path / "a.yaml", KERNEL, OF_A_KERNEL["SCHEMA-009"])
    assert main(["contracts", "validate", str(path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["errors"], found["warnings"]) == (1, 0, 1)
    (problem,) = found["problems"]
    assert problem["rule"] == "SCHEMA-009" and problem["severity"] == "warning"
    assert problem["file"] == str(path) and problem["line"] > 1 and problem["column"] > 1


def test_the_contracts_of_this_project_have_neither_errors_nor_warnings() -> None:
    loaded = checked_contracts((), ROOT)
    assert [str(p) for one in loaded for p in one.problems] == []
    for one in loaded:
        assert one.contract is not None and one.contract.runs
        assert THING["dialect"] in one.path.read_text("utf-8").splitlines()[0]
