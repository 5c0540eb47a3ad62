"""Contract files for tests: valid ones in which a test changes one field, and a small project for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Change = Callable[[dict[str, Any]], object]


MODULE = '''"""Doubles."""


# contract: thing-v1
def double(x: int) -> int:
    return 2 * x


def unused() -> int:
    return 0
'''

TESTS = """import pytest
from thing.double import double


@pytest.mark.parametrize("x", [1, 2])
def test_doubles(x):
    assert double(x) == 2 * x


def test_other():
    assert double(0) == 0


@pytest.mark.skip(reason="no machine for it")
def test_skipped():
    pass


@pytest.mark.xfail(reason="known to fail")
def test_expected_to_fail():
    assert False


def test_fails():
    assert double(3) == 7, "three doubled is not seven"


@pytest.fixture
def broken():
    raise RuntimeError("no such thing")


def test_errors(broken):
    pass
"""

PROOFS = """from engine.contracts.proving import PROVED, REFUTED, Proved


def holds():
    return Proved(result=PROVED, cases=10, detail="all of 10 cases")


def fails():
    return Proved(result=REFUTED, cases=2, detail="1: odd")


def gives_up():
    return Proved(result="unknown", cases=1, detail="z3 gave up (timeout)")


def nothing():
    return Proved(result=PROVED, cases=0, detail="all of 0 cases")


def breaks():
    raise RuntimeError("no such thing")


def absent():
    raise ModuleNotFoundError("no z3", name="z3")
"""

THING: dict[str, Any] = {
    "dialect": "engine-1",
    "metadata": {
        "version": "1.0.0",
        "description": "doubling",
        "kind": "pattern",
        "references": ["arithmetic"],
    },
    "binds": ["thing.double:double"],
    "equations": {"double": {"formula": "d(x) = 2x"}},
    "proof_obligations": [
        {
            "id": "TWICE",
            "type": "equivalence",
            "property": "it doubles",
            "tolerance": {"value": 0.0, "kind": "abs", "derivation": "integers"},
        },
        {
            "id": "OLD",
            "type": "bound",
            "property": "it is fast",
            "status": "demoted",
            "demoted_by": "evidence/slow",
        },
    ],
    "falsification_tests": [
        {
            "id": "F-1",
            "obligations": ["TWICE"],
            "rule": "twice",
            "prediction": "2x",
            "test": "python:tests/test_thing.py::test_doubles",
            "if_fails": "it does not double",
        }
    ],
    "proof_harnesses": [
        {
            "id": "P-1",
            "obligation": "TWICE",
            "engine": "enumerate",
            "harness": "contracts.proofs.some:holds",
            "bound": "ten numbers",
            "strategy": "exhaustive",
        }
    ],
    "qa_gate": {
        "id": "F-THING",
        "name": "thing",
        "checks": ["doubling"],
        "pass_criteria": "every test",
        "planted": [
            {
                "id": "B-1",
                "what": "it triples",
                "edit": {
                    "module": "thing.double",
                    "replace": "return 2 * x",
                    "with": "return 3 * x",
                },
                "turns_red": ["F-1"],
            }
        ],
    },
}


def text_of(contract: dict[str, Any], change: Change = lambda contract: None) -> str:
    """Return a contract as YAML, with one change."""
    changed = copy.deepcopy(contract)
    change(changed)
    return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=1000)


def write_contract(
    path: Path, contract: dict[str, Any], change: Change = lambda contract: None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(contract, change), encoding="utf-8")
    return path


def make_project(root: Path, change: Change = lambda contract: None) -> Path:
    """Make a project with one function, its tests, its proofs and a contract that holds; returns `root`."""
    for name, text in (
        ("thing/__init__.py", ""),
        ("thing/double.py", MODULE),
        ("tests/test_thing.py", TESTS),
        ("contracts/proofs/some.py", PROOFS),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    write_contract(root / "contracts" / "thing-v1.yaml", THING, change)
    return root


def at(*path: str | int) -> Callable[[dict[str, Any]], Any]:
    """Return a function that reads a part of a contract."""

    def read(contract: Any) -> Any:
        for key in path:
            contract = contract[key]
        return contract

    return read


def put(*path: str | int, value: object) -> Change:
    """Return a change that sets one field."""

    def change(contract: dict[str, Any]) -> None:
        at(*path[:-1])(contract)[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    """Return a change that removes one field, or one row."""

    def change(contract: dict[str, Any]) -> None:
        del at(*path[:-1])(contract)[path[-1]]

    return change
